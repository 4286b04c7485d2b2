"""What objectives and evaluators read of an example."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from tests import tiny
from vit_jax import config as schema
from vit_jax.data import preprocess
from vit_jax.data.ops import Op
from vit_jax.errors import UserError
from vit_jax.evaluators.create import EVALUATORS, OF_FEATURES, example_keys
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.create import OBJECTIVES
from vit_jax.objectives.masked_patch import MaskedPatch
from vit_jax.parameters.sharding import create_mesh
from vit_jax.run import create_run
from vit_jax.train import train_and_evaluate


@dataclasses.dataclass(frozen=True)
class Weigh(Op):
    """Adds the mean of the pixels, float32 [1]."""

    def __call__(self, example: dict[str, Any], _rng: np.random.Generator) -> dict[str, Any]:
        return {**example, "weight": np.float32([example["image"].mean() / 255])}


class Weighted(Classification):
    """Needs one more array of each example."""

    example_keys = ("image", "label", "weight")

    def values(self, logits: jax.Array, batch: Any, **kwargs: Any) -> Any:
        values = super().values(logits, batch, **kwargs)
        return {**values, "loss": values["loss"] * batch["weight"][:, 0]}


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> ConfigDict:
    monkeypatch.setitem(preprocess.OPS, "weigh", Weigh)
    monkeypatch.setitem(OBJECTIVES, "weighted", Weighted)
    config = tiny.config(objective__name="weighted")
    for key in ("preprocess", "eval_preprocess"):
        config.dataset[key] += "|weigh"
    return config


def test_another_key_is_trained_on_evaluated_and_planned(config: ConfigDict, tmp_path: Any) -> None:
    with config.unlocked():
        config.evaluators.near = schema.evaluator(
            "test[:20]", "nearest_neighbors", train_split="train[:20]"
        )
    mesh = create_mesh()
    with jax.set_mesh(mesh):
        batch = create_run(config, mesh).step_arguments()[-1]
    assert {key: array.shape[1:] for key, array in batch.items()} == {
        "image": (16, 16, 3),
        "label": (),
        "weight": (1,),
        "mask": (),
    }
    config.schedule.learning_rate = 0.0
    results = train_and_evaluate(config, str(tmp_path / "run"))
    # A head of zeros guesses, and digits are about a third white.
    assert 0.2 < results["test/loss"] / np.log(10) < 0.5
    assert results["near/num_examples"] == 20


def test_a_key_that_examples_do_not_have_is_named(config: ConfigDict) -> None:
    config.dataset.eval_preprocess = tiny.OVERRIDES["dataset.eval_preprocess"]
    known = "reads 'weight', but examples of dataset.name='digits' have image, label; "
    with pytest.raises(
        UserError, match=rf"^evaluators.test \(split='test\[:50\]'\): objective {known}"
    ):
        create_run(config, create_mesh())
    config.dataset.preprocess = tiny.OVERRIDES["dataset.preprocess"]
    with pytest.raises(UserError, match=f"^objective.name='weighted' {known}"):
        create_run(config, create_mesh())


def test_labels_are_needed_by_those_who_read_them() -> None:
    needing = {kind for kind in EVALUATORS if "label" in example_keys(kind, MaskedPatch)}
    assert needing == {*OF_FEATURES, "zero_shot"}
    assert all("label" in example_keys(kind, Classification) for kind in EVALUATORS)
