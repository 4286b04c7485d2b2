"""LiT: a tower of texts beside a locked one of images, from the losses to zero-shot results."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.saved_models import save_model
from tests.test_train import as_of
from vit_jax.data.pipeline import train_batches_on
from vit_jax.data.text import Tokenize
from vit_jax.errors import UserError
from vit_jax.export.convert import convert_checkpoint
from vit_jax.export.write import export_model
from vit_jax.files.paths import read_json
from vit_jax.inference.evaluate import evaluate
from vit_jax.inference.load import load_model, load_tower
from vit_jax.models.description import Similarity
from vit_jax.objectives.contrastive import Contrastive, SigmoidContrastive
from vit_jax.objectives.objective import Objective, scale_images
from vit_jax.objectives.ring import sigmoid_losses
from vit_jax.parameters.sharding import batch_sharding, create_mesh, keep_batch_sharding
from vit_jax.run import create_run
from vit_jax.train import train_and_evaluate
from vit_jax.trees import flatten_names
from vit_jax.workdir.checkpoints import restore_params

IMAGES = "decode(channels=3)|resize(16)"
TOKENS = "tokenize('caption', vocab='characters', length=4)"
IMAGENET = "decode|resize(16)|normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a head, which goes."""
    folder = tmp_path_factory.mktemp("tower") / "a"
    return save_model(folder, class_names=("ant", "bee"), classifier="gap", eval_preprocess=IMAGES)


def lit(image: Any, **overrides: Any) -> Any:
    config = tiny.config(
        **{
            "objective__name": "contrastive",
            "objective__image": str(image),
            "model__name": "text-Ti",
            "model__hidden_size": 16,
            "model__num_layers": 1,
            "model__mlp_dim": 16,
            "model__num_heads": 2,
            "model__vocab_size": Tokenize().num_tokens,
            "dataset__name": "glyphs(size=16, num_examples=256)",
            "dataset__split": "train",
            "dataset__preprocess": f"{IMAGES}|{TOKENS}",
            "dataset__eval_preprocess": f"{IMAGES}|{TOKENS}",
            "evaluators__test__split": "test[:64]",
            **overrides,
        }
    )
    with config.unlocked():
        config.evaluators.zero_shot = tiny.default.evaluator(
            "test[:64]", "zero_shot", prompts=("{}", "a {}"), preprocess=IMAGES
        )
    return config


@pytest.fixture(scope="module")
def workdir(tower: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lit") / "run"
    results = train_and_evaluate(lit(tower, checkpoint__every_steps=4), str(folder))
    assert {"test/loss", "test/accuracy", "zero_shot/accuracy"} <= results.keys()
    assert results["zero_shot/num_examples"] == 64
    return folder


@pytest.mark.parametrize("scale", ["", "|normalize((0.4, 0.5, 0.6), 0.2)"])
def test_images_in_shapes_of_their_own(scale: str, tower: Path, tmp_path: Path) -> None:
    """A tower of squares is tuned on rows of patches; pixels in the range of the data, or not."""
    chain = f"decode(channels=3)|patchify((4, 9), {load_model(tower).module.patch_size}){scale}"
    settings = dict.fromkeys(("preprocess", "eval_preprocess"), f"{chain}|{TOKENS}")
    options = {f"dataset__{key}": value for key, value in settings.items()}
    config = lit(tower, objective__lock_image=False, duration__steps=2, **options)
    config.evaluators.zero_shot.preprocess = chain
    results = train_and_evaluate(config, str(tmp_path / "run"))
    assert results["zero_shot/num_examples"] == 64
    images = load_model(f"{tmp_path}/run#img")
    assert "patchify(4" in images.description.eval_preprocess
    assert images.features(np.zeros((30, 16, 3), np.uint8), "pre_logits").shape[0] == 1


def vectors(seed: int, count: int = 6) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(count, 8))
    return np.float32(x / np.linalg.norm(x, axis=1, keepdims=True))


def losses_of(kind: type[Objective], embeddings: Any, mask: np.ndarray) -> Any:
    objective = kind.__new__(kind)
    params = {"t": np.log(np.full(1, 5.0, np.float32)), "b": np.full(1, -2.0, np.float32)}
    return jax.jit(objective.loss_of)(params, embeddings, {"mask": mask})


def test_the_losses_by_hand() -> None:
    image, text = vectors(0).astype(np.float64), vectors(1).astype(np.float64)
    logits = 5.0 * image @ text.T
    rows = np.log(np.exp(logits).sum(1)) - np.diag(logits)
    columns = np.log(np.exp(logits).sum(0)) - np.diag(logits)
    embeddings = {"img": np.float32(image), "txt": np.float32(text)}
    loss, metrics = losses_of(Contrastive, embeddings, np.ones(6, np.float32))
    assert loss == pytest.approx((rows + columns).mean() / 2, rel=1e-5)
    assert metrics["accuracy"] == np.mean(logits.argmax(1) == np.arange(6))
    assert metrics["temperature"] == pytest.approx(5.0)
    signs = 2 * np.eye(6) - 1
    pairs = np.log1p(np.exp(-signs * (logits - 2.0)))
    loss, _ = losses_of(SigmoidContrastive, embeddings, np.ones(6, np.float32))
    assert loss == pytest.approx(pairs.sum(1).mean(), rel=1e-5)


