"""Checkpoints: what is restored is what was saved, or the step is not used at all."""

import contextlib
import errno
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tests.golden import MIXER
from vit_jax.errors import TransientError, UserError
from vit_jax.files import manifest as checksums
from vit_jax.training.optimizer import OPTIMIZERS, create_optimizer
from vit_jax.training.step import TrainState
from vit_jax.workdir import orbax_parts
from vit_jax.workdir.checkpoints import (
    CheckpointManager,
    best_checkpoint,
    best_text,
    restore_params,
)
from vit_jax.workdir.orbax_parts import damaged_in, is_disk_error, steps_in


def mesh_of(*shape: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def sharding_of(leaf: Any, mesh: Mesh) -> NamedSharding:
    split = leaf.ndim and leaf.shape[0] % mesh.shape["fsdp"] == 0
    return NamedSharding(mesh, PartitionSpec("fsdp") if split else PartitionSpec())


def build_state(step: int, *, polyak: bool = False, size: int = 16) -> TrainState:
    """With leaves small enough to damage byte by byte."""
    params = {
        "dense": {"kernel": jnp.arange(size * 4.0).reshape(size, 4) + step},
        "bias": jnp.linspace(0, step, 8).astype(jnp.bfloat16),
    }
    # EmptyState of clip and the None of mask-free transforms: nodes without leaves.
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    return TrainState(
        step=jnp.int32(step),
        params=params,
        opt_state=tx.init(params),
        polyak_params=jax.tree.map(lambda x: x * 0.5, params) if polyak else None,
    )


def make_state(step: int, mesh: Mesh, **kwargs: Any) -> TrainState:
    state = build_state(step, **kwargs)
    return jax.device_put(state, jax.tree.map(lambda x: sharding_of(x, mesh), state))


def abstract(state: TrainState, mesh: Mesh) -> TrainState:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x, mesh)), state
    )


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@contextlib.contextmanager
def managing(workdir: Path, **kwargs: Any) -> Iterator[CheckpointManager]:
    manager = CheckpointManager(workdir, **({"every_steps": 1, "keep": 3} | kwargs))
    yield manager
    manager.close()


def save_steps(workdir: Path, *steps: int, **kwargs: Any) -> None:
    with managing(workdir) as manager:
        for step in steps:
            manager.save(step, make_state(step, mesh_of(4, 2), **kwargs))


def assert_restores(manager: CheckpointManager, state: TrainState, *shape: int) -> None:
    """That the step of `state` is the one restored, to a mesh of that shape, and bit for bit."""
    restored = manager.restore(abstract(state, mesh_of(*shape)))
    assert restored is not None
    assert restored[0] == int(state.step)
    assert_same(restored[1], state)
    kernel = jax.tree.leaves(restored[1].params)[-1]
    assert kernel.sharding == sharding_of(kernel, mesh_of(*shape))


def damage_in(workdir: Path, step: int) -> list[str]:
    return damaged_in(workdir / "checkpoints" / str(step))


def on_disk(workdir: Path) -> list[int]:
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir())


def test_roundtrip_is_bitwise_on_any_mesh(tmp_path: Path) -> None:
    save_steps(tmp_path, 7, polyak=True)
    state = build_state(7, polyak=True)
    with managing(tmp_path, every_steps=10) as manager:
        due = [step for step in range(1, 26) if manager.should_save(step, total_steps=25)]
        assert due == [10, 20, 25]
        assert manager.latest_step() == 7
        for shape in ((4, 2), (1, 8), (2, 1), (1, 1)):
            assert_restores(manager, state, *shape)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_so_is_the_state_of_every_optimizer(tmp_path: Path, name: str) -> None:
    """With what it does not keep of frozen parameters."""
    rng = np.random.default_rng(0)
    dense, head = ({"kernel": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)} for _ in range(2))
    params = {"MixerBlock_0": {"channel_mixing": {"Dense_0": dense}}, "head": head}
    tx = create_optimizer(
        name, table=MIXER, schedule=lambda _: 0.1, momentum_dtype="bfloat16", freeze="head/.*"
    )
    _, opt_state = tx.update(params, tx.init(params), params)
    state = TrainState(step=jnp.int32(1), params=params, opt_state=opt_state)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(opt_state) if leaf.dtype == jnp.bfloat16)
    with managing(tmp_path) as manager:
        manager.save(
            1, jax.device_put(state, jax.tree.map(lambda x: sharding_of(x, mesh_of(4, 2)), state))
        )
        assert_restores(manager, state, 4, 2)


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="checkpoint.best_mode='maximum' is unknown"):
        CheckpointManager(tmp_path, every_steps=1, keep=3, best_mode="maximum")


