"""Recipes build, and every key of the config is read by something."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs import finetune, quickstart
from tests import fixtures_data, tiny
from tests.tiny import Script
from vit_jax import config as default
from vit_jax import run as run_module
from vit_jax.command_line import help_of
from vit_jax.data.pipeline import HostBatches
from vit_jax.errors import UserError
from vit_jax.launch import start_processes
from vit_jax.models.create import MODELS, create_model
from vit_jax.models.variants import get_variant
from vit_jax.multihost.watchdog import Watchdog
from vit_jax.parameters.sharding import create_mesh
from vit_jax.pretrained.fit.adapt import adapt_params
from vit_jax.pretrained.load import load_pretrained
from vit_jax.run import Run, create_run
from vit_jax.train import train_and_evaluate
from vit_jax.training.mixing import create_mixing
from vit_jax.training.schedule import to_steps
from vit_jax.training.step import make_train_step
from vit_jax.workdir.checkpoints import CheckpointManager

ROOT = Path(__file__).resolve().parents[1]

# Sections that are handed over whole, and who names their keys.
SECTIONS: dict[str, Callable[..., Any] | tuple[Callable[..., Any], ...]] = {
    "duration": to_steps,
    "loader": HostBatches.__init__,
    "mesh": create_mesh,
    "mix": create_mixing,
    "train_step": make_train_step,
    "checkpoint": CheckpointManager.__init__,
    "processes": (start_processes, Watchdog.start),
    "pretrained": (load_pretrained, adapt_params),
}


@pytest.mark.parametrize("section", list(SECTIONS))
def test_every_key_of_a_section_is_an_argument(section: str) -> None:
    functions = SECTIONS[section]
    known: set[str] = set()
    for function in functions if isinstance(functions, tuple) else (functions,):
        known |= set(inspect.signature(function).parameters)
    assert set(default.get_config()[section]) <= known


@pytest.mark.parametrize("variant", ["B/16", "R50+L/32", "DeiT-distilled-S/16", "R152x2"])
def test_every_variant_is_a_section(variant: str) -> None:
    config = default.get_config()
    config.model = default.section("model", **get_variant(variant))
    model = create_model(**config.model, num_classes=3)
    assert type(model) is MODELS[get_variant(variant)["name"]]
    assert model == create_model(**get_variant(variant), num_classes=3)


def all_kinds() -> list[tuple[str, str]]:
    return [(key, name) for key, (table, _) in default.KINDS.items() for name in table]


@pytest.mark.parametrize(("key", "name"), all_kinds())
def test_every_key_of_a_kind_has_a_type_and_a_line_of_help(key: str, name: str) -> None:
    texts = help_of(key, name)
    assert not [each for each in default.kind_keys(key, name) if not texts.get(each)]


def test_a_section_has_the_keys_of_its_kind_only() -> None:
    config = default.get_config()
    assert "momentum" not in config.optimizer
    default.set_kind(config, "optimizer", "sgd")
    assert config.optimizer.momentum == 0.9
    assert "b1" not in config.optimizer
    config.optimizer.weight_decay = 0.25
    default.set_kind(config, "optimizer", "adafactor")  # what both have is kept
    assert config.optimizer.weight_decay == 0.25
    with pytest.raises(UserError, match="schedule.linear_end is not a key of schedule.name='cos"):
        default.section("schedule", "cosine", linear_end=0.1)
    with pytest.raises(UserError, match="model.resnet_layers has no default"):
        default.section("model", "bit")
    with config.unlocked():
        config.optimizer.b1 = 0.9
    with pytest.raises(UserError, match="optimizer.b1 is not a key of optimizer.name='adafactor'"):
        default.check_config(config)
    with config.unlocked():
        del config.optimizer["b1"], config.optimizer["momentum"]
    with pytest.raises(UserError, match="optimizer.momentum is missing"):
        default.check_config(config)


def test_the_loop_reads_every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by watching the config while a fine-tuning runs."""
    train_and_evaluate(tiny.config(duration__steps=2, schedule__warmup_steps=0), f"{tmp_path}/a")
    config = tiny.config(
        duration__steps=2, schedule__warmup_steps=0, pretrained__source=f"{tmp_path}/a"
    )
    names = {id(node): key for key, node in config.items() if hasattr(node, "items")}
    names |= {id(config): "", id(config.evaluators.test): "evaluators.test"}
    read: set[str] = set()
    get = ConfigDict.__getitem__

    def recorded(node: ConfigDict, key: str) -> Any:
        if id(node) in names:
            read.add(f"{names[id(node)]}.{key}".lstrip("."))
        return get(node, key)

    # These two look at everything, and use nothing.
    monkeypatch.setattr(run_module, "check_config", lambda _: None)
    monkeypatch.setattr(ConfigDict, "to_dict", lambda node: {"tiny": id(node)})
    monkeypatch.setattr(ConfigDict, "__getitem__", recorded)
    train_and_evaluate(config, f"{tmp_path}/b")
    monkeypatch.undo()
    every = {"seed"} | {
        f"{s}.{key}" for s in set(names.values()) - {""} for key in _node(config, s)
    }
    unread = {key for key in every - read if not key.startswith(("sweep.", "evaluators."))}
    unread |= {f"evaluators.test.{key}" for key in config.evaluators.test} - read
    # scripts/sweep.py reads `sweep`, launch.main `processes`.
    assert unread <= STARTED_BY_LAUNCH


STARTED_BY_LAUNCH = {f"processes.{key}" for key in default.get_config().processes}


def _node(config: ConfigDict, key: str) -> ConfigDict:
    return functools.reduce(lambda node, part: node[part], key.split("."), config)


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
    assert run.description.grid == ((3, 3) if stage == "pretrain" else (6, 6))
    if stage != "pretrain":
        assert run.dataset.num_examples == 300
        assert {k: d.num_examples for k, d in run.datasets.items()} == {
            "train": 300,
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
    grids = {"Ti/16": (24, 24), "H/14": (27, 27), "R26+S/32": (12, 12)}
    assert run.description.grid == grids[variant]


@pytest.mark.parametrize("argument", ["B/16", "B/16,", "B/17,cifar10"])
def test_arguments_of_the_recipe_that_make_no_sense(argument: str) -> None:
    with pytest.raises(UserError, match=r"VARIANT,DATASET|Did you mean"):
        finetune.get_config(argument)


def test_a_saved_config_rebuilds_the_model() -> None:
    config = finetune.get_config("R50+L/32,cifar10")
    saved = json.loads(json.dumps(config.to_dict()))
    again = default.get_config()
    for section in ("model", "optimizer", "schedule"):
        default.set_kind(again, section, saved[section]["name"])
        for key, value in saved[section].items():
            again[section][key] = tuple(value) if isinstance(value, list) else value
    assert again.model.to_dict() == config.model.to_dict()
    assert again.optimizer.to_dict() == config.optimizer.to_dict()


def test_help_lists_every_key_with_its_meaning(script: Script) -> None:
    text = script("train.py", "--help").stdout
    assert "--workdir" in text
    for section, keys in default.get_config().items():
        if section != "evaluators" and hasattr(keys, "items"):
            for key in keys:
                assert f"  {section}.{key} = " in text
    assert "duration.steps = None  # updates" in text
    assert "optimizer.momentum = 0.9  # (sgd, adafactor) decay of the sum of gradients" in text
    assert "evaluators.NAME.every_steps = 0  # between two evaluations; 0 is only after" in text
