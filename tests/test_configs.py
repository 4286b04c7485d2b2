"""Recipes build, and every key of the config is read by something."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs import finetune, quickstart
from tests import fixtures_data
from vit_jax import config as default
from vit_jax import launch
from vit_jax.data.pipeline import train_batches
from vit_jax.errors import UserError
from vit_jax.models.create import MODELS, create_model
from vit_jax.models.variants import get_variant
from vit_jax.multihost.processes import start_processes
from vit_jax.objectives.classification import Classification
from vit_jax.parameters.sharding import create_mesh
from vit_jax.pretrained.load import load_pretrained
from vit_jax.run import Run, create_run
from vit_jax.training.length import to_steps
from vit_jax.training.mixing import create_mixing
from vit_jax.training.optimizer import create_optimizer, create_schedule
from vit_jax.training.step import jit_train_step
from vit_jax.workdir.checkpoints import CheckpointManager

ROOT = Path(__file__).resolve().parents[1]

# Sections that the loop hands over whole. The functions take no **kwargs, so a key that they do
# not name is a TypeError, and what they do name they use (ruff finds unused arguments).
SECTIONS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "duration": (to_steps, set()),
    "loader": (train_batches, set()),
    "mesh": (create_mesh, set()),
    "mix": (create_mixing, set()),
    "objective": (Classification.__init__, {"name"}),
    "optimizer": (create_optimizer, {"learning_rate"}),  # goes to the schedule
    "schedule": (create_schedule, set()),
    "train_step": (jit_train_step, set()),
    "checkpoint": (CheckpointManager.__init__, set()),
    "processes": (start_processes, set()),
    "pretrained": (load_pretrained, set()),
}


@pytest.mark.parametrize("section", list(SECTIONS))
def test_every_key_of_a_section_is_an_argument(section: str) -> None:
    function, read_elsewhere = SECTIONS[section]
    keys = set(default.get_config()[section]) - read_elsewhere
    assert keys <= set(inspect.signature(function).parameters)


def test_every_model_key_is_an_attribute_and_back() -> None:
    """Of any kind of model; what one of them does not have, `create_model` leaves out."""
    fields = {field.name for model in MODELS.values() for field in dataclasses.fields(model)}
    assert set(default.get_config().model) | {"num_classes", "parent"} == fields


@pytest.mark.parametrize("variant", ["B/16", "R50+L/32", "DeiT-distilled-S/16", "R152x2"])
def test_every_variant_goes_over_the_defaults(variant: str) -> None:
    config = default.get_config()
    config.model.update(get_variant(variant))
    model = create_model(**config.model, num_classes=3)
    assert type(model) is MODELS[get_variant(variant)["name"]]
    assert model == create_model(**get_variant(variant), num_classes=3)


def test_every_other_key_is_read_by_the_loop() -> None:
    source = "".join(
        (ROOT / "vit_jax" / f"{name}.py").read_text() for name in ("run", "train", "train_events")
    )
    config = default.get_config()
    keys = [f"{s}.{key}" for s in ("dataset", "log") for key in config[s]]
    keys += [f"evaluators.{key}" for key in config.evaluators.test]
    for key in keys:
        section, _, last = key.rpartition(".")
        name = {"dataset": "data", "evaluators": "evaluator", "log": "log"}[section]
        assert f"{name}.{last}" in source or f'"{last}"' in source, key
    # `sweep` is for scripts/sweep.py, see tests/test_sweep.py.
    handed_over = {*SECTIONS, "model", "dataset", "log", "evaluators", "seed", "sweep"}
    assert set(config) == handed_over


def test_a_key_that_is_not_there_cannot_be_set() -> None:
    config = default.get_config()
    with pytest.raises(AttributeError, match="learning_rate"):
        config.optimizer.learing_rate = 1.0
    with pytest.raises(TypeError):
        config.optimizer.learning_rate = "fast"


@pytest.mark.parametrize("patch_size", [8, (4, 8)])
def test_patches_are_an_int_or_a_pair(patch_size: Any) -> None:
    config = default.get_config()
    config.model.patch_size = patch_size
    assert config.model.patch_size == patch_size


def built(config: ConfigDict) -> Run:
    """Through the real entry: datasets opened, sizes checked against each other, model built."""
    return create_run(config, create_mesh(**config.mesh))


@pytest.mark.parametrize("stage", ["pretrain", "finetune", "scratch"])
def test_quickstart_stages_build(stage: str, tmp_path: Path) -> None:
    config = quickstart.get_config(stage)
    config.dataset.data_dir = str(tmp_path)
    config.mesh.data = 1
    config.mesh.fsdp = 1
    config.mesh.tensor = 8  # batches of 50 do not split over the 8 devices of the tests
    run = built(config)
    assert run.grid == ((3, 3) if stage == "pretrain" else (6, 6))
    if stage != "pretrain":
        assert run.dataset.num_examples == 300
        assert {k: d.num_examples for k, d in run.eval_datasets.items()} == {
            "validation": 300,
            "test": 300,
        }


def test_fine_tuning_and_scratch_differ_in_their_start_alone() -> None:
    ours, theirs = (quickstart.get_config(s).to_dict() for s in ("finetune", "scratch"))
    assert ours["optimizer"].pop("learning_rate") != theirs["optimizer"].pop("learning_rate")
    assert ours["evaluators"]["test"].pop("at_start")
    assert not theirs["evaluators"]["test"].pop("at_start")
    assert ours == theirs


@pytest.mark.parametrize("dataset", list(finetune.DATASETS))
def test_fine_tuning_recipes_are_table_4(dataset: str) -> None:
    config = finetune.get_config(f"B/16,{dataset}")
    assert config.dataset.batch_size == 512
    assert config.optimizer.clip_norm == 1.0
    assert config.optimizer.weight_decay == 0.0
    assert config.optimizer.momentum == 0.9
    assert config.schedule.name == "cosine"
    steps = {"imagenet2012": 20_000, "cifar10": 10_000, "cifar100": 10_000}
    assert config.duration.steps == steps.get(dataset, 500)
    assert "384" in config.dataset.preprocess


@pytest.mark.parametrize("variant", ["Ti/16", "H/14", "R26+S/32"])
def test_fine_tuning_builds_on_a_real_tfds_directory(variant: str, tmp_path: Path) -> None:
    fixtures_data.tiny_tfds("cifar10", str(tmp_path), {"train": 600, "test": 20})
    config = finetune.get_config(f"{variant},cifar10")
    config.dataset.data_dir = str(tmp_path)
    run = built(config)
    assert run.dataset.num_classes == 10
    assert run.grid == {"Ti/16": (24, 24), "H/14": (27, 27), "R26+S/32": (12, 12)}[variant]


@pytest.mark.parametrize("argument", ["B/16", "B/16,", "B/17,cifar10"])
def test_arguments_of_the_recipe_that_make_no_sense(argument: str) -> None:
    with pytest.raises(UserError, match=r"VARIANT,DATASET|Did you mean"):
        finetune.get_config(argument)


def test_a_saved_config_rebuilds_the_model() -> None:
    config = finetune.get_config("R50+L/32,cifar10")
    saved = json.loads(json.dumps(config.to_dict()))
    again = default.get_config()
    for section in ("model", "optimizer", "schedule"):
        for key, value in saved[section].items():
            again[section][key] = tuple(value) if isinstance(value, list) else value
    assert again.model.to_dict() == config.model.to_dict()
    assert again.optimizer.to_dict() == config.optimizer.to_dict()


def test_help_lists_every_key_with_its_comment() -> None:
    launch.define_flags(None)
    text = launch.help_text("doc")
    for section, keys in default.get_config().items():
        if section != "evaluators" and hasattr(keys, "items"):
            for key in keys:
                assert f"  {section}.{key} = " in text
    assert "# updates" in text
    assert "evaluators.test.every_steps = 0  # 0 is only after the last step" in text