def test_restored_and_saved_states_may_be_donated(tmp_path: Path) -> None:
    # On CPU, Orbax hands one host buffer to all eight devices of a replicated leaf without a
    # copy, and reads the buffers of a state while it is saved: a donated step must not show.
    replicated = NamedSharding(mesh_of(8, 1), PartitionSpec())
    numbers = jnp.arange(1 << 18, dtype=jnp.float32)
    state = jax.device_put(TrainState(jnp.int32(0), {"a": numbers}, None), replicated)
    step_fn = jax.jit(
        lambda s: s.replace(params={"a": s.params["a"] * 2 + 1}),
        out_shardings=replicated,
        donate_argnums=0,
    )
    target = abstract(state, mesh_of(8, 1))
    expected = np.arange(1 << 18, dtype=np.float32)
    with managing(tmp_path) as manager:
        for step in range(1, 5):
            manager.save(step, state)
            state = step_fn(step_fn(state))  # while the save is under way
            newest, restored = manager.restore(target)
            assert newest == step
            np.testing.assert_array_equal(restored.params["a"], expected)
            again = step_fn(step_fn(restored))
            expected = (expected * 2 + 1) * 2 + 1
            for shard in again.params["a"].addressable_shards:
                np.testing.assert_array_equal(shard.data, expected)
            np.testing.assert_array_equal(state.params["a"], expected)


def save_scores(workdir: Path, scores: dict[int, Any], **options: Any) -> None:
    with managing(workdir, **options) as manager:
        for step, metrics in scores.items():
            manager.save(step, make_state(step, mesh_of(1, 1)), metrics)


