"""Plans with data that are here, that are not, and that are damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny
from vit_jax.errors import UserError
from vit_jax.plan.plan import build_subject
from vit_jax.plan.topology import parse_topology

CPU = parse_topology("cpu:8")


def test_data_that_are_not_here_are_planned_by_size() -> None:
    config = tiny.config(
        dataset__name="imagenet21k",
        dataset__split="full[51200:]",
        dataset__preprocess="official_train(16)",
        dataset__eval_preprocess="official_eval(16)",
        evaluators__test__split="full[:25600]",
    )
    subject = build_subject(config, CPU)
    assert subject.run.dataset.num_examples == 14_197_122 - 51_200
    assert subject.run.dataset.num_classes == 21_843
    assert "configs/pretrain.py" in subject.data_note
    config.dataset.name = "my_photos"
    with pytest.raises(UserError, match="give --num_examples and --num_classes"):
        build_subject(config, CPU)
    with pytest.raises(UserError, match=r"no recipe knows .*'my_photos'; give --num_classes"):
        build_subject(config, CPU, num_examples=1000)
    subject = build_subject(config, CPU, num_examples=1000, num_classes=7)
    assert (subject.run.dataset.num_examples, subject.run.dataset.num_classes) == (1000, 7)


def test_data_that_are_here_but_damaged_are_no_missing_data(tmp_path: Path) -> None:
    config = tiny.config(
        dataset__name="imagenet21k",
        dataset__data_dir=str(tmp_path),
        dataset__split="full[51200:]",
        evaluators__test__split="full[:25600]",
    )
    assert "not prepared" in build_subject(config, CPU).data_note
    version = tmp_path / "imagenet21k" / "1.0.0"
    version.mkdir(parents=True)
    (version / "dataset_info.json").write_text("{")
    with pytest.raises(UserError, match="cannot read its metadata"):
        build_subject(config, CPU)


def test_classes_that_contradict_the_data_that_are_here() -> None:
    with pytest.raises(UserError, match="--num_classes=7: the data are here and have 10"):
        build_subject(tiny.config(), CPU, num_classes=7)
    assert not build_subject(tiny.config(), CPU, num_classes=10).data_note
