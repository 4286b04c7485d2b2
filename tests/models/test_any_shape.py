"""Images in shapes of their own: as each image alone, in a run, and what cannot take them."""

from functools import partial
from pathlib import Path
from typing import Any

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tests import tiny
from tests.test_train import as_of
from vit_jax.data.datasets import create_dataset
from vit_jax.data.ops import Patchify, grid_within
from vit_jax.data.pipeline import train_batches
from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError
from vit_jax.inference.evaluate import evaluate
from vit_jax.inference.load import load_model
from vit_jax.models.create import create_model
from vit_jax.models.kernels import attention as choose
from vit_jax.models.kernels import devices
from vit_jax.models.kernels.attention_cudnn import cudnn
from vit_jax.parameters.sharding import MESH_AXES, create_mesh, keep_batch_sharding
from vit_jax.patches import Patches
from vit_jax.run import create_run
from vit_jax.train import train_and_evaluate
from vit_jax.trees import flatten_names
from vit_jax.workdir.metrics import read_metrics

SIZES: dict[str, Any] = {"patch_size": 4, "hidden_size": 32, "num_layers": 1, "mlp_dim": 48}
SIZES |= {"num_heads": 4, "position_grid": (4, 4), "num_classes": 5}
SHAPES = ((8, 12), (16, 16), (4, 28))  # of the images; 16 patches at most
LENGTH = 17


def images(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.uniform(-1, 1, (*shape, 3)).astype(np.float32) for shape in SHAPES]


def rows_of(shown: list[np.ndarray], padding: float) -> Patches:
    """Of images, in rows of `LENGTH` patches whose padding has this value."""
    pixels, grids = np.full((len(shown), LENGTH, 48), padding, np.float32), []
    for row, image in zip(pixels, shown, strict=True):
        rows, columns = image.shape[0] // 4, image.shape[1] // 4
        cells = image.reshape(rows, 4, columns, 4, 3).swapaxes(1, 2).reshape(-1, 48)
        row[: len(cells)] = cells
        grids.append((rows, columns))
    return Patches(jnp.asarray(pixels), jnp.asarray(grids, jnp.int32))


def random_params(module: Any) -> Any:
    params = module.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)), train=False)["params"]
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    noise = [leaf + 0.1 * rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    return jax.tree.unflatten(tree, noise)


@partial(jax.jit, static_argnums=0)
def outputs_and_gradients(module: Any, params: Any, batch: Any) -> Any:
    """Of rows, or of a list of images, each alone."""

    def loss(params: Any) -> Any:
        parts = batch if isinstance(batch, list) else [batch]
        out = [module.apply({"params": params}, part, train=False) for part in parts]
        out = jnp.concatenate(out)
        return jnp.sum(jnp.sin(out)), out

    grads, out = jax.grad(loss, has_aux=True)(params)
    return out, grads


def alone(module: Any, params: Any) -> Any:
    """The same of each image as [1, H, W, C], by the reference attention."""
    module = module.clone(attention="reference", remat="none")
    return outputs_and_gradients(module, params, [jnp.asarray(one[None]) for one in images()])


def assert_close(values: Any, expected: Any) -> None:
    """1e-5 of the largest of all: sums in another order, some over ten times as many terms."""
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    close = partial(np.testing.assert_allclose, rtol=0, atol=1e-5 * scale)
    jax.tree.map(close, values, expected)


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("vit", {"classifier": "gap"}),
    ("vit", {"classifier": "token", "position_resize": "bicubic"}),
    ("vit", {"classifier": "map", "position_embedding": "sincos2d"}),
    ("vit", {"position_embedding": "learned2d_layers", "position_resize": "linear_square"}),
    ("vit", {"position_embedding": "learned_shared", "classifier": "gap"}),
    ("deit", {"position_resize": "bicubic_square"}),
    ("modern_vit", {"rope": "centered", "num_registers": 3, "classifier": "token_gap"}),
    ("modern_vit", {"rope": "mixed", "classifier": "map", "position_resize": "linear"}),
    ("modern_vit", {"rope": "grid", "position_embedding": "none", "final_norm": "pooled"}),
]


