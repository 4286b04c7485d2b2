import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from scipy import stats

from tests import tiny
from vit_jax.errors import UserError
from vit_jax.objectives.classification import LOSSES, Classification, one_hot_targets
from vit_jax.objectives.objective import Objective, Task
from vit_jax.parameters.sharding import create_mesh
from vit_jax.run import create_run
from vit_jax.training.mixing import create_mixing
from vit_jax.training.step import create_train_state, make_train_step

KEY = jax.random.key(7)


@pytest.fixture
def uniform_beta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beta(1, 1) whatever is asked for: JAX's sampler takes seconds to compile."""

    def beta(key: jax.Array, _a: float, _b: float, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.uniform(key, shape)

    monkeypatch.setattr("vit_jax.training.mixing.jax.random.beta", beta)


def make_batch(num_rows: int, height: int = 4, width: int = 6) -> dict[str, np.ndarray]:
    """uint8 noise, labels that number the rows, and no padding."""
    shape = (num_rows, height, width, 3)
    return {
        "image": np.random.default_rng(0).integers(0, 256, shape, np.uint8),
        "label": np.arange(num_rows, dtype=np.int32),
        "mask": np.ones(num_rows, np.float32),
    }


def mix(batch: dict[str, np.ndarray], rng: jax.Array = KEY, **kwargs: Any) -> dict[str, np.ndarray]:
    mixing = create_mixing(**kwargs)
    assert mixing is not None
    return {name: np.asarray(value) for name, value in jax.jit(mixing)(batch, rng).items()}


def scaled(images: np.ndarray) -> np.ndarray:
    return images.astype(np.float32) / 127.5 - 1


def test_mixup_has_the_larger_share_of_a_beta_distribution_on_any_mesh() -> None:
    batch, alpha = make_batch(4000, 2, 2), 0.2
    mixing = create_mixing(mixup_alpha=alpha, cutmix_alpha=0.6, per_example=True)
    assert mixing is not None
    rows = NamedSharding(create_mesh(data=2, fsdp=4), PartitionSpec(("data", "fsdp")))
    one = jax.jit(mixing)(batch, KEY)
    eight = jax.jit(mixing, in_shardings=(rows, None))(jax.device_put(batch, rows), KEY)
    for name, value in one.items():  # images are fused in another way
        np.testing.assert_allclose(eight[name], value, rtol=0, atol=1e-6 * (name == "image"))
    out = mix(batch, mixup_alpha=alpha, per_example=True)
    weight = out["label_weight"]
    assert weight.dtype == np.float32
    assert weight.min() >= 0.5
    below = stats.beta(alpha, alpha).cdf
    for quantile in (0.6, 0.7, 0.8, 0.9, 0.99, 0.9999):
        # P(max(l, 1 - l) <= q) = P(1 - q <= l <= q); four deviations of a share of 4000.
        share = below(quantile) - below(1 - quantile)
        tolerance = 4 * np.sqrt(share * (1 - share) / 4000)
        assert np.mean(weight <= quantile) == pytest.approx(share, abs=tolerance)
    np.testing.assert_array_equal(out["label"], batch["label"])
    np.testing.assert_array_equal(out["other_label"], np.roll(batch["label"], 1))
    own = weight[:, None, None, None]
    images = scaled(batch["image"])
    expected = own * images + (1 - own) * np.roll(images, 1, axis=0)
    np.testing.assert_allclose(out["image"], expected, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("uniform_beta")
def test_a_batch_draws_once_unless_told_otherwise() -> None:
    batch = make_batch(4, 2, 2)
    mixing = create_mixing(mixup_alpha=0.5, cutmix_alpha=1.0, probability=0.8)
    assert mixing is not None
    draw = jax.jit(jax.vmap(lambda rng: mixing(batch, rng)["label_weight"]))
    weights = np.asarray(draw(jax.random.split(KEY, 500)))
    np.testing.assert_array_equal(weights, np.broadcast_to(weights[:, :1], weights.shape))
    assert len(np.unique(weights[:, 0])) > 100


def authors_boxes(coefficients: np.ndarray, height: int, width: int) -> np.ndarray:
    """Share of the image that is left, by algorithm A1 of 1905.04899, one example at a time."""
    rng, left = np.random.default_rng(1), []
    for coefficient in coefficients:
        ratio = np.sqrt(1 - coefficient)
        box_height, box_width = int(height * ratio), int(width * ratio)
        y, x = rng.integers(height), rng.integers(width)
        top, bottom = (np.clip(y + s * (box_height // 2), 0, height) for s in (-1, 1))
        start, end = (np.clip(x + s * (box_width // 2), 0, width) for s in (-1, 1))
        left.append(1 - (bottom - top) * (end - start) / (height * width))
    return np.array(left)


@pytest.mark.usefixtures("uniform_beta")
def test_cutmix_pastes_a_box_and_weighs_by_what_is_left() -> None:
    batch = make_batch(2000, 12, 16)
    batch["image"] = np.broadcast_to(
        np.float32(batch["label"])[:, None, None, None], (2000, 12, 16, 3)
    )
    out = mix(batch, cutmix_alpha=1.0, per_example=True)  # fmt: skip
    own = out["image"] == batch["image"]
    assert np.all(own | (out["image"] == np.roll(batch["image"], 1, axis=0)))
    own = own[..., 0]
    # A rectangle: as many pixels as its rows times its columns.
    pasted = ~own
    rows, columns = pasted.any(axis=2).sum(axis=1), pasted.any(axis=1).sum(axis=1)
    np.testing.assert_array_equal(pasted.sum(axis=(1, 2)), rows * columns)
    np.testing.assert_allclose(out["label_weight"], own.mean(axis=(1, 2)), rtol=0, atol=1e-6)
    coefficients = np.random.default_rng(2).beta(1.0, 1.0, 20000)
    expected = authors_boxes(coefficients, 12, 16)
    ours = out["label_weight"].astype(float)  # multiples of 1 / 192
    assert stats.ks_2samp(np.rint(ours * 192), np.rint(expected * 192)).pvalue > 1e-3


@pytest.mark.usefixtures("uniform_beta")
def test_probabilities_of_mixing_and_of_cutmix() -> None:
    batch = {**make_batch(4000, 4, 4), "image": scaled(make_batch(4000, 4, 4)["image"])}
    kwargs = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "per_example": True}
    out = mix(batch, **kwargs, probability=0.5, cutmix_probability=0.3)
    images, others = batch["image"], np.roll(batch["image"], 1, axis=0)
    stays = np.all(out["image"] == images, axis=(1, 2, 3))
    pasted = np.all((out["image"] == images) | (out["image"] == others), axis=(1, 2, 3)) & ~stays
    blended = ~stays & ~pasted
    deviation = 4 * 0.5 / np.sqrt(4000)
    assert blended.mean() == pytest.approx(0.5 * 0.7, abs=deviation)
    # Sides below 2 of 4 pixels, at (2 / 4)^2 = 1/4 of the uniform coefficients, paste nothing.
    assert pasted.mean() == pytest.approx(0.5 * 0.3 * 0.75, abs=deviation)
    assert np.all(out["label_weight"][stays] == 1.0)
    assert np.all(out["label_weight"][~stays] < 1.0)
    never = mix(batch, **kwargs, probability=0.0)
    np.testing.assert_array_equal(never["image"], images)
    assert np.all(never["label_weight"] == 1.0)


@pytest.mark.usefixtures("uniform_beta")
def test_padding_does_not_leak() -> None:
    batch = {**make_batch(6), "image": scaled(make_batch(6)["image"])}
    batch["mask"][[1, 5]] = 0
    out = mix(batch, mixup_alpha=0.8)
    for row in (0, 2):  # whose partners are rows 5 and 1
        np.testing.assert_array_equal(out["image"][row], batch["image"][row])
        assert out["label_weight"][row] == 1.0
    for row in (3, 4):
        assert np.any(out["image"][row] != batch["image"][row])


class Model:
    """Answers with fixed logits."""

    classifier = "token"

    def __init__(self, logits: np.ndarray):
        self._logits = logits

    def apply(self, _variables: Any, _images: Any, mutable: Any = (), **_: Any) -> Any:
        logits = jnp.asarray(self._logits)
        return (logits, {}) if mutable else logits


def test_the_loss_is_the_weighted_sum_of_both_labels_losses() -> None:
    smoothing = 0.1
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 5)).astype(np.float32)
    label, other = rng.integers(0, 5, (2, 6)).astype(np.int32)
    weight = np.float32([1.0, 0.9, 0.6, 0.5, 0.3, 0.0])
    batch = {
        "image": np.zeros((6, 2, 2, 3), np.float32),
        "label": label,
        "other_label": other,
        "label_weight": weight,
        "mask": np.ones(6, np.float32),
    }
    objective = Classification(Task.of(Model(logits)), label_smoothing=smoothing)
    value, metrics = objective.loss({}, batch, KEY)
    of = functools.partial(one_hot_targets, num_classes=5, label_smoothing=smoothing)
    one, two = (LOSSES["softmax"](logits, of(labels)) for labels in (label, other))
    np.testing.assert_allclose(value, np.mean(weight * one + (1 - weight) * two), rtol=1e-6)
    heavier = np.where(weight >= 0.5, label, other)
    assert float(metrics["accuracy"]) == pytest.approx(np.mean(logits.argmax(-1) == heavier))


class Probe(Objective):
    """An objective whose gradient is what it sees of the batch, and that gives its key away."""

    def loss(self, params: Any, batch: Any, rng: jax.Array) -> Any:
        pixels = jnp.mean(batch["image"], axis=(1, 2, 3))
        seen = jnp.stack([pixels * batch["label"], jnp.float32(pixels**2)], axis=-1)  # [B, 2]
        if "label_weight" in batch:
            seen = seen * batch["label_weight"][:, None] + batch["other_label"][:, None]
        key = jnp.asarray(jax.random.key_data(rng)[-1] % 2**20, jnp.float32)
        return jnp.sum(params["w"] * jnp.mean(seen, axis=0)), {"key": key}


@functools.cache
def probe(mixup_alpha: float, accumulation_steps: int = 1) -> Any:
    """step -> (gradient, key) of update step + 1."""
    tx = optax.sgd(1.0)
    mixing = create_mixing(mixup_alpha=mixup_alpha, per_example=mixup_alpha > 0)
    update = jax.jit(
        make_train_step(Probe(), tx, seed=3, accumulation_steps=accumulation_steps, mixing=mixing)
    )

    def probed(step: int) -> tuple[np.ndarray, float]:
        with jax.set_mesh(create_mesh(data=1, tensor=8)):
            state = create_train_state({"w": jnp.zeros(2)}, tx=tx, polyak_decay=0.0)
            batch = {**make_batch(8), "image": scaled(make_batch(8)["image"])}
            after, metrics = update(dataclasses.replace(state, step=jnp.int32(step)), {}, batch)
        return -np.asarray(after.params["w"]), float(metrics["key"])

    return probed


@pytest.mark.usefixtures("uniform_beta")
def test_mixing_is_a_function_of_seed_and_step_and_leaves_dropouts_key_alone() -> None:
    plain, key = probe(0.0)(4)
    expected = jax.random.key_data(jax.random.fold_in(jax.random.key(3), 4))[-1] % 2**20
    assert key == float(expected)  # that of runs before there was mixing
    mixed, mixed_key = probe(0.8)(4)
    assert mixed_key == key
    assert np.abs(mixed - plain).max() > 1e-2
    np.testing.assert_allclose(probe(0.8, accumulation_steps=4)(4)[0], mixed, rtol=1e-5)
    np.testing.assert_array_equal(probe(0.8)(4)[0], mixed)
    assert np.any(probe(0.8)(5)[0] != mixed)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"probability": 0.5}, "mix.probability=0.5 has no effect"),
        ({"per_example": True}, "mix.per_example=True has no effect"),
        ({"mixup_alpha": 0.2, "cutmix_probability": 0.3}, "cutmix_probability=0.3 has no effect"),
    ],
)
def test_settings_without_effect_are_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_mixing(**kwargs)


def test_repeats_are_checked_before_anything_starts() -> None:
    with pytest.raises(UserError, match="repeated_augmentation=3"):
        create_run(tiny.config(dataset__repeated_augmentation=3), create_mesh())
