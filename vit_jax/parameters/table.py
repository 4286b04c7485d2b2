"""Which parameter is which: the rows of a run's models, by prefix, and of its objective."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.create import MODELS, clone_with, family_of
from vit_jax.models.family import LAST, Family, Row
from vit_jax.trees import flatten_names, unflatten_names


class Parameter(NamedTuple):
    """A parameter's row, and the parts of its name."""

    row: Row
    prefix: str  # "" or the part before the model's own tree, such as `teacher/`
    block: int | None  # block number
    is_stacked: bool  # an array of all blocks, with a layer axis
    general: str  # the name with * for the number of a block or unit


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterTable:
    """The parameters of one or several models, each below its prefix, and of an objective.

    A name is looked up in the family of its prefix only, so models may use the same names.
    """

    families: Mapping[str, Family]  # by prefix; "" for a model at the root of the tree
    # Logical axes of the objective's own parameters, by name.
    own: Mapping[str, tuple[str | None, ...]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def find(self) -> Callable[[str], Parameter]:
        """The parameter called, for example, `head/kernel` or `teacher/head/kernel`.

        An adapter (parameters/lora.py) has the row of its kernel, but its own axes. Raises a
        ValueError if no row, or more than one, matches.
        """
        return functools.cache(self._find)

    def _find(self, name: str) -> Parameter:
        parent, _, last = name.rpartition("/")
        if last in ("lora_a", "lora_b"):
            kernel = self.find(f"{parent}/kernel")
            first, *others = kernel.row.axes
            axes = (first, None) if last == "lora_a" else (None, *others)
            general = kernel.general.removesuffix("kernel") + last
            return kernel._replace(row=dataclasses.replace(kernel.row, axes=axes), general=general)
        if name in self.own:
            return Parameter(Row(re.escape(name), self.own[name], LAST), "", None, False, name)
        prefix, family = self._family_of(name)
        general = name.removeprefix(prefix)
        rows = ((row, re.fullmatch(row.pattern, general)) for row in family.rows)
        matches = [(row, match) for row, match in rows if match]
        if len(matches) != 1:
            raise ValueError(f"{name!r} matches {len(matches)} rows of {family.title}, not 1.")
        [(row, match)] = matches
        spans = {key: match.span(key) for key, text in match.groupdict().items() if text}
        for start, end in sorted(spans.values(), reverse=True):
            general = f"{general[:start]}*{general[end:]}"
        block = int(match["block"]) if "block" in spans else None
        is_stacked = "block" in match.groupdict() and block is None
        return Parameter(row, prefix, block, is_stacked, prefix + general)

    def _family_of(self, name: str) -> tuple[str, Family]:
        """The prefix of a name, with its slash, and the family of the model below it."""
        first = name.partition("/")[0]
        if first in self.families:
            return f"{first}/", self.families[first]
        if "" in self.families:
            return "", self.families[""]
        raise ValueError(f"{name!r} is below none of the prefixes {', '.join(self.families)}.")

    def has(self, name: str) -> bool:
        """Whether a row matches `name`."""
        try:
            self.find(name)
        except ValueError:
            return False
        return True

    def check(self, names: Iterable[str], who: str) -> None:
        """Raises a ValueError that says what to declare, unless every name has a row."""
        for name in names:
            if not self.has(name):
                raise ValueError(
                    f"{who} has the parameter {name!r}, which is neither among its own_parameters "
                    f"({', '.join(self.own) or 'none'}) nor a row of its models: "
                    f"{', '.join(f'{prefix!r}: {f.title}' for prefix, f in self.families.items())}."
                )

    def role_of(self, name: str) -> str:
        """The role of the parameter `name`; "" if it has none, or there is no such parameter."""
        return self.find(name).row.role if self.has(name) else ""

    def with_role(self, role: str, names: Iterable[str]) -> list[str]:
        """The `names` with this role, in the order of the rows."""
        rows = [row for family in self.families.values() for row in family.rows]
        chosen = [name for name in names if self.role_of(name) == role]
        return sorted(chosen, key=lambda name: rows.index(self.find(name).row))

    def image_kernel(self, names: Collection[str]) -> str:
        """Name of the convolution on the image; "" if there is none."""
        return next(iter(self.with_role("image", names) or self.with_role("patches", names)), "")

    def last_norms(self, names: Iterable[str]) -> list[str]:
        """Layers after the last block that have one scale per feature."""
        scales = [name for name in names if name.endswith("/scale") and self.has(name)]
        rows = {name.removesuffix("/scale"): self.find(name).row for name in scales}
        return [name for name, row in rows.items() if (row.depth, row.axes) == (LAST, ("embed",))]

    def is_stacked(self, name: str) -> bool:
        """Whether the leaf with this name has a layer axis."""
        return self.has(name) and self.find(name).is_stacked

    def is_in_block(self, name: str) -> bool:
        """Whether it belongs to one of the blocks, or to all in the scan form."""
        return self.is_stacked(name) or self.find(name).block is not None

    def loop_names(self, name: str, leaf: Any) -> list[str]:
        """The name, or for a leaf of the scan form its name in each block."""
        if not self.is_stacked(name):
            return [name]
        head, tail = self._split(name)
        return [f"{head}_{i}/{tail}" for i in range(leaf.shape[0])]

    def _split(self, name: str) -> tuple[str, str]:
        """A name in a block -> (that of the block without its number, the rest)."""
        _, family = self._family_of(name)
        match = re.match(rf"((?:.*/)?{family.block_name})(?:_\d+)?/(.*)$", name)
        assert match is not None, name  # the row has a block
        return match[1], match[2]

    def stack(self, tree: Any) -> dict[str, Any]:
        """Loop form -> scan form: L leaves [...] become one [L, ...]; scan form stays as it is.

        UserError if a block lacks a leaf that another has, or a block number is missing.
        """
        towers: dict[str, dict[str, dict[int, Any]]] = {}  # by the name of a block, and in it
        flat: dict[str, Any] = {}
        for name, leaf in flatten_names(tree).items():
            block = self.find(name).block if self.has(name) else None
            if block is None:
                flat[name] = leaf
            else:
                head, tail = self._split(name)
                towers.setdefault(head, {}).setdefault(tail, {})[block] = leaf
        for head, groups in towers.items():
            depth = max(max(leaves) + 1 for leaves in groups.values())
            for tail, leaves in groups.items():
                name = f"{head}/{tail}"
                if len(leaves) < depth:  # a corrupt name may imply any depth: count, do not list
                    missing = next(i for i in itertools.count() if i not in leaves)
                    raise UserError(f"{name!r} is missing in encoder block {missing} of {depth}.")
                flat[name] = np.stack([np.asarray(leaves[i]) for i in range(depth)])  # [L, ...]
        return unflatten_names(flat)

    def unstack(self, tree: Any) -> dict[str, Any]:
        """Scan form -> loop form, the inverse of `stack`; loop form stays as it is.

        Leaves are arrays or jax.ShapeDtypeStructs. UserError if a block exists in both forms, or a
        stacked leaf has no layer axis.
        """
        leaves = flatten_names(tree)
        flat: dict[str, Any] = {}
        for name, leaf in leaves.items():
            if not self.is_stacked(name):
                flat[name] = leaf
                continue
            if not leaf.shape:
                raise UserError(f"{name!r} has no layer axis.")
            for i, single in enumerate(self.loop_names(name, leaf)):
                if single in leaves:
                    raise UserError(f"both {name!r} (stacked) and {single!r} exist; keep one.")
                # A trace of every slice would take a quarter of the time of `abstract_params`.
                is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
                part = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if is_shape else leaf[i]
                flat[single] = part
        return unflatten_names(flat)


def table_of(model: Any) -> ParameterTable:
    """The parameters of a module that `create_model` made, or of a kind of `MODELS`."""
    return ParameterTable({"": MODELS[model] if isinstance(model, str) else family_of(model)})


@functools.cache  # a loader asks several times; nobody changes the tree
def abstract_params(model: Any, input_shape: tuple[int, ...]) -> dict[str, Any]:
    """Shapes and dtypes of a model's parameters, for images [H, W, C] or texts [T]."""

    def init() -> Any:
        dtype = jnp.int32 if family_of(model).input == "text" else jnp.float32
        inputs = jnp.zeros((1, *input_shape), dtype)
        # Blocks are equal: only one is traced.
        return clone_with(model, scan=True).init(jax.random.key(0), inputs, train=False)["params"]

    params = jax.eval_shape(init)
    return params if getattr(model, "scan", False) else table_of(model).unstack(params)