@pytest.mark.parametrize(("name", "attributes"), FORMS)
def test_rows_are_images(name: str, attributes: dict[str, Any]) -> None:
    """Outputs and gradients are those of the images alone, whatever the padding holds."""
    kind = {"classifier": "gap"} if attributes.get("final_norm") else {}
    module = create_model(name, **SIZES, **attributes, **kind)
    params = random_params(module)
    expected = alone(module, params)
    for padding in (0.0, 50.0):
        assert_close(outputs_and_gradients(module, params, rows_of(images(), padding)), expected)


@pytest.mark.parametrize("attention", ["xla", "chunked", "pallas", "splash", "cudnn"])
def test_no_attention_sees_padding(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every implementation; of cuDNN's what surrounds it. Scanned and recomputed blocks."""
    if attention == "cudnn":
        monkeypatch.setattr(devices, "device_of_program", lambda: ("gpu", "NVIDIA H100"))
        other = partial(cudnn, implementation="xla")
        monkeypatch.setitem(choose.ATTENTIONS, "cudnn", other)
    module = create_model("vit", **SIZES, classifier="map", remat="full", attention=attention)
    params = random_params(module)
    expected = alone(module, params)
    assert_close(outputs_and_gradients(module, params, rows_of(images(), 9.0)), expected)


def test_masks_within_the_roundings_of_bfloat16() -> None:
    """Twice as far from float32 as each image alone in the same dtype, at most."""
    module = create_model("vit", **SIZES, classifier="gap", attention="pallas")
    params = random_params(module)
    exact, _ = alone(module, params)
    low = module.clone(dtype=jnp.bfloat16)
    out, _ = outputs_and_gradients(low, params, rows_of(images(), 9.0))
    single, _ = alone(low, params)
    off = [float(jnp.sqrt(jnp.mean(jnp.square(x - exact)))) for x in (out, single)]
    assert 0 < off[0] < 2 * off[1]


@pytest.mark.parametrize("attention", ["pallas", "splash", "xla"])
def test_rows_on_a_mesh(attention: str) -> None:
    """Split by images and heads over eight devices, as on one."""
    module = create_model("vit", **SIZES, classifier="gap", attention=attention)
    params, batch = random_params(module), rows_of(images() + images(1)[:1], 9.0)
    expected = outputs_and_gradients(module, params, batch)
    eight = np.array(jax.devices()).reshape(2, 2, 2)
    mesh = jax.sharding.Mesh(eight, MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh), keep_batch_sharding():
        assert_close(outputs_and_gradients(module, params, batch), expected)


def test_images_of_another_size_than_the_positions() -> None:
    """Of one size for all: as rows without padding."""
    module = create_model("vit", **SIZES)
    params, shown = random_params(module), images()[:1]
    fixed = module.apply({"params": params}, jnp.asarray(shown), train=False)
    rows = module.apply({"params": params}, rows_of(shown, 1.0), train=False)
    np.testing.assert_allclose(fixed, rows, atol=1e-6)


def test_rows_are_nearly_full() -> None:
    """At least 90 % of the tokens are real, for photos of 1:3 to 3:1 and the usual lengths."""
    rng = np.random.default_rng(0)
    sides = np.exp(rng.uniform(np.log(1 / 3), np.log(3), 300))
    for most in (128, 196, 256, 576, 1024):
        grids = [grid_within(most, 16, 480, round(480 * side)) for side in sides]
        assert 0.9 < np.mean([rows * columns for rows, columns in grids]) / most <= 1
        ratios = [columns / rows for rows, columns in grids]
        assert np.median(np.abs(np.log(ratios / sides))) < 0.06


LENGTHS = "decode|flip_lr|patchify((9, 16, 25), 4)"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of images in many shapes: two classes, by the colour of one half."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, count in (("train", 24), ("test", 10)):
        for name in ("a", "b"):
            for i in range(count // 2):
                height, width = rng.integers(10, 60, 2)
                image = rng.integers(0, 90, (height, width, 3), np.uint8)
                image[:, : width // 2, "ab".index(name)] += 150
                path = folder / split / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(path), image[..., ::-1])
    return str(folder)


def settings(photos: str, **others: Any) -> dict[str, Any]:
    return {
        "dataset__name": photos,
        "dataset__split": "train",
        "dataset__preprocess": LENGTHS,
        "dataset__eval_preprocess": "decode|patchify(16, 4)",
        "evaluators__test__split": "test",
        "model__patch_size": 4,
        "duration__steps": 8,
        "checkpoint__every_steps": 4,
        **others,
    }


def test_lengths_are_drawn_by_seed_and_step(photos: str) -> None:
    """The same with a late start, and for each process with its rows."""
    dataset = create_dataset(name=photos, split="train", preprocess=LENGTHS)
    options = {"batch_size": 4, "seed": 3, "total_steps": 12}
    with train_batches(dataset, **options) as batches:
        whole = list(batches)
    assert {batch["image"].shape[1] for batch in whole} == {9, 16, 25}
    for batch in whole:
        assert np.all(np.prod(batch["grid"], axis=1) <= batch["image"].shape[1])
    with train_batches(dataset, **options, start_step=7, rows=np.array([1, 3])) as batches:
        for batch, expected in zip(batches, whole[7:], strict=True):
            for key, array in batch.items():
                np.testing.assert_array_equal(array, expected[key][[1, 3]])


def test_a_run_is_resumed_and_used(photos: str, tmp_path: Path, script: tiny.Script) -> None:
    """At most one program per length; then predictions, features and pictures in own shapes."""
    config = tiny.config(**settings(photos))
    results = train_and_evaluate(config, str(tmp_path / "run"))
    copy = as_of(4, tmp_path / "run", tmp_path / "copy")
    train_and_evaluate(config, str(copy))
    assert (copy / "params.npz").read_bytes() == (tmp_path / "run/params.npz").read_bytes()
    assert len(read_metrics(tmp_path / "run")) > 0
    run = str(tmp_path / "run")
    assert evaluate(run)["accuracy"] == pytest.approx(results["test/accuracy"])
    longer = evaluate(run, preprocess="decode|patchify(49, 4)")
    assert longer["loss"] != results["test/loss"]
    loaded = load_model(run)
    assert loaded.description.model["position_grid"] == (3, 3)  # of the first length
    features = f"{tmp_path}/x.npz"
    arguments = "--features=gap,patches", f"--output={features}"
    done = script("extract_features.py", run, f"{photos}/test/a", *arguments)
    assert done.returncode == 0, done.stderr
    with np.load(features) as arrays:
        counts = np.prod(arrays["grid"], axis=1)
        assert arrays["patches"].shape == (5, 16, loaded.module.hidden_size)
        assert len({*counts.tolist()}) > 1
        for patches, gap, count in zip(arrays["patches"], arrays["gap"], counts, strict=True):
            assert not patches[count:].any()
            np.testing.assert_allclose(patches[:count].mean(axis=0), gap, atol=1e-5)
    done = script("visualize.py", run, f"{photos}/test/a", f"--output={tmp_path}/pictures")
    assert done.returncode == 0, done.stderr
    pictures = {path.stem for path in (tmp_path / "pictures").iterdir()}
    assert {"rollout", "heads", "pca", "similarity", "attention_distance"} <= pictures
    done = script("predict.py", run, f"{photos}/test/b")
    assert done.returncode == 0, done.stderr


def test_one_program_for_each_length(photos: str) -> None:
    run = create_run(tiny.config(**settings(photos)), create_mesh())
    with jax.set_mesh(run.mesh):
        step, state = run.jit_train_step(), run.initial_state(0)
        options = {"batch_size": run.batch_size, "seed": 0, "total_steps": 9}
        with train_batches(run.dataset, **options) as batches:
            for batch in batches:
                state, metrics = step(state, run.place_constants(), batch)
                assert np.isfinite(metrics["loss"])
    assert step._cache_size() == 3  # type: ignore[attr-defined]
    _, _, batch = run.step_arguments()
    assert batch["image"].shape[1] == 25  # of the largest


def test_a_model_of_one_shape_is_tuned_and_used_in_own_shapes(photos: str, tmp_path: Path) -> None:
    """Its positions are interpolated; without patchify it remains what it was."""
    plain = settings(photos, dataset__preprocess="decode|resize(16)", duration__steps=1)
    plain["dataset__eval_preprocess"] = "decode|resize(16)"
    train_and_evaluate(tiny.config(**plain), str(tmp_path / "plain"))
    own = load_model(tmp_path / "plain", preprocess="decode|patchify(16, 4)")
    square = load_model(tmp_path / "plain")
    shown = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    np.testing.assert_allclose(own.logits(shown), square.logits(shown), atol=1e-5)
    tuned = settings(photos, pretrained__source=str(tmp_path / "plain"), duration__steps=1)
    tuned |= {"schedule__learning_rate": 0.0, "pretrained__reset_head": False}
    tuned["dataset__preprocess"] = "decode|patchify(16, 4)"
    train_and_evaluate(tiny.config(**tuned), str(tmp_path / "tuned"))
    result, source = (flatten_names(load_model(tmp_path / n).params) for n in ("tuned", "plain"))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), result, source)


