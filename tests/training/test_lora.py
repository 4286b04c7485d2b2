"""LoRA: what is trained, what it adds up to, and runs from weights to a result like any other."""

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests import tiny
from tests.golden import MIXER, VIT
from tests.kinds import shape_of, small
from tests.saved_models import save_model
from vit_jax.errors import UserError
from vit_jax.inference.evaluate import evaluate
from vit_jax.models.create import create_model
from vit_jax.parameters.lora import Lora
from vit_jax.parameters.sharding import parameter_axes
from vit_jax.parameters.table import abstract_params, table_of
from vit_jax.train import train_and_evaluate
from vit_jax.trees import count_parameters, flatten_names, unflatten_names
from vit_jax.workdir.checkpoints import restore_params
from vit_jax.workdir.metrics import read_metrics

LORA = Lora(rank=3, alpha=6.0)
WIDTH = 16  # of tests/kinds.py


def drawn(shapes: Any) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [("vit", {"scan": True, "classifier": "map"}), ("deit", {}), ("bert", {})],
)
def test_adapters_of_every_model_that_attends(kind: str, attributes: dict[str, Any]) -> None:
    model = create_model(**{**small(kind), **attributes}, num_classes=5)
    base = drawn(abstract_params(model, shape_of(kind)))
    table = table_of(model)
    start = LORA.add(base, jax.random.key(0), table)
    added = flatten_names(start).keys() - flatten_names(base).keys()
    # Two blocks with query and value, A and B each.
    adapters = {name: flatten_names(start)[name] for name in added}
    assert count_parameters(adapters) == 2 * 2 * 2 * WIDTH * LORA.rank
    for name, leaf in adapters.items():
        assert len(parameter_axes(name, leaf.ndim, table)) == leaf.ndim
    for before, after in zip(*map(jax.tree.leaves, (base, LORA.merge(start))), strict=True):
        np.testing.assert_array_equal(after, before)

    trained = drawn(start)
    merged = flatten_names(table.unstack(LORA.merge(trained)))
    flat = flatten_names(table.unstack(trained))
    for name, value in merged.items():
        parent = name.removesuffix("kernel")
        if f"{parent}lora_a" in flat:
            product = np.tensordot(flat[f"{parent}lora_a"], flat[f"{parent}lora_b"], 1)
            # Float32 sums of three products.
            np.testing.assert_allclose(value, flat[name] + 2.0 * product, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(value, flat[name])


def test_a_model_without_attention_is_refused() -> None:
    params = drawn(abstract_params(create_model(**small("mixer"), num_classes=5), (16, 16, 3)))
    with pytest.raises(UserError, match="lora.rank=3: the model has no blocks with query"):
        LORA.add(params, jax.random.key(0), MIXER)
    with pytest.raises(UserError, match="lora.alpha=0.0 must be positive"):
        Lora(rank=3, alpha=0.0)
    with pytest.raises(UserError, match="lora.rank=3 adapts pre-trained weights"):
        train_and_evaluate(tiny.config(lora__rank=3), "unused")


def test_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Scanned and sharded; its result needs no adapters. test_train.py has one that is resumed."""
    digits = tuple(map(str, range(10)))
    source = save_model(tmp_path / "source", class_names=digits, mlp_dim=16, scale=0.2)
    config = tiny.config(
        lora__rank=3,
        pretrained__source=str(source),
        pretrained__reset_head=False,
        model__scan=True,
        mesh__fsdp=2,
        mesh__tensor=2,
        duration__steps=4,
        train_step__accumulation_steps=2,
        schedule__warmup_steps=0,
        evaluators__test__at_start=True,
    )
    workdir = tmp_path / "run"
    caplog.set_level(logging.INFO)
    results = train_and_evaluate(config, str(workdir))
    # A and B of query and value, and the head; all others are frozen.
    count = 2 * 2 * WIDTH * 3 + WIDTH * 10 + 10
    total = 192 + sum(leaf.size for leaf in np.load(source / "params.npz").values())
    assert f"{total - count:,} of {total:,} parameters are frozen" in caplog.text

    data: dict[str, Any] = {"dataset": "digits", "split": "test[:50]"}
    first = read_metrics(workdir)[0]
    assert first["step"] == 0
    assert first["test/loss"] == pytest.approx(evaluate(str(source), **data)["loss"], rel=1e-5)
    last = evaluate(str(workdir), **data)["loss"]
    assert last == pytest.approx(results["test/loss"], rel=1e-5)
    assert abs(last - first["test/loss"]) > 1e-3

    with np.load(source / "params.npz") as before, np.load(workdir / "params.npz") as after:
        assert set(before.files) == set(after.files)
        changed = {name for name in before.files if np.any(before[name] != after[name])}
        merged = flatten_names(VIT.unstack(restore_params(workdir)))
        for name in after.files:
            np.testing.assert_allclose(merged[name], after[name], rtol=0, atol=1e-7, err_msg=name)
    attention = "Transformer/encoderblock_0/MultiHeadDotProductAttention_0"
    kernels = {f"{attention}/{name}/kernel" for name in ("query", "value")}
    assert changed == {*kernels, "head/kernel", "head/bias"}
    assert unflatten_names(merged).keys() == {"Transformer", "cls", "embedding", "head"}
