"""Plans with data that are here, that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import saved_models, tiny
from vit_jax.errors import UserError
from vit_jax.plan.subject import planned_run
from vit_jax.plan.topology import parse_topology
from vit_jax.pretrained.zoo.entries import class_names

CPU = parse_topology("cpu:8")


def test_data_that_are_not_here_are_planned_by_size() -> None:
    config = tiny.config(
        dataset__name="imagenet21k",
        dataset__split="full[51200:]",
        dataset__preprocess="official_train(16)",
        dataset__eval_preprocess="official_eval(16)",
        evaluators__test__split="full[:25600]",
    )
    run, origin = planned_run(config, CPU)
    assert run.dataset.num_examples == 14_197_122 - 51_200
    assert run.datasets["test"].num_examples == 25_600
    assert run.dataset.num_classes == 21_843
    assert "configs/pretrain.py" in origin
    assert "not prepared" in origin
    config.dataset.name = "my_photos"
    for known in ({}, {"num_examples": 1000}, {"num_classes": 7}):
        with pytest.raises(UserError, match="give --num_examples and --num_classes"):
            planned_run(config, CPU, **known)
    run, _ = planned_run(config, CPU, num_examples=1000, num_classes=7)
    assert (run.dataset.num_examples, run.dataset.num_classes) == (1000, 7)


def test_damaged_data_are_told(tmp_path: Path) -> None:
    config = tiny.config(
        dataset__name="imagenet21k",
        dataset__data_dir=str(tmp_path),
        dataset__split="full[51200:]",
        evaluators__test__split="full[:25600]",
    )
    version = tmp_path / "imagenet21k" / "1.0.0"
    version.mkdir(parents=True)
    (version / "dataset_info.json").write_text("{")
    _, origin = planned_run(config, CPU)
    assert "cannot read its metadata" in origin


def test_a_teacher_for_data_that_are_not_here(tmp_path: Path) -> None:
    names = class_names("imagenet2012")
    teacher = saved_models.save_model(tmp_path / "teacher", class_names=names, image_size=16)
    config = tiny.config(
        dataset__name="imagenet2012",
        dataset__split="train",
        dataset__preprocess="official_train(16)",
        dataset__eval_preprocess="official_eval(16)",
        evaluators__test__split="validation",
        objective__name="hard_distillation",
        objective__teacher=str(teacher),
    )
    run, origin = planned_run(config, CPU)
    assert "not prepared" in origin
    assert list(run.objective.constants) == ["teacher"]
