"""Checkpoints: what is restored is what was saved, or the step is not used at all."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tests import forks, tiny
from vit_jax.errors import PassingError, UserError, may_pass  # noqa: F401  # PEER imports all
from vit_jax.files import manifest as checksums
from vit_jax.files.atomic import write_json
from vit_jax.workdir import orbax_parts
from vit_jax.workdir.checkpoints import CheckpointManager, restore_params
from vit_jax.workdir.orbax_parts import damaged_in, is_disk_error, steps_in

REPO = Path(__file__).parents[2]


@flax.struct.dataclass
class State:
    """The fields of the real train state, with leaves small enough to damage byte by byte."""

    step: jax.Array
    params: Any
    opt_state: Any
    polyak_params: Any = None


def mesh_of(*shape: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def sharding_of(leaf: Any, mesh: Mesh) -> NamedSharding:
    split = leaf.ndim and leaf.shape[0] % mesh.shape["fsdp"] == 0
    return NamedSharding(mesh, PartitionSpec("fsdp") if split else PartitionSpec())


def build_state(step: int, *, polyak: bool = False, size: int = 16) -> State:
    params = {
        "dense": {"kernel": jnp.arange(size * 4.0).reshape(size, 4) + step},
        "bias": jnp.linspace(0, step, 8).astype(jnp.bfloat16),
    }
    # EmptyState of clip and the None of mask-free transforms: nodes without leaves.
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    return State(
        step=jnp.int32(step),
        params=params,
        opt_state=tx.init(params),
        polyak_params=jax.tree.map(lambda x: x * 0.5, params) if polyak else None,
    )


def make_state(step: int, mesh: Mesh, **kwargs: Any) -> State:
    state = build_state(step, **kwargs)
    return jax.device_put(state, jax.tree.map(lambda x: sharding_of(x, mesh), state))


def abstract(state: State, mesh: Mesh) -> State:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x, mesh)), state
    )


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def manager_of(workdir: Path, **kwargs: Any) -> CheckpointManager:
    return CheckpointManager(workdir, **({"every_steps": 1, "keep": 3} | kwargs))


def save_steps(workdir: Path, *steps: int, **kwargs: Any) -> None:
    manager = manager_of(workdir)
    for step in steps:
        manager.save(step, make_state(step, mesh_of(4, 2), **kwargs))
    manager.close()


def damage_in(workdir: Path, step: int) -> list[str]:
    return damaged_in(workdir / "checkpoints" / str(step))


def on_disk(workdir: Path) -> list[int]:
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir())


@pytest.mark.parametrize("shape", [(4, 2), (1, 8), (2, 1), (1, 1)])
@pytest.mark.parametrize("polyak", [False, True])
def test_roundtrip_is_bitwise_on_any_mesh(
    tmp_path: Path, shape: tuple[int, int], polyak: bool
) -> None:
    save_steps(tmp_path, 7, polyak=polyak)
    state, mesh = make_state(7, mesh_of(4, 2), polyak=polyak), mesh_of(*shape)
    manager = manager_of(tmp_path)
    assert manager.latest_step() == 7
    restored = manager.restore(abstract(state, mesh))
    assert restored is not None
    step, got = restored
    assert step == 7
    assert isinstance(got, State)
    assert_same(got, state)
    assert got.params["dense"]["kernel"].sharding == sharding_of(
        state.params["dense"]["kernel"], mesh
    )
    manager.close()


def test_no_checkpoint_restores_nothing(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    assert manager.latest_step() is None
    mesh = mesh_of(1, 1)
    assert manager.restore(abstract(make_state(1, mesh), mesh)) is None
    manager.close()


@pytest.mark.parametrize(
    ("step", "total_steps", "due"),
    [(1, 25, False), (10, 25, True), (20, 25, True), (24, 25, False), (25, 25, True)],
)
def test_should_save(tmp_path: Path, step: int, total_steps: int, due: bool) -> None:
    manager = manager_of(tmp_path, every_steps=10)
    assert manager.should_save(step, total_steps) is due
    manager.close()


@pytest.mark.parametrize(
    ("key", "value"), [("every_steps", 0), ("keep", 0), ("keep_best", 0), ("best_mode", "maximum")]
)
def test_arguments_out_of_range_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"checkpoint\.{key}=.*{value}"):
        manager_of(tmp_path, **{key: value})


def test_restored_and_saved_states_may_be_donated(tmp_path: Path) -> None:
    # On CPU, Orbax hands one host buffer to all eight devices of a replicated leaf without a
    # copy, and reads the buffers of a state while it is saved: a donated step must not show.
    mesh = mesh_of(8, 1)
    replicated = NamedSharding(mesh, PartitionSpec())

    @jax.jit
    def fresh() -> dict[str, jax.Array]:
        return {"params": jnp.arange(1 << 18, dtype=jnp.float32)}

    state = jax.device_put(fresh(), replicated)
    step_fn = jax.jit(
        lambda s: {"params": s["params"] * 2 + 1},
        in_shardings=({"params": replicated},),
        out_shardings={"params": replicated},
        donate_argnums=0,
    )
    target = {"params": jax.ShapeDtypeStruct((1 << 18,), jnp.float32, sharding=replicated)}
    manager = manager_of(tmp_path)
    expected = np.arange(1 << 18, dtype=np.float32)
    for step in range(1, 5):
        manager.save(step, state)
        state = step_fn(step_fn(state))  # while the save is under way
        restored = manager.restore(target)
        assert restored is not None
        assert restored[0] == step
        np.testing.assert_array_equal(restored[1]["params"], expected)
        again = step_fn(step_fn(restored[1]))
        expected = (expected * 2 + 1) * 2 + 1
        for shard in again["params"].addressable_shards:
            np.testing.assert_array_equal(shard.data, expected)
        np.testing.assert_array_equal(state["params"], expected)
    manager.close()


def test_keeps_the_latest_and_the_best(tmp_path: Path) -> None:
    mesh = mesh_of(1, 1)
    options = {"keep": 2, "best_metric": "accuracy"}
    scores = {1: 0.1, 2: 0.9, 3: None, 4: 0.3, 5: float("nan"), 6: 0.5}
    manager = manager_of(tmp_path, **options)
    for step, score in scores.items():
        metrics = None if score is None else {"accuracy": score, "loss": 1.0}
        manager.save(step, make_state(step, mesh), metrics)
        if step == 3:
            manager.wait()
            assert on_disk(tmp_path) == [2, 3]  # 2 is the best, 3 has no metric but is recent
    manager.close()
    assert on_disk(tmp_path) == [2, 5, 6]

    manager = manager_of(tmp_path, **options)  # the scores are read from the disk
    manager.save(7, make_state(7, mesh), {"accuracy": 0.2})
    manager.save(8, make_state(8, mesh), {"accuracy": 0.95})
    manager.save(9, make_state(9, mesh))
    manager.save(10, make_state(10, mesh))
    manager.close()
    assert on_disk(tmp_path) == [8, 9, 10]


def test_a_score_that_comes_later_counts_as_well(tmp_path: Path) -> None:
    options = {"keep": 1, "best_metric": "accuracy"}
    save_steps(tmp_path, 1)
    manager = manager_of(tmp_path, **options)
    manager.add_metrics(1, {"accuracy": 0.9})
    assert damage_in(tmp_path, 1) == []
    manager.save(2, make_state(2, mesh_of(1, 1)), {"accuracy": 0.8})
    manager.save(3, make_state(3, mesh_of(1, 1)), {"accuracy": 0.7})
    manager.close()
    assert on_disk(tmp_path) == [1, 3]

    manager = manager_of(tmp_path, **options)  # from the disk
    manager.save(4, make_state(4, mesh_of(1, 1)))
    manager.close()
    assert on_disk(tmp_path) == [1, 4]


def test_best_by_the_smallest_value(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, keep=1, best_metric="loss", best_mode="min", keep_best=2)
    for step, loss in enumerate((3.0, 1.0, 2.0, 4.0, 5.0), start=1):
        manager.save(step, make_state(step, mesh_of(1, 1)), {"loss": loss})
    manager.close()
    assert on_disk(tmp_path) == [2, 3, 5]


def test_a_best_metric_nobody_reports_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_of(tmp_path, best_metric="acuracy")
    manager.save(1, make_state(1, mesh_of(1, 1)), {"accuracy": 0.5})
    manager.close()
    assert "Did you mean 'accuracy'?" in caplog.text


def item_files(workdir: Path, step: int) -> list[Path]:
    files = sorted(p for p in (workdir / "checkpoints" / str(step)).rglob("*") if p.is_file())
    assert len(files) > 8
    return files


def test_a_flipped_byte_is_noticed_or_harmless(tmp_path: Path) -> None:
    """Any byte of any file: the step is refused, or it restores to exactly what was saved."""
    save_steps(tmp_path, 1)
    state, mesh = make_state(1, mesh_of(4, 2)), mesh_of(2, 1)
    target = abstract(state, mesh)
    manager = manager_of(tmp_path)
    noticed, harmless = set(), set()
    for path in item_files(tmp_path, 1):
        original = path.read_bytes()
        name = str(path.relative_to(tmp_path / "checkpoints" / "1"))
        size = len(original)
        for position in {0, size // 3, size // 2, size - 1} if size else set():
            damaged = bytearray(original)
            damaged[position] ^= 0x10
            path.write_bytes(damaged)
            if damage_in(tmp_path, 1):
                assert damage_in(tmp_path, 1) == [name]
                noticed.add(name)
                continue
            restored = manager.restore(target)
            assert restored is not None
            assert_same(restored[1], state)
            harmless.add(name)
        path.write_bytes(original)
    assert damage_in(tmp_path, 1) == []
    manager.close()
    # What Orbax writes around the item, and an empty mark that it adds after our manifest.
    assert harmless <= {"_CHECKPOINT_METADATA", "commit_success.txt", "state/commit_success.txt"}
    assert any("/d/" in name for name in noticed)
    assert {"state/_METADATA", "state/manifest.ocdbt", "state/checksums.json"} <= noticed


@pytest.mark.parametrize("damage", ["truncate", "empty", "delete", "grow", "flip", "no_manifest"])
def test_falls_back_to_the_newest_intact_step(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1, 2, 3)
    path = max(
        (p for p in item_files(tmp_path, 3) if p.parent.name == "d"), key=lambda p: p.stat().st_size
    )
    content = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(content[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "delete":
        path.unlink()
    elif damage == "grow":
        path.write_bytes(content + b"\0")
    elif damage == "flip":
        path.write_bytes(content[:9] + bytes([content[9] ^ 1]) + content[10:])
    else:
        path = tmp_path / "checkpoints" / "3" / "state" / "checksums.json"
        path.unlink()

    manager = manager_of(tmp_path)
    name = str(path.relative_to(tmp_path / "checkpoints" / "3"))
    assert damage_in(tmp_path, 3) == [name]
    mesh = mesh_of(4, 2)
    state = make_state(2, mesh)
    restored = manager.restore(abstract(state, mesh))
    assert restored is not None
    assert restored[0] == 2
    assert_same(restored[1], state)
    assert f"{Path('checkpoints', '3')} is damaged" in caplog.text
    assert name in caplog.text
    # Set aside, not deleted; the step can be saved again, and is believed again.
    assert (tmp_path / "checkpoints_damaged" / "3-1" / "state").is_dir()
    assert on_disk(tmp_path) == [1, 2]
    manager.save(3, make_state(3, mesh))
    manager.wait()
    assert manager.latest_step() == 3
    assert damage_in(tmp_path, 3) == []
    manager.close()


def test_checkpoints_of_which_none_is_intact_are_an_error_every_time(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        (tmp_path / "checkpoints" / str(step) / "state" / "manifest.ocdbt").unlink()
    mesh = mesh_of(1, 1)
    for _ in range(2):  # the second start must not find an empty folder and begin anew
        manager = manager_of(tmp_path)
        with pytest.raises(UserError) as error:
            manager.restore(abstract(make_state(1, mesh), mesh))
        manager.close()
        assert "\n" not in str(error.value)
        assert str(tmp_path) in str(error.value)
        assert "step 2: state/manifest.ocdbt; step 1: state/manifest.ocdbt" in str(error.value)
    assert on_disk(tmp_path) == [1, 2]
    with pytest.raises(UserError, match="No checkpoint"):
        restore_params(tmp_path)


@pytest.mark.parametrize("damage", ["delete", "truncate", "garbage"])
def test_metadata_of_orbax_outside_the_item_cannot_break_a_restore(
    tmp_path: Path, damage: str
) -> None:
    manager = manager_of(tmp_path, best_metric="accuracy")
    mesh = mesh_of(4, 2)
    for step in (1, 2):
        manager.save(step, make_state(step, mesh), {"accuracy": 0.5})
    manager.close()
    outside = [p for p in item_files(tmp_path, 2) if "state" not in p.parts]
    assert "_CHECKPOINT_METADATA" in [p.name for p in outside]
    for path in outside:
        content = path.read_bytes()
        path.unlink()
        if damage != "delete":
            path.write_bytes(b"\xff{" if damage == "garbage" else content[: len(content) // 2])
    manager = manager_of(tmp_path, best_metric="accuracy")
    restored = manager.restore(abstract(make_state(2, mesh), mesh))
    assert restored is not None
    assert restored[0] == 2
    assert_same(restored[1], make_state(2, mesh))
    manager.save(3, make_state(3, mesh), {"accuracy": 0.1})
    manager.close()
    assert on_disk(tmp_path) == [1, 2, 3]


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    mesh = mesh_of(1, 1)
    state = make_state(1, mesh)
    kernel = state.params["dense"]["kernel"]
    others = {
        r"params/dense/kernel \(saved float32\[16, 4\], needed float32\[16, 5\]\)": {
            "dense": {"kernel": jnp.zeros((16, 5))},
            "bias": state.params["bias"],
        },
        r"params/bias \(saved bfloat16\[8\], needed float32\[8\]\)": {
            "dense": {"kernel": kernel},
            "bias": jnp.zeros(8),
        },
        r"params/extra \(saved nothing, needed float32\[2\]\)": {
            **state.params,
            "extra": jnp.zeros(2),
        },
        r"params/bias \(saved bfloat16\[8\], needed nothing\)": {"dense": {"kernel": kernel}},
    }
    manager = manager_of(tmp_path)
    for message, params in others.items():
        with pytest.raises(UserError, match=message) as error:
            manager.restore(abstract(state.replace(params=params), mesh))
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="polyak_params/"):
        manager.restore(abstract(state.replace(polyak_params=state.params), mesh))
    assert manager.restore(abstract(state, mesh)) is not None
    manager.close()
    assert on_disk(tmp_path) == [1]  # another model is no damage


# Orbax leaves the other writes of a failed save to an event loop that it has closed.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_a_user_error_and_the_last_good_step_stays(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    mesh = mesh_of(1, 1)
    big = make_state(2, mesh, size=1 << 18)  # 4 MiB and as much for each moment of Adam
    manager = manager_of(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, hard))
    try:
        manager.save(2, big)
        with pytest.raises(UserError, match=r"step 2 could not be written.*good one is step 1"):
            manager.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert manager.latest_step() == 1
    assert damage_in(tmp_path, 1) == []
    manager.save(2, big)  # there is room again
    manager.close()
    assert on_disk(tmp_path) == [1, 2]


def poll_should_save(manager: CheckpointManager) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        manager.should_save(3, total_steps=9)
        time.sleep(0.01)


def test_an_error_of_a_shared_disk_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command is to be given again, as after a full disk it is not."""
    save_steps(tmp_path, 1)
    mesh = mesh_of(1, 1)
    state = make_state(2, mesh)

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    manager = manager_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(orbax_parts, "write_manifest", fails)
        manager.save(2, state)
        # At an update, not at the next save: the other processes would wait for this one.
        with pytest.raises(PassingError, match=r"step 2 could not be written.*Stale file handle"):
            poll_should_save(manager)
    with monkeypatch.context() as patch:
        patch.setattr(checksums, "digest", fails)
        with pytest.raises(OSError, match="Stale"):  # not: step 1 is damaged
            manager.restore(abstract(state, mesh))
    assert manager.latest_step() == 1
    assert damage_in(tmp_path, 1) == []
    manager.close()


