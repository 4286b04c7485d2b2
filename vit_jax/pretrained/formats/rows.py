"""Two naming schemes as one table shared by reader and writer: each inverts the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.vit import ATTENTION, BLOCKS
from vit_jax.pretrained.formats.stored import Stored

# Constant buffers of PyTorch modules.
_BUFFERS = ("num_batches_tracked", "relative_position_index", "position_ids")


class Op(NamedTuple):
    """Converts one of their arrays, given the number of heads, to one of ours; and back."""

    read: Callable[[np.ndarray, int], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]

    def of_heads(self, num_heads: int | None) -> Op:
        """For this number of heads whatever the file's other blocks have; None: for theirs."""
        return self._replace(read=lambda x, heads: self.read(x, num_heads or heads))


SAME = Op(lambda x, _: x, lambda x: x)
DENSE = Op(lambda x, _: x.T, lambda x: x.T)  # [out, in] <-> [in, out]
# [out, in, h, w] <-> [h, w, in, out]
CONV = Op(lambda x, _: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1))
# [H*d, D] <-> [D, H, d], and its bias [H*d] <-> [H, d]
HEADS_IN = Op(
    lambda x, heads: x.T.reshape(x.shape[1], heads, -1), lambda x: x.reshape(len(x), -1).T
)
HEADS_BIAS = Op(lambda x, heads: x.reshape(heads, -1), lambda x: x.reshape(-1))
# [D, H*d] <-> [H, d, D]
HEADS_OUT = Op(
    lambda x, heads: x.T.reshape(heads, -1, len(x)), lambda x: x.reshape(-1, x.shape[-1]).T
)


class Row(NamedTuple):
    """One of their arrays holds several of ours, concatenated: query, key, value in `qkv`."""

    ours: tuple[str, ...]
    theirs: str
    op: Op = SAME


def layer(ours: str | list[str], theirs: str, op: Op = DENSE, bias: Op = SAME) -> list[Row]:
    """A PyTorch layer, or several of ours as one: a weight, converted by `op`, and a bias."""
    names = [ours] if isinstance(ours, str) else ours
    return [
        Row(tuple(f"{name}/kernel" for name in names), f"{theirs}.weight", op),
        Row(tuple(f"{name}/bias" for name in names), f"{theirs}.bias", bias),
    ]


def norm(ours: str, theirs: str, scale: str = ".weight", bias: str = ".bias") -> list[Row]:
    """A layer or group norm."""
    return [Row((f"{ours}/scale",), f"{theirs}{scale}"), Row((f"{ours}/bias",), f"{theirs}{bias}")]


def encoder_block(
    number: int, folder: str, theirs: str, blocks: str = BLOCKS, num_heads: int | None = None
) -> list[Row]:
    """A block; `theirs` names its parts: norm, query, key, value (or all three as one layer),
    out, norm, and both layers of the MLP.

    A decoder has other `blocks` of ours, and its own number of heads.
    """
    ours = f"{blocks}_{number}"
    ops = [op.of_heads(num_heads) for op in (HEADS_IN, HEADS_BIAS, HEADS_OUT)]
    attention = f"{ours}/{ATTENTION}"
    before, *qkv, out, after, fc1, fc2 = (f"{folder}.{name}" for name in theirs.split())
    inputs = [f"{attention}/{name}" for name in ("query", "key", "value")]
    groups = [inputs] if len(qkv) == 1 else [[name] for name in inputs]
    rows = norm(f"{ours}/LayerNorm_0", before)
    for names, part in zip(groups, qkv, strict=True):
        rows += layer(names, part, ops[0], ops[1])
    rows += layer(f"{attention}/out", out, ops[2])
    rows += norm(f"{ours}/LayerNorm_1", after)
    rows += layer(f"{ours}/MlpBlock_0/Dense_0", fc1)
    return rows + layer(f"{ours}/MlpBlock_0/Dense_1", fc2)


def block_numbers(names: Iterable[str]) -> list[tuple[int, ...]]:
    """Block numbers of a Vision Transformer's parameters, in our names."""
    return numbers(rf"{BLOCKS}_(\d+)/", names)


def numbers(pattern: str, names: Iterable[str]) -> list[tuple[int, ...]]:
    """The numbers in `names` that match the groups of `pattern`, in order."""
    matches = (re.search(pattern, name) for name in names)
    return sorted({tuple(map(int, match.groups())) for match in matches if match})


def read_rows(
    stored: Stored, arrays: dict[str, np.ndarray], rows: list[Row], *, num_heads: int = 1
) -> None:
    """Moves arrays into `stored`; UserError for a shape that does not fit the row or the heads."""
    for row in rows:
        if row.theirs not in arrays:
            continue
        array = arrays.pop(row.theirs)
        try:
            parts = [row.op.read(part, num_heads) for part in np.split(array, len(row.ours))]
        except (ValueError, IndexError) as error:
            raise UserError(
                f"{row.theirs} of shape {array.shape} cannot be {', '.join(row.ours)} with "
                f"{num_heads} heads: {error}."
            ) from error
        for name, part in zip(row.ours, parts, strict=True):
            stored.add(name, part)
    for name in arrays:
        if name.rpartition(".")[2] in _BUFFERS:
            stored.dropped[name] = "a constant, not a parameter"
        else:
            stored.unexpected.append(name)


def write_rows(
    rows: list[Row], params: Mapping[str, np.ndarray], format: str
) -> dict[str, np.ndarray]:
    """Our flat names -> theirs, contiguous; UserError if the format has no name for one."""
    if left := params.keys() - {name for row in rows for name in row.ours}:
        raise UserError(f"--format={format} cannot store {', '.join(sorted(left))}.")
    return {
        row.theirs: np.ascontiguousarray(
            np.concatenate([row.op.write(params[name]) for name in row.ours])
        )
        for row in rows
        if row.ours[0] in params
    }
