"""Recipes build, and every key of the config is read by something."""

import copy
import dataclasses
import functools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import pytest
from ml_collections import ConfigDict

from configs import finetune, quickstart
from tests import fixtures_data, tiny
from tests.saved_models import save_model
from tests.tiny import Script
from vit_jax import config as default
from vit_jax import run as run_module
from vit_jax.arguments import split_overrides
from vit_jax.command_line import help_of, override
from vit_jax.errors import UserError
from vit_jax.models.create import get_variant
from vit_jax.parameters.sharding import create_mesh
from vit_jax.run import Run, create_run
from vit_jax.train import train_and_evaluate


def all_kinds() -> list[tuple[str, str]]:
    return [(key, name) for key, (table, _) in default.KINDS.items() for name in table]


@pytest.mark.parametrize(("key", "name"), all_kinds())
def test_every_key_of_a_kind_has_a_type_and_a_line_of_help(key: str, name: str) -> None:
    texts = help_of(key, name)
    assert not [key for key in default.kind_keys(key, name) if not texts.get(key)]


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
    with pytest.raises(UserError, match="has no default for model.resnet_layers; set"):
        default.section("model", "bit")
    with config.unlocked():
        config.optimizer.b1 = 0.9
    with pytest.raises(UserError, match="optimizer.b1 is not a key of optimizer.name='adafactor'"):
        default.check_config(config)
    with config.unlocked():
        del config.optimizer["b1"], config.optimizer["momentum"]
    with pytest.raises(UserError, match="optimizer.momentum is missing"):
        default.check_config(config)


# Of keys without a default, as a command line gives them.
VALUES = {"patch_size": "8,16", "resnet_layers": "(1, 2)"}


def switched(config: ConfigDict, *overrides: str) -> ConfigDict:
    """A copy of the config with the overrides of a command line."""
    return override(copy.deepcopy(config), overrides)


def switches(
    config: ConfigDict, kinds: list[tuple[str, str]], only: str = ""
) -> Iterator[tuple[str, ConfigDict]]:
    """Each section, and the config with these kinds in it."""
    for key, name in kinds:
        keys = default.kind_keys(key, name)
        required = [leaf for leaf, (_, value) in keys.items() if value is dataclasses.MISSING]
        names = [f"evaluators.{test}" for test in config.evaluators]
        for section in names if "." in key else [key]:
            if only not in ("", section):
                continue
            values = [f"{section}.{leaf}={VALUES.get(leaf, '2')}" for leaf in required]
            new = switched(config, f"{section}.name={name}", *values)
            default.check_config(new)
            node = _node(new, section)
            assert node.name == name
            for leaf, (hint, _) in keys.items():
                options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
                assert isinstance(node[leaf], tuple(get_origin(o) or o for o in options)), leaf
            yield section, new


