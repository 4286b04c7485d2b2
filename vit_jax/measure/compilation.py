"""Seconds to trace and compile the initial parameters and the update, beside other projects."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.measure.peers import JAX_PEERS, check_peer, jax_peer
from vit_jax.measure.tpu import peer_update
from vit_jax.measure.turns import Case, take_turns
from vit_jax.parameters.initial import draw
from vit_jax.parameters.names import flatten_names
from vit_jax.parameters.sharding import create_mesh
from vit_jax.plan.subject import step_arguments
from vit_jax.run import Run, create_run


def benchmark_compile(
    config: ConfigDict, *, against: Sequence[str], clones: str = "", rounds: int = 3
) -> list[Case]:
    """What a run waits for before its first update, ours and that of the peers in turn.

    Args:
      config: as of `configs/benchmark.py`.
      against: some of `peers.JAX_PEERS`, or `reference`: one program for all initial parameters,
        and the reference attention.
      clones: folder with clones of the peers' repositories.
      rounds: how often all take turns.

    Returns:
      Per peer a case for the initial parameters, which are also computed, and one for the update,
      in seconds. Nothing that an earlier turn compiled is used.

    Raises:
      UserError: a peer is not here.
    """
    for peer in against:
        if peer not in (*JAX_PEERS, "reference"):
            raise UserError(
                f"--against={peer}: compile takes {', '.join(JAX_PEERS)} and reference."
            )
        check_peer(peer, config.model, clones)
    mesh = create_mesh(**config.mesh)
    run = create_run(config, mesh)
    arguments = step_arguments(run)
    subjects: dict[str, Callable[[], float]] = {}
    for name in ("vit_jax", *against):
        made = _peer(name, run, arguments, clones) if name in JAX_PEERS else _ours(run, arguments)
        if name == "reference":
            other = config.copy_and_resolve_references()
            other.model.attention = "reference"
            plain = create_run(other, mesh)
            made = _ours(plain, arguments)
            made["initial parameters"] = functools.partial(_in_one_program, plain)
        for what, make in made.items():
            subjects[f"{name} {what}"] = _seconds(make, mesh)
    found = take_turns(subjects, rounds, warm_up=0)
    return [
        Case(f"until there: {what}", peer, found[f"vit_jax {what}"], theirs, "s")
        for peer in against
        for what in ("initial parameters", "update")
        for theirs in [found[f"{peer} {what}"]]
    ]


def _ours(run: Run, arguments: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    state, constants, _ = arguments
    shardings = {name: leaf.sharding for name, leaf in flatten_names(state.params).items()}
    key = jax.random.key(0)

    def update() -> Any:
        step: Any = run.train_step(state, constants)
        return step.lower(*arguments).compile()

    def params() -> Any:
        return draw(lambda rng: flatten_names(run.init_params(rng)), key, shardings)

    return {"initial parameters": params, "update": update}


def _in_one_program(run: Run) -> Any:
    return jax.jit(run.init_params)(jax.random.key(0))


def _peer(
    peer: str, run: Run, arguments: tuple[Any, ...], clones: str
) -> dict[str, Callable[[], Any]]:
    num_classes = run.objective.num_outputs
    init, _ = jax_peer(peer, run.config.model, num_classes, clones)
    spec, key = arguments[2]["image"], jax.random.key(0)
    one = np.zeros((1, *spec.shape[1:]), spec.dtype)

    def update() -> Any:
        step, theirs = peer_update(peer, run, arguments, num_classes, clones)
        return step.lower(*theirs).compile()

    return {"initial parameters": lambda: jax.jit(init)(key, one), "update": update}


def _seconds(make: Callable[[], Any], mesh: Any) -> Callable[[], float]:
    def turn() -> float:
        jax.clear_caches()
        start = time.perf_counter()
        with jax.set_mesh(mesh):
            made = make()
        jax.block_until_ready(made)  # an executable is
        return time.perf_counter() - start

    return turn
