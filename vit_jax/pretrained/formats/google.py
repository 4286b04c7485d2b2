"""The `.npz` files of Google's code of all eras, of Big Transfer, and our own.

* `npz`: the official code's current names, which we use too.
* `npz_published`: the published files. Before Linen, Flax numbered the parts of a block jointly,
  and group norms have shape [1, 1, 1, C].
* `big_vision`: `params/` before every name (`params/img/` in two-tower models), position embeddings
  at the root and without a row for the class token, blocks possibly stacked for a scan, and in
  old files the attention-pooling head's parts at the root.

Any historical mixture can be read, such as with a prefix `opt/target/` (a whole train state). In
Big Transfer's files each group norm is below the convolution that follows it (`a`, `b`, `c` of
a unit), and the head is a 1x1 convolution.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import bit
from vit_jax.models.create import MODELS, recognise
from vit_jax.models.positions import infer_positions
from vit_jax.models.vit import BLOCKS, POSITIONS
from vit_jax.parameters.table import ParameterTable, table_of
from vit_jax.pretrained.formats.rows import Op, Row, norm, numbers, read_rows, write_rows
from vit_jax.pretrained.formats.stored import ONE_TABLE, Holds, Stored
from vit_jax.trees import flatten_names, unflatten_names

# What Google's code computes for all its files.
ASSUMED = {"gelu": "tanh", "layer_norm_epsilon": 1e-6}
# Big Transfer's own code; big_vision pads with minus infinity.
BIT_ASSUMED = {"max_pool_padding": "zero", "standardization_epsilon": 1e-10}
PREFIXES = ("opt/target/", "params/img/", "params/", "target/", "")
_OTHER_POSITIONS = ("pos_embedding", "Transformer/pos_embedding")
_BLOCK = rf"({BLOCKS}(?:_\d+)?/)"
_PRE_LINEN = {
    "MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0",
    "LayerNorm_2": "LayerNorm_1",
    "MlpBlock_3": "MlpBlock_0",
}
_LINEN = {new: old for old, new in _PRE_LINEN.items()}
_GROUP_NORM = re.compile(r"(?:.*/)?(?:gn(?:\d+|_root|_proj)|norm-pre-head)/(?:scale|bias)")
_MAP_HEAD_PARTS = ("probe", "MultiHeadDotProductAttention_0", "LayerNorm_0", "MlpBlock_0")
# The rest of a train state stored in the same file as the parameters.
_TRAIN_STATE = re.compile(r"(?:opt|optimizer|opt_state|state|chrono|extra|step|epoch)(?:/.*)?")


def find_prefix(names: Collection[str], part: str = "") -> str | None:
    """The prefix of the parameters' names, or None if there are no such parameters."""
    rows = [row for family in MODELS.values() for row in family.rows]
    inputs = [row.pattern for row in rows if row.role in ("image", "patches", "vocabulary")]
    prefixes = (f"params/{part}/", f"{part}/") if part else PREFIXES
    return next((p for p in prefixes if any(f"{p}{name}" in names for name in inputs)), None)


def _rename_blocks(name: str, table: dict[str, str]) -> str:
    match = re.match(_BLOCK + r"([^/]+)(/.*)$", name)
    return match[1] + table.get(match[2], match[2]) + match[3] if match else name


def read_google(
    arrays: dict[str, np.ndarray], *, grid: tuple[int, int] | None = None, part: str = ""
) -> Stored:
    """Reads any of the three naming schemes; UserError if two arrays are the same parameter."""
    prefix = find_prefix(arrays, part)
    assert prefix is not None  # the format was detected by it
    names = [name.removeprefix(prefix) for name in arrays if name.startswith(prefix)]
    table = table_of(recognise(names))
    stored = Stored(_format(arrays, prefix, table))
    taken: dict[str, str] = {}  # our name -> name in the file
    is_text = table.with_role("vocabulary", names)
    for name in list(arrays):
        if not name.startswith(prefix) or (not prefix and _TRAIN_STATE.fullmatch(name)):
            if prefix.count("/") > 1 and name.startswith("params/"):
                stored.dropped[name] = f"not part of {prefix.split('/')[1]!r}"
            elif _TRAIN_STATE.fullmatch(name):
                stored.dropped[name] = "part of the train state, not a parameter"
            else:
                stored.unexpected.append(name)
            continue
        ours = _rename_blocks(name.removeprefix(prefix), _PRE_LINEN)
        if ours.split("/")[0] in _MAP_HEAD_PARTS:
            ours = f"MAPHead_0/{ours}"
        if ours in _OTHER_POSITIONS and not is_text:
            ours = POSITIONS
        if ours in taken:
            raise UserError(f"{taken[ours]!r} and {name!r} both map to the parameter {ours!r}.")
        taken[ours] = name
        array = arrays.pop(name)
        if _GROUP_NORM.fullmatch(ours) and array.shape[:-1] == (1, 1, 1):
            array = array.reshape(-1)  # [C]
        stored.add(ours, array)
    stored.params = flatten_names(table.unstack(unflatten_names(stored.params)))
    if "cls" in stored.params and not taken.get(POSITIONS, POSITIONS).endswith(POSITIONS):
        _place_posemb(stored, taken[POSITIONS], grid)
    stored.conventions = dict(ASSUMED)
    if infer_positions(stored.params, "Transformer", BLOCKS) == "sincos2d":  # no such arrays
        # Only big_vision has models with fixed positions; elsewhere the array is missing.
        is_fixed = stored.format == "big_vision"
        stored.conventions["position_embedding"] = "sincos2d" if is_fixed else "learned"
    return stored


