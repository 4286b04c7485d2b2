"""The masked autoencoder: what its encoder sees, what it predicts, what counts, what remains."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import mae as recipe
from tests import golden, tiny
from vit_jax.errors import UserError
from vit_jax.inference.load import load_model
from vit_jax.models.create import create_model
from vit_jax.models.features import available_features
from vit_jax.models.later.mae import FixedPositions, sincos_table
from vit_jax.models.vit import POSITIONS
from vit_jax.objectives.mae import MaskedAutoencoding
from vit_jax.objectives.objective import Task
from vit_jax.parameters.table import abstract_params
from vit_jax.pretrained.adopt import adopt
from vit_jax.pretrained.load import load_pretrained
from vit_jax.train import train_and_evaluate
from vit_jax.trees import flatten_names

KEY = jax.random.key(0)
SHAPE = (16, 24, 3)  # 4 x 6 patches of 4 x 4
ENCODER = {"patch_size": 4, "hidden_size": 16, "num_layers": 2, "mlp_dim": 16, "num_heads": 2}
DECODER = {"hidden_size": 8, "num_layers": 1, "mlp_dim": 16, "num_heads": 2}
SIZES = {**ENCODER, **{f"decoder_{key}": value for key, value in DECODER.items()}}
module = functools.partial(create_model, "mae", **SIZES, num_classes=0)


def build(**keys: Any) -> MaskedAutoencoding:
    task = Task(lambda count: create_model("mae", num_classes=count, **SIZES), image_shape=SHAPE)
    return MaskedAutoencoding(task, **keys)


def make_batch(count: int = 4) -> dict[str, np.ndarray]:
    images = np.random.default_rng(0).integers(0, 256, (count, *SHAPE), np.uint8)
    return {"image": images, "mask": np.ones(count, np.float32)}


def params_of(objective: MaskedAutoencoding) -> Any:
    return golden.filled(objective.model, (1, *SHAPE))


def test_as_many_patches_of_every_image_are_masked_uniformly() -> None:
    objective = build()
    seen = objective.corruption(jax.random.uniform(KEY, (2000, 24)))
    visible, restore = map(np.asarray, (seen["visible"], seen["restore"]))
    assert visible.shape == (2000, 6)
    np.testing.assert_array_equal(np.sort(restore, axis=1), np.tile(np.arange(24), (2000, 1)))
    # A visible patch is where `restore` says, all others are masked.
    places = np.take_along_axis(restore, visible, axis=1)
    np.testing.assert_array_equal(places, np.tile(np.arange(6), (2000, 1)))
    share = (restore >= 6).mean(axis=0)  # five standard deviations of 2000 draws
    np.testing.assert_allclose(share, 0.75, atol=5 * np.sqrt(0.75 * 0.25 / 2000))
    assert build(mask_ratio=0.9).corruption(jnp.zeros((1, 24)))["visible"].shape == (1, 2)


def test_the_encoder_sees_visible_patches_only() -> None:
    model = module()
    params = golden.filled(model, (1, *SHAPE))
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (2, *SHAPE)).astype(np.float32)
    order = rng.permuted(np.tile(np.arange(24), (2, 1)), axis=1)
    seen = {"visible": order[:, :6], "restore": np.argsort(order, axis=1)}

    @jax.jit
    def predict(x: jax.Array, corruption: Any) -> Any:
        return model.apply(
            {"params": params},
            x,
            train=False,
            corruption=corruption,
            capture_intermediates=lambda submodule, _: submodule.name == "Transformer",
            mutable=["intermediates"],
        )

    pixels, state = predict(images, seen)
    assert pixels.shape == (2, 24, 48)
    tokens = state["intermediates"]["Transformer"]["__call__"][0]
    assert tokens.shape == (2, 7, 16)
    # Other pixels in masked patches change nothing, in a visible one everything.
    is_masked = (seen["restore"] >= 6).reshape(2, 4, 6).repeat(4, 1).repeat(4, 2)
    noise = rng.normal(size=images.shape).astype(np.float32)
    for place, same in ((is_masked, True), (~is_masked, False)):
        other, _ = predict(images + noise * place[..., None], seen)
        assert np.array_equal(other, pixels) == same
    # Nothing masked: the same tokens as those of the Vision Transformer with these parameters.
    every = {"visible": np.tile(np.arange(24), (2, 1)), "restore": np.tile(np.arange(24), (2, 1))}
    _, state = predict(images, every)
    vit = create_model("vit", **ENCODER, num_classes=0)
    names = flatten_names(jax.eval_shape(lambda: vit.init(KEY, images, train=False)["params"]))
    encoder = {key: params[key] for key in ("cls", "embedding", "Transformer")}
    assert names.keys() == flatten_names(encoder).keys()
    expected = jax.jit(lambda x: vit.apply({"params": encoder}, x, train=False))(images)
    tokens = state["intermediates"]["Transformer"]["__call__"][0]
    np.testing.assert_allclose(tokens[:, 0], expected, rtol=0, atol=1e-5)  # order of sums


class Oracle:
    """A model whose predictions are its parameters."""

    decoder_num_layers, pixels_per_token = 1, (4, 4)

    def token_grid(self, _: Any) -> tuple[int, int]:
        return 4, 6

    def apply(self, variables: Any, *_: Any, **__: Any) -> jax.Array:
        return variables["params"]["pixels"]


@pytest.mark.parametrize("norm_pix_loss", [True, False])
def test_the_loss_is_that_of_masked_patches_of_real_images(norm_pix_loss: bool) -> None:
    batch = make_batch(3)
    scaled = batch["image"].astype(np.float64) / 127.5 - 1
    rows = [scaled[:, y : y + 4, x : x + 4] for y in range(0, 16, 4) for x in range(0, 24, 4)]
    targets = np.stack(rows, axis=1).reshape(3, 24, 48)
    if norm_pix_loss:  # torch's variance, which the authors' code uses, divides by n - 1
        mean, std = targets.mean(-1, keepdims=True), targets.std(-1, keepdims=True, ddof=1)
        targets = (targets - mean) / np.sqrt(std**2 + 1e-6)
    task = Task(lambda _: Oracle(), image_shape=SHAPE)
    objective = MaskedAutoencoding(task, norm_pix_loss=norm_pix_loss)
    loss = jax.jit(lambda pixels, batch: objective.loss({"pixels": pixels}, batch, KEY)[0])
    assert float(loss(targets, batch)) == pytest.approx(0.0, abs=1e-9)
    noise = jax.random.uniform(jax.random.split(KEY)[1], (3, 24))
    masked = np.asarray(objective.corruption(noise)["restore"]) >= 6
    pixels = targets + ~masked[..., None]  # wrong where they do not count
    assert float(loss(pixels, batch)) == pytest.approx(0.0, abs=1e-9)
    pixels = targets + np.array([1.0, 2.0, 3.0])[:, None, None]
    assert float(loss(pixels, batch)) == pytest.approx((1 + 4 + 9) / 3, rel=1e-5)
    batch["mask"] = np.array([1.0, 1.0, 0.0], np.float32)  # the third is padding
    assert float(loss(pixels, batch)) == pytest.approx((1 + 4) / 2, rel=1e-5)


def test_an_image_is_evaluated_alike_in_any_batch() -> None:
    objective = build()
    params, batch, evaluate = params_of(objective), make_batch(4), jax.jit(objective.evaluate)
    together = evaluate(params, batch)
    alone = evaluate(params, {key: value[2:3] for key, value in batch.items()})
    np.testing.assert_allclose(alone["loss"][0], together["loss"][2], rtol=1e-5)
    assert len(np.unique(together["loss"])) == 4


def test_every_parameter_but_the_positions_learns() -> None:
    objective = build()
    batch, params = make_batch(), params_of(objective)
    shapes = jax.eval_shape(objective.init, KEY, batch)
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    grad_of = jax.jit(jax.grad(lambda p: objective.loss(p, batch, KEY)[0]))
    grads = flatten_names(jax.device_get(grad_of(params)))
    still = {name for name, grad in grads.items() if not np.any(grad)}
    # The bias of a key adds the same to all scores of a query; what remains is rounding.
    assert still - {name for name in grads if "/key/bias" in name} == {
        POSITIONS,
        "decoder/posembed_input/pos_embedding",
    }
    init = jax.jit(FixedPositions((4, 6)).init, static_argnums=1)
    fresh = init(KEY, 16)["params"]["pos_embedding"]
    np.testing.assert_array_equal(fresh, sincos_table((4, 6), 16))


def test_mistakes_are_said() -> None:
    vit = Task(lambda n: create_model("vit", num_classes=n, **ENCODER), image_shape=SHAPE)
    with pytest.raises(UserError, match="objective.name='mae' needs a decoder: set model.name"):
        MaskedAutoencoding(vit)
    for ratio, shown in ((0.0, 24), (0.99, 0), (1.5, -12)):
        with pytest.raises(UserError, match=rf"mask_ratio={ratio} shows {shown} of an image's 24"):
            build(mask_ratio=ratio)
    with pytest.raises(UserError, match="model.decoder_hidden_size=10 must be divisible by"):
        module(decoder_hidden_size=10)
    with pytest.raises(UserError, match=r"position_stddev=0.1 is unknown. Known: 0.02"):
        module(position_stddev=0.1)


def test_the_recipe_of_the_linear_probe() -> None:
    """Table 10 of 2111.06377, and main_linprobe.py of the authors."""
    probe = recipe.get_config("linear,L/16,imagenet2012")
    optimizer = {"name": "lars", "weight_decay": 0.0, "clip_norm": None, "freeze": "(?!head/).*"}
    assert optimizer.items() <= {**probe.optimizer}.items()
    assert (probe.schedule.name, probe.schedule.learning_rate) == ("cosine", 0.1 * 16384 / 256)
    assert probe.schedule.warmup_steps == 10 * 1_281_167 // 16384
    assert (probe.dataset.batch_size, probe.duration.epochs) == (16384, 90.0)
    assert probe.model.head_norm
    assert probe.mix.mixup_alpha == probe.objective.label_smoothing == 0.0
    assert probe.sweep.published.startswith("75.8 linear")
    with pytest.raises(UserError, match=r"must be \[finetune,\|linear,\]VARIANT,DATASET"):
        recipe.get_config("linear,L/16")


def config() -> Any:
    sizes = {f"model__{key}": value for key, value in SIZES.items() if key.startswith("decoder_")}
    kinds = {"model__name": "mae", "objective__name": "mae", "model__gelu": "exact"}
    sizes["model__decoder_hidden_size"] = 16  # the encoder's: fewer programs draw parameters
    return tiny.config(**kinds, **sizes, objective__mask_ratio=0.5, duration__steps=2)


def test_a_run_is_fine_tuned_as_a_vision_transformer(tmp_path: Path) -> None:
    run = tmp_path / "run"
    results = train_and_evaluate(config(), str(run))
    assert np.isfinite(results["test/loss"])
    model = load_model(run)
    assert model.description.model["name"] == "mae"
    assert {"cls", "gap", "block_0"} <= {*available_features(model.module)}
    # With a new head; the decoder is dropped, and nothing else.
    tuned = tiny.config(pretrained__source=str(run))
    assert tuned.model.gelu == "tanh"
    tuned = adopt(tuned, str(tmp_path / "tuned"))
    assert tuned.model.gelu == "exact"
    vit = create_model(**tuned.model, num_classes=10)
    like = abstract_params(vit, model.description.image_shape)
    _, report = load_pretrained(run, like=like, kind=tuned.model.name, model=tuned.model)
    assert report["reset"] == ["head/bias", "head/kernel"]
    assert set(report["dropped"].values()) == {"only used in its pre-training task"}
    dropped = {"mask_token", "decoder_embed", "decoder", "decoder_pred"}
    assert {name.partition("/")[0] for name in report["dropped"]} == dropped