@pytest.fixture
def unprinted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag writes its whole default down, which takes longer than to override a key."""
    monkeypatch.setattr(ConfigDict, "__str__", object.__repr__)


@pytest.mark.usefixtures("unprinted")
def test_every_kind_takes_every_other_one() -> None:
    for section, config in switches(default.get_config(), all_kinds()):
        assert list(switches(config, all_kinds(), section))


def test_a_key_of_another_type_does_not_keep_its_value() -> None:
    """Although its name is the same."""
    config = switched(default.get_config(), "evaluators.test.name=linear_probe")
    assert switched(config, "evaluators.test.name=few_shot").evaluators.test.l2 == 1024.0
    hybrid = switched(config, "model.name=R50+B/16")
    with pytest.raises(UserError, match=r"model.resnet_layers; set what is missing, or a variant"):
        switched(hybrid, "model.name=bit")
    layers = "model.resnet_layers=(1, 2)"
    assert switched(hybrid, layers, "model.name=bit").model.resnet_layers == (1, 2)


def test_a_row_of_variants_replaces_all_sizes_and_gives_way_to_the_command_line() -> None:
    config = default.get_config()
    config.model.dropout_rate = 0.1
    config = switched(config, "model.name=R50+L/32")
    config = switched(config, "model.name=DeiT-S/16", "model.num_layers=3")
    sizes = {**get_variant("DeiT-S/16"), "num_layers": 3, "resnet_layers": None}
    assert {**config.model, **sizes} == dict(config.model)
    assert config.model.dropout_rate == 0.1  # no size
    assert switched(config, "model.name=B/16").model.gelu == "tanh"
    in_two_words = ["--config.model.name", "R50x1", "--config.optimizer.clip_norm", "None"]
    config = switched(config, *split_overrides(in_two_words)[0])
    assert (config.model.name, config.model.resnet_layers) == ("bit", (3, 4, 6, 3))
    with pytest.raises(UserError, match=r"'B16' is not vit \| .*Did you mean 'B/16'"):
        switched(config, "model.name=B16")


def test_the_loop_reads_every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by watching the config while a fine-tuning runs."""
    source = str(save_model(tmp_path / "a", num_classes=3, mlp_dim=16))
    config = tiny.config(duration__steps=2, pretrained__source=source)
    names = {id(node): key for key, node in config.items() if hasattr(node, "items")}
    names |= {id(config): "", id(config.evaluators.test): "evaluators.test"}
    read: set[str] = set()
    get = ConfigDict.__getitem__

    def recorded(node: ConfigDict, key: str) -> Any:
        if id(node) in names:
            read.add(f"{names[id(node)]}.{key}".lstrip("."))
        return get(node, key)

    # A copy would not be watched; it alone reads `pretrained.keep`.
    monkeypatch.setattr("vit_jax.pretrained.adopt.adopt", lambda config, _, **__: config)
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
    assert unread <= {"pretrained.keep", *(f"processes.{key}" for key in config.processes)}


def _node(config: ConfigDict, key: str) -> ConfigDict:
    return functools.reduce(lambda node, part: node[part], key.split("."), config)


def test_what_can_be_set() -> None:
    config = default.get_config()
    for patch_size in (8, (4, 8)):
        config.model.patch_size = patch_size
        assert config.model.patch_size == patch_size
    with pytest.raises(UserError, match=r"Did you mean 'schedule\.learning_rate'"):
        config.schedule.learing_rate = 1.0
    with pytest.raises(UserError, match=r"schedule\.learning_rate='fast' must be of type float"):
        config.schedule.learning_rate = "fast"
    with pytest.raises(UserError, match=r"optimizer='sgd' must be of type dict"):
        config.optimizer = "sgd"
    with pytest.raises(UserError, match=r"evaluators\.val is not a key .*unlocked\(\):` adds one"):
        config.evaluators.val = default.evaluator(split="val")
    with pytest.raises(UserError, match=r"evaluators\.NAME\.every_step is not .*'objective'"):
        config.evaluators.test.every_step = 3
    config.dataset.batch_size = None
    with pytest.raises(UserError, match=r"dataset\.batch_size=None must have a value"):
        default.check_config(config)


def same(config: ConfigDict) -> ConfigDict:
    return config


@pytest.mark.parametrize(
    "copied",
    [
        same,
        copy.deepcopy,
        ConfigDict,  # of its own at the top alone
        ConfigDict.copy_and_resolve_references,
        lambda config: pickle.loads(pickle.dumps(config)),
    ],
)
def test_an_assignment_does_what_the_flag_does(copied: Any) -> None:
    flags = ["optimizer.name=sgd", "optimizer.momentum=0.5", "duration.epochs=3"]
    flags += ["model.name=bit", "model.resnet_layers=(1, 2)"]
    expected = switched(default.get_config(), *flags).to_dict()
    start = default.get_config()
    start.duration.steps = 100
    config = copied(start)
    config.optimizer.name = "sgd"
    config.optimizer.momentum = 0.5
    config.duration.epochs = 3
    config.model.update(resnet_layers=[1, 2], name="bit")  # in any order
    assert config.to_dict() == expected
    at_once = default.get_config()
    at_once.update(json.loads(json.dumps(expected)))  # a saved one
    assert at_once.to_dict() == expected
    config["evaluators"]["test"]["name"] = "few_shot"
    default.check_config(config)
    with pytest.raises(UserError, match="Here it is schedule.learning_rate"):
        config.optimizer.lr = 1.0


