"""What timm's and transformers' files of Vision Transformers share, in both directions.

`modern_vit.py` has one form of each part, theirs have several that compute the same: positions with
rows for the class token, features of rotary pairs side by side, relative biases as one table.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.files.paths import reading
from vit_jax.models.description import Description
from vit_jax.models.family import axis_of
from vit_jax.models.later import modern_vit
from vit_jax.models.later.mae import DECODER_BLOCKS, DECODER_POSITIONS
from vit_jax.models.vit import ATTENTION, BLOCKS, POSITIONS
from vit_jax.pretrained.formats.names import Names, Part, numbers
from vit_jax.pretrained.formats.stored import Arrays, Grid, Stored, positive

DECODER_HEADS = 16  # of every published decoder
_DECODER: Names = {
    "mask_token": "mask_token",
    DECODER_POSITIONS: "decoder_pos_embed",
    "decoder_embed/": "decoder_embed.",
    "decoder/encoder_norm/": "decoder_norm.",
    "decoder_pred/": "decoder_pred.",
}


def decoder(
    folders: Sequence[str], blocks: Iterable[Names], settings: Mapping[str, Any], key: str
) -> list[Part]:
    """A masked autoencoder's decoder; of `folders` and `blocks` the first are written."""
    with reading("config.json"):
        num_heads = positive(settings.get(key, DECODER_HEADS))
    table = [Part(_DECODER, theirs=folders[0].rpartition("decoder_")[0])]
    for folder, names in itertools.product(folders, blocks):
        table += [Part(names, f"{DECODER_BLOCKS}_{{}}/", folder, num_heads=num_heads)]
    return table


def check_square(format: str, description: Description, what: str = "it") -> None:
    """UserError unless patches and image are square, as some models of others need."""
    (height, width), model = description.grid, description.model
    if height != width or not isinstance(model["patch_size"], int):
        patches = f"{height}x{width} patches of {model['patch_size']} pixels"
        text = f"--format={format} cannot store model.name={model['name']!r} for {patches}"
        raise UserError(f"{text}: {what} has squares only; use --format=npz or orbax.")


def defaults(attributes: str) -> dict[str, tuple[Any, ...]]:
    """The defaults of these attributes of `modern_vit`, as the only values in `Holds.values`."""
    return {key: (modern_vit.FAMILY.keys[key].default,) for key in attributes.split()}


def renamed(model: Mapping[str, Any], names: str) -> dict[str, Any]:
    """Attributes under their names, such as "qk_norm depth=num_layers": theirs first."""
    pairs = (name.partition("=") for name in names.split())
    return {theirs: model[ours or theirs] for theirs, _, ours in pairs}


_MODERN = re.compile(
    rf"registers|pooled_norm/.*|Transformer/pre_norm/.*|.*/(?:LayerScale_\d|RMSNorm_\d|query_norm|gate"
    rf"|relative_bias|rope|{ATTENTION}/norm|MlpBlock_0/norm)/.*"
)


def has_modern_part(params: Arrays) -> bool:
    """Whether there is a parameter of a part that the paper's model does not have."""
    return any(map(_MODERN.fullmatch, params))


def join_positions(stored: Stored, tokens: int) -> None:
    """Positions of `tokens` tokens before the patches become part of these tokens."""
    positions = stored.params[POSITIONS]
    stored.rename(POSITIONS, modern_vit.POSITIONS)
    stored.params[modern_vit.POSITIONS] = positions[:, tokens:]  # [1, h*w, D]
    start = 0
    for name in ("cls", "registers"):
        count = axis_of(stored.params, name, 3, 1)
        if count is None or start == tokens:
            continue
        stored.params[name] = stored.params[name] + positions[:, start : start + count]
        stored.changed[name] = "its position added"
        start += count
    if start != tokens:
        raise UserError(f"{tokens} positions before those of the patches, but {start} tokens.")


RELATIVE_BIAS = f"{BLOCKS}_{{}}/{ATTENTION}/relative_bias/"


def read_relative_bias(stored: Stored, number: int, table: np.ndarray, grid: Grid | None) -> None:
    """Adds BEiT's table [(2h - 1) (2w - 1) + 3, H] of a block; UserError: of another grid."""
    side = math.isqrt(max(len(table) - 3, 0))
    height, width = (2 * n - 1 for n in grid) if grid else (side, side)
    if height * width + 3 != len(table):
        text = f"relative positions of shape {table.shape} are not of {grid or 'a square grid'}"
        raise UserError(f"{text}; give its rows and columns (pretrained.grid, --grid).")
    name = RELATIVE_BIAS.format(number)
    stored.add(f"{name}offsets", table[:-3].reshape(height, width, -1))
    stored.add(f"{name}tokens", table[-3:])


def write_relative_biases(params: Arrays, theirs: str) -> Arrays:
    """Takes relative biases out of `params`, and returns them as tables by their name."""
    tables = {}
    for (i,) in numbers(RELATIVE_BIAS, params):
        bias = RELATIVE_BIAS.format(i)
        offsets, tokens = params.pop(f"{bias}offsets"), params.pop(f"{bias}tokens")
        table = np.concatenate([offsets.reshape(-1, offsets.shape[-1]), tokens])
        tables[f"{theirs.format(i)}.relative_position_bias_table"] = table
    return tables
