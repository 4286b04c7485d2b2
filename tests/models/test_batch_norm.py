"""Batch norms with running statistics: beside PyTorch's, and through runs."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import golden, tiny
from tests.test_train import as_of, assert_same_params
from vit_jax.errors import UserError
from vit_jax.inference.load import load_model
from vit_jax.models.create import create_model
from vit_jax.models.layers import BatchNorm
from vit_jax.train import train_and_evaluate
from vit_jax.trees import flatten_names


@pytest.mark.parametrize("affine", [True, False])
def test_three_updates_and_an_evaluation_are_pytorchs(affine: bool) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    batches = [rng.normal(1.0, 2.0, (4, 5, 6, 3)).astype(np.float32) for _ in range(4)]
    peer = torch.nn.BatchNorm2d(3, eps=1e-6, affine=affine)
    train, test = (BatchNorm(t, epsilon=1e-6, affine=affine) for t in (True, False))
    params: Any = train.init(jax.random.key(0), batches[0])["params"]
    for x in batches[:3]:
        y, new = train.apply({"params": params}, x, mutable=["buffers"])
        expected = peer(torch.from_numpy(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        # Sums of 120 float32 numbers in another order.
        np.testing.assert_allclose(y, expected.detach(), rtol=0, atol=2e-6)
        params = {**params, **new["buffers"]}
    np.testing.assert_allclose(params["mean"], peer.running_mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(params["var"], peer.running_var, rtol=1e-6)
    expected = peer.eval()(torch.from_numpy(batches[3]).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    y = test.apply({"params": params}, batches[3])
    np.testing.assert_allclose(y, expected.detach(), rtol=0, atol=2e-6)


def test_statistics_are_trained_saved_resumed_and_described(tmp_path: Path) -> None:
    """Of the stem and before the head; with accumulation, those of the parts are averaged."""
    config = tiny.config(
        model__resnet_layers=(),
        model__resnet_batch_norm=True,
        model__head_norm=True,
        model__patch_size=2,
        duration__steps=4,
        checkpoint__every_steps=2,
        train_step__accumulation_steps=2,
        train_step__polyak_decay=0.5,
    )
    train_and_evaluate(config, str(tmp_path / "whole"))
    parts = as_of(2, tmp_path / "whole", tmp_path / "parts")
    train_and_evaluate(config, str(parts))
    assert_same_params(tmp_path / "whole", parts)
    params = flatten_names(load_model(parts).params)
    statistics = {name: x for name, x in params.items() if name.endswith(("/mean", "/var"))}
    assert len(statistics) == 4
    for name, array in statistics.items():  # at the start zeros and ones
        assert np.abs(array - name.endswith("var")).max() > 1e-3, name


def test_an_objective_that_keeps_no_statistics_is_refused() -> None:
    sizes = {"stage_layers": (1,), "stage_widths": (8,), "group_width": 8}
    model = create_model("regnet", num_classes=2, **sizes)
    images = jnp.zeros((2, 8, 8, 3))
    params = golden.filled(model, images.shape)
    with pytest.raises(UserError, match="does not keep the statistics.*frozen_norms=True"):
        model.apply({"params": params}, images, train=True)