def test_a_dict_sets_keys_of_a_section_and_another_section_replaces_it() -> None:
    config = default.get_config()
    config.schedule = {"linear_end": 0.1, "name": "linear"}
    assert (config.schedule.linear_end, config.schedule.warmup_steps) == (0.1, 0)
    config.evaluators = ConfigDict({"val": default.evaluator(split="val")})
    assert config.evaluators.val.split == "val"
    assert "test" not in config.evaluators


def built(config: ConfigDict) -> Run:
    """Through the real entry: datasets opened, sizes checked against each other, model built."""
    return create_run(config, create_mesh(**config.mesh))


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_quickstart_stages_build(stage: str, tmp_path: Path) -> None:
    config = quickstart.get_config(stage)
    config.dataset.data_dir = str(tmp_path)
    config.mesh.data = 1
    config.mesh.fsdp = 1
    config.mesh.tensor = 8  # batches of 50 do not split over the 8 devices of the tests
    run = built(config)
    assert run.descriptions[""].grid == ((3, 3) if stage == "pretrain" else (6, 6))
    if stage != "pretrain":
        assert {dataset.num_examples for dataset in run.datasets.values()} == {300}
        assert set(run.datasets) == {"train", "validation", "test"}


def test_a_run_says_if_its_average_keeps_the_start(caplog: pytest.LogCaptureFixture) -> None:
    built(tiny.config(train_step__polyak_decay=0.9, duration__steps=4))
    assert "after 4 steps 66% of the average" in caplog.text
    assert "is the random start" in caplog.text


def test_fine_tuning_and_scratch_differ_in_their_start_alone() -> None:
    tuned, scratch = (quickstart.get_config(s).to_dict() for s in ("finetune", "scratch"))
    assert tuned["schedule"].pop("learning_rate") != scratch["schedule"].pop("learning_rate")
    assert tuned["evaluators"]["test"].pop("at_start")
    assert not scratch["evaluators"]["test"].pop("at_start")
    assert tuned == scratch


def test_fine_tuning_builds_on_a_real_tfds_directory(tmp_path: Path) -> None:
    fixtures_data.tiny_tfds("cifar10", str(tmp_path), {"train": 600, "test": 20})
    config = finetune.get_config("R+Ti/16,cifar10")
    config.dataset.data_dir = str(tmp_path)
    run = built(config)
    assert run.dataset.num_classes == 10
    assert run.descriptions[""].grid == (12, 12)


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
    assert (
        "optimizer.momentum = 0.9  # (sgd, adafactor, lars, muon) decay of the accumulated gradient"
        in text
    )
    assert "evaluators.NAME.every_steps = 0  # steps between evaluations; 0: only after" in text


def test_help_has_the_values_of_the_recipe_and_of_the_command_line(script: Script) -> None:
    recipe = "configs/finetune.py:L/16,cifar10"
    overrides = "--config.schedule.warmup_steps=7", "--config.evaluators.test.name=linear_probe"
    for command in (("--help", f"--config={recipe}", *overrides), ("--config", recipe, "-h")):
        text = script("finetune.py", *command).stdout
        assert f"config keys of {recipe}, as --config.KEY=VALUE:" in text
        assert "  model.hidden_size = 1024  # (vit, " in text
        assert "  optimizer.name = 'sgd'  # " in text
        assert "  optimizer.momentum_dtype = 'bfloat16'  # " in text
        assert "  optimizer.b1 = 0.9  # (adamw" in text  # not of the recipe's kind: its default
        assert f"  schedule.warmup_steps = {7 if overrides[0] in command else 500}  # " in text
        assert "  duration.epochs = None  # " in text
    text = script("finetune.py", "--help", f"--config={recipe}", *overrides).stdout
    assert "  evaluators.test.max_iterations = 1000\n" in text
    wrong = script("train.py", "--config=configs/finetun.py", "--help")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: --config: there is no recipe 'configs/finetun.py'.")
