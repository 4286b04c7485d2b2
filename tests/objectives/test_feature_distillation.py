"""Students learn a teacher's features: distances beside PyTorch's, several students, a run."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests import tiny
from tests.saved_models import save_model
from vit_jax.errors import UserError
from vit_jax.inference.load import load_model, load_tower
from vit_jax.models.create import create_model
from vit_jax.models.views import tokens_function
from vit_jax.objectives.feature_distillation import FeatureDistillation
from vit_jax.objectives.objective import Task
from vit_jax.train import train_and_evaluate

SHAPE = (16, 24, 3)
MODEL: dict[str, Any] = {"patch_size": 4, "hidden_size": 8, "num_layers": 1, "mlp_dim": 8}
RNG = jax.random.key(0)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With patches of 8 pixels, where the student has 4."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    return str(save_model(folder, image_size=SHAPE[:2], num_classes=5))


def task() -> Task:
    def build(n: int) -> Any:
        return create_model("vit", **MODEL, num_heads=2, num_classes=n)

    def load(source: str, key: str) -> Any:
        return load_tower(key, source, image_shape=SHAPE, dtype="float32")

    def tokens_of(model: Any) -> Any:
        return tokens_function(model, SHAPE[:2])

    return Task(build, SHAPE, load_tower=load, tokens_of=tokens_of)


@pytest.mark.parametrize("distance", ["smooth_l1", "cosine"])
def test_the_distances_are_those_of_pytorch(distance: str, teacher: str) -> None:
    objective = FeatureDistillation(task(), teacher=teacher, features="both", distance=distance)
    rng = np.random.default_rng(0)
    batch: Any = {"image": rng.integers(0, 256, (3, *SHAPE), np.uint8), "mask": np.ones(3)}
    batch["mask"] = np.float32([1, 1, 0])
    like = jax.eval_shape(objective.init, RNG, batch)
    params = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), like)
    params = {**params, **objective.constants}
    loss, _ = jax.jit(objective.loss)(params, batch, RNG)
    images = jnp.asarray(batch["image"][:2], jnp.float32) / 127.5 - 1
    tower = load_tower("x", teacher, image_shape=SHAPE, dtype="float32")
    theirs = tokens_function(tower.module, SHAPE[:2])(tower.params, images, train=False)
    student = tokens_function(objective.model, SHAPE[:2])
    ours = student(params["student"], images, train=False)
    means = []
    for kind, target, output in zip(("pooled", "patches"), theirs, ours, strict=True):
        target = torch.tensor(np.array(target))
        target = torch.nn.functional.layer_norm(target, target.shape[-1:], eps=1e-6)
        output = torch.tensor(np.array(output))
        if kind == "patches":  # 4 x 6 patches to 2 x 3
            cells = output.reshape(2, 4, 6, 8).permute(0, 3, 1, 2)
            cells = torch.nn.functional.interpolate(
                cells, size=(2, 3), mode="bilinear", antialias=True
            )
            output = cells.permute(0, 2, 3, 1).reshape(2, 6, 8)
        dense = {k: torch.tensor(x) for k, x in params[f"student_{kind}"].items()}
        output = output @ dense["kernel"] + dense["bias"]
        if distance == "smooth_l1":
            means.append(torch.nn.functional.smooth_l1_loss(output, target, beta=2.0))
        else:
            means.append(1 - torch.nn.functional.cosine_similarity(output, target, dim=-1).mean())
    np.testing.assert_allclose(loss, np.mean(means), rtol=1e-5)
    grads = jax.jit(jax.grad(lambda p: objective.loss({**params, **p}, batch, RNG)[0]))(
        {"student": params["student"]}
    )
    assert all(np.any(x != 0) for x in jax.tree.leaves(grads["student"]["Transformer"]))


def test_several_students_of_one_run_are_loaded_by_name(teacher: str, tmp_path: Path) -> None:
    config = tiny.config(
        objective__name="feature_distillation",
        objective__teacher=teacher,
        objective__students=("mu/16",),
        model__classifier="gap",
        duration__steps=30,
        schedule__learning_rate=3e-3,
        log__every_steps=10,
    )
    results = train_and_evaluate(config, str(tmp_path / "run"))
    assert {"test/loss", "test/student_2_loss"} <= results.keys()
    assert results["test/loss"] < 0.3  # of whitened features; 0.36 for a student that says 0
    first, second = load_model(str(tmp_path / "run")), load_model(f"{tmp_path}/run#student_2")
    assert first.module.hidden_size == 16
    assert second.module.hidden_size == 32
    image = np.zeros((16, 16, 3), np.uint8)
    assert second.features(image, "patches").shape == (1, 1, 32)


def test_a_teacher_that_is_missing_or_has_no_weights(teacher: str) -> None:
    with pytest.raises(UserError, match=r"objective.students='.*' must be a variant, such as"):
        FeatureDistillation(task(), teacher=teacher, students=(teacher,))
    with pytest.raises(UserError, match=r"objective.teacher is missing: set the teacher's weights"):
        FeatureDistillation(task())
    with pytest.raises(UserError, match=r"objective.teacher='S/8' is a variant: give trained"):
        FeatureDistillation(task(), teacher="S/8")
    with pytest.raises(UserError, match=r"objective.features='all' is unknown"):
        FeatureDistillation(task(), teacher="x", features="all")
