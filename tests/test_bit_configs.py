"""configs/bit.py and configs/hyperrule.py against BiT's paper and code."""

import numpy as np
import pytest

from configs import bit, hyperrule, pretrain
from tests import fixtures_data
from vit_jax.errors import UserError
from vit_jax.training.schedule import create_schedule, to_steps


def test_pre_training() -> None:
    for argument, epochs, decays in (
        ("R50x1,imagenet2012", 90, (30, 60, 80)),
        ("R152x4,imagenet21k", 90, (30, 60, 80)),
        ("R152x4,jft", 40, (10, 23, 30, 37)),
    ):
        config = bit.get_config(argument)
        assert config.schedule.learning_rate == 0.48
        assert (config.optimizer.name, config.optimizer.momentum) == ("sgd", 0.9)
        # 1e-4 before momentum.
        assert config.optimizer.weight_decay == pytest.approx(1e-4 / (1 - 0.9))
        data = pretrain.DATASETS[config.dataset.name]
        total = to_steps(**config.duration, num_examples=data.num_examples, batch_size=4096)
        schedule = create_schedule(**config.schedule, total_steps=total)
        for passed, epoch in enumerate(decays):
            step = round(epoch * total / epochs)
            rates = [float(schedule(step)), float(schedule(step + 1))]
            expected = 0.48 * 0.1 ** np.array([passed, passed + 1])
            np.testing.assert_allclose(rates, expected, rtol=1e-5)
    adam = pretrain.get_config("R50x1,jft,7")
    sgd = bit.get_config("R50x1,jft,7")
    assert adam.duration == sgd.duration
    assert adam.optimizer.name != sgd.optimizer.name
    assert sgd.sweep.published.startswith("78.24 ")
    with pytest.raises(UserError, match="VARIANT.*'B/16'"):
        bit.get_config("B/16,jft")
    with pytest.raises(UserError, match=r"configs/bit.py:R50x1 must be VARIANT,DATASET\[,EPOCHS\]"):
        bit.get_config("R50x1")


@pytest.mark.parametrize(
    ("dataset", "pixels", "mixup", "schedule"),
    [
        ("imagenet2012", 480, 0.1, (500, 6_000, 12_000, 18_000, 20_000)),
        ("cifar10", 128, 0.1, (500, 3_000, 6_000, 9_000, 10_000)),
        ("oxford_iiit_pet", 480, 0.0, (100, 200, 300, 400, 500)),
        ("vtab/svhn", 128, 0.0, (100, 200, 300, 400, 500)),
    ],
)
def test_hyperrule(dataset: str, pixels: int, mixup: float, schedule: tuple[int, ...]) -> None:
    config = hyperrule.get_config(f"R50x1,{dataset}")
    assert config.dataset.eval_preprocess == f"official_eval({pixels})"
    assert config.mix.mixup_alpha == mixup
    assert config.dataset.batch_size == 512
    optimizer = config.optimizer
    assert (optimizer.momentum, optimizer.weight_decay, optimizer.clip_norm) == (0.9, 0.0, None)
    warmup, *decays, steps = schedule
    assert config.duration.steps == steps
    rate = create_schedule(**config.schedule, total_steps=steps)
    # BiT's code counts finished updates, and divides after the one of the list.
    expected = {0: 0.0, warmup // 2: 0.0015, warmup: 0.003}
    for passed, step in enumerate(decays):
        expected |= {step: 0.003 / 10**passed, step + 1: 0.003 / 10 ** (passed + 1)}
    for step, value in expected.items():
        assert float(rate(step)) == pytest.approx(value, rel=1e-5), step


def test_the_hyperrule_counts_the_images_of_a_folder(tmp_path, monkeypatch):
    splits = {"train": {"cat": 4, "dog": 4}, "test": {"cat": 3, "dog": 2}}
    photos = fixtures_data.write_folder(tmp_path / "photos", splits)
    config = hyperrule.get_config(f"R50x1,{photos}")
    assert (config.duration.steps, config.mix.mixup_alpha) == (500, 0.0)
    assert "resize(512)|random_crop(480)" in config.dataset.preprocess
    assert "random_crop(128)" in hyperrule.get_config(f"R50x1,{photos},small").dataset.preprocess
    task = hyperrule.finetune.find_task(str(photos))
    assert hyperrule.count(task) == 8
    monkeypatch.setattr(hyperrule, "count", lambda _: 20_000)
    config = hyperrule.get_config(f"R50x1,{photos}")
    assert (config.duration.steps, config.mix.mixup_alpha) == (10_000, 0.1)
    with pytest.raises(UserError, match=r"must be VARIANT,DATASET\[,small\]"):
        hyperrule.get_config("R50x1")
