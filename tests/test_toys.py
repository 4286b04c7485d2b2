"""What the package does not know goes through everything: two families, two objectives.

The families' parameters have equal names; the objectives have parameters and buffers of their own.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import jax
import numpy as np
import pytest

from tests import tiny, toys
from tests.test_train import as_of, assert_same_params
from vit_jax.data.pipeline import to_device
from vit_jax.errors import UserError
from vit_jax.inference.load import load_model
from vit_jax.parameters.sharding import batch_sharding, create_mesh
from vit_jax.plan.plan import make_plan
from vit_jax.plan.topology import parse_topology
from vit_jax.run import create_run
from vit_jax.train import train_and_evaluate
from vit_jax.trees import flatten_names


@pytest.fixture(autouse=True, scope="module")
def tables() -> Iterator[None]:
    yield from toys.registered()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    pixels = np.random.default_rng(0).integers(0, 256, (4, 20, 24, 3), np.uint8)
    for number, photo in enumerate(pixels):
        cv2.imwrite(str(folder / f"{number}.png"), photo)
    return folder


def config_of(**overrides: Any) -> Any:
    model = {f"model__{key}": value for key, value in toys.SIZES.items()}
    return tiny.config(**{"model__name": "toy_patches", **model, **overrides})


def flags(workdir: Path, *overrides: str) -> list[str]:
    """A training command without what only a ViT has, on eight devices."""
    command = tiny.command("train.py", workdir)[2:]
    known = [argument for argument in command if "config.model." not in argument]
    mesh = ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "duration.steps=4"]
    sections = [f"--config.{override}" for override in (*mesh, *overrides)]
    return ["--distributed=off", *known, *sections]


def through_every_script(
    script: tiny.Script, photos: Path, tmp_path: Path, kind: str, *overrides: str
) -> None:
    """Trains such a model, and calls all scripts that take its command or its result."""
    run, data = str(tmp_path / "run"), ["--dataset=digits", "--split=test[:40]"]
    model = (f"model.name={kind}/8", *overrides)
    grid = "sweep.learning_rates=(0.01,)", "sweep.train_split=train[:80]"
    for name, *command in (
        ("train.py", *flags(tmp_path / "run", *model)),
        ("plan.py", *flags(tmp_path / "run", *model), "--topology=cpu:8", "--noremedies"),
        ("finetune.py", *flags(tmp_path / "tuned", *model, f"pretrained.source={run}")),
        ("sweep.py", *flags(tmp_path / "sweep", *model, *grid), "--seeds=1"),
        ("extract_features.py", run, str(photos), "--features=gap,block_1", f"--output={run}.npz"),
        ("probe.py", run, *data, "--train_split=train[:40]", "--kinds=few_shot", "--feature=gap"),
        ("visualize.py", run, str(photos), "--what=cka", f"--against={run}", f"--output={run}_in"),
        ("export.py", run, f"{run}_stablehlo", "--format=stablehlo"),
        ("convert_checkpoint.py", run, f"{run}_orbax", "--format=orbax"),
        ("convert_checkpoint.py", f"{run}_orbax", f"{run}_again.npz", "--format=npz"),
        ("report.py", run, "--max_examples=8"),
        ("plot_run.py", run, f"--output={run}.png"),
    ):
        result = script(name, *command)
        assert result.returncode == 0, (name, result.stderr)
    first, again = (load_model(source) for source in (run, f"{run}_again.npz"))
    assert first.description.model["name"] == again.description.model["name"] == kind
    for name, array in flatten_names(first.params).items():
        np.testing.assert_array_equal(flatten_names(again.params)[name], array)


def test_families_with_the_same_names_do_not_meet(script, photos, tmp_path):
    """The other one is that of the next test."""
    kind = "toy_patches"
    through_every_script(script, photos, tmp_path, kind)
    run = str(tmp_path / "run")
    result = script("evaluate.py", run, "--dataset=digits", "--split=test[:40]", "--json")
    assert math.isfinite(json.loads(result.stdout)["loss"])
    assert script("predict.py", run, str(photos)).returncode == 0
    adapted = (f"model.name={kind}/8", "lora.rank=2", f"pretrained.source={run}")
    lora = flags(tmp_path / "lora", *adapted)
    assert "no blocks with query and value" in script("train.py", *lora).stderr


def test_an_objective_with_parameters_of_its_own(script, photos, tmp_path):
    through_every_script(script, photos, tmp_path, "toy_pixels", "objective.name=prototypes")
    with np.load(tmp_path / "run" / "params.npz") as arrays:
        assert arrays["prototypes"].shape == (10, 8)
    model = load_model(tmp_path / "run")
    assert model.features(np.zeros((1, 16, 16, 3), np.float32), "logits").shape == (1, 8)
    with pytest.raises(UserError, match="outputs are not classes|not classes"):
        raise UserError(script("evaluate.py", str(tmp_path / "run")).stderr)


@pytest.mark.parametrize(
    ("attribute", "value", "name"),
    [("own_parameters", {}, "prototypes"), ("prefix", "body", "body/")],
)
def test_a_parameter_that_nobody_declares_is_named(attribute, value, name, monkeypatch):
    monkeypatch.setattr(toys.Prototypes, attribute, value)
    monkeypatch.setattr(toys.Prototypes, "models", property(lambda self: {"": self.model}))
    with pytest.raises(
        ValueError, match=rf"'prototypes' has the parameter '{name}.*toy of patches"
    ):
        create_run(config_of(objective__name="prototypes"), create_mesh())


AVERAGED = {"objective__name": "self_distillation", "evaluators__test__name": "objective"}


def test_a_teacher_that_is_an_average_is_trained_and_resumed_to_the_bit(tmp_path: Path) -> None:
    config = config_of(**AVERAGED, duration__steps=4, checkpoint__every_steps=2, mesh__fsdp=2)
    results = train_and_evaluate(config, str(tmp_path / "whole"))
    parts = as_of(2, tmp_path / "whole", tmp_path / "parts")
    train_and_evaluate(config, str(parts))
    assert_same_params(tmp_path / "whole", parts)
    assert math.isfinite(results["test/loss"])
    teacher, student = (load_model(f"{parts}#{part}") for part in ("teacher", "student"))
    weights = [flatten_names(model.params)["head/kernel"] for model in (teacher, student)]
    assert 0 < np.abs(weights[0] - weights[1]).max() < 0.1
    default = flatten_names(load_model(parts).params)["head/kernel"]
    np.testing.assert_array_equal(default, weights[0])  # the first one described


def test_its_state_is_that_of_one_device_and_of_the_formula() -> None:
    rng = np.random.default_rng(0)
    host = {
        "image": rng.integers(0, 256, (16, 16, 16, 3), np.uint8),
        "mask": np.ones(16, np.float32),
    }

    def updated(start: Any = None, **layout: int) -> tuple[Any, Any, Any]:
        devices = jax.devices()[: math.prod(layout.values())]
        config = config_of(**AVERAGED, optimizer__name="sgd", schedule__learning_rate=0.1)
        with jax.set_mesh(mesh := create_mesh(**layout, devices=devices)):
            run = create_run(config, mesh)
            state = run.initial_state(0, start)
            first = jax.device_get((state.params, state.buffers))
            for _ in range(2):
                batch = to_device(host, batch_sharding(mesh), 16)
                state, _ = run.jit_train_step()(state, {}, batch)
            return first, jax.device_get(state.params), jax.device_get(state.buffers)

    (params, buffers), after, eight = updated(data=2, fsdp=2, tensor=2)
    _, _, one = updated(params, data=1)
    for name, array in flatten_names(eight).items():
        # Sums over devices come in another order.
        np.testing.assert_allclose(array, flatten_names(one)[name], rtol=0, atol=1e-6)
    first, student = (flatten_names(tree["student"])["head/kernel"] for tree in (params, after))
    np.testing.assert_array_equal(flatten_names(buffers["teacher"])["head/kernel"], first)
    teacher = flatten_names(eight["teacher"])["head/kernel"]
    # After two updates: 0.81 of the start, 0.09 of the first update's and 0.1 of the second's.
    between = (teacher - 0.81 * first) / 0.19
    assert np.abs(between - student).max() < np.abs(first - student).max()
    assert np.abs(eight["centre"]).max() > 0


def test_its_memory_and_arithmetic_are_counted() -> None:
    plans = [
        make_plan(config_of(**kind), parse_topology("cpu:8"), try_remedies=False)
        for kind in (AVERAGED, {"objective__name": "prototypes"})
    ]
    averaged, alone = plans
    # Forward and backward pass are three times a forward pass; the teacher's is a fourth.
    model = alone.model_flops_per_image - 3 * 2 * 8 * 10  # without the products with prototypes
    assert averaged.model_flops_per_image == pytest.approx(4 / 3 * model, rel=1e-6)
    names = {row.name for row in averaged.rows}
    assert any(name.startswith("teacher/") for name in names), names
