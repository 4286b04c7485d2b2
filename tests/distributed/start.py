"""Starts a script so that all processes of a run on CPUs find their programs in JAX's cache.

JAX's key of a program holds the topology. On CPUs each process has its own, and only the first
writes to the cache: the others would compile everything at every start.
"""

import runpy
import sys

from jax._src import cache_key

cache_key._hash_accelerator_config = cache_key._hash_devices

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
