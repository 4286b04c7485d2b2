"""Masked patch prediction: what is corrupted, what is predicted, what counts."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import golden, tiny
from vit_jax.errors import UserError
from vit_jax.models.create import create_model
from vit_jax.objectives.masked_patch import MaskedPatch, color_classes
from vit_jax.objectives.objective import Task
from vit_jax.pretrained.load import load_pretrained
from vit_jax.train import train_and_evaluate
from vit_jax.trees import flatten_names
from vit_jax.workdir.checkpoints import restore_params

KEY = jax.random.key(0)
SHAPE = (16, 24, 3)  # 2 x 3 patches of 8 x 8
SIZES = {"patch_size": 8, "hidden_size": 16, "num_layers": 1, "mlp_dim": 16, "num_heads": 2}


def task(**model: Any) -> Task:
    build = functools.partial(
        create_model, "vit", **{**SIZES, "classifier": "token_unpooled", **model}
    )
    return Task(lambda num_outputs: build(num_classes=num_outputs), image_shape=SHAPE)


def make_batch(count: int = 4) -> dict[str, np.ndarray]:
    images = np.random.default_rng(0).integers(0, 256, (count, *SHAPE), np.uint8)
    return {"image": images, "mask": np.ones(count, np.float32)}


def test_colors_have_three_bits_per_channel() -> None:
    edges = np.array([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0], [-1.0, -1.0, -0.75], [0.0, -1.0, 0.99]])
    np.testing.assert_array_equal(color_classes(edges), [0, 511, 1, 4 * 64 + 0 + 7])
    assert int(color_classes(np.array([0.5]))) == 6  # a grey image has 8 classes


def test_shares_of_what_is_drawn() -> None:
    corruption, masked, replaced = 0.5, 0.8, 0.1
    objective = MaskedPatch(task(), corruption=corruption, masked=masked, replaced=replaced)
    images = np.zeros((2000, *SHAPE), np.float32)
    corrupted, drawn = jax.device_get(jax.jit(objective._draw)(KEY, images))
    corrupted = corrupted > 0
    moved = drawn["source"] != np.arange(6)
    assert corrupted.shape == (2000, 6)
    # Five standard deviations of 12,000 draws.
    assert corrupted.mean() == pytest.approx(corruption, abs=0.023)
    assert drawn["masked"][corrupted].mean() == pytest.approx(masked, abs=0.06)
    assert moved[corrupted].mean() == pytest.approx(replaced, abs=0.06)
    assert not drawn["masked"][~corrupted].any()
    assert not moved[~corrupted].any()
    assert set(np.unique(drawn["source"])) == set(range(6))


def test_the_model_sees_the_mask_and_not_the_patch() -> None:
    module = create_model("vit", num_classes=5, **SIZES, classifier="token_unpooled")
    images = make_batch(2)["image"].astype(np.float32) / 127.5 - 1
    own = np.tile(np.arange(6), (2, 1))
    none = {"masked": np.zeros((2, 6), bool), "source": own}
    init = functools.partial(module.init, KEY, images, train=False, corruption=none)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), jax.eval_shape(init)["params"]
    )

    @jax.jit
    def logits(x: jax.Array, corruption: Any) -> jax.Array:
        return module.apply({"params": params}, x, train=False, corruption=corruption)

    plain = logits(images, None)
    np.testing.assert_array_equal(logits(images, none), plain)
    every = {**none, "masked": np.ones((2, 6), bool)}
    np.testing.assert_array_equal(logits(images, every), logits(np.flip(images, 0), every))
    assert np.abs(logits(images, every) - plain).max() > 1e-3
    # The first patch's embedding everywhere: as an image of six equal patches.
    first = {**none, "source": np.zeros((2, 6), int)}
    tiled = np.tile(images[:, :8, :8], (1, 2, 3, 1))
    np.testing.assert_allclose(logits(images, first), logits(tiled, None), rtol=0, atol=1e-6)


class Oracle:
    """A model whose outputs are its parameters: [B, P, K], behind a class token."""

    classifier = "token_unpooled"
    prefix_tokens = ("cls",)
    pixels_per_token = (8, 8)
    outputs_per = "token"

    def apply(self, variables: Any, *_: Any, **__: Any) -> jax.Array:
        return jnp.pad(variables["params"]["outputs"], ((0, 0), (1, 0), (0, 0)))


def patches(images: np.ndarray) -> np.ndarray:
    """Plain numpy: [B, P, 8, 8, C] in [-1, 1]."""
    scaled = images.astype(np.float32) / 127.5 - 1
    rows = [scaled[:, y : y + 8, x : x + 8] for y in (0, 8) for x in (0, 8, 16)]
    return np.stack(rows, axis=1)


@pytest.mark.parametrize("target", ["mean_color", "downsized", "pixels"])
def test_the_right_answer_has_no_loss_and_only_corrupted_patches_count(target: str) -> None:
    batch = make_batch(3)
    pixels = patches(batch["image"])
    if target == "pixels":
        outputs = pixels.reshape(3, 6, -1)
    else:
        side = 1 if target == "mean_color" else 4
        cells = pixels.reshape(3, 6, side, 8 // side, side, 8 // side, 3).mean(axis=(3, 5))
        bins = np.clip(np.floor((cells.reshape(3, 6, side * side, 3) + 1) * 4), 0, 7)
        classes = (bins @ [64, 8, 1]).astype(int)
        outputs = 50.0 * np.eye(512, dtype=np.float32)[classes].reshape(3, 6, -1)
    task = Task(lambda _: Oracle(), image_shape=SHAPE)
    objective = MaskedPatch(task, target=target, corruption=0.5)
    loss_of = jax.jit(lambda outputs: objective.loss({"outputs": outputs}, batch, KEY))
    assert (
        objective.num_outputs == {"mean_color": 512, "downsized": 16 * 512, "pixels": 192}[target]
    )
    loss, metrics = loss_of(outputs)
    assert float(loss) == pytest.approx(0.0, abs=1e-5)
    assert set(metrics) | {"loss"} == set(objective.measures)
    # Wrong where nothing is corrupted: still no loss. Wrong everywhere: loss.
    corrupted = np.asarray(objective._draw(jax.random.split(KEY)[1], batch["image"])[0])
    assert 0 < corrupted.sum() < corrupted.size
    wrong = outputs[..., ::-1] + 1
    unseen = np.where(corrupted[..., None] > 0, outputs, wrong)
    assert float(loss_of(unseen)[0]) == pytest.approx(0.0, abs=1e-5)
    assert float(loss_of(wrong)[0]) > 0.1


def test_an_image_is_evaluated_alike_in_any_batch() -> None:
    objective = MaskedPatch(task())
    batch = make_batch(4)
    shapes = flatten_names(jax.eval_shape(objective.init, KEY, batch))
    params = golden.params({name: leaf.shape for name, leaf in shapes.items()}, "fanin")
    evaluate = jax.jit(objective.evaluate)
    together = evaluate(params, batch)
    assert set(together) == set(objective.measures) == {"loss", "accuracy"}
    alone = evaluate(params, {key: value[2:3] for key, value in batch.items()})
    np.testing.assert_allclose(alone["loss"][0], together["loss"][2], rtol=1e-5)
    assert len(np.unique(together["loss"])) == 4


@pytest.mark.parametrize(
    ("model", "kwargs", "message"),
    [
        ({"classifier": "token"}, {}, "model.classifier='token_unpooled'"),
        ({}, {"target": "colour"}, "objective.target='colour'"),
        ({}, {"corruption": 0.0}, "objective.corruption=0.0"),
        ({}, {"masked": 0.8, "replaced": 0.3}, "objective.replaced=0.3"),
        ({"patch_size": 2}, {"target": "downsized"}, "patches of 2x2"),
    ],
)
def test_mistakes_are_named(model: dict, kwargs: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        MaskedPatch(task(**model), **kwargs)


def test_training_needs_no_labels_and_fine_tuning_starts_from_it(tmp_path: Path) -> None:
    config = tiny.config(
        objective__name="masked_patch", model__classifier="token_unpooled", duration__steps=2
    )
    results = train_and_evaluate(config, str(tmp_path / "run"))
    assert {"test/loss", "test/accuracy"} <= set(results)
    params = flatten_names(restore_params(str(tmp_path / "run")))
    assert "mask_embedding" in params
    model = create_model("vit", num_classes=7, **SIZES)
    images = jnp.zeros((1, 16, 16, 3))
    like = jax.eval_shape(lambda: model.init(KEY, images, train=False))["params"]
    loaded, report = load_pretrained(tmp_path / "run", like=like, kind="vit")
    assert report["dropped"]["mask_embedding"] == "only used in its pre-training task"
    kernel = flatten_names(loaded)["embedding/kernel"]
    np.testing.assert_array_equal(kernel, params["embedding/kernel"])
