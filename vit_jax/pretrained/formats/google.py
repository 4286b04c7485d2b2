"""The `.npz` files of Google's code of all eras, of Big Transfer, and our own.

* `npz`: the official code's current names, which we use too.
* `npz_published`: the published files. Before Linen, Flax numbered the parts of a block jointly,
  and group norms have shape [1, 1, 1, C]. In Big Transfer's files each group norm is below the
  convolution that follows it (`a`, `b`, `c` of a unit), and the head is a 1x1 convolution.
* `big_vision`: `params/` before every name (`params/img/` in two-tower models), position embeddings
  at the root and without a row for the class token, blocks possibly stacked for a scan, and in
  old files the attention-pooling head's parts at the root.

Any historical mixture can be read, such as with a prefix `opt/target/` (a whole train state).
"""

import functools
import math
import re
from collections.abc import Collection
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import bit
from vit_jax.models.create import MODELS, recognise
from vit_jax.models.positions import infer_positions
from vit_jax.models.vit import BLOCKS, POSITIONS
from vit_jax.parameters.table import ParameterTable, table_of
from vit_jax.pretrained.formats.names import SAME, Op, Part, read_table, write_table
from vit_jax.pretrained.formats.stored import ONE_TABLE, Arrays, Beside, Grid, Holds, Stored
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
_GROUP_NORM = re.compile(r"(?:.*/)?(?:gn(?:\d+|_root|_proj)|norm-pre-head)/(?:scale|bias)")
_MAP_HEAD_PARTS = ("probe", "MultiHeadDotProductAttention_0", "LayerNorm_0", "MlpBlock_0")
# The rest of a train state stored in the same file as the parameters.
_TRAIN_STATE = re.compile(r"(?:opt|optimizer|opt_state|state|chrono|extra|step|epoch)(?:/.*)?")


def detect(arrays: Arrays, part: str) -> bool:
    is_bit = any(name.startswith("resnet/root_block/") for name in arrays)
    return is_bit or _find_prefix(arrays, part) is not None


def _find_prefix(names: Collection[str], part: str) -> str | None:
    """The prefix of the parameters' names, or None if there are no such parameters."""
    rows = [row for family in MODELS.values() for row in family.rows]
    inputs = [row.pattern for row in rows if row.role in ("image", "patches", "vocabulary")]
    prefixes = (f"params/{part}/", f"{part}/") if part else PREFIXES
    return next((p for p in prefixes if any(f"{p}{name}" in names for name in inputs)), None)


def _format(own: Arrays, prefix: str, table: ParameterTable) -> str:
    """The name of the format of a model's own arrays, whose names in the file have this prefix."""
    if any(part in name for name in own for part in _PRE_LINEN) or prefix.endswith("target/"):
        return "npz_published"
    if prefix or {"pos_embedding", "probe"} & own.keys() or any(map(table.is_stacked, own)):
        return "big_vision"
    norms = (array for name, array in own.items() if _GROUP_NORM.fullmatch(name))
    return "npz_published" if any(array.ndim == 4 for array in norms) else "npz"


def read(arrays: Arrays, beside: Beside) -> Stored:
    """Reads any of the three naming schemes; UserError if two arrays are the same parameter."""
    prefix = _find_prefix(arrays, beside.part)
    if prefix is None:
        stored = Stored("npz_published", conventions=dict(BIT_ASSUMED))
        # Some files number the convolutions of a unit.
        arrays = {re.sub(r"(conv2d)_\d+/", r"\1/", name): array for name, array in arrays.items()}
        read_table(stored, arrays, _BIG_TRANSFER)
        return stored
    own = {n.removeprefix(prefix): array for n, array in arrays.items() if n.startswith(prefix)}
    table = table_of(recognise(own))
    stored = Stored(_format(own, prefix, table), conventions=dict(ASSUMED))
    taken: dict[str, str] = {}  # our name -> name in the file
    is_text = table.with_role("vocabulary", own)
    for name, array in arrays.items():
        if _TRAIN_STATE.fullmatch(name) and not (prefix and name.startswith(prefix)):
            stored.dropped[name] = "part of the train state, not a parameter"
            continue
        if not name.startswith(prefix):
            if prefix.count("/") > 1 and name.startswith("params/"):
                stored.dropped[name] = f"not part of {prefix.split('/')[1]!r}"
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
        if _GROUP_NORM.fullmatch(ours) and array.shape[:-1] == (1, 1, 1):
            array = array.reshape(-1)  # [C]
        stored.add(ours, array)
    stored.params = flatten_names(table.unstack(unflatten_names(stored.params)))
    if "cls" in stored.params and not taken.get(POSITIONS, POSITIONS).endswith(POSITIONS):
        _place_posemb(stored, taken[POSITIONS], beside.grid)
    if infer_positions(stored.params, "Transformer", BLOCKS) == "sincos2d":  # no such arrays
        # Only big_vision has models with fixed positions; elsewhere the array is missing.
        is_fixed = stored.format == "big_vision"
        stored.conventions["position_embedding"] = "sincos2d" if is_fixed else "learned"
    return stored


