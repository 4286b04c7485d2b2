"""How long a checkpoint keeps the training waiting, until it is on the disk, until it is back."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.measure.turns import Case, take_turns
from vit_jax.parameters.sharding import create_mesh, to_host
from vit_jax.run import create_run
from vit_jax.workdir.checkpoints import CheckpointManager


def benchmark_checkpoint(config: ConfigDict, folder: Path, *, rounds: int) -> list[Case]:
    """Our checkpoints of the whole training state beside flax's msgpack, in turn.

    flax.serialization is what the official code keeps its states with. Ours has checksums, which
    are compared when it is read.

    Args:
      config: as of `configs/benchmark.py`.
      folder: gets the files.
      rounds: how often both take turns.

    Returns:
      Seconds that the caller of `save` waits; until all is on the disk; to read it back onto the
      devices.
    """
    mesh = create_mesh(**config.mesh)
    run = create_run(config, mesh)
    abstract = run.sharded_state()
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    state = jax.jit(run.init_state, out_shardings=shardings)(jax.random.key(0))
    manager = CheckpointManager(str(folder / "run"), **config.checkpoint)
    steps, file = itertools.count(1), folder / "flax.msgpack"

    def save() -> list[float]:
        start = time.perf_counter()
        manager.save(next(steps), state)
        waited = time.perf_counter() - start
        manager.wait()
        return [waited, time.perf_counter() - start]

    def flax_save() -> list[float]:
        start = time.perf_counter()
        with file.open("wb") as out:
            out.write(flax.serialization.to_bytes(to_host(state)))
            out.flush()
            os.fsync(out.fileno())
        return [time.perf_counter() - start] * 2

    def restore() -> list[float]:
        return [_seconds(lambda: manager.restore(abstract))]

    def flax_restore() -> list[float]:
        def read() -> Any:
            like = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), abstract)
            return jax.device_put(flax.serialization.from_bytes(like, file.read_bytes()), shardings)

        return [_seconds(read)]

    turns = {"ours": lambda: save() + restore(), "flax": lambda: flax_save() + flax_restore()}
    found = take_turns(turns, rounds)
    manager.close()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)) / 1e9
    names = ("the training waits", "on the disk", "read back")
    return [
        Case(f"checkpoint of {size:.2g} GB: {name}", "flax msgpack", ours, theirs, "s")
        for name, ours, theirs in zip(
            names, zip(*found["ours"], strict=True), zip(*found["flax"], strict=True), strict=True
        )
    ]


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start