@pytest.mark.parametrize("kind", [Contrastive, SigmoidContrastive])
def test_padding_counts_neither_as_a_row_nor_as_a_column(kind: type[Objective]) -> None:
    whole = {"img": vectors(0), "txt": vectors(1)}
    real = {name: x[:4] for name, x in whole.items()}
    expected, metrics = losses_of(kind, real, np.ones(4, np.float32))
    loss, padded = losses_of(kind, whole, np.float32([1, 1, 1, 1, 0, 0]))
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert padded["accuracy"] == metrics["accuracy"]


def dense_sigmoid_losses(scale: Any, bias: Any, images: Any, texts: Any, mask: Any) -> Any:
    """All B x B logits at once."""
    logits = scale * (images @ texts.T) + bias
    losses = -jax.nn.log_sigmoid((2.0 * jnp.eye(len(mask)) - 1.0) * logits)
    best = jnp.argmax(jnp.where(mask[None] > 0, logits, -jnp.inf), axis=1)
    return jnp.sum(losses * mask[None], axis=1), jnp.float32(best == jnp.arange(len(mask)))


def test_texts_that_go_around_the_devices_give_the_dense_loss() -> None:
    """Losses, hits and gradients, on one device and on eight."""
    images, texts = vectors(0, 16), vectors(1, 16)
    images[:6] = texts[:6]
    mask = np.float32([1.0] * 15 + [0.0])
    inputs = np.float32(5.0), np.float32(-2.0), images, texts, mask

    def weighted(function: Any, *inputs: Any) -> Any:
        with keep_batch_sharding():  # as an update: around the forward pass alone
            losses, hits = function(*inputs)
        return jnp.sum(losses * np.linspace(0.5, 1.5, 16)), (losses, hits)

    def results(function: Any) -> Any:
        gradient = jax.value_and_grad(functools.partial(weighted, function), (0, 1, 2, 3), True)
        return jax.jit(gradient)(*inputs), str(jax.make_jaxpr(gradient)(*inputs))

    expected, _ = results(dense_sigmoid_losses)
    assert 5 < np.sum(expected[0][1][1]) < 14
    for sizes in ({"data": 1}, {"data": 4, "fsdp": 2}, {"data": 2, "fsdp": 2, "tensor": 2}):
        mesh = create_mesh(**sizes, devices=jax.devices()[: 1 if len(sizes) == 1 else 8])
        with jax.set_mesh(mesh):
            actual, program = results(sigmoid_losses)
        assert ("f32[16,16]" in program) == (len(sizes) == 1)  # all pairs at once
        # Sums in another order: 1e-6 of the largest.
        for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * np.abs(theirs).max())


def test_both_towers_load_and_the_locked_one_is_as_it_was(tower: Path, workdir: Path) -> None:
    parts = read_json(workdir / "model.json")["parts"]
    assert list(parts) == ["img", "txt"]
    before, image, text = (load_model(x) for x in (tower, workdir, f"{workdir}#txt"))
    assert (
        flatten_names(load_model(f"{workdir}#img").params).keys()
        == flatten_names(image.params).keys()
    )
    for name, array in flatten_names(image.params).items():
        np.testing.assert_array_equal(array, flatten_names(before.params)[name])
    assert text.is_text
    assert not image.is_text
    logits = text.features(["a", "Kk"], "logits")
    assert logits.shape == (2, 16)
    assert np.abs(logits[0] - logits[1]).max() > 1e-3
    tokens = text.preprocess(["a", "Kk"])
    assert (tokens.shape, tokens.dtype) == ((2, 4), np.int32)
    apply = jax.jit(functools.partial(text.module.apply, train=False))
    expected = apply({"params": text.params}, tokens)
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    assert text.look(["a"], "attention")["attention"].shape == (1, 1, 2, 4, 4)
    with pytest.raises(UserError, match="no part 'nobody': its parts are img, txt|'nobody'"):
        load_model(f"{workdir}#nobody")


def test_the_locked_tower_is_in_no_checkpoint_and_a_resumed_run_is_the_same(
    tower: Path, workdir: Path, tmp_path: Path
) -> None:
    config = lit(tower, checkpoint__every_steps=4)
    with config.unlocked():
        config.evaluators = {}
    parts = as_of(4, workdir, tmp_path / "parts")
    train_and_evaluate(config, str(parts), resume="force")
    expected, resumed = (flatten_names(restore_params(str(run))) for run in (workdir, parts))
    assert {name.partition("/")[0] for name in resumed} == {"txt", "t"}
    for name, array in resumed.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_it_is_exported_and_converted(tower: Path, workdir: Path, tmp_path: Path) -> None:
    for format in ("stablehlo", "onnx"):
        report = export_model(f"{workdir}#txt", tmp_path / format, format=format)
        assert report["max_difference"] <= report["tolerance"]
    assert "int32" in (tmp_path / "onnx/README.md").read_text()
    for part in ("img", "txt"):
        target = str(tmp_path / f"{part}.npz")
        report = convert_checkpoint(f"{workdir}#{part}", target, format="npz")
        assert report["parameters_identical"]
    with pytest.raises(UserError, match="the text tower of .*: it describes one model"):
        evaluate(str(tower), dataset="digits", split="test[:50]", prompts=["{}"])