def _rename_blocks(name: str, table: dict[str, str]) -> str:
    match = re.match(_BLOCK + r"([^/]+)(/.*)$", name)
    return match[1] + table.get(match[2], match[2]) + match[3] if match else name


def _place_posemb(stored: Stored, name: str, grid: Grid | None) -> None:
    """Adds the class token's row of position embeddings, which big_vision folds into the token."""
    posemb = stored.params[POSITIONS]
    num_rows = posemb.shape[1] if posemb.ndim == 3 else 0

    def is_grid(count: int) -> bool:
        return count == math.prod(grid) if grid else count > 0 and math.isqrt(count) ** 2 == count

    if is_grid(num_rows) == is_grid(num_rows - 1):
        text = f"{name!r} has {num_rows} rows, maybe one for the class token, and is not a square"
        raise UserError(f"{text}; give the rows and columns of tokens (pretrained.grid, --grid).")
    if is_grid(num_rows):
        stored.params[POSITIONS] = np.pad(posemb, ((0, 0), (1, 0), (0, 0)))  # [1, 1 + h*w, D]
        stored.changed[POSITIONS] = "row of zeros added for the class token"


def to_published(params: Arrays) -> Arrays:
    """Renames our flat names to those of the published files."""
    old = {new: old for old, new in _PRE_LINEN.items()}
    return {_rename_blocks(name, old): array for name, array in _with_4d_norms(params).items()}


def _with_4d_norms(params: Arrays) -> Arrays:
    """Reshapes group norms to [1, 1, 1, C]."""
    return {
        name: array.reshape(1, 1, 1, -1) if _GROUP_NORM.fullmatch(name) else array
        for name, array in params.items()
    }


def to_big_vision(params: Arrays) -> Arrays:
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
_HEAD = Op(lambda x, _: x[0, 0], lambda x: x[None, None])  # [1, 1, D, K] <-> [D, K]
_UNIT: dict[Any, Any] = {"conv_proj/kernel": (f"a/proj/{_CONV}", SAME)}
for _number, _letter in enumerate("abc", start=1):
    _UNIT[f"gn{_number}/scale"] = f"{_letter}/group_norm/gamma"
    _UNIT[f"gn{_number}/bias"] = f"{_letter}/group_norm/beta"
    _UNIT[f"conv{_number}/kernel"] = (f"{_letter}/{_CONV}", SAME)
_BIG_TRANSFER = (
    Part(
        {
            "root_block/conv_root/kernel": (f"root_block/{_CONV}", SAME),
            "norm-pre-head/scale": "group_norm/gamma",
            "norm-pre-head/bias": "group_norm/beta",
            "head/kernel": ("head/conv2d/kernel", _HEAD),
            "head/bias": "head/conv2d/bias",
        },
        theirs="resnet/",
    ),
    Part(_UNIT, "block{}/unit{:02}/", "resnet/block{}/unit{:02}/"),
)


to_big_transfer = functools.partial(write_table, _BIG_TRANSFER, format="npz_published")

_POOLED = ("token", "gap", "unpooled", "token_unpooled")
# Our own names, which the official code reads too; its conventions are in no JSON file.
NPZ = (Holds("", dict, assumed={**ASSUMED, "position_embedding": "learned"}),)
_LEARNED = {"position_embedding": ("learned",), "resnet_batch_norm": (False,)}
PUBLISHED = (
    Holds("vit", to_published, {"classifier": _POOLED, **_LEARNED}, ASSUMED),
    Holds("bit", to_big_transfer, assumed=BIT_ASSUMED),
)
_BIG_VISION = {"classifier": ("token", "gap", "map"), "resnet_layers": (None,), **ONE_TABLE}
BIG_VISION = (
    Holds("vit", to_big_vision, _BIG_VISION, ASSUMED),
    Holds("bit", to_big_vision, assumed={**BIT_ASSUMED, "max_pool_padding": "-inf"}),
)
