"""Initial parameters: shapes from one block, numbers from one program per kind of parameter.

The blocks of a model have the same parameters, drawn in the same way from different keys. One
program for all of them takes XLA as long as the update does. Here the traced computation is cut
into those of single parameters; equal ones, but for the numbers folded into their keys, share a
program. What no key decides, such as zeros, is one program together.
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

from vit_jax.parameters.names import unstack_blocks

# What has been compiled, for the next model of this process. A program keeps its equations, so no
# other function comes to stand at the addresses that their text may hold.
_programs: dict[Any, Callable[..., list[jax.Array]]] = {}


def abstract_params(model: Any, image_shape: tuple[int, ...]) -> dict[str, Any]:
    """Shapes and types of a model's parameters, for images [H, W, C].

    Blocks are alike: where they can be scanned, one is traced instead of all.
    """
    is_loop = getattr(model, "scan", None) is False
    traced = model.clone(scan=True) if is_loop else model
    images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    shapes = jax.eval_shape(lambda x: traced.init(jax.random.key(0), x, train=False), images)
    if not is_loop:
        return shapes["params"]
    # With an axis of layers that can be indexed, and no bytes.
    stacked = jax.tree.map(
        lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), shapes["params"]
    )
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), unstack_blocks(stacked))


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
    inputs = dict(zip([*jaxpr.invars, *jaxpr.constvars], [rng, *closed.consts], strict=True))
    key_of_all = jaxpr.invars[0]
    drawn = [n for n in names if key_of_all in _free(_needed_for([outs[n]], jaxpr), [])]
    arrays: dict[str, jax.Array] = {}
    for group in filter(None, (sorted(outs.keys() - drawn), *([name] for name in drawn))):
        wanted, places = [outs[name] for name in group], [shardings[name] for name in group]
        equations = _needed_for(wanted, jaxpr)
        folded = [v.val for each in equations for v in each.invars if _is_folded(v)]
        read = _free(equations, wanted)
        key = (_text(equations, wanted), *places)
        if key not in _programs:
            run = _as_function(equations, wanted, read)
            _programs[key] = jax.jit(run, out_shardings=places)
        found = _programs[key]([inputs[v] for v in read], list(map(np.uint32, folded)))
        arrays |= zip(group, found, strict=True)
    return arrays


def _needed_for(outs: list[Any], jaxpr: Any) -> list[Any]:
    """The equations that these arrays depend on, in order."""
    needed, found = {out for out in outs if isinstance(out, core.Var)}, []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            found.append(equation)
            needed.update(v for v in equation.invars if isinstance(v, core.Var))
    return found[::-1]


def _free(equations: list[Any], outs: list[Any]) -> list[Any]:
    """The variables that are read and not computed, in the order of their first use."""
    computed = {v for each in equations for v in each.outvars}
    read = [*(v for each in equations for v in each.invars), *outs]
    return list(dict.fromkeys(v for v in read if isinstance(v, core.Var) and v not in computed))


def _is_folded(atom: Any) -> bool:
    """Whether it is a number that is folded into a key."""
    return isinstance(atom, core.Literal) and getattr(atom.aval, "dtype", None) == np.uint32


def _text(equations: list[Any], outs: list[Any]) -> str:
    """Equal for computations that differ in the names of their variables and in folded numbers."""
    numbers: dict[Any, int] = {}

    def atom(v: Any) -> str:
        if isinstance(v, core.Var):
            return f"{numbers.setdefault(v, len(numbers))}:{v.aval}"
        return "folded" if _is_folded(v) else f"{v.val!r}:{v.aval}"

    lines = [
        f"{[atom(v) for v in e.invars]} {e.primitive} {e.params} {[atom(v) for v in e.outvars]}"
        for e in equations
    ]
    return "\n".join([*lines, *map(atom, outs)])


def _as_function(
    equations: list[Any], outs: list[Any], free: list[Any]
) -> Callable[..., list[jax.Array]]:
    """(values of the free variables, folded numbers) -> arrays."""

    def run(inputs: list[jax.Array], folded: list[Any]) -> list[jax.Array]:
        values = dict(zip(free, inputs, strict=True))
        numbers = iter(folded)

        def read(v: Any) -> Any:
            if _is_folded(v):
                return next(numbers)
            return values[v] if isinstance(v, core.Var) else v.val

        for each in equations:
            parameters = each.primitive.get_bind_params(each.params)
            with each.ctx.manager:
                found = each.primitive.bind(*map(read, each.invars), **parameters)
            found = found if each.primitive.multiple_results else [found]
            values.update(zip(each.outvars, found, strict=True))
        return list(map(read, outs))

    return run