def test_keeps_the_latest_and_the_best(tmp_path: Path) -> None:
    options = {"keep": 2, "best_metric": "accuracy"}
    save_scores(tmp_path, {1: {"accuracy": 0.1}, 2: {"accuracy": 0.9}, 3: None}, **options)
    assert on_disk(tmp_path) == [2, 3]  # 2 is the best, 3 has no metric but is recent
    more = {4: {"accuracy": 0.3}, 5: {"accuracy": float("nan")}, 6: {"accuracy": 0.5, "loss": 1.0}}
    save_scores(tmp_path, more, **options)  # the scores are read from the disk
    assert on_disk(tmp_path) == [2, 5, 6]
    save_scores(tmp_path, {7: {"accuracy": 0.2}, 8: {"accuracy": 0.95}, 9: None}, **options)
    assert on_disk(tmp_path) == [8, 9]
    # A score that comes later counts as well.
    with managing(tmp_path, **options) as manager:
        manager.add_metrics(9, {"accuracy": 0.99})
    assert damage_in(tmp_path, 9) == []
    save_scores(tmp_path, dict.fromkeys((10, 11, 12)), **options)
    assert on_disk(tmp_path) == [9, 11, 12]
    # The smallest values.
    losses = {step: {"loss": loss} for step, loss in enumerate((3.0, 1.0, 2.0, 4.0, 5.0), start=13)}
    options = {"best_metric": "loss", "keep_best": 2}
    save_scores(tmp_path, losses, keep=1, **options)
    assert on_disk(tmp_path) == [14, 15, 17]
    for metric, mode, best in (("loss", "auto", "14"), ("loss", "max", "17")):
        config = {"checkpoint": {"best_metric": metric, "best_mode": mode}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert best_checkpoint(tmp_path).name == best
    assert best_text(tmp_path) == (f"{tmp_path}/best is the last, step 17, loss 5.", False)
    (tmp_path / "config.json").write_text(json.dumps(config).replace("max", "min"))
    told = f"{tmp_path}/best is step 14, loss 1; {tmp_path} is step 17, loss 5."
    assert best_text(tmp_path) == (told, True)
    (tmp_path / "config.json").write_text(json.dumps(config).replace("loss", "f1"))
    with pytest.raises(UserError, match="no best checkpoint: checkpoint.best_metric='f1'"):
        best_checkpoint(tmp_path)
    assert best_text(tmp_path) == ("", False)


def item_files(workdir: Path, step: int) -> list[Path]:
    files = sorted(p for p in (workdir / "checkpoints" / str(step)).rglob("*") if p.is_file())
    assert len(files) > 8
    return files


def test_a_flipped_byte_is_noticed_or_harmless(tmp_path: Path) -> None:
    """Any byte of any file: the step is refused, or it restores to exactly what was saved."""
    save_steps(tmp_path, 1)
    noticed, harmless = set(), set()
    with managing(tmp_path) as manager:
        for path in item_files(tmp_path, 1):
            original = path.read_bytes()
            name = str(path.relative_to(tmp_path / "checkpoints" / "1"))
            size = len(original)
            for position in {0, size // 3, size // 2, size - 1} if size else set():
                damaged = bytearray(original)
                damaged[position] ^= 0x10
                path.write_bytes(damaged)
                if problems := damage_in(tmp_path, 1):
                    assert problems == [name]
                    noticed.add(name)
                else:
                    assert_restores(manager, build_state(1), 2, 1)
                    harmless.add(name)
            path.write_bytes(original)
    assert damage_in(tmp_path, 1) == []
    # What Orbax writes around the item, and an empty mark that it adds after our manifest.
    assert harmless <= {"_CHECKPOINT_METADATA", "commit_success.txt", "state/commit_success.txt"}
    assert any("/d/" in name for name in noticed)
    assert {"state/_METADATA", "state/manifest.ocdbt", "state/checksums.json"} <= noticed


@pytest.mark.parametrize("damage", ["longer", "deleted", "no manifest"])
def test_falls_back_to_the_newest_intact_step(tmp_path, damage, caplog):
    save_steps(tmp_path, 1, 2, 3)
    path = next(p for p in item_files(tmp_path, 3) if p.parent.name == "d")
    if damage == "no manifest":
        path = tmp_path / "checkpoints" / "3" / "state" / "checksums.json"
    content = path.read_bytes()
    path.unlink()
    if damage == "longer":
        path.write_bytes(content + b"\0")
    name = str(path.relative_to(tmp_path / "checkpoints" / "3"))
    assert damage_in(tmp_path, 3) == [name]
    with managing(tmp_path) as manager:
        assert_restores(manager, build_state(2), 4, 2)
        assert f"{Path('checkpoints', '3')} is damaged: {name}" in caplog.text
        # Moved aside, not deleted; the step can be saved again, and is believed again.
        assert (tmp_path / "checkpoints_damaged" / "3.1" / "state").is_dir()
        assert on_disk(tmp_path) == [1, 2]
        manager.save(3, make_state(3, mesh_of(4, 2)))
        assert_restores(manager, build_state(3), 4, 2)


def test_checkpoints_of_which_none_is_intact_are_an_error_every_time(tmp_path: Path) -> None:
    with managing(tmp_path) as manager:
        assert manager.restore(abstract(build_state(1), mesh_of(1, 1))) is None
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        (tmp_path / "checkpoints" / str(step) / "state" / "manifest.ocdbt").unlink()
    message = rf"{tmp_path}.*step 2: state/manifest.ocdbt; step 1: state/manifest.ocdbt"
    for _ in range(2):  # the second start must not find an empty folder and begin anew
        with managing(tmp_path) as manager, pytest.raises(UserError, match=message):
            manager.restore(abstract(build_state(1), mesh_of(1, 1)))
    assert on_disk(tmp_path) == [1, 2]
    with pytest.raises(UserError, match="No checkpoint"):
        restore_params(tmp_path)


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    state = build_state(1)
    params = state.params
    others = {
        r"params/dense/kernel \(saved float32\[16, 4\], needed float32\[16, 5\]\)": {
            "params": {**params, "dense": {"kernel": jnp.zeros((16, 5))}}
        },
        r"params/bias \(saved bfloat16\[8\], needed float32\[8\]\)": {
            "params": {**params, "bias": jnp.zeros(8)}
        },
        r"params/extra \(saved nothing, needed float32\[2\]\)": {
            "params": {**params, "extra": jnp.zeros(2)}
        },
        "polyak_params/": {"polyak_params": params},
    }
    with managing(tmp_path) as manager:
        for message, changes in others.items():
            with pytest.raises(UserError, match=message) as error:
                manager.restore(abstract(state.replace(**changes), mesh_of(1, 1)))
            assert "\n" not in str(error.value)
        assert_restores(manager, state, 1, 1)
    assert on_disk(tmp_path) == [1]  # another model is no damage


def test_a_full_disk_is_a_user_error_and_the_last_good_step_stays(tmp_path, caplog):
    save_steps(tmp_path, 1)
    big = make_state(2, mesh_of(1, 1), size=1 << 18)  # 4 MiB, and as much for each moment of Adam
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with managing(tmp_path) as manager:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, hard))
        try:
            manager.save(2, big)
            with pytest.raises(UserError, match=r"step 2 could not be written.*good one is step 1"):
                manager.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert manager.latest_step() == 1
        assert damage_in(tmp_path, 1) == []
        assert not [record for record in caplog.records if record.exc_info]  # of Orbax's threads
        # There is room again. Not step 2: TensorStore may still be writing to what is left of it,
        # until the process ends, as it does for a user after such an error.
        manager.save(3, big)
    assert steps_in(tmp_path / "checkpoints") == [3, 1]