def test_weights_for_rows_of_another_length(photos: str, tmp_path: Path) -> None:
    """The positions stay those of the source: for longer rows, and for images of one size."""
    first = settings(photos, dataset__preprocess="decode|patchify(16, 4)", duration__steps=1)
    train_and_evaluate(tiny.config(**first), str(tmp_path / "first"))
    longer = first | {"dataset__preprocess": "decode|patchify(36, 4)"}
    longer |= {"pretrained__source": str(tmp_path / "first"), "schedule__learning_rate": 0.0}
    longer |= {"pretrained__reset_head": False}
    train_and_evaluate(tiny.config(**longer), str(tmp_path / "longer"))
    one, two = (load_model(tmp_path / name) for name in ("first", "longer"))
    assert two.description.grid == (6, 6)
    assert two.description.model["position_grid"] == (4, 4)
    np.testing.assert_array_equal(
        flatten_names(one.params)["Transformer/posembed_input/pos_embedding"],
        flatten_names(two.params)["Transformer/posembed_input/pos_embedding"],
    )
    large = load_model(tmp_path / "first", image_size=24, preprocess="decode|resize(24)")
    shown = np.random.default_rng(0).integers(0, 256, (2, 24, 24, 3), np.uint8)
    rows = load_model(tmp_path / "first", preprocess="decode|patchify(36, 4)")
    np.testing.assert_allclose(large.logits(shown), rows.logits(shown), atol=1e-5)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model__position_embedding": "relative"}, "relative positions are of one shape"),
    ({"model__patch_size": 8}, r"must have model\.patch_size=8"),
    ({"mix__mixup_alpha": 0.2}, "mix.mixup_alpha=0.2 is for images of one shape"),
    ({"train_step__patch_sizes": (4, 8)}, r"train_step.patch_sizes=\(4, 8\) is for images of one"),
    ({"objective__name": "mae", "model__name": "mae"}, "takes images of one shape"),
    ({"dataset__preprocess": "decode|patchify(9, 4)|flip_lr"}, "only scaling of values may follow"),
    ({"dataset__preprocess": "decode|patchify((1, 2, 3, 4, 5, 6), 4)"}, "up to 5 of them"),
    ({"dataset__preprocess": "decode|patchify(0)"}, "must be a positive number"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_is_of_one_shape_is_refused(photos: str, overrides: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_run(tiny.config(**settings(photos, **overrides)), create_mesh())


def test_other_models_are_refused() -> None:
    sizes = {"patch_size": 4, "hidden_size": 16, "num_layers": 1, "num_classes": 3}
    with pytest.raises(UserError, match="has the positions of its images"):
        create_model("mae", **sizes, mlp_dim=16, num_heads=2, position_grid=(4, 4))
    module = create_model("vit", **{**SIZES, "position_grid": None})
    with pytest.raises(UserError, match="model.position_grid=None; images in shapes of their own"):
        jax.eval_shape(lambda: module.init(jax.random.key(0), rows_of(images(), 0.0), train=False))


def test_patches_of_normalised_pixels() -> None:
    """Each channel by its own mean, as before the patches were cut."""
    image = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    chain = parse("normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))")
    rng = np.random.default_rng(0)
    patches = chain(Patchify(6, 4)({"image": image}, rng), rng)["image"]
    expected = chain({"image": image}, rng)["image"].reshape(2, 4, 3, 4, 3).swapaxes(1, 2)
    np.testing.assert_array_equal(patches, expected.reshape(6, 48))
    with pytest.raises(UserError, match="has no patches of label"):
        Patchify(6, 4)({"image": image, "label_map": image[..., 0]}, rng)
