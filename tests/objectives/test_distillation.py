"""Distillation: losses in closed form, which head learns what, the teacher as a constant."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests import golden, tiny
from tests.saved_models import save_model
from tests.test_train import as_of
from vit_jax.errors import UserError
from vit_jax.inference.load import Teacher, load_model, load_teacher
from vit_jax.models.create import create_model
from vit_jax.objectives.distillation import HardDistillation, SoftDistillation
from vit_jax.objectives.objective import Task
from vit_jax.parameters.sharding import create_mesh
from vit_jax.run import create_run
from vit_jax.train import train_and_evaluate
from vit_jax.trees import flatten_names
from vit_jax.workdir.checkpoints import restore_params

KEY = jax.random.key(0)
SIZES = {"patch_size": 8, "hidden_size": 16, "num_layers": 1, "mlp_dim": 16, "num_heads": 2}
CLASSES = tuple("abcde")


def make_task(answers: np.ndarray, model: str = "deit", **attributes: Any) -> Task:
    build = functools.partial(create_model, model, **SIZES, **attributes)

    def load_teacher(_: str) -> Any:
        """One that always says the same."""

        def logits(params: Any, images: jax.Array) -> jax.Array:
            assert set(params) == {"of"}
            return jnp.asarray(answers) + 0.0 * jnp.sum(images)

        return Teacher(None, logits, {"of": np.ones(3, np.float32)})

    return Task(
        build_model=lambda num_outputs: build(num_classes=num_outputs),
        image_shape=(16, 16, 3),
        class_names=CLASSES,
        load_teacher=load_teacher,
    )


def make_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(0, 256, (4, 16, 16, 3), np.uint8),
        "label": np.array([0, 3, 2, 4], np.int32),
        "mask": np.array([1, 1, 1, 0], np.float32),
    }


def student(objective: Any) -> Any:
    """Parameters with heads that differ, and the constants beside them."""
    params = golden.filled(objective.model, (1, 16, 16, 3))
    for i, head in enumerate(("head", "head_dist")):
        if head in params:
            params[head]["kernel"] = np.random.default_rng(i).normal(size=(16, 5)).astype("float32")
    return {**params, **objective.constants}


def heads(objective: Any, params: Any) -> tuple[np.ndarray, np.ndarray]:
    """Logits of both heads, from the tokens themselves: the other head is set to zero."""
    images = make_batch()["image"].astype(np.float32) / 127.5 - 1
    apply = jax.jit(lambda p: objective.model.apply({"params": p}, images, train=False))
    of = []
    for head in ("head", "head_dist"):
        alone = {**params, "head": params["head"], "head_dist": params["head_dist"]}
        other = "head_dist" if head == "head" else "head"
        alone[other] = jax.tree.map(np.zeros_like, params[other])
        of.append(2 * apply(alone))
    return np.asarray(of[0]), np.asarray(of[1])


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return -(targets * np.asarray(jax.nn.log_softmax(logits))).sum(-1)


ANSWERS = np.random.default_rng(5).normal(size=(4, 5)).astype(np.float32)


def test_hard_and_soft_losses() -> None:
    weight = 0.3
    batch, real = make_batch(), slice(0, 3)
    labels = np.eye(5)[batch["label"]]
    hard = HardDistillation(make_task(ANSWERS), teacher="x", weight=weight)
    params = student(hard)
    logits, logits_dist = heads(hard, params)
    of_labels = cross_entropy(logits, labels)[real].mean()
    of_teacher = cross_entropy(logits_dist, np.eye(5)[ANSWERS.argmax(-1)])[real].mean()
    loss, metrics = jax.jit(hard.loss)(params, batch, KEY)
    assert float(loss) == pytest.approx((1 - weight) * of_labels + weight * of_teacher, rel=1e-5)
    assert float(metrics["distillation_loss"]) == pytest.approx(of_teacher, rel=1e-5)

    soft = SoftDistillation(make_task(ANSWERS), teacher="x", weight=weight, temperature=2.0)
    p = np.asarray(jax.nn.softmax(ANSWERS / 2))
    q = np.asarray(jax.nn.softmax(logits_dist / 2))
    divergence = 4 * (p * np.log(p / q)).sum(-1)[real].mean()
    loss, _ = jax.jit(soft.loss)(params, batch, KEY)
    assert float(loss) == pytest.approx((1 - weight) * of_labels + weight * divergence, rel=1e-4)


def test_each_head_learns_its_own_and_the_teacher_nothing() -> None:
    gradients = {}
    for weight in (0.0, 1.0):
        objective = HardDistillation(make_task(ANSWERS), teacher="x", weight=weight)
        params = student(objective)

        def loss(params: Any, objective: Any = objective) -> jax.Array:
            return objective.loss(params, make_batch(), KEY)[0]

        gradient = flatten_names(jax.device_get(jax.jit(jax.grad(loss))(params)))
        gradients[weight] = {name: np.abs(leaf).max() for name, leaf in gradient.items()}
    for weight, learns, stays in ((0.0, "head", "head_dist"), (1.0, "head_dist", "head")):
        assert gradients[weight][f"{learns}/kernel"] > 1e-3
        assert gradients[weight][f"{stays}/kernel"] == 0.0
        assert gradients[weight]["teacher/of"] == 0.0
        assert gradients[weight]["dist"] > 0.0


def test_a_student_of_one_head_learns_both_with_it() -> None:
    objective = HardDistillation(make_task(ANSWERS, model="vit"), teacher="x", weight=0.5)
    params = student(objective)
    batch = make_batch()
    logits = np.asarray(jax.jit(objective.predict)(params, batch))
    targets = 0.5 * np.eye(5)[batch["label"]] + 0.5 * np.eye(5)[ANSWERS.argmax(-1)]
    loss, _ = jax.jit(objective.loss)(params, batch, KEY)
    assert float(loss) == pytest.approx(cross_entropy(logits, targets)[:3].mean(), rel=1e-5)


def test_the_teacher_gets_its_own_range_and_answers_in_the_order_of_the_data(tmp_path):
    ops = "decode|resize(16)|normalize((0.5, 0.0, 0.0), (0.25, 1.0, 2.0))"
    source = save_model(tmp_path / "m", class_names=("a", "b", "c"), eval_preprocess=ops)
    model = load_model(source)
    _, logits, params = load_teacher(
        "objective.teacher",
        str(source),
        image_shape=(16, 16, 3),
        class_names=("c", "a"),
        dtype="float32",
    )
    images = np.random.default_rng(0).uniform(-1, 1, (2, 16, 16, 3)).astype(np.float32)
    pixels = (images + 1) / 2
    inputs = (pixels - [0.5, 0.0, 0.0]) / [0.25, 1.0, 2.0]
    apply = jax.jit(functools.partial(model.module.apply, train=False))
    expected = apply({"params": model.params}, inputs)[:, [2, 0]]
    np.testing.assert_allclose(jax.jit(logits)(params, images), expected, rtol=0, atol=1e-5)


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return save_model(tmp_path / "teacher", class_names=tuple("0123456789"))


def distilling(teacher: Path, **overrides: Any) -> Any:
    kinds = {"model__name": "deit", "objective__name": "hard_distillation"}
    return tiny.config(**{**kinds, "objective__teacher": str(teacher), **overrides})


def test_the_teacher_is_in_no_checkpoint_and_a_resumed_run_is_the_same(teacher, tmp_path):
    """With GSAM: two passes, which the teacher stays out of too, and a distance of the step."""
    options = {"gradient__name": "gsam", "duration__steps": 4, "checkpoint__every_steps": 2}
    results = train_and_evaluate(distilling(teacher, **options), str(tmp_path / "whole"))
    assert results["test/loss"] > 0
    parts = str(as_of(2, tmp_path / "whole", tmp_path / "parts"))
    train_and_evaluate(distilling(teacher, **options), parts)
    expected, resumed = (flatten_names(restore_params(x)) for x in (tmp_path / "whole", parts))
    assert not any("teacher" in name for name in resumed)
    for name, array in resumed.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    # Another teacher is noticed.
    params = dict(np.load(teacher / "params.npz"))
    params["head/bias"] = params["head/bias"] + 1
    np.savez(teacher / "params.npz", **params)
    with pytest.raises(UserError, match="teacher"):
        train_and_evaluate(distilling(teacher, **options), parts)


def test_the_teacher_is_sharded_as_parameters_are(teacher: Path) -> None:
    config = distilling(teacher, mesh__data=2, mesh__fsdp=2, mesh__tensor=2)
    mesh = create_mesh(**config.mesh)
    with jax.set_mesh(mesh):
        run = create_run(config, mesh)
        constants = flatten_names(run.place_constants())
    kernel = "Transformer/encoderblock_0/MlpBlock_0/Dense_0/kernel"
    assert constants[f"teacher/{kernel}"].sharding.spec == P("fsdp", "tensor")
    assert not any(name.startswith("teacher") for name in flatten_names(run.abstract_state.params))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"objective__teacher": ""}, "config.objective.teacher is missing"),
        ({"objective__weight": 1.5}, "objective.weight=1.5"),
        ({"objective__teacher": "/nowhere.npz"}, "objective.teacher='/nowhere.npz'"),
    ],
)
def test_mistakes_are_named(teacher: Path, overrides: dict, message: str) -> None:
    config = distilling(teacher, **overrides)
    with pytest.raises(UserError, match=message):
        create_run(config, create_mesh())
