"""timm's MLP-Mixers: their names."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import mixer
from vit_jax.models.description import Description, InputSettings
from vit_jax.pretrained.formats import rows
from vit_jax.pretrained.formats.rows import Row, layer, norm, numbers
from vit_jax.pretrained.formats.stored import Holds, Stored
from vit_jax.pretrained.formats.timm_config import ratio, to_config

MIXERS = {
    f"Mixer-{size}/{patch}": f"mixer_{size.lower()}{patch}_224"
    for size in "SBL"
    for patch in (32, 16)
}


def is_mixer(names: Collection[str]) -> bool:
    return {"stem.proj.weight", "blocks.0.mlp_channels.fc1.weight"} <= set(names)


def _table(blocks: list[tuple[int, ...]]) -> list[Row]:
    """The table for these blocks."""
    table = [
        *layer("stem", "stem.proj", rows.CONV),
        *norm("pre_head_layer_norm", "norm"),
        *layer("head", "head"),
    ]
    for (i,) in blocks:
        ours, theirs = f"{mixer.BLOCKS}_{i}", f"blocks.{i}"
        for k in (0, 1):
            table += norm(f"{ours}/LayerNorm_{k}", f"{theirs}.norm{k + 1}")
            table += layer(f"{ours}/token_mixing/Dense_{k}", f"{theirs}.mlp_tokens.fc{k + 1}")
            table += layer(f"{ours}/channel_mixing/Dense_{k}", f"{theirs}.mlp_channels.fc{k + 1}")
    return table


def read_mixer(stored: Stored, arrays: dict[str, np.ndarray]) -> None:
    """Moves `arrays` into `stored`; UserError for a part that our models lack."""
    if any(".linear_tokens." in name for name in arrays):
        raise UserError("this model has affine norms and one layer over the tokens, as ResMLP.")
    before, after = (arrays.get(f"blocks.0.mlp_channels.fc{k}.weight") for k in (1, 2))
    if before is not None and after is not None and len(before) != after.shape[-1]:
        raise UserError("this model has gated MLPs (as gMLP, gMixer), which are not supported.")
    rows.read_rows(stored, arrays, _table(numbers(r"^blocks\.(\d+)\.", arrays)))


def to_timm_mixer(
    params: dict[str, np.ndarray], description: Description, inputs: InputSettings
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Like `timm.to_timm`, for MLP-Mixer."""
    model = description.model
    widths = (model["tokens_mlp_dim"], model["channels_mlp_dim"])
    keys = ("patch_size", "hidden_size", "num_layers")  # not arguments of timm's functions
    known = {tuple(mixer.FAMILY.sizes[name][key] for key in keys): name for name in MIXERS}
    name = known.get(tuple(model[key] for key in keys))
    if name is None:
        raise UserError(
            f"timm has no Mixer with {', '.join(f'{key}={model[key]}' for key in keys)}; "
            f"--format=timm can write {', '.join(MIXERS)}."
        )
    args: dict[str, Any] = {
        "img_size": list(description.image_shape[:2]),
        "in_chans": description.image_shape[2],
        "mlp_ratio": [ratio(width, model["hidden_size"]) for width in widths],
    }
    config = to_config(description, inputs, MIXERS[name], args, "avg")
    table = _table(numbers(rf"{mixer.BLOCKS}_(\d+)/", params))
    return rows.write_rows(table, params, "timm"), {"config.json": config}


TIMM_MIXERS = {"mixer": Holds(to_timm_mixer, assumed={"gelu": "exact"})}