def test_another_process_that_hangs_is_not_called_a_full_disk() -> None:
    assert is_disk_error(OSError(28, "No space left on device"))
    assert not is_disk_error(TimeoutError("Timed out while waiting for a barrier."))
    assert not is_disk_error(RuntimeError("RESOURCE_EXHAUSTED: Out of memory on the device."))


def test_a_workdir_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(FileExistsError, match="checkpoints"):
        manager_of(tmp_path)


def test_an_error_that_is_not_of_the_disk_is_not_a_user_error(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    with pytest.raises(ValueError, match="TypeHandler lookup failed") as error:
        manager.save(1, {"step": object()})
    assert not isinstance(error.value, UserError)
    manager.close()


@pytest.mark.parametrize("polyak", [False, True])
def test_params_are_read_without_a_target(tmp_path: Path, polyak: bool) -> None:
    save_steps(tmp_path, 1, 2, polyak=polyak)
    state = make_state(2, mesh_of(1, 1), polyak=polyak)
    expected = jax.tree.map(np.asarray, state.polyak_params if polyak else state.params)
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "2"):
        params = restore_params(path)
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(params))
        assert_same(params, expected)


def test_params_come_from_the_newest_intact_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1, 2)
    damaged = tmp_path / "checkpoints" / "2" / "state" / "manifest.ocdbt"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    state = make_state(1, mesh_of(1, 1))
    assert_same(restore_params(tmp_path), jax.tree.map(np.asarray, state.params))
    assert "state/manifest.ocdbt" in caplog.text
    assert on_disk(tmp_path) == [1, 2]  # it may be somebody else's workdir: nothing is moved
    with pytest.raises(UserError, match=r"state/manifest\.ocdbt"):
        restore_params(tmp_path / "checkpoints" / "2")


