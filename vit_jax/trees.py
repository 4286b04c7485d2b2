"""Parameters by name: nested dicts of arrays, and their flat form.

The flat form `{"a/b/c": array}` is what `.npz` files contain. Transformer blocks are stored as
`encoderblock_0 ... encoderblock_{L-1}` (loop form, as in published files) or as one `encoderblock`
whose leaves have a leading axis of length L (scan form), see `table.ParameterTable`; other models
use other names, see `Family.blocks`.
"""

import hashlib
import math
from typing import Any

import jax
import numpy as np

from vit_jax.errors import UserError


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
    """`{"a/b": leaf}` -> nested dict; UserError: one name is a leaf and the prefix of another."""
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


def merge_trees(*trees: Any) -> dict[str, Any]:
    """Nested dicts as one; of arrays with the same name, the last."""
    merged: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = merge_trees(merged[key], value) if both else value
    return merged


def count_parameters(tree: Any) -> int:
    """Number of scalars in all leaves (arrays or ShapeDtypeStructs)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def fingerprint(tree: Any) -> str:
    """16 hex digits of all names and bytes of a tree of host arrays."""
    digest = hashlib.blake2b(digest_size=8)
    for name, array in flatten_names(tree).items():
        digest.update(name.encode() + b"\0" + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
