"""What objectives and evaluators read of an example."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests import tiny
from vit_jax.data import preprocess
from vit_jax.data.ops import Op
from vit_jax.errors import UserError
from vit_jax.evaluators.create import EVALUATORS, OF_FEATURES, example_keys
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.create import OBJECTIVES
from vit_jax.objectives.masked_patch import MaskedPatch
from vit_jax.parameters.sharding import create_mesh
from vit_jax.run import create_run


@dataclasses.dataclass(frozen=True)
class Weigh(Op):
    """Adds an array."""

    def __call__(self, example: dict[str, Any], _rng: np.random.Generator) -> dict[str, Any]:
        return {**example, "weight": np.ones(1)}


class Weighted(Classification):
    """Needs one more array of each example."""

    example_keys = ("image", "label", "weight")


def test_a_key_that_examples_do_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(preprocess.OPS, "weigh", Weigh)
    monkeypatch.setitem(OBJECTIVES, "weighted", Weighted)
    config = tiny.config(objective__name="weighted")
    config.dataset.preprocess += "|weigh"
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
    others = {k for k in EVALUATORS if "label" not in example_keys(k, Classification)}
    assert others == {"retrieval"}