@pytest.mark.parametrize("name", ["missing", "", "."])
def test_params_of_a_folder_without_checkpoints(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="holds no checkpoint"):
        restore_params(tmp_path / name)


SAVER = """
import logging, sys
sys.path.insert(0, "tests/workdir")
from test_checkpoints import *
logging.disable(logging.CRITICAL)
workdir = Path(sys.argv[1])
mesh = mesh_of(4, 2)
manager = manager_of(workdir, keep=2)
first = make_state(0, mesh, size=1 << 17)
restored = manager.restore(abstract(first, mesh))
step = 0
if restored is not None:
    step, state = restored
    assert_same(state, make_state(step, mesh, size=1 << 17))
while True:
    step += 1
    manager.save(step, make_state(step, mesh, size=1 << 17))
    print(step, flush=True)
"""


def start(code: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_killed_at_any_moment_the_newest_step_on_disk_is_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    reached = 0
    for _ in range(2):
        process = start(SAVER, str(tmp_path))
        assert process.stdout is not None
        assert process.stderr is not None
        for _ in range(3):
            line = process.stdout.readline()
            assert line, process.stderr.read()
            reached = int(line)
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        manager = manager_of(tmp_path, keep=2)  # removes what the killed save left behind
        latest = manager.latest_step()
        manager.close()
        assert latest is not None
        assert latest >= reached - 1
        manager = manager_of(tmp_path)
        assert damage_in(tmp_path, latest) == []
        manager.close()
        assert all(p.name.isdecimal() for p in (tmp_path / "checkpoints").iterdir())
    assert reached >= 4


PEER = """
import os, sys
workdir, port, index = sys.argv[1:]
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(index))
sys.path.insert(0, "tests/workdir")
from test_checkpoints import *
from vit_jax.files.atomic import write_json
from vit_jax.multihost.first_process import run_on_first_process
from vit_jax.workdir import claim
from vit_jax.workdir.claim import claim_workdir

workdir, mesh = Path(workdir), mesh_of(2, 4)
config = {"model": {"width": 8}}
claim_workdir(workdir, config, {}, resume="auto", runtime_keys=())
try:
    claim_workdir(workdir, {"model": {"width": 9}}, {}, resume="auto", runtime_keys=())
    raise AssertionError("the other config was not refused here")
except UserError as error:
    assert "model.width: 8 -> 9" in str(error)

for check, message in (
    (lambda: claim._check_same(config, {"train": index}, ()), 'train: "0" -> "1"'),
    (lambda: claim._check_shared(workdir / ("other" if int(index) else "")), "is not the one that"),
):
    try:
        check()
        assert index == "0", "nothing was raised on the other host"
    except UserError as error:
        assert index == "1" and message in str(error), str(error)

def sharded(step):
    shape = jax.eval_shape(lambda: build_state(step))
    shardings = jax.tree.map(lambda x: sharding_of(x, mesh), shape)
    return jax.jit(lambda: build_state(step), out_shardings=shardings)()

def assert_restores(manager, step):
    found, state = manager.restore(abstract(sharded(0), mesh))
    assert found == step, (found, step)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(sharded(step)), strict=True):
        assert a.sharding == b.sharding and not a.is_fully_addressable
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes()

def fails(error):
    raise error

for raised in (PassingError("the disk is away"), OSError(errno.ESTALE, "Stale", "some/file")):
    try:
        run_on_first_process(lambda: fails(raised))
        raise AssertionError("nothing was raised here")
    except (PassingError, OSError) as error:
        assert type(error) is type(raised) and may_pass(error), repr(error)
        assert str(raised.args[-1]) in str(error)

def verify_and_damage(step):
    assert damage_in(workdir, step) == []
    path = workdir / "checkpoints" / str(step) / "state" / "manifest.ocdbt"
    path.write_bytes(path.read_bytes()[:-1])

manager = manager_of(workdir, keep=2, best_metric="accuracy")
assert_restores(manager, 1)  # saved by one process
manager.save(2, sharded(2), {"accuracy": 0.5})
manager.save(3, sharded(3))
manager.save(4, sharded(4))
manager.wait()
run_on_first_process(lambda: verify_and_damage(4))
assert_restores(manager, 3)
manager.save(4, sharded(4))
manager.save(5, sharded(5))
manager.close()
params = restore_params(workdir)
np.testing.assert_array_equal(params["dense"]["kernel"], build_state(5).params["dense"]["kernel"])
print("done")
"""


@pytest.mark.slow
def test_two_processes_continue_what_one_has_saved_and_the_other_way_round(tmp_path: Path) -> None:
    workdir = tmp_path
    save_steps(workdir, 1)
    write_json(workdir / "config.json", {"model": {"width": 8}})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    logs = [tmp_path / f"{index}.log" for index in range(2)]
    peers = [
        forks.Process([str(script), str(workdir), port, str(index)], log, tiny.environment())
        for index, log in enumerate(logs)
    ]
    try:
        for peer, log in zip(peers, logs, strict=True):
            assert peer.wait(timeout=120) == 0, log.read_text()[-3000:]
            assert "done\n" in log.read_text()
    finally:
        for peer in peers:
            peer.send_signal(signal.SIGKILL)
    assert on_disk(workdir) == [2, 4, 5]  # the best and the latest two
    assert (workdir / "checkpoints_damaged" / "4-1").is_dir()
    manager = manager_of(workdir)
    assert [damage_in(workdir, step) for step in (2, 4, 5)] == [[], [], []]
    restored = manager.restore(abstract(build_state(5), mesh_of(1, 8)))
    assert restored is not None
    assert restored[0] == 5
    assert_same(restored[1], build_state(5))
    manager.close()


def test_swapped_steps_are_noticed(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    folder = tmp_path / "checkpoints"
    for old, new in (("2", "x"), ("3", "2"), ("x", "3")):
        (folder / old).rename(folder / new)
    assert damage_in(tmp_path, 3) == ["it is step 2"]
    state = make_state(1, mesh_of(4, 2))
    restored = manager_of(tmp_path).restore(abstract(state, mesh_of(4, 2)))
    assert restored is not None
    assert restored[0] == 1
    assert_same(restored[1], state)
    assert on_disk(tmp_path) == [1]


def test_folders_that_are_no_steps_are_left_alone(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    for name in ("0099", "99x", "²"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert steps_in(tmp_path / "checkpoints") == [1]
