"""Their names and ours as tables, which reader and writer share: each inverts the other."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.vit import ATTENTION
from vit_jax.pretrained.formats.stored import Arrays, Stored


class Op(NamedTuple):
    """Converts one of their arrays, given the number of heads, to one of ours; and back."""

    read: Callable[[np.ndarray, int], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]


SAME = Op(lambda x, _: x, lambda x: x)
# [out, in, h, w] <-> [h, w, in, out]
CONV = Op(lambda x, _: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1))
# A dense layer as a 1x1 convolution: [out, in, 1, 1] <-> [in, out]
POINTWISE = Op(lambda x, _: x[:, :, 0, 0].T, lambda x: x.T[:, :, None, None])
# PyTorch's layouts by our names: of the first that matches, else the same.
_OPS = {
    # [H*d, D] <-> [D, H, d], and its bias [H*d] <-> [H, d]
    r".*/(query|key|value)/kernel": Op(
        lambda x, heads: x.T.reshape(x.shape[1], heads, -1), lambda x: x.reshape(len(x), -1).T
    ),
    r".*/(query|key|value)/bias": Op(
        lambda x, heads: x.reshape(heads, -1), lambda x: x.reshape(-1)
    ),
    # [D, H*d] <-> [H, d, D]
    r".*/out/kernel": Op(
        lambda x, heads: x.T.reshape(heads, -1, len(x)), lambda x: x.reshape(-1, x.shape[-1]).T
    ),
    r"(.*/)?(embedding|stem|conv\w*)/kernel": CONV,
    r".*/kernel": Op(lambda x, _: x.T, lambda x: x.T),  # [out, in] <-> [in, out]
}
_LAYER = {"kernel": "weight", "bias": "bias"}
_NORM = {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
_NORMS = re.compile(r"(.*/)?(\w*Norm_\d|\w*_norm|norm|norm-pre-head|[bg]n\w+)/")
# Constant buffers of PyTorch modules.
_BUFFERS = ("num_batches_tracked", "relative_position_index", "position_ids")

_QUERY, _KEY, _VALUE, _OUT = (f"{ATTENTION}/{x}/" for x in ("query", "key", "value", "out"))
_DENSE_0, _DENSE_1, _GATE = (f"MlpBlock_0/{x}/" for x in ("Dense_0", "Dense_1", "gate"))
# The parts of our blocks that `block` names.
_BLOCK_PARTS = {
    "norms": ("LayerNorm_0/", "LayerNorm_1/"),
    "attention": (_QUERY, _KEY, _VALUE, _OUT),
    "qkv": tuple(tuple(f"{x}{y}" for x in (_QUERY, _KEY, _VALUE)) for y in ("kernel", "bias")),
    "qv_biases": (f"{_QUERY}bias", f"{_VALUE}bias"),
    "q_kv": (_QUERY, (_KEY, _VALUE)),
    "out": (_OUT,),
    "mlp": (_DENSE_0, _DENSE_1),
    "swiglu": (_GATE, _DENSE_0, _DENSE_1),
    "packed_swiglu": ((_GATE, _DENSE_0), _DENSE_1),
    "scales": ("LayerScale_0/gamma", "LayerScale_1/gamma"),
}

# {ours: theirs, and an op if it is unusual}. Names that end in a slash, and in a dot, are of a
# layer or a norm: of all its arrays. Several of ours are concatenated: query, key and value.
Names = Mapping[str | tuple[str, ...], str | tuple[str, Op]]


def block(**parts: str) -> dict[Any, Any]:
    """The names of parts of a block, such as `mlp="fc1. fc2."`: theirs for ours above."""
    names: dict[Any, Any] = {}
    for part, theirs in parts.items():
        names |= zip(_BLOCK_PARTS[part], theirs.split(), strict=True)
    return names


class Part(NamedTuple):
    """The names of a part of a model; of each of these parts, where {} stands for numbers."""

    names: Names
    ours: str = ""  # before all of our names, such as `Transformer/encoderblock_{}/`
    theirs: str = ""
    shift: int = 0  # our numbers minus theirs
    num_heads: int | None = None  # None: those of the other parts


class _Row(NamedTuple):
    ours: list[str]
    theirs: str
    op: Op
    num_heads: int | None  # None: those of the model


def numbers(form: str, names: Iterable[str]) -> set[tuple[int, ...]]:
    """The numbers in place of the {} of `form` in those `names` that begin with it."""
    pattern = r"(\d+)".join(map(re.escape, re.split(r"\{.*?\}", form)))
    matches = (re.match(pattern, name) for name in names)
    return {tuple(map(int, match.groups())) for match in matches if match}


def _rows(table: Iterable[Part], names: Collection[str]) -> Iterator[_Row]:
    """A row for each of the arrays, with the numbers that are in `names`, ours or theirs."""
    for part in table:
        repeats = {()} if "{" not in part.ours else numbers(part.theirs, names)
        if "{" in part.ours:
            known = numbers(part.ours, names)
            repeats |= {tuple(number - part.shift for number in group) for group in known}
        for group in sorted(repeats):
            ours = part.ours.format(*(number + part.shift for number in group))
            theirs = part.theirs.format(*group)
            for name, value in part.names.items():
                parts = [name] if isinstance(name, str) else name
                their_name, op = (value, None) if isinstance(value, str) else value
                yield from _leaves([ours + x for x in parts], theirs + their_name, op, part)


def _leaves(ours: list[str], theirs: str, op: Op | None, part: Part) -> Iterator[_Row]:
    """The arrays of a layer, or a single one."""
    leaves = {"": ""}
    if theirs.endswith("."):
        leaves = _NORM if _NORMS.fullmatch(ours[0]) else _LAYER
    for leaf, their_leaf in leaves.items():
        usual = (op for pattern, op in _OPS.items() if re.fullmatch(pattern, ours[0] + leaf))
        chosen = op if op and leaf != "bias" else next(usual, SAME)
        yield _Row([name + leaf for name in ours], theirs + their_leaf, chosen, part.num_heads)


def read_table(stored: Stored, arrays: Arrays, table: Iterable[Part], num_heads: int = 1) -> None:
    """Moves arrays into `stored`; UserError for a shape that does not fit the row or the heads."""
    for row in _rows(table, list(arrays)):
        if row.theirs not in arrays or stored.params.keys() & {*row.ours}:
            continue
        array, heads = arrays.pop(row.theirs), row.num_heads or num_heads
        try:
            parts = [row.op.read(part, heads) for part in np.split(array, len(row.ours))]
        except (ValueError, IndexError) as error:
            text = f"{row.theirs} of shape {array.shape} cannot be {', '.join(row.ours)}"
            raise UserError(f"{text} with {heads} heads: {error}.") from error
        for name, part in zip(row.ours, parts, strict=True):
            stored.add(name, part)
    for name in arrays:
        if name.rpartition(".")[2] in _BUFFERS:
            stored.dropped[name] = "a constant, not a parameter"
        else:
            stored.unexpected.append(name)


def write_table(table: Iterable[Part], params: Arrays, format: str) -> Arrays:
    """Our flat names -> theirs (the first of several); UserError if there is none."""
    left, arrays = dict(params), {}
    for row in _rows(table, list(params)):
        if left.keys() >= {*row.ours}:
            parts = [row.op.write(left.pop(name)) for name in row.ours]
            arrays[row.theirs] = np.ascontiguousarray(np.concatenate(parts))
    if left:
        raise UserError(f"--format={format} cannot store {', '.join(sorted(left))}.")
    return arrays