def _format(arrays: dict[str, np.ndarray], prefix: str, table: ParameterTable) -> str:
    names = [name.removeprefix(prefix) for name in arrays if name.startswith(prefix)]
    if any(part in name for name in names for part in _PRE_LINEN) or prefix.endswith("target/"):
        return "npz_published"
    if prefix or any(map(table.is_stacked, names)):
        return "big_vision"
    if "pos_embedding" in names or "probe" in names:
        return "big_vision"
    norms = (arrays[name] for name in names if _GROUP_NORM.fullmatch(name))
    return "npz_published" if any(array.ndim == 4 for array in norms) else "npz"


def _place_posemb(stored: Stored, name: str, grid: tuple[int, int] | None) -> None:
    """Adds the class token's row of position embeddings, which big_vision folds into the token."""
    posemb = stored.params[POSITIONS]
    num_rows = posemb.shape[1] if posemb.ndim == 3 else 0
    counts = {num_rows - 1: False, num_rows: True}  # tokens of the grid -> whether it is folded
    if grid is not None:
        folded = counts.get(grid[0] * grid[1])
    else:
        squares = [f for n, f in counts.items() if n > 0 and math.isqrt(n) ** 2 == n]
        folded = squares[0] if len(squares) == 1 else None
    if folded is None:
        raise UserError(
            f"{name!r} has {num_rows} rows, which with or without one for the class token is not a "
            "square; give the rows and columns of tokens (pretrained.grid)."
        )
    if folded:
        stored.params[POSITIONS] = np.pad(posemb, ((0, 0), (1, 0), (0, 0)))  # [1, 1 + h*w, D]
        stored.changed[POSITIONS] = "row of zeros added for the class token"


def to_published(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Renames our flat names to those of the published files."""
    return {_rename_blocks(n, _LINEN): array for n, array in _with_4d_norms(params).items()}


def _with_4d_norms(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Reshapes group norms to [1, 1, 1, C]."""
    return {
        name: array.reshape(1, 1, 1, -1) if _GROUP_NORM.fullmatch(name) else array
        for name, array in params.items()
    }


def to_big_vision(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Renames our flat names to big_vision's; folds the class token's position into the token."""
    params = dict(params)
    posemb = params.pop(POSITIONS, None)
    if posemb is not None:
        if "cls" in params:
            row, posemb = posemb[:, :1], posemb[:, 1:]
            if row.any():  # otherwise -0.0 would become 0.0
                params["cls"] = params["cls"] + row
        params["pos_embedding"] = posemb
    if bit.STEM in params:  # whose norms have that shape there
        params = _with_4d_norms(params)
    return {f"params/{name}": array for name, array in params.items()}


_CONV = "standardized_conv2d/kernel"
_BIT_NORM = ("/group_norm/gamma", "/group_norm/beta")  # scale and bias
_BIT_HEAD = Op(lambda x, _: x[0, 0], lambda x: x[None, None])  # [1, 1, D, K] <-> [D, K]


def _bit_rows(names: Iterable[str]) -> list[Row]:
    """The table of Big Transfer for the units in `names`, of either naming."""
    rows = [
        Row(("root_block/conv_root/kernel",), f"resnet/root_block/{_CONV}"),
        *norm("norm-pre-head", "resnet", *_BIT_NORM),
        Row(("head/kernel",), "resnet/head/conv2d/kernel", _BIT_HEAD),
        Row(("head/bias",), "resnet/head/conv2d/bias"),
    ]
    for block, unit in numbers(r"block(\d+)/unit(\d+)/", names):
        ours = f"block{block}/unit{unit:02}"
        rows += [Row((f"{ours}/conv_proj/kernel",), f"resnet/{ours}/a/proj/{_CONV}")]
        for number, letter in enumerate("abc", start=1):
            rows += norm(f"{ours}/gn{number}", f"resnet/{ours}/{letter}", *_BIT_NORM)
            rows += [Row((f"{ours}/conv{number}/kernel",), f"resnet/{ours}/{letter}/{_CONV}")]
    return rows


def read_big_transfer(arrays: dict[str, np.ndarray]) -> Stored:
    """Reads a Big Transfer file; UserError for an array of another shape."""
    stored = Stored("npz_published", conventions=dict(BIT_ASSUMED))
    # Some files number the convolutions of a unit.
    arrays = {re.sub(r"(conv2d)_\d+/", r"\1/", name): array for name, array in arrays.items()}
    read_rows(stored, arrays, _bit_rows(arrays))
    return stored


_POOLED = ("token", "gap", "unpooled", "token_unpooled")
PUBLISHED = {
    "vit": Holds(
        to_published, {"classifier": _POOLED, "position_embedding": ("learned",)}, ASSUMED
    ),
    "bit": Holds(
        lambda params: write_rows(_bit_rows(params), params, "npz_published"), assumed=BIT_ASSUMED
    ),
}
BIG_VISION = {
    "vit": Holds(
        to_big_vision,
        {"classifier": ("token", "gap", "map"), "resnet_layers": (None,), **ONE_TABLE},
        ASSUMED,
    ),
    "bit": Holds(to_big_vision, assumed={**BIT_ASSUMED, "max_pool_padding": "-inf"}),
}
