"""The state before the first update: random parameters, or loaded ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax.extend import core

from vit_jax.parameters.names import flatten_names, unflatten_names
from vit_jax.training.step import TrainState

# Programs that draw parameters, by what they compute, where, and how they are compiled. All runs of
# a sweep share them.
_DRAWERS: dict[tuple[Any, ...], Any] = {}


class Initial(NamedTuple):
    """Random parameters that are not yet drawn."""

    program: core.ClosedJaxpr  # key -> arrays, in the order of the leaves of `shapes`
    shapes: Any  # nested dict of jax.ShapeDtypeStruct


def trace_initial(init: Callable[[jax.Array], Any]) -> Initial:
    """Traces `init`, from a key to a tree of parameters; a run traces it only once."""

    def strong(rng: jax.Array) -> Any:
        # An update gives strong types back: for weak ones it would be compiled twice.
        return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), init(rng))

    traced = jax.jit(strong).trace(jax.eval_shape(lambda: jax.random.key(0)))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced.out_info)
    return Initial(traced.jaxpr, shapes)


def initial_state(
    initial: Initial,
    start_state: Callable[[Any], TrainState],
    abstract_state: TrainState,
    *,
    seed: int,
    loaded: Any = None,
) -> TrainState:
    """The state before the first update, on the devices.

    Args:
      initial: random parameters.
      start_state: parameters -> the state before their first update; pure.
      abstract_state: shapes with shardings.
      seed: of the random parameters.
      loaded: a tree of host arrays to start from, with shapes (or missing) where an array is
        to be random (a new head); None: all are random.
    """
    arrays = flatten_names(initial.shapes) | flatten_names(loaded)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    places = flatten_names(shardings.params)
    wanted = {
        index: sharding
        for index, (name, sharding) in enumerate(places.items())
        if isinstance(arrays[name], jax.ShapeDtypeStruct)
    }
    drawn = draw(initial.program, jax.random.key(seed), wanted)
    params = {name: drawn[index] for index, name in enumerate(places) if index in drawn}
    for name in [name for name in arrays if name not in params]:
        # One at a time: a large model is never completely on both host and devices.
        array = arrays.pop(name)
        params[name] = jax.make_array_from_callback(array.shape, places[name], array.__getitem__)
    start = jax.jit(
        start_state,
        out_shardings=shardings,
        donate_argnums=0,
        compiler_options=_quick_compilation(),
    )
    return start(unflatten_names(params))


def draw(
    program: core.ClosedJaxpr, rng: jax.Array, shardings: Mapping[int, Any]
) -> dict[int, jax.Array]:
    """The outputs of `program` with these indices, on the devices of their shardings.

    Parameters of one shape and initializer differ in their keys alone, so one program draws all of
    them. XLA would take apart a program for the whole model, and compile the generator for each.
    """
    jaxpr, equations = program.jaxpr, program.jaxpr.eqns
    made_by = {var: index for index, each in enumerate(equations) for var in each.outvars}

    def needed(start: Iterable[Any], stop: Callable[[Any], bool]) -> tuple[set[int], list[Any]]:
        """Equations behind variables, and those where the search stops."""
        found: set[int] = set()
        ends: dict[Any, None] = {}
        stack = list(start)
        while stack:
            var = stack.pop()
            if isinstance(var, core.Literal):
                continue
            if var not in made_by or stop(var):
                ends[var] = None
            elif made_by[var] not in found:
                found.add(made_by[var])
                stack += equations[made_by[var]].invars
        return found, list(ends)

    groups: list[tuple[set[int], list[int]]] = []  # equations, and the outputs that they make
    for output in shardings:
        found, _ = needed([jaxpr.outvars[output]], _is_key)
        outputs = [output]
        # Such as all parameters of a scan.
        for shared in [each for each in groups if each[0] & found]:
            groups.remove(shared)
            found, outputs = found | shared[0], shared[1] + outputs
        groups.append((found, outputs))

    options = _quick_compilation()
    values = dict(zip(jaxpr.constvars, program.consts, strict=True)) | {jaxpr.invars[0]: rng}
    calls: list[tuple[Any, list[Any], list[int]]] = []  # function, its arguments, the outputs
    lowered: list[Any] = []
    for _, outputs in groups:
        outvars = [jaxpr.outvars[output] for output in outputs]
        found, inputs = needed(outvars, _is_key)
        eqns = [equations[index] for index in sorted(found)]
        part = jaxpr.replace(constvars=[], invars=inputs, outvars=outvars, eqns=eqns)
        before, _ = needed(inputs, values.__contains__)
        for index in sorted(before):
            _evaluate(equations[index], values)
        places = tuple(shardings[output] for output in outputs)
        arguments = [values[var] for var in inputs]
        program_key = (str(part), *_arrays_in(eqns), places, *options.items())
        function = _DRAWERS.get(program_key)
        if function is None:
            function = jax.jit(
                core.jaxpr_as_fun(core.ClosedJaxpr(part, [])),
                out_shardings=list(places),
                compiler_options=options,
            )
            _DRAWERS[program_key] = function
            lowered.append(function.lower(*arguments))
        calls.append((function, arguments, outputs))
    # XLA compiles each on one core: all at once. The calls below find what it has compiled.
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda each: each.compile(), lowered))
    drawn: dict[int, jax.Array] = {}
    for function, arguments, outputs in calls:
        drawn |= zip(outputs, function(*arguments), strict=True)
    return drawn


def _quick_compilation() -> dict[str, Any]:
    """XLA options of programs that run once: two thirds of a CPU's compilation, the same bits.

    A level that the user has set in XLA_FLAGS counts instead.
    """
    option = "xla_backend_optimization_level"  # 0 draws other bits
    chosen = option in os.environ.get("XLA_FLAGS", "")
    return {} if chosen or jax.default_backend() != "cpu" else {option: 1}


def _arrays_in(equations: Iterable[Any]) -> list[int]:
    """Identities of the arrays that called functions hold, which no text of a program shows."""
    called = [x for x in jax.tree.leaves([each.params for each in equations]) if hasattr(x, "eqns")]
    return [n for x in called for n in (*map(id, getattr(x, "consts", ())), *_arrays_in(x.eqns))]


def _is_key(var: Any) -> bool:
    return jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.prng_key)


def _evaluate(equation: Any, values: dict[Any, Any]) -> None:
    """Adds the results of an equation, mostly a key folded with a name, to the values."""
    read = [x.val if isinstance(x, core.Literal) else values[x] for x in equation.invars]
    primitive = equation.primitive
    out = primitive.bind(*read, **primitive.get_bind_params(equation.params))
    values |= zip(equation.outvars, out if primitive.multiple_results else [out], strict=True)
