"""Files in big_vision's names, read by us, give the logits that big_vision computed from them."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests import golden
from tests.pretrained import weights
from vit_jax.files.paths import write_arrays
from vit_jax.inference.load import load_model

PIXELS = 224
KEYS = sorted(
    key
    for key in golden.arrays("bv_logits")
    if re.match(r"(mu|Ti)/16.*fanin", key)  # tests/models/test_golden.py has the other recipe
    # Without a head the model gives other things, and unpooled tokens are of no file.
    and not any(part in key for part in (",none,", ",0,", "num_classes=None"))
)


@pytest.mark.parametrize("key", KEYS)
def test_logits(key: str, tmp_path: Path) -> None:
    config, recipe = key.split("|")
    names = golden.table("bv_names")[config]
    shapes = names.get("params", names)
    params = {name: golden.fill(name, tuple(shape), recipe) for name, shape in shapes.items()}
    path = write_arrays(tmp_path / "file.npz", {f"params/{n}": a for n, a in params.items()})
    loaded = load_model(path, image_size=PIXELS)
    assert loaded.format == "big_vision"
    fixed = loaded.description.model["position_embedding"] == "sincos2d"
    assert fixed == ("sincos2d" in config)
    images = golden.images(2, PIXELS, PIXELS)
    logits = weights.logits(loaded.module, loaded.params, images)
    np.testing.assert_allclose(logits, golden.arrays("bv_logits")[key], rtol=0, atol=1e-5)
