"""timm's MLP-Mixers, gMixers and ResMLPs: their names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.create import VARIANTS_OF, variant_defaults
from vit_jax.models.description import Description, InputSettings
from vit_jax.models.later import mixer
from vit_jax.pretrained.formats import rows
from vit_jax.pretrained.formats.rows import Op, Row, layer, norm, numbers
from vit_jax.pretrained.formats.stored import Holds, Stored
from vit_jax.pretrained.formats.timm_config import ratio, to_config

# timm's functions by our sizes.
MIXERS = {
    **{f"Mixer-{size}/{p}": f"mixer_{size.lower()}{p}_224" for size in "SBL" for p in (32, 16)},
    **{f"gMixer-{depth}/16": f"gmixer_{depth}_224" for depth in (12, 24)},
    **{f"ResMLP-S{depth}/16": f"resmlp_{depth}_224" for depth in (12, 24, 36)},
    "ResMLP-B24/8": "resmlp_big_24_224",
}
# [1, 1, D] <-> [D]
_PER_FEATURE = Op(lambda x, _: x.reshape(-1), lambda x: x[None, None])


def is_mixer(names: Collection[str]) -> bool:
    return {"stem.proj.weight", "blocks.0.mlp_channels.fc1.weight"} <= set(names)


def _affine(ours: str, theirs: str) -> list[Row]:
    pairs = {"scale": "alpha", "bias": "beta"}.items()
    return [Row((f"{ours}/{a}",), f"{theirs}.{b}", _PER_FEATURE) for a, b in pairs]


def _table(blocks: list[tuple[int, ...]], is_resmlp: bool) -> list[Row]:
    """The table for these blocks."""
    norms, first = (_affine, "Affine") if is_resmlp else (norm, "LayerNorm")
    table = [
        *layer("stem", "stem.proj", rows.CONV),
        *norms("pre_head_layer_norm", "norm"),
        *layer("head", "head"),
    ]
    for (i,) in blocks:
        ours, theirs = f"{mixer.BLOCKS}_{i}", f"blocks.{i}"
        single = f"{theirs}.linear_tokens" if is_resmlp else ""
        for k in (0, 1):
            table += norms(f"{ours}/{first}_{k}", f"{theirs}.norm{k + 1}")
            table += [Row((f"{ours}/LayerScale_{k}/gamma",), f"{theirs}.ls{k + 1}")]
            tokens = single or f"{theirs}.mlp_tokens.fc{k + 1}"
            table += layer(f"{ours}/token_mixing/Dense_{k}", tokens)
            table += layer(f"{ours}/channel_mixing/Dense_{k}", f"{theirs}.mlp_channels.fc{k + 1}")
    return table


def read_mixer(stored: Stored, arrays: dict[str, np.ndarray]) -> None:
    """Moves `arrays` into `stored`; UserError for a part that our models lack."""
    if any(".gate." in name for name in arrays):
        raise UserError("this model has spatial gating units (gMLP), which are not supported.")
    is_resmlp = "blocks.0.linear_tokens.weight" in arrays
    rows.read_rows(stored, arrays, _table(numbers(r"^blocks\.(\d+)\.", arrays), is_resmlp))


def to_timm_mixer(
    params: dict[str, np.ndarray], description: Description, inputs: InputSettings
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Like `timm.to_timm`, for these models."""
    model = description.model
    args: dict[str, Any] = {
        "img_size": list(description.image_shape[:2]),
        "in_chans": description.image_shape[2],
    }
    # What is no argument of timm's functions: of plain Mixers, not the widths of the MLPs.
    keys = ["patch_size", "hidden_size", "num_layers", "norm", "gated"]
    if model["norm"] == "layer" and not model["gated"] and model["tokens_mlp_dim"]:
        widths = (model["tokens_mlp_dim"], model["channels_mlp_dim"])
        args["mlp_ratio"] = [ratio(width, model["hidden_size"]) for width in widths]
    else:
        keys += ["tokens_mlp_dim", "channels_mlp_dim"]

    def key_of(model: Mapping[str, Any]) -> list[Any]:
        return [model["layer_scale_init"] is None, *(model[key] for key in keys)]

    sizes = {name: {**variant_defaults("mixer"), **VARIANTS_OF["mixer"][name]} for name in MIXERS}
    found = [MIXERS[name] for name in MIXERS if key_of(sizes[name]) == key_of(model)]
    if not found:
        raise UserError(
            f"timm has no Mixer with {', '.join(f'{key}={model[key]}' for key in keys)}; "
            f"--format=timm can write {', '.join(MIXERS)}."
        )
    config = to_config(description, inputs, found[0], args, "avg")
    table = _table(numbers(rf"{mixer.BLOCKS}_(\d+)/", params), model["norm"] == "affine")
    return rows.write_rows(table, params, "timm"), {"config.json": config}


TIMM_MIXERS = {"mixer": Holds(to_timm_mixer, assumed={"gelu": "exact"})}
