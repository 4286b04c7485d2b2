"""Images per second of the bare update, or of the forward pass, beside those of other projects."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from vit_jax.measure.loop import device_batch, in_memory
from vit_jax.measure.peers import check_peer, jax_peer, timm_step, train_step, update_rule
from vit_jax.measure.turns import Case, take_turns
from vit_jax.parameters.sharding import create_mesh, keep_batch_sharding, state_shardings
from vit_jax.run import Run, create_run

Steps = Callable[[int], Any]  # runs so many, and waits for them


def benchmark_step(
    config: ConfigDict,
    *,
    against: Sequence[str],
    clones: str = "",
    train: bool = True,
    steps: int = 3,
    rounds: int = 8,
) -> tuple[list[Case], dict[str, float]]:
    """Our update, or forward pass, and those of the peers in turn, all on the same batch.

    Args:
      config: as of `configs/benchmark.py`.
      against: some of `peers.PEERS`.
      clones: folder with clones of the peers' repositories.
      train: the update, else the forward pass.
      steps: per turn.
      rounds: how often all take turns.

    Returns:
      A case per peer, and by name: our `images_per_second`, the `ceiling` of a matrix product in
      FLOP/s, the `mfu` of ours against it.

    Raises:
      UserError: a peer is not here, see `check_peer`.
    """
    for peer in against:
        check_peer(peer, config.model, clones)
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.evaluators = ConfigDict()
    config.duration.steps = 10**6
    mesh = create_mesh(**config.mesh)
    with jax.set_mesh(mesh):
        run = _in_memory(config, mesh)
        subjects = {"vit_jax": _ours(run, train)}
        for peer in against:
            subjects[peer] = _peer(peer, config, run, mesh, clones, train)
        timed = {name: _images_per_second(run, each, steps) for name, each in subjects.items()}
        ceiling = _matrix_ceiling(config.model.dtype)
        found = take_turns(timed, rounds)
        flops = run.train_flops_per_image() if train else run.train_flops_per_image() / 3
    what = "update" if train else "forward pass"
    sizes = f"{'x'.join(map(str, run.dataset.element_spec['image'].shape[:2]))} pixels"
    rate = f", dropout {config.model.dropout_rate}" if config.model.dropout_rate else ""
    name = f"{what}, {config.model.dtype}, batch {run.batch_size}, {sizes}{rate}"
    ours = found.pop("vit_jax")
    cases = [Case(name, peer, ours, theirs, "images/s") for peer, theirs in found.items()]
    speed = float(np.median(ours))
    return cases, {
        "images_per_second": speed,
        "ceiling": ceiling,
        "mfu": speed * flops / ceiling / jax.device_count(),
    }


def _in_memory(config: ConfigDict, mesh: Any) -> Run:
    run = create_run(config, mesh)
    return dataclasses.replace(run, dataset=in_memory(run.dataset, run.batch_size))


def _images_per_second(run: Run, subject: Steps, steps: int) -> Callable[[], float]:
    def turn() -> float:
        subject(1)  # brings back memory and caches that the others took
        start = time.perf_counter()
        subject(steps)
        return steps * run.batch_size / (time.perf_counter() - start)

    return turn


def _ours(run: Run, train: bool) -> Steps:
    """The update of the training loop, or the objective's prediction."""
    batch = device_batch(run)
    shardings = state_shardings(run.abstract_state, run.mesh)
    state = jax.jit(run.init_state, out_shardings=shardings)(jax.random.key(run.config.seed))
    constants = run.place_constants()
    if train:
        step = run.train_step(state, constants)
        held = [state]

        def update(steps: int) -> None:
            for _ in range(steps):
                held[0], metrics = step(held[0], constants, batch)
            jax.block_until_ready((held[0], metrics))

        return update
    objective: Any = run.objective  # classifies

    @jax.jit
    def predict(params: Any, batch: Any) -> jax.Array:
        with keep_batch_sharding():
            return objective.predict(params, batch)

    return _repeated(lambda: predict({**state.params, **constants}, batch))


def _peer(peer: str, config: ConfigDict, run: Run, mesh: Any, clones: str, train: bool) -> Steps:
    if peer == "reference":
        config = config.copy_and_resolve_references()
        config.model.attention = "reference"
        return _ours(_in_memory(config, mesh), train)
    batch = device_batch(run)
    num_classes = run.objective.num_outputs
    if peer.startswith("timm"):
        images, labels = np.asarray(batch["image"]), np.asarray(batch["label"])
        compiled = peer == "timm"
        return timm_step(config, images, labels, num_classes, train=train, compiled=compiled)
    init, forward = jax_peer(peer, config.model, num_classes, clones)
    params = jax.jit(init)(jax.random.key(0), batch["image"][:1])
    if not train:
        rng = jax.random.key(0)
        predict = jax.jit(lambda params, images: forward(params, images, False, rng))
        return _repeated(lambda: predict(params, batch["image"]))
    tx = update_rule(config.optimizer)
    step = jax.jit(train_step(forward, tx), donate_argnums=0)
    held = [(params, jax.jit(tx.init)(params), 0)]

    def update(steps: int) -> None:
        for _ in range(steps):
            held[0], loss = step(held[0], batch["image"], batch["label"])
        jax.block_until_ready((held[0], loss))

    return update


def _repeated(function: Callable[[], Any]) -> Steps:
    def run(steps: int) -> None:
        for _ in range(steps):
            value = function()
        jax.block_until_ready(value)

    return run


def _matrix_ceiling(dtype: str) -> float:
    """FLOP/s of a large product of matrices of random numbers with a float32 result, per device."""
    size = 1024 if jax.default_backend() == "cpu" else 8192  # the larger is no faster on a CPU
    a = jax.device_put(np.random.default_rng(0).random((size, size), np.float32)).astype(dtype)

    @jax.jit
    def product(a: jax.Array) -> jax.Array:
        return jnp.matmul(a, a, preferred_element_type=jnp.float32)

    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(product(a))
        return time.perf_counter() - start

    seconds()
    return 2 * size**3 / min(seconds() for _ in range(5))
