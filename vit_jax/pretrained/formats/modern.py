"""What timm's and transformers' files of today's Vision Transformers share, in both directions.

`modern_vit.py` has one form of each part, theirs have several that compute the same: positions with
rows for the class token, features of rotary pairs side by side, relative biases as one table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.later import modern_vit
from vit_jax.models.vit import ATTENTION, BLOCKS, POSITIONS
from vit_jax.pretrained.formats.rows import Row, layer, norm
from vit_jax.pretrained.formats.stored import Stored

Params = dict[str, np.ndarray]


_PARTS = re.compile(
    rf"registers|pooled_norm/.*|Transformer/pre_norm/.*|.*/(?:LayerScale_\d|RMSNorm_\d|query_norm|gate"
    rf"|relative_bias|rope|{ATTENTION}/norm|MlpBlock_0/norm)/.*"
)


def has_modern_part(params: Params) -> bool:
    """Whether there is a parameter of a part that the paper's model does not have."""
    return any(map(_PARTS.fullmatch, params))


def extra_rows(number: int, folder: str, names: dict[str, str]) -> list[Row]:
    """The rows of a block that `rows.encoder_block` does not have.

    `names` are theirs within the `folder`, by ours: `query_norm`, `key_norm`, `norm` (of all
    heads), `mlp_norm`, `gate`, `scale_0` and `scale_1` (both LayerScales).
    """
    ours = f"{BLOCKS}_{number}"
    places = {"mlp_norm": f"{ours}/MlpBlock_0/norm"}
    table = []
    for part, name in names.items():
        theirs = f"{folder}.{name}"
        if part == "gate":
            table += layer(f"{ours}/MlpBlock_0/gate", theirs)
        elif part.startswith("scale_"):
            table += [Row((f"{ours}/LayerScale_{part[-1]}/gamma",), theirs)]
        else:
            table += norm(places.get(part, f"{ours}/{ATTENTION}/{part}"), theirs)
    return table


def join_positions(stored: Stored, tokens: int) -> None:
    """Positions of `tokens` tokens before the patches become part of these tokens."""
    positions = stored.params.pop(POSITIONS)
    how = stored.changed.pop(POSITIONS, "")
    stored.params[modern_vit.POSITIONS] = positions[:, tokens:]  # [1, h*w, D]
    if how:
        stored.changed[modern_vit.POSITIONS] = how
    names, start = [name for name in ("cls", "registers") if name in stored.params], 0
    for name in names:
        if start == tokens:
            break
        count = stored.params[name].shape[1]
        stored.params[name] = stored.params[name] + positions[:, start : start + count]
        stored.changed[name] = "its position added"
        start += count
    if start != tokens:
        raise UserError(f"{tokens} positions before those of the patches, but {start} tokens.")


def name_rms_norms(stored: Stored) -> None:
    """Norms of blocks and of pooling were read as layer norms, and are RMS norms."""
    for name in [name for name in stored.params if "/LayerNorm_" in name]:
        new = name.replace("/LayerNorm_", "/RMSNorm_")
        stored.params[new] = stored.params.pop(name)
        if name in stored.changed:
            stored.changed[new] = stored.changed.pop(name)


def pair_order(head_dim: int, *, neighbours: bool, x_first: bool) -> np.ndarray:
    """The place in their heads of each of our features, [d]; see `models/later/rotary.py`.

    `neighbours`: their pairs are features 2 k and 2 k + 1; `x_first`: the first half of the pairs
    turns with x.
    """
    pairs = np.arange(head_dim // 2)
    if x_first:
        pairs = np.roll(pairs, head_dim // 4)
    if neighbours:
        return np.concatenate([2 * pairs, 2 * pairs + 1])
    return np.concatenate([pairs, pairs + head_dim // 2])


_TURNED = re.compile(rf"{BLOCKS}_\d+/{ATTENTION}/(?:(?:query|key)/.*|(?:query|key)_norm/.*)")


def reorder(params: Params, order: np.ndarray) -> None:
    """Permutes the features of queries and keys, and of their norms, in place."""
    for name in filter(_TURNED.fullmatch, list(params)):
        params[name] = params[name][..., order]


def relative_name(number: int | str) -> str:
    return f"{BLOCKS}_{number}/{ATTENTION}/relative_bias"


def read_relative_bias(
    stored: Stored, number: int, table: np.ndarray, grid: tuple[int, int] | None
) -> None:
    """Adds BEiT's table [(2h - 1) (2w - 1) + 3, H] of a block; UserError: it is not of this grid.

    Its last rows are scores of the class token with patches, of patches with it, and with itself.
    """
    count = len(table) if table.ndim == 2 else 0
    side = math.isqrt(max(count - 3, 0))
    height, width = (2 * n - 1 for n in grid) if grid else (side, side)
    if height * width + 3 != count:
        raise UserError(
            f"relative positions of shape {table.shape} are not of {grid or 'a square grid'}; give "
            "its rows and columns (pretrained.grid, --grid)."
        )
    stored.add(f"{relative_name(number)}/offsets", table[:-3].reshape(height, width, -1))
    stored.add(f"{relative_name(number)}/tokens", table[-3:])


def write_relative_bias(params: Params, theirs: Callable[[int], str]) -> Params:
    """Takes relative biases out of `params`, and returns them as tables by their name."""
    pattern = re.compile(relative_name(r"(\d+)") + "/offsets")
    tables = {}
    for name in list(params):
        if match := pattern.fullmatch(name):
            offsets = params.pop(name)
            tokens = params.pop(name.replace("/offsets", "/tokens"))
            table = np.concatenate([offsets.reshape(-1, offsets.shape[-1]), tokens])
            tables[theirs(int(match[1]))] = table
    return tables
