"""Remedies, their order and their prices."""

from __future__ import annotations

import itertools

from configs import pretrain
from tests import tiny
from vit_jax.plan.plan import Changes, changed, flags, remedies
from vit_jax.plan.subject import planned_run
from vit_jax.plan.topology import parse_topology

CPU = parse_topology("cpu:8")


def test_remedies_come_in_order() -> None:
    config = tiny.config(dataset__batch_size=64)
    found = [changes for changes, _ in remedies(config, CPU)]
    assert [list(changes)[-1] for changes in found] == [
        "model.remat",
        "mesh.fsdp",
        *["train_step.accumulation_steps"] * 3,  # 64 images on 8 devices: 2, 4, 8
        "optimizer.momentum_dtype",
    ]
    assert flags(found[3]) == (
        "--config.model.scan=True --config.model.remat=full --config.mesh.data=-1 "
        "--config.mesh.fsdp=0 --config.train_step.accumulation_steps=4"
    )
    assert config.train_step.accumulation_steps == 1  # the config itself is left as it was
    best = changed(config, found[-1])
    assert not list(remedies(best, CPU))  # nothing is left to change


def test_prices_add_up_and_name_what_the_training_draws_anew() -> None:
    config = tiny.config(dataset__batch_size=64)
    prices = [price for _, price in remedies(config, CPU)]
    assert prices[0] == (
        "about a quarter more arithmetic; other initial values and dropout masks from the same seed"
    )
    for before, after in itertools.pairwise(prices):
        assert after.startswith(before)
    assert len(set(prices[-1].split("; "))) == len(prices[-1].split("; ")) == 5
    [first, *_] = remedies(tiny.config(model__scan=True), CPU)
    assert first[1] == "about a quarter more arithmetic"


def test_a_resnet_computes_again_where_its_batch_cannot_be_cut() -> None:
    """Later than a ViT, as accumulation costs it less; it knows no scan."""
    config = changed(
        pretrain.get_config("R50x1,imagenet21k"),
        {"mesh.fsdp": 0, "mesh.data": -1, "dataset.batch_size": 16},  # 2 images on each device
    )
    (cut, _), (again, price), *_ = remedies(config, CPU)
    assert cut == {"train_step.accumulation_steps": 2}
    assert again == {**cut, "model.remat": "full"}
    assert price.endswith("up to a third more arithmetic")
    [(last, _)] = remedies(changed(config, again), CPU)
    assert "model.remat" not in last


def test_remedies_where_the_config_leaves_the_size_of_an_axis_open() -> None:
    config = tiny.config(mesh__data=4, mesh__fsdp=1, mesh__tensor=-1)  # tensor is 2
    config.model.scan, config.model.remat = True, "full"
    found = [changes for changes, _ in remedies(config, CPU)]
    split: Changes = {"mesh.data": -1, "mesh.fsdp": 0, "mesh.tensor": 2}
    assert found[:3] == [
        split,
        {**split, "train_step.accumulation_steps": 2},  # 16 images on 4 devices
        {**split, "train_step.accumulation_steps": 4},
    ]
    run, _ = planned_run(changed(config, split), CPU)
    assert dict(run.mesh.shape) == {"data": 1, "fsdp": 4, "tensor": 2}