def test_zero_shot_of_the_script_is_that_of_the_loop(workdir: Path) -> None:
    measured = evaluate(
        str(workdir),
        dataset="glyphs(size=16, num_examples=256)",
        split="test[:64]",
        prompts=["{}", "a {}"],
    )
    results = read_json(workdir / "results.json")
    assert measured["accuracy"] == pytest.approx(results["zero_shot/accuracy"])
    temperature = np.exp(restore_params(str(workdir))["t"][0])
    image = load_model(workdir)
    assert image.description.similarity == Similarity(pytest.approx(temperature))
    assert 0 < measured["loss"] < 2 * temperature + np.log(26)  # of cosines from -1 to 1


def test_a_tower_sees_images_as_it_was_trained(tmp_path: Path) -> None:
    """Its own normalisation, of images that the training scales to [-1, 1]."""
    folder = save_model(tmp_path / "a", class_names=("ant", "bee"), eval_preprocess=IMAGENET)
    tower = load_tower("x", str(folder), image_shape=(16, 16, 3), dtype="float32")
    pixels = np.random.default_rng(0).integers(0, 256, (1, 16, 16, 3)).astype(np.uint8)
    expected = load_model(folder).preprocess(pixels[0])
    scaled = tower.to_input(scale_images(jnp.asarray(pixels)))
    np.testing.assert_allclose(scaled, expected, atol=1e-5)
    assert tower.description.eval_preprocess == IMAGENET
    assert (tower.width, tower.description.model["num_classes"]) == (16, 0)
    with pytest.raises(UserError, match="x='.*the data have"):
        load_tower("x", str(folder), image_shape=(16, 16, 1), dtype="float32")


def test_parts_of_a_batch_and_layouts_change_nothing(tower: Path) -> None:
    """One update on one device, and in parts on all: the same loss and gradient norm."""
    results, params, rng = [], None, np.random.default_rng(0)

    def drawn(shape: jax.ShapeDtypeStruct) -> np.ndarray:
        return np.float32(0.3 * rng.standard_normal(shape.shape))

    axes = {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2}
    for overrides in ({"mesh__data": 1}, {**axes, "train_step__accumulation_steps": 4}):
        config = lit(
            tower, objective__name="sigmoid_contrastive", objective__lock_image=False, **overrides
        )
        mesh = create_mesh(**config.mesh, devices=jax.devices()[: 8 if len(overrides) > 1 else 1])
        with jax.set_mesh(mesh):
            run = create_run(config, mesh)
            params = params or jax.tree.map(drawn, run.start.shapes)
            state = run.initial_state(0, params)
            step = run.jit_train_step()
            with train_batches_on(
                batch_sharding(mesh),
                run.objective.example_keys,
                dataset=run.dataset,
                batch_size=run.batch_size,
                seed=0,
                total_steps=1,
            ) as batches:
                _, metrics = step(state, run.place_constants(), next(batches))
        results.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4)


def test_an_image_tower_is_trained_from_its_weights_or_from_scratch(tower: Path) -> None:
    """As in CLIP and SigLIP."""
    run = create_run(lit(tower, objective__lock_image=False), create_mesh())
    assert set(run.start.shapes) == {"img", "txt", "t"}
    weights = flatten_names(load_model(tower).params)
    for name, array in flatten_names(run.objective.start["img"]).items():
        np.testing.assert_array_equal(array, weights[name])
    new = create_run(lit("mu/8", objective__lock_image=False), create_mesh())
    assert "img/cls" in flatten_names(new.start.shapes)
    assert next(iter(new.descriptions.values())).model["name"] == "vit"
    assert next(iter(new.descriptions.values())).eval_preprocess == f"{IMAGES}|{TOKENS}"


def test_texts_are_not_classified(tower: Path) -> None:
    config = lit(tower, objective__name="contrastive")
    tiny.default.set_kind(config, "objective", "classification")
    with pytest.raises(UserError, match="model.name='text' takes a text, but objective.name="):
        create_run(config, create_mesh(**config.mesh))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"objective__image": ""}, "config.objective.image is missing"),
        ({"objective__image": "B/16"}, "has random weights, which lock_image=True"),
        ({"objective__temperature": 0.0}, "objective.temperature=0.0 must be positive"),
        ({"dataset__preprocess": IMAGES, "dataset__eval_preprocess": IMAGES}, "text"),
    ],
)
def test_mistakes_are_named(tower: Path, overrides: dict[str, Any], message: str) -> None:
    config = lit(tower, **overrides)
    with pytest.raises(UserError, match=message):
        create_run(config, create_mesh(**config.mesh))
