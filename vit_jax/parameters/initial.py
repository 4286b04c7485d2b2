"""Initial parameters: shapes from one block, numbers from one program per kind of parameter.

The blocks of a model have the same parameters, drawn in the same way from different keys. One
program for all of them takes XLA as long as the update does. Here the traced computation is cut
into those of single parameters, each from its key; equal ones share a program. What no key decides,
such as zeros, is one program together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from vit_jax.parameters.names import repeat_block

# What has been compiled, for the next model of this process. A program keeps its equations, so no
# other function comes to stand at the addresses that their text may hold.
_programs: dict[Any, Callable[..., list[jax.Array]]] = {}
_fold_in = jax.jit(jax.random.fold_in)


def abstract_params(model: Any, image_shape: tuple[int, ...]) -> dict[str, Any]:
    """Shapes and types of a model's parameters, for images [H, W, C]."""

    def init(model: Any) -> Any:
        return model.init(jax.random.key(0), jnp.zeros((1, *image_shape)), train=False)["params"]

    return shapes_of(model, init)


def shapes_of(model: Any, init: Callable[[Any], Any]) -> Any:
    """Shapes and types of `init(model)`, a tree of parameters.

    Blocks are alike: one is traced instead of all.
    """
    depth = getattr(model, "num_layers", None)
    if not depth:
        return jax.eval_shape(lambda: init(model))
    shapes = jax.eval_shape(lambda: init(model.clone(num_layers=1, scan=False)))
    return repeat_block(shapes, depth, stacked=model.scan)


def draw(
    init: Callable[[jax.Array], Mapping[str, jax.Array]],
    rng: jax.Array,
    shardings: Mapping[str, Any],
) -> dict[str, jax.Array]:
    """`init(rng)`: the same numbers, each with its sharding.

    Args:
      init: rng -> arrays by name; pure.
      rng: a key.
      shardings: by name; what it does not name is not computed.
    """
    names = sorted(shardings)
    if not names:
        return {}
    closed = jax.make_jaxpr(lambda rng: operator.itemgetter(*names)(init(rng)))(rng)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(names), instantiate=True)
    outs = dict(zip(names, jaxpr.outvars, strict=True))
    keys = {jaxpr.invars[0]: rng}
    for each in jaxpr.eqns:
        if each.primitive.name == "random_fold_in":
            parent, number = each.invars
            if parent in keys and isinstance(number, core.Literal):
                keys[each.outvars[0]] = _fold_in(keys[parent], np.uint32(number.val))
    known = {**keys, **dict(zip(jaxpr.constvars, closed.consts, strict=True))}
    computed = [each for each in jaxpr.eqns if each.outvars[0] not in keys]

    def is_drawn(name: str) -> bool:
        return not keys.keys().isdisjoint(_free(_needed_for([outs[name]], computed), []))

    drawn = list(filter(is_drawn, names))
    arrays: dict[str, jax.Array] = {}
    for group in filter(None, (sorted(outs.keys() - drawn), *([name] for name in drawn))):
        wanted, places = [outs[name] for name in group], [shardings[name] for name in group]
        equations = _needed_for(wanted, computed)
        read = _free(equations, wanted)
        key = (_text(equations, wanted), *places)
        if key not in _programs:
            run = _as_function(equations, wanted, read)
            _programs[key] = jax.jit(run, out_shardings=places)
        found = _programs[key]([known[v] for v in read])
        arrays |= zip(group, found, strict=True)
    return arrays


def _needed_for(outs: list[Any], equations: list[Any]) -> list[Any]:
    """Those of the equations that these arrays depend on, in order."""
    needed, found = {out for out in outs if isinstance(out, core.Var)}, []
    for equation in reversed(equations):
        if needed.intersection(equation.outvars):
            found.append(equation)
            needed.update(v for v in equation.invars if isinstance(v, core.Var))
    return found[::-1]


def _free(equations: list[Any], outs: list[Any]) -> list[Any]:
    """The variables that are read and not computed, in the order of their first use."""
    computed = {v for each in equations for v in each.outvars}
    read = [*(v for each in equations for v in each.invars), *outs]
    return list(dict.fromkeys(v for v in read if isinstance(v, core.Var) and v not in computed))


def _text(equations: list[Any], outs: list[Any]) -> str:
    """Equal for computations that differ in the names of their variables alone."""
    numbers: dict[Any, int] = {}

    def atom(v: Any) -> str:
        if isinstance(v, core.Var):
            return f"{numbers.setdefault(v, len(numbers))}:{v.aval}"
        return f"{v.val!r}:{v.aval}"

    lines = [
        f"{[atom(v) for v in e.invars]} {e.primitive} {e.params} {[atom(v) for v in e.outvars]}"
        for e in equations
    ]
    return "\n".join([*lines, *map(atom, outs)])


def _as_function(
    equations: list[Any], outs: list[Any], free: list[Any]
) -> Callable[..., list[jax.Array]]:
    """Values of the free variables -> arrays."""

    def run(inputs: list[jax.Array]) -> list[jax.Array]:
        values = dict(zip(free, inputs, strict=True))

        def read(v: Any) -> Any:
            return values[v] if isinstance(v, core.Var) else v.val

        for each in equations:
            parameters = each.primitive.get_bind_params(each.params)
            with each.ctx.manager:
                found = each.primitive.bind(*map(read, each.invars), **parameters)
            found = found if each.primitive.multiple_results else [found]
            values.update(zip(each.outvars, found, strict=True))
        return list(map(read, outs))

    return run
