"""How long it takes to load a published file, beside timm, which reads the same files."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit_jax.files.paths import write_arrays
from vit_jax.measure.peers import import_timm
from vit_jax.models.create import create_model
from vit_jax.models.variants import get_variant
from vit_jax.parameters.names import abstract_params, flatten_names
from vit_jax.pretrained.formats.google import to_published
from vit_jax.pretrained.load import load_pretrained


def benchmark_load(folder: Path, *, variant: str, rounds: int) -> dict[str, Any]:
    """Seconds of `load_pretrained`, and of timm's `load_pretrained`, in turn.

    Both models are made beforehand; both read the whole file (from the cache of the operating
    system after the first round, which is not counted), check it and put it where the model has
    it: timm into its parameters, we into arrays of JAX on the first device.

    Args:
      folder: gets the file, in the published naming, with random numbers for 224 pixels.
      variant: a key of `vit_jax.models.variants.VARIANTS` that timm has.
      rounds: how often both take turns.

    Returns:
      `{"vit_jax": [seconds per turn], "timm": [...], "ratio": median of ours / timm's}`.

    Raises:
      UserError: timm cannot be imported.
    """
    timm, _ = import_timm()
    sizes = get_variant(variant)
    theirs = timm.models.vision_transformer.VisionTransformer(
        patch_size=sizes["patch_size"],
        embed_dim=sizes["hidden_size"],
        depth=sizes["num_layers"],
        num_heads=sizes["num_heads"],
    )
    ours = create_model(**sizes, num_classes=1000)
    like = abstract_params(ours, (224, 224, 3))
    rng, path = np.random.default_rng(0), folder / "published.npz"
    shapes = flatten_names(like).items()
    arrays = {name: rng.random(leaf.shape, np.float32) for name, leaf in shapes}
    write_arrays(path, to_published(arrays))

    def load() -> None:
        params, _ = load_pretrained(path, like=like, reset_head=False)
        jax.block_until_ready(jax.device_put(params, jax.devices()[0]))

    turns = {"vit_jax": load, "timm": lambda: theirs.load_pretrained(str(path))}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for turn in range(rounds + 1):
        for name, turn_of in turns.items():
            start = time.perf_counter()
            turn_of()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds["vit_jax"], seconds["timm"], strict=True)]
    return {**seconds, "ratio": statistics.median(ratios)}
