"""Predictions of pixels and numbers: losses beside PyTorch, devices, metrics, runs to answers."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import jaccard_score, r2_score

from tests import golden, tiny
from tests.saved_models import save_model
from vit_jax.config import set_kind
from vit_jax.data.map_files import ClassTable, read_labels
from vit_jax.errors import UserError
from vit_jax.evaluators.dense import class_overlaps, number_errors
from vit_jax.inference import dense
from vit_jax.inference.evaluate import evaluate
from vit_jax.inference.load import load_model
from vit_jax.inference.predict import predict
from vit_jax.models.create import create_model
from vit_jax.objectives.dense import PixelRegression, Segmentation
from vit_jax.objectives.objective import Task
from vit_jax.parameters.sharding import create_mesh
from vit_jax.report.report import write_report
from vit_jax.run import create_run
from vit_jax.train import train_and_evaluate
from vit_jax.trees import flatten_names

RNG = jax.random.key(0)
MODEL: dict[str, Any] = {"patch_size": 4, "hidden_size": 8, "num_layers": 1, "mlp_dim": 8}
MODEL |= {"num_heads": 2, "classifier": "dense"}
KINDS: dict[str, dict[str, Any]] = {
    "vit": {**MODEL, "classifier": "token_dense"},
    "modern_vit": {**MODEL, "num_registers": 2, "head_norm": True},
}


def task(name: str = "vit", classes: int = 3) -> Task:
    def build(n: int) -> Any:
        return create_model(name=name, **KINDS[name], num_classes=n)

    return Task(build, (8, 12, 3), tuple("abcdef"[:classes]))


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    maps = rng.choice(np.uint8([0, 1, 2, 255]), (5, 8, 12), p=[0.3, 0.3, 0.2, 0.2])
    maps[1] = 255  # an image without a pixel that counts
    values = rng.uniform(0.5, 4.0, (5, 8, 12)).astype(np.float32)
    values[rng.random(values.shape) < 0.3] = 0.0
    values[0, :2], values[0, 2] = np.nan, np.inf
    return {
        "image": rng.integers(0, 256, (5, 8, 12, 3), np.uint8),
        "label_map": maps,
        "value_map": values,
        "mask": np.float32([1.0, 1.0, 1.0, 1.0, 0.0]),
    }


@pytest.mark.parametrize("name", KINDS)
def test_the_loss_is_that_of_pytorch_on_its_own_interpolation(name, batch):
    """Of the head on the patches; so are its gradients."""
    objective = Segmentation(task(name))
    params = golden.filled(objective.model, (1, 8, 12, 3))

    def loss_of(head: Any) -> Any:
        loss, metrics = objective.loss({**params, "head": head}, batch, RNG)
        return loss, metrics

    (loss, metrics), grads = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params["head"])
    features = _head_inputs(objective.model, params, batch["image"])
    head = {key: torch.tensor(np.array(x), requires_grad=True) for key, x in params["head"].items()}
    patches = torch.tensor(features) @ head["kernel"] + head["bias"]  # [B, P, K]
    cells = patches.reshape(5, 2, 3, 3).permute(0, 3, 1, 2)
    logits = torch.nn.functional.interpolate(cells, size=(8, 12), mode="bilinear")[:4]
    labels = torch.tensor(batch["label_map"][:4].astype(np.int64))
    expected = torch.nn.functional.cross_entropy(logits, labels, ignore_index=255)
    expected.backward()
    # Float32 sums over a few hundred pixels.
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    for key, grad in grads.items():
        np.testing.assert_allclose(grad, head[key].grad, rtol=1e-4, atol=1e-6)
    hits = (logits.argmax(1) == labels)[labels != 255]
    np.testing.assert_allclose(metrics["accuracy"], hits.float().mean(), rtol=1e-6)


def _head_inputs(model: Any, params: Any, images: np.ndarray) -> np.ndarray:
    """The patches after the last norm, and after a batch norm if the head has one, [B, P, D]."""
    scaled = jnp.asarray(images, jnp.float32) / 127.5 - 1.0
    _, stored = model.apply(
        {"params": params},
        scaled,
        train=False,
        capture_intermediates=lambda module, _: module.name == "pre_logits",
        mutable=["intermediates"],
    )
    x = np.asarray(stored["intermediates"]["pre_logits"]["__call__"][0], np.float64)
    if model.head_norm:  # of the batch, as in training
        x = (x - x.mean((0, 1))) / np.sqrt(x.var((0, 1)) + 1e-6)
    return x.astype(np.float32)


@pytest.mark.parametrize("kind", [Segmentation, PixelRegression])
def test_parts_of_a_batch_have_the_loss_of_the_whole(kind, batch):
    """With accumulation each part is divided by the pixels of the whole batch."""
    objective = kind(task())
    params = golden.filled(objective.model, (1, 8, 12, 3))
    batch = {key: np.concatenate([x, x[::-1]])[:8] for key, x in batch.items()}
    batch["mask"] = np.ones(8, np.float32)
    whole = jax.jit(objective.loss)(params, batch, RNG)[0]
    prepared = jax.jit(objective.prepare)(batch)
    parts = [{key: x[i : i + 4] for key, x in prepared.items()} for i in (0, 4)]
    losses = [float(jax.jit(objective.loss)(params, part, RNG)[0]) for part in parts]
    assert abs(losses[0] - losses[1]) > 1e-3  # else the mean of the parts' means would do
    np.testing.assert_allclose(np.mean(losses), whole, rtol=1e-5)
    plain = [float(jax.jit(objective.loss)(params, {**part}, RNG)[0]) for part in _without(parts)]
    assert abs(np.mean(plain) - whole) > 1e-4


def _without(parts: Any) -> Any:
    return [{key: x for key, x in part.items() if key != "mean_pixels"} for part in parts]


@pytest.mark.parametrize("distance", ["l1", "l2", "scale_invariant"])
def test_depths_beside_their_formulas(distance, batch):
    objective = PixelRegression(task(), distance=distance, unit=2.0, max_value=7.0)
    params = golden.filled(objective.model, (1, 8, 12, 3))
    outputs = np.asarray(jax.jit(objective.predict)(params, batch))[..., 0].astype(np.float64)
    values = {k: np.asarray(x) for k, x in jax.jit(objective.evaluate)(params, batch).items()}
    for i in range(5):
        with np.errstate(invalid="ignore"):
            true = 2.0 * batch["value_map"][i].astype(np.float64)
            valid = (true > 0) & (true <= 7.0)
            assert valid.any()
        true, output = true[valid], outputs[i][valid]
        error, ratio = output - np.log(true), np.exp(output) / true
        expected = {
            "l1": np.abs(error).mean(),
            "l2": np.square(error).mean(),
            "scale_invariant": np.square(error).mean() - 0.5 * error.mean() ** 2,
        }
        np.testing.assert_allclose(values["loss"][i], expected[distance], rtol=1e-4)
        rmse = np.sqrt(np.mean((np.exp(output) - true) ** 2))
        np.testing.assert_allclose(values["rmse"][i], rmse, rtol=1e-4)
        np.testing.assert_allclose(values["abs_rel"][i], np.abs(ratio - 1).mean(), rtol=1e-4)
        near = (np.maximum(ratio, 1 / ratio) < 1.25).mean()
        np.testing.assert_allclose(values["delta1"][i], near, atol=1e-6)
    grads = jax.jit(jax.grad(lambda p: objective.loss(p, batch, RNG)[0]))(params)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(grads))


def test_overlaps_and_r2_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    labels, guesses = rng.integers(0, 4, (2, 3, 50))
    hot = np.eye(5)  # no pixel has the fifth
    arrays = {
        "hits": (hot[labels] * (labels == guesses)[..., None]).sum(1),
        "labelled": hot[labels].sum(1),
        "predicted": hot[guesses].sum(1),
    }
    overlaps = class_overlaps(arrays)
    expected = jaccard_score(labels.ravel(), guesses.ravel(), average=None)
    np.testing.assert_allclose(overlaps[:4], expected, rtol=1e-12)
    assert np.isnan(overlaps[4])
    target, value = rng.normal(size=(2, 30, 2)) * [1.0, 100.0]
    errors = number_errors(["mae_a", "mae_b"], value, target)
    np.testing.assert_allclose(errors["r2"], r2_score(target, value), rtol=1e-12)
    np.testing.assert_allclose(errors["mae_b"], np.abs(value - target)[:, 1].mean())


def test_models_and_settings_that_do_not_fit() -> None:
    plain = Task(lambda n: create_model("vit", **{**MODEL, "classifier": "gap"}, num_classes=n))
    for kind in (Segmentation, PixelRegression):
        with pytest.raises(UserError, match="predicts every pixel: use a Vision Transformer with"):
            kind(plain)
    with pytest.raises(UserError, match="objective.unit=0.0 must be positive"):
        PixelRegression(task(), unit=0.0)
    with pytest.raises(UserError, match="final_norm='tokens' or 'none'"):
        create_model("modern_vit", **MODEL, final_norm="pooled", num_classes=2)
    with pytest.raises(UserError, match="gives logits per pixel; classification requires"):
        create_run(tiny.config(model__classifier="dense"), create_mesh())


def write_squares(root: Path, count: int = 24) -> None:
    """Red and green squares on grey, with their masks and, further away the lower, depths."""
    rng = np.random.default_rng(0)
    for i in range(count):
        image, mask = np.full((24, 32, 3), 90, np.uint8), np.zeros((24, 32), np.uint8)
        top, left, kind = *rng.integers(0, (14, 22)), int(rng.integers(2))
        image[top : top + 10, left : left + 10, kind] = 250
        mask[top : top + 10, left : left + 10] = 1 + kind
        mask[0, 0] = 255
        depth = (1000 + 500 * mask.astype(np.int32)).astype(np.uint16)
        for folder, pixels in (("images", image), ("masks", mask), ("depth", depth)):
            (root / folder).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(root / folder / f"{i}.png")
    (root / "classes.txt").write_text("back\nred\ngreen\n")


RUN: dict[str, Any] = {
    "dataset__preprocess": "decode|random_resized_crop(16, (0.4, 1))|flip_lr",
    "dataset__split": "train",
    "model__patch_size": 4,
    "model__classifier": "dense",
    "model__head_norm": True,
    "evaluators__test__split": "test",
    "duration__steps": 60,
    "schedule__learning_rate": 1e-2,
    "log__every_steps": 20,
}


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("squares")
    write_squares(root)
    return root


@pytest.fixture(scope="module")
def segmented(squares: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    workdir = tmp_path_factory.mktemp("runs") / "segmentation"
    config = tiny.config(objective__name="segmentation", dataset__name=str(squares), **RUN)
    set_kind(config, "evaluators.test", "segmentation")
    return workdir, train_and_evaluate(config, str(workdir))


def test_a_run_of_segmentation(segmented: Any, squares: Path, capsys: Any, tmp_path: Path) -> None:
    """From a folder of masks to masks of images of any size."""
    workdir, results = segmented
    assert results["test/mIoU"] > 0.55
    assert results["test/pixel_accuracy"] > 0.85
    scores = evaluate(str(workdir))
    assert scores["mIoU"] > 0.5
    assert [row["class"] for row in scores["per_class"]][1] == "red"
    swapped = tmp_path / "swapped"  # its classes are in another order
    shutil.copytree(squares, swapped)
    (swapped / "classes.txt").unlink()
    rows = ["green,2", "red,1", "back,0"]
    (swapped / "classes.csv").write_text("\n".join(rows))
    assert evaluate(str(workdir), dataset=str(swapped))["mIoU"] == pytest.approx(scores["mIoU"])
    page = write_report(str(workdir), output=str(tmp_path / "page.html"), max_examples=4)
    assert "the image, its map, the prediction" in page.read_text("utf-8")
    photo = squares / "images/3.png"
    with pytest.raises(UserError, match=r"predicts pixels: scripts/predict.py --output"):
        load_model(str(workdir)).predict(str(photo))
    large = tmp_path / "large.jpg"
    cv2.imwrite(str(large), cv2.resize(cv2.imread(str(photo)), (100, 75)))
    options: dict[str, Any] = {"output": str(tmp_path / "out"), "as_json": True}
    assert predict(str(workdir), [str(photo), str(large)], **options) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {max(row["shares"], key=row["shares"].get) for row in rows} == {"back"}
    table = ClassTable(("back", "red", "green"), {0: 0, 1: 1, 2: 2})
    small = read_labels(tmp_path / "out/3.png", table)
    big = read_labels(tmp_path / "out/large.png", table)
    assert small.shape == (24, 32)
    assert big.shape == (75, 100)
    truth = np.asarray(Image.open(squares / "masks/3.png"))
    assert np.mean(small[truth < 255] == truth[truth < 255]) > 0.8
    shrunk = cv2.resize(big, (32, 24), interpolation=cv2.INTER_NEAREST)
    assert np.mean(shrunk == small) > 0.9
    assert cv2.imread(str(tmp_path / "out/3.overlay.jpg")).shape == (24, 32, 3)
    with pytest.raises(UserError, match=r"3.png cannot be written: that is an image"):
        predict(str(workdir), [str(photo)], output=str(squares / "images"))
    drawn = tmp_path / "drawn"
    shutil.copytree(squares / "masks", drawn)
    with pytest.raises(UserError, match=r"drawn/3.png is not a result of this script"):
        predict(str(workdir), [str(photo)], output=str(drawn))
    with pytest.raises(UserError, match=r"--short_side=8 must be at least the model's 16 pixels"):
        predict(str(workdir), [str(photo)], short_side=8)
    with pytest.raises(UserError, match=r"--loss is for classes of images"):
        evaluate(str(workdir), loss="softmax")
    with pytest.raises(UserError, match=r"--picture draws classes"):
        predict(str(workdir), [str(photo)], picture=str(tmp_path / "sheet.png"))


def test_windows_cover_an_image_and_agree_with_the_model(segmented: Any) -> None:
    model = load_model(str(segmented[0]))
    height, width, _ = model.description.image_shape
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    once = dense.pixel_outputs(model, image)
    np.testing.assert_allclose(once, model.logits(image)[0], atol=1e-5)
    wide = np.concatenate([image, image[:, ::-1], image], axis=1)
    outputs = dense.pixel_outputs(model, wide)
    assert outputs.shape == (height, 3 * width, 3)
    # The first columns are in the first window alone, the last ones in the last.
    np.testing.assert_allclose(outputs[:, :4], once[:, :4], atol=1e-5)
    np.testing.assert_allclose(outputs[:, -4:], once[:, -4:], atol=1e-5)
    assert dense.pixel_outputs(model, image, short_side=2 * height).shape[:2] == (32, 32)
    classes = dense.best_classes(outputs, (height, 3 * width))
    np.testing.assert_array_equal(classes, outputs.argmax(-1))


def test_a_run_of_depths(squares: Path, tmp_path: Path, capsys: Any) -> None:
    config = tiny.config(
        objective__name="pixel_regression", objective__unit=0.001, dataset__name=str(squares), **RUN
    )
    set_kind(config, "evaluators.test", "pixel_regression")
    results = train_and_evaluate(config, str(tmp_path / "run"))
    assert results["test/delta1"] > 0.8
    assert results["test/rmse"] < 0.4
    assert evaluate(str(tmp_path / "run"))["delta1"] > 0.8
    assert (
        predict(str(tmp_path / "run"), [str(squares / "images/1.png")], output=str(tmp_path)) == 0
    )
    assert "median " in capsys.readouterr().out
    depth = np.load(tmp_path / "1.npy")
    assert depth.shape == (24, 32)
    assert 0.8 < np.median(depth) < 1.3


def test_a_run_of_numbers(squares: Path, tmp_path: Path, capsys: Any) -> None:
    """Where the square is, from a table with two columns."""
    rows = []
    for i in range(24):
        mask = np.asarray(Image.open(squares / f"masks/{i}.png")) % 255
        top, left = np.argwhere(mask)[0]
        rows.append((squares / f"images/{i}.png", 1000 + top, left, "test" if i > 18 else "train"))
    with open(tmp_path / "t.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "y", "x", "split"), *rows])
    options = {**RUN, "model__classifier": "gap", "dataset__preprocess": "decode|resize(16)"}
    config = tiny.config(
        objective__name="regression",
        dataset__name=str(tmp_path / "t.csv"),
        dataset__label_key="y, x",
        **options,
    )
    set_kind(config, "evaluators.test", "regression")
    results = train_and_evaluate(config, str(tmp_path / "run"))
    assert results["test/mae_y"] < 6
    assert {"test/r2", "test/mae_x"} <= results.keys()
    again = evaluate(str(tmp_path / "run"))
    np.testing.assert_allclose(again["mae_y"], results["test/mae_y"], rtol=1e-4)
    assert predict(str(tmp_path / "run"), [str(rows[0][0])]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("y 10")
    config.dataset.label_key = "y,z"
    with pytest.raises(UserError, match=r"has no column 'z', but path, y, x, split"):
        train_and_evaluate(config, str(tmp_path / "other"))


def test_parts_and_layouts_lead_to_the_same_parameters(squares: Path, tmp_path: Path) -> None:
    """The whole batch on eight devices, and two parts of it with split parameters."""
    layouts: dict[str, Any] = {"whole": {}}
    layouts["parts"] = {"mesh__data": 4, "mesh__fsdp": 2, "train_step__accumulation_steps": 2}
    found = {}
    for name, options in layouts.items():
        settings = {**RUN, "model__head_norm": False, "duration__steps": 3, **options}
        config = tiny.config(objective__name="segmentation", dataset__name=str(squares), **settings)
        train_and_evaluate(config, str(tmp_path / name))
        found[name] = flatten_names(load_model(str(tmp_path / name)).params)
    assert np.any(found["whole"]["head/kernel"] != 0)
    for key, array in found["whole"].items():
        if not key.endswith("key/bias"):  # has no gradient but rounding, which Adam enlarges
            # Sums of float32 in another order, over three updates of Adam at 1e-2.
            np.testing.assert_allclose(found["parts"][key], array, atol=1e-4, err_msg=key)


def test_frozen_weights_grey_and_wide_images_with_their_own_scale(tmp_path: Path) -> None:
    """The head of a model of 16 x 24 grey pixels learns; a photo that EXIF turns is upright."""
    root = tmp_path / "data"
    write_squares(root, 12)
    backbone = save_model(tmp_path / "backbone", image_size=(16, 24), num_classes=4, scale=0.2)
    scale = "normalize(0.4, 0.2)"
    settings = {
        **RUN,
        "pretrained__source": str(backbone),
        "pretrained__channels": "sum",
        "model__patch_size": 8,
        "model__hidden_size": 16,
        "model__mlp_dim": 24,
        "model__classifier": "token_dense",
        "optimizer__freeze": "(?!head).*",
        "dataset__preprocess": "decode(channels=1)|random_resized_crop((16, 24))|" + scale,
        "dataset__eval_preprocess": "decode(channels=1)|resize(16, 24)|" + scale,
        "duration__steps": 4,
    }
    config = tiny.config(objective__name="segmentation", dataset__name=str(root), **settings)
    train_and_evaluate(config, str(tmp_path / "run"))
    model = load_model(str(tmp_path / "run"))
    before, after = (flatten_names(x.params) for x in (load_model(str(backbone)), model))
    kept = [name for name in after if not name.startswith(("head", "embedding/kernel"))]
    assert all(np.array_equal(after[name], before[name]) for name in kept)
    assert np.any(after["head/kernel"] != 0)
    assert evaluate(str(tmp_path / "run"), short_side=32)["num_examples"] == len(
        model.open_dataset(**model.test_data(), needs=("label_map",)).source
    )
    tall = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30), np.uint8))
    exif = tall.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    tall.save(tmp_path / "turned.jpg", exif=exif)
    assert predict(str(tmp_path / "run"), [str(tmp_path / "turned.jpg")], output=str(tmp_path)) == 0
    assert np.asarray(Image.open(tmp_path / "turned.png")).shape == (30, 40)
