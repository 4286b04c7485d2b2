"""How many images fit on a device."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable

import jax
from ml_collections import ConfigDict

from vit_jax.parameters.sharding import create_mesh
from vit_jax.plan.compiled import TooLargeError, compile_step
from vit_jax.plan.subject import step_arguments
from vit_jax.run import create_run

_SIZES = sorted({size for n in range(15) for size in (2**n, 2**n * 3 // 2)})


def largest_per_device(fits: Callable[[int], bool]) -> int:
    """By bisection, a power of two or one and a half of one; 0 if not even one image fits."""
    count = bisect.bisect_left(_SIZES, True, key=lambda size: not fits(size))
    return _SIZES[count - 1] if count else 0


def largest_batch(config: ConfigDict) -> int:
    """The largest `dataset.batch_size` whose update fits on the devices of this machine.

    As the compiler counts memory; nothing is run. 0 if not even one image a device fits.
    """
    mesh = create_mesh(**config.mesh)
    trial = config.copy_and_resolve_references()

    def fits(per_device: int) -> bool:
        trial.dataset.batch_size = per_device * mesh.size
        with jax.set_mesh(mesh):
            run = create_run(trial, mesh)
        try:
            step = compile_step(run, step_arguments(run), full=True)
        except TooLargeError:
            return False
        return step.memory["total"] <= _bytes_of_a_device()

    return largest_per_device(fits) * mesh.size


def _bytes_of_a_device() -> int:
    stats = jax.local_devices()[0].memory_stats()
    if stats:
        return stats["bytes_limit"]
    # CPUs, whose devices share the memory with all else that runs.
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return memory * 3 // 4 // jax.local_device_count()