def poll_should_save(manager: CheckpointManager) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        manager.should_save(3, total_steps=9)
        time.sleep(0.01)


def test_an_error_of_a_shared_disk_may_pass(tmp_path, monkeypatch):
    """The same command is to be given again, as after a full disk it is not."""
    save_steps(tmp_path, 1)

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with managing(tmp_path) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(orbax_parts, "write_manifest", fails)
            manager.save(2, make_state(2, mesh_of(1, 1)))
            # At an update, not at the next save: the other processes would wait for this one.
            with pytest.raises(TransientError, match=r"step 2 could not be written.*Stale file"):
                poll_should_save(manager)
        with monkeypatch.context() as patch:
            patch.setattr(checksums, "digest", fails)
            with pytest.raises(OSError, match="Stale"):  # not: step 1 is damaged
                manager.restore(abstract(build_state(2), mesh_of(1, 1)))
        assert_restores(manager, build_state(1), 1, 1)


def test_another_process_that_hangs_is_not_called_a_full_disk() -> None:
    assert is_disk_error(OSError(28, "No space left on device"))
    assert not is_disk_error(TimeoutError("Timed out while waiting for a barrier."))
    assert not is_disk_error(RuntimeError("RESOURCE_EXHAUSTED: Out of memory on the device."))


def test_params_are_read_without_a_target(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, 1, 2)
    save_steps(tmp_path / "averaged", 3, polyak=True)
    average = build_state(3, polyak=True).polyak_params
    assert_same(restore_params(tmp_path / "averaged"), jax.tree.map(np.asarray, average))

    def expected(step: int) -> Any:
        return jax.tree.map(np.asarray, build_state(step).params)

    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "2"):
        params = restore_params(path)
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(params))
        assert_same(params, expected(2))
    damaged = tmp_path / "checkpoints" / "2" / "state" / "manifest.ocdbt"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert_same(restore_params(tmp_path), expected(1))
    assert "state/manifest.ocdbt" in caplog.text
    assert on_disk(tmp_path) == [1, 2]  # it may be somebody else's workdir: nothing is moved
    with pytest.raises(UserError, match=r"state/manifest\.ocdbt"):
        restore_params(tmp_path / "checkpoints" / "2")
    with pytest.raises(UserError, match="holds no checkpoint"):
        restore_params(tmp_path / "missing")


def test_swapped_steps_are_noticed_and_other_folders_left_alone(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    folder = tmp_path / "checkpoints"
    for old, new in (("2", "x"), ("3", "2"), ("x", "3")):
        (folder / old).rename(folder / new)
    assert damage_in(tmp_path, 3) == ["it is step 2"]
    others = {"0099", "99x", "²"}
    for name in others:
        (folder / name).mkdir()
    with managing(tmp_path) as manager:
        assert_restores(manager, build_state(1), 4, 2)
    assert steps_in(folder) == [1]
    assert {path.name for path in folder.iterdir()} == {"1", *others}
