"""Parameters by name: trees, the two forms of the blocks, and the model's row of each.

A parameter tree is a nested dict of arrays. Its flat form `{"a/b/c": array}` is what `.npz` files
contain. Transformer blocks are stored as `encoderblock_0 ... encoderblock_{L-1}` (loop form, as in
published files) or as one `encoderblock` whose leaves have a leading axis of length L (scan form);
other models use other names, see `Family.blocks`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.create import MODELS, clone_with, family_of
from vit_jax.models.family import LAST, Row
from vit_jax.objectives.create import OBJECTIVES


def _in_block(name: str, number: str = "") -> re.Match[str] | None:
    """Matches a name with this expression after the model's name of a block; "": scan form."""
    words = "|".join(sorted({each.block_name for each in MODELS.values() if each.blocks}))
    return re.match(rf"(?P<head>(?:.*/)?(?:{words})){number}/(?P<tail>.*)$", name)


def path_name(path: Any) -> str:
    """A path of JAX's tree functions -> "a/b", from its dict keys only.

    So a moment in the optimizer state has the name of its parameter.
    """
    keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    return "/".join(str(key) for key in keys)


def flatten_names(tree: Any) -> dict[str, Any]:
    """Nested dict -> `{"a/b": leaf}` in sorted order; `None` leaves are dropped."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def unflatten_names(flat: dict[str, Any]) -> dict[str, Any]:
    """`{"a/b": leaf}` -> nested dict; the inverse of `flatten_names`.

    Raises:
      UserError: one name is a leaf and also the prefix of another.
    """
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise UserError(f"{name!r} is below {parent!r}, which is an array.")
        if last in node:
            raise UserError(f"{name!r} is both an array and a group of arrays.")
        node[last] = leaf
    return tree


def count_parameters(tree: Any) -> int:
    """Number of scalars in all leaves (arrays or ShapeDtypeStructs)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def fingerprint(tree: Any) -> str:
    """16 hex digits of all names and bytes of a tree of host arrays."""
    digest = hashlib.blake2b(digest_size=8)
    for name, array in flatten_names(tree).items():
        digest.update(name.encode() + b"\0" + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def is_stacked(name: str) -> bool:
    """Whether the leaf with this name has a layer axis."""
    return _in_block(name) is not None


def loop_names(name: str, leaf: Any) -> list[str]:
    """The name, or for a leaf of the scan form its name in each block."""
    match = _in_block(name)
    if match is None:
        return [name]
    return [f"{match['head']}_{i}/{match['tail']}" for i in range(leaf.shape[0])]


def is_scanned(flat: dict[str, Any]) -> bool:
    """Whether a flat tree is in scan form."""
    return any(is_stacked(name) for name in flat)


def stack_blocks(tree: Any) -> dict[str, Any]:
    """Loop form -> scan form: L leaves [...] become one [L, ...]. Scan form is returned unchanged.

    Raises:
      UserError: a block lacks a leaf that another has, or a block number is missing.
    """
    towers: dict[str, dict[str, dict[int, Any]]] = {}  # by the prefix of a block's number
    flat: dict[str, Any] = {}
    for name, leaf in flatten_names(tree).items():
        match = _in_block(name, r"_(?P<index>\d+)")
        if match is None:
            flat[name] = leaf
        else:
            group = towers.setdefault(match["head"], {}).setdefault(match["tail"], {})
            group[int(match["index"])] = leaf
    for head, groups in towers.items():
        depth = max(max(leaves) + 1 for leaves in groups.values())
        for tail, leaves in groups.items():
            name = f"{head}/{tail}"
            if len(leaves) < depth:  # a corrupt name may imply any depth: count, do not list
                missing = next(i for i in itertools.count() if i not in leaves)
                raise UserError(f"{name!r} is missing in encoder block {missing} of {depth}.")
            flat[name] = np.stack([np.asarray(leaves[i]) for i in range(depth)])  # [L, ...]
    return unflatten_names(flat)


def unstack_blocks(tree: Any) -> dict[str, Any]:
    """Scan form -> loop form, the inverse of `stack_blocks`. Loop form is returned unchanged.

    Leaves are arrays or jax.ShapeDtypeStructs.

    Raises:
      UserError: a block exists in both forms, or a stacked leaf has no layer axis.
    """
    given = flatten_names(tree)
    flat: dict[str, Any] = {}
    for name, leaf in given.items():
        match = _in_block(name)
        if match is None:
            flat[name] = leaf
            continue
        if not leaf.shape:
            raise UserError(f"{name!r} has no layer axis.")
        for i in range(leaf.shape[0]):
            single = f"{match['head']}_{i}/{match['tail']}"
            if single in given:
                raise UserError(f"both {name!r} (stacked) and {single!r} exist; keep one.")
            # A trace of every slice would take a quarter of the time of `abstract_params`.
            is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
            flat[single] = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if is_shape else leaf[i]
    return unflatten_names(flat)


@functools.cache  # a loader asks several times; nobody changes the tree
def abstract_params(model: Any, input_shape: tuple[int, ...]) -> dict[str, Any]:
    """Shapes and dtypes of a model's parameters, for images [H, W, C] or texts [T].

    Blocks are equal: only one is traced, as under a scan.
    """

    def init() -> Any:
        dtype = jnp.int32 if family_of(model).input == "text" else jnp.float32
        inputs = jnp.zeros((1, *input_shape), dtype)
        return clone_with(model, scan=True).init(jax.random.key(0), inputs, train=False)["params"]

    params = jax.eval_shape(init)
    return params if getattr(model, "scan", False) else unstack_blocks(params)


@dataclasses.dataclass(frozen=True)
class Found:
    """A parameter's row, and the parts of its name."""

    row: Row
    prefix: str  # "" or the part before the model's own tree, such as `teacher/`
    block: int | None  # block number
    general: str  # the name with * for the number of a block or unit


def all_rows() -> tuple[Row, ...]:
    """Of all models and objectives, without duplicates."""
    return _rows_of(_kinds())


def _kinds() -> tuple[int, ...]:
    """Tells when a kind was added: hashing all rows would take most of the time of loading."""
    return tuple(map(id, (*MODELS.values(), *OBJECTIVES.values())))


@functools.cache
def _rows_of(kinds: tuple[int, ...]) -> tuple[Row, ...]:
    del kinds  # all there are
    rows = [row for family in MODELS.values() for row in family.rows]
    for kind in OBJECTIVES.values():
        rows += [Row(name, axes, LAST) for name, axes in kind.own_parameters.items()]
    return tuple(dict.fromkeys(rows))


def parameter_row(name: str) -> Found:
    """The row of the parameter `name`, as it is or below any prefix (`student/head/kernel`).

    An adapter (parameters/lora.py) has the row of its kernel, but its own axes.

    Raises:
      ValueError: no row, or more than one, matches.
    """
    parent, _, last = name.rpartition("/")
    if last not in ("lora_a", "lora_b"):
        return _find(name, _kinds())
    found = _find(f"{parent}/kernel", _kinds())
    first, *others = found.row.axes
    row = dataclasses.replace(
        found.row, axes=(first, None) if last == "lora_a" else (None, *others)
    )
    return dataclasses.replace(found, row=row, general=found.general.removesuffix("kernel") + last)


@functools.cache
def _find(name: str, kinds: tuple[int, ...]) -> Found:
    parts, rows = name.split("/"), _rows_of(kinds)
    matches: list[Found] = []
    for start in range(len(parts)):
        own_name = "/".join(parts[start:])
        for row in rows:
            if match := re.fullmatch(row.pattern, own_name):
                numbers = {k: match.span(k) for k, v in match.groupdict().items() if v is not None}
                block = int(match["block"]) if "block" in numbers else None
                general = own_name
                for first, last in sorted(numbers.values(), reverse=True):
                    general = f"{general[:first]}*{general[last:]}"
                prefix = name.removesuffix(own_name)
                matches.append(Found(row, prefix, block, prefix + general))
        if matches:
            break
    if len(matches) != 1:
        raise ValueError(f"{name!r} matches {len(matches)} rows of the models' families, not 1.")
    return matches[0]


def role_of(name: str) -> str:
    """The role of the parameter `name`; "" if it has none, or belongs to no model."""
    row = _row_of(name)
    return row.role if row else ""


def _row_of(name: str) -> Row | None:
    try:
        return parameter_row(name).row
    except ValueError:
        return None


def with_role(role: str, names: Iterable[str]) -> list[str]:
    """The `names` with this role, in the order of the rows."""
    found = [(parameter_row(name).row, name) for name in names if role_of(name) == role]
    return [name for _, name in sorted(found, key=lambda pair: all_rows().index(pair[0]))]


def image_kernel(names: Iterable[str]) -> str:
    """Name of the convolution on the image; "" if there is none."""
    return next(iter(with_role("image", names) or with_role("patches", names)), "")


def last_norms(names: Iterable[str]) -> list[str]:
    """Layers after the last block that have one scale per feature."""
    scales = [name.removesuffix("/scale") for name in names if name.endswith("/scale")]
    rows = {name: _row_of(f"{name}/scale") for name in scales}
    return [n for n, row in rows.items() if row and (row.depth, row.axes) == (LAST, ("embed",))]


def last_norm(params: Any) -> str:
    """The layer norm whose output, or mean over tokens, is the head's input; UserError if none."""
    names = flatten_names(params)
    found = last_norms(names)
    if len(found) != 1 or with_role("pre_logits", names):
        raise UserError(
            "pretrained.standardize=True needs a head on the last layer norm; this model has "
            "other layers between them."
        )
    return found[0]
