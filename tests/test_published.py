"""A published checkpoint's whole life: load, fine-tune, evaluate, reload."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.pretrained import weights
from vit_jax.files.paths import write_arrays
from vit_jax.models.create import get_variant
from vit_jax.pretrained.formats import google

# Peak of resident memory while loading, over what Python and JAX take by themselves.
MEASURE = r"""
import re, sys, jax
import jax.numpy as jnp
from vit_jax.models.create import VARIANTS, create_model
from vit_jax.pretrained.load import load_pretrained
def peak():
    # Not getrusage: what it says includes the process that started this one.
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])
jax.numpy.zeros(1).block_until_ready()
before = peak()
model = create_model(**VARIANTS["B/16"] | {"num_layers": 4}, num_classes=10)
image = jnp.zeros((1, 224, 224, 3))
like = jax.eval_shape(lambda: model.init(jax.random.key(0), image, train=False))["params"]
params, report = load_pretrained(sys.argv[1], like=like, kind="vit")
del like
arrays = [jax.device_put(leaf) for leaf in jax.tree.leaves(params) if hasattr(leaf, "nbytes")]
jax.block_until_ready(arrays)
print(peak() - before)
"""


def published(folder: Path, variant: str, **sizes: int) -> Path:
    """A file as those of ImageNet-21k: 21,843 classes, pre-logits, pre-Linen names."""
    width = get_variant(variant)["hidden_size"]
    module = weights.module_of(variant, num_classes=21_843, representation_size=width, **sizes)
    params = weights.seeded(module, (224, 224, 3), "r02")
    return write_arrays(folder / "published.npz", google.to_published(params))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_loading_takes_less_than_2_2_times_the_file(tmp_path: Path) -> None:
    """Of 186 MB: a third of the blocks of the real file."""
    base = published(tmp_path, "B/16", num_layers=4)
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(base)],
        env=tiny.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    peak, size = int(result.stdout.split()[-1]), base.stat().st_size
    assert 0.9 * size < peak < 2.2 * size  # less than the file would mean that nothing was measured
