"""Recipes of later papers; parameter counts, and two real steps of the largest models' recipe."""

import math
from pathlib import Path
from typing import Any

import pytest

from configs import augreg, better_baselines, pretrain, scaling_vit
from tests import fixtures_data
from tests.recipes import PRETRAINING, settings
from vit_jax.errors import UserError
from vit_jax.models.create import create_model
from vit_jax.parameters.table import abstract_params
from vit_jax.train import train_and_evaluate
from vit_jax.training.schedule import to_steps
from vit_jax.trees import count_parameters
from vit_jax.workdir.checkpoints import CheckpointManager

# 2205.01580, table 1: 90, 150 and 300 epochs; the settings that an option changes.
BETTER_BASELINES: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {
    "": ((76.5, 78.5, 80.0), {}),
    ",posemb=learned": ((75.0, 78.0, 79.6), {"position_embedding": "learned"}),
    ",batch=4096": ((74.7, 77.3, 78.6), {"batch_size": 4096}),
    ",pool=token": ((75.0, 76.9, 78.2), {"classifier": "token"}),
    ",head=linear": ((76.7, 78.6, 79.8), {"representation_size": None}),
    ",aug=none": ((73.6, 73.7, 73.7), {"preprocess": "official_train(224)", "mixup_alpha": 0.0}),
}


@pytest.mark.parametrize("options", BETTER_BASELINES)
def test_better_baselines(options: str) -> None:
    accuracies, changed = BETTER_BASELINES[options]
    for epochs, accuracy in zip((90, 150, 300), accuracies, strict=True):
        config = better_baselines.get_config(f"{epochs}{options}")
        assert settings(config) == PRETRAINING | {
            "split": "train[:99%]",
            "preprocess": "official_train(224)|randaug(2, 10)",
            "batch_size": 1024,
            "epochs": epochs,
            "representation_size": 384,
            "head_bias_init": 0.0,
            "classifier": "gap",
            "position_embedding": "sincos2d",
            "mixup_alpha": 0.2,
            "loss": "softmax",
            "learning_rate": 0.001,
            "weight_decay": 0.1,
            "clip_norm": 1.0,
            "momentum_dtype": "bfloat16",
            "splits": {"test": "validation", "validation": "train[99%:]"},
            **changed,
        }
        assert config.sweep.published == f"{accuracy} (2205.01580)"
        assert {test.every_steps for test in config.evaluators.values()} == {10_000}
    assert to_steps(epochs=90, num_examples=1_268_355, batch_size=1024) == 111_477
    both = better_baselines.get_config("90,pool=token,head=linear")
    assert (both.model.classifier, both.model.representation_size) == ("token", None)
    assert both.sweep.published == ""


@pytest.mark.parametrize("argument", ["", "100", "90,posemb=rope", "90,aug"])
def test_arguments_of_better_baselines_that_make_no_sense(argument: str) -> None:
    with pytest.raises(UserError, match=r"90, 150, 300 .*posemb=learned, batch=4096, pool=token"):
        better_baselines.get_config(argument)


@pytest.mark.parametrize("variant", ["g/14", "G/14"])
def test_scaling_vit(variant: str) -> None:
    config = scaling_vit.get_config(variant)
    assert (config.optimizer.name, config.schedule.learning_rate) == ("adafactor", 8e-4)
    # big_vision states it times the rate.
    assert config.optimizer.weight_decay == pytest.approx(2.4e-5 / 8e-4)
    assert config.optimizer.decay_multipliers == (("head/kernel", 100.0),)
    assert config.optimizer.decay_parameters == "kernels"
    assert (config.optimizer.momentum, config.optimizer.momentum_dtype) == (0.9, "bfloat16")
    assert (config.optimizer.b2, config.optimizer.factored_decay) == (0.999, 0.8)
    assert config.optimizer.clip_norm == 1.0
    schedule = config.schedule
    assert (schedule.name, schedule.timescale_steps) == ("rsqrt", 10_000)
    assert (schedule.warmup_steps, schedule.cooldown_steps) == (10_000, 50_000)
    assert (config.dataset.batch_size, config.duration.steps) == (16_384, 1_000_000)
    assert config.model.classifier == "map"  # which has no class token
    assert (config.model.head_bias_init, config.model.representation_size) == (-10.0, None)
    assert (config.objective.loss, config.dataset.preprocess) == ("sigmoid", "official_train(224)")
    assert pretrain.DATASETS[config.dataset.name].num_classes == 29_593
    assert ("90.45" in config.sweep.published) == (variant == "G/14")


def test_data_and_models_for_scaling_vit() -> None:
    assert scaling_vit.get_config("g/14,/data/photos").dataset.name == "/data/photos"
    assert scaling_vit.get_config("G/14,imagenet21k").dataset.split == "full[51200:]"
    with pytest.raises(UserError, match=r"VARIANT\[,DATASET\].*imagenet21k, jft"):
        scaling_vit.get_config("g/14,")
    with pytest.raises(UserError, match="R50x1 has no tokens to pool"):
        scaling_vit.get_config("R50x1")
    with pytest.raises(UserError, match="objective.name='hard_distillation'"):
        scaling_vit.get_config("DeiT-distilled-B/16")


# Recipe, argument, classes, parameters: of the official tests, or added up from published files.
COUNTS = [
    (pretrain, "B/16,imagenet21k", 21_843, 103_186_515),
    (augreg, "pretrain,Ti/16,imagenet21k", 21_843, 9_740_115),
    (better_baselines, "90,head=linear,posemb=learned", 1_000, 22_049_896),
]


@pytest.mark.parametrize(("recipe", "argument", "num_classes", "count"), COUNTS)
def test_parameter_counts(recipe: Any, argument: str, num_classes: int, count: int) -> None:
    model = create_model(**recipe.get_config(argument).model, num_classes=num_classes)
    assert count_parameters(abstract_params(model, (224, 224, 3))) == count


def test_two_steps_of_scaling_vit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As large models are: the state split over devices, the blocks in one loop.

    With the smallest model, batch and schedule; the rest is as it is. Nothing is saved.
    """
    monkeypatch.setattr(CheckpointManager, "save", lambda *_, **__: None)
    counts = {"train": {"cat": 8, "dog": 8}, "test": {"cat": 4, "dog": 4}}
    photos = fixtures_data.write_folder(tmp_path / "photos", counts)
    config = scaling_vit.get_config(f"g/14,{photos}")
    assert (config.optimizer.name, config.mesh.fsdp, config.model.scan) == ("adafactor", 4, True)
    sizes = {"hidden_size": 16, "num_layers": 1, "mlp_dim": 16, "num_heads": 2, "patch_size": 56}
    config.model.update({**sizes, "remat": "none"})
    config.dataset.batch_size = 8
    config.duration.steps = 2
    config.schedule.update({"warmup_steps": 0, "cooldown_steps": 0})
    config.loader.update({"num_workers": 0, "num_threads": 0})
    config.log.update({"every_steps": 1, "tensorboard": False})
    results = train_and_evaluate(config, str(tmp_path / "run"))
    assert results["step"] == 2
    assert math.isfinite(results["test/loss"])
