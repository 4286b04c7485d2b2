"""The pictures are written, and what cannot be is said."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.saved_models import save_model
from vit_jax.errors import UserError
from vit_jax.inference.load import load_model
from vit_jax.inference.pictures import color_range, draw_heads, draw_rollout, fitted, overlay
from vit_jax.inference.visualize import OF_IMAGES, OF_PARAMETERS, visualize
from vit_jax.inference.visualize import photos as photos_of


def saved(folder: Path, **model: Any) -> str:
    """With tokens of 8 pixels: a grid of 2 x 3."""
    return str(save_model(folder, image_size=(16, 24), num_classes=10, **model))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(4):
        pixels = rng.integers(0, 256, (20, 30, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"${number}$.png")  # a name is no formula
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("model") / "run", num_layers=2, scan=True)


def check(paths: list[Path], names: tuple[str, ...]) -> None:
    assert [path.name for path in paths] == [f"{name}.png" for name in names]
    for path in paths:
        with Image.open(path) as picture:
            width, height = picture.size
            assert 400 < width < 1200
            assert 300 < height < 1600
            assert np.asarray(picture.convert("L")).std() > 5  # not blank


def test_every_picture(tmp_path: Path, model: str, photos: Path) -> None:
    drawn = visualize(model, [str(photos)], output=str(tmp_path), against=model, batch_size=3)
    check(drawn, (*OF_PARAMETERS, *OF_IMAGES))
    check(visualize(model, output=str(tmp_path), what=["filters"]), ("filters",))


def test_photos_are_finer_than_the_input(model: str, tmp_path: Path) -> None:
    image = np.zeros((200, 300, 3), np.uint8)
    image[1::2] = (255, 128, 0)  # lines that the 16 x 24 pixels of the input do not have
    large = photos_of(load_model(model), [image])
    assert large.shape == (1, 176, 264, 3)
    assert np.ptp(large[0, :, 180, 0]) > 0.1
    fixed = saved(tmp_path / "fixed", eval_preprocess="decode")
    small = np.full((16, 24, 3), 255, np.uint8)
    np.testing.assert_allclose(photos_of(load_model(fixed), [small]), np.ones((1, 16, 24, 3)))


def test_an_overlay_has_the_brightness_of_its_map() -> None:
    image = np.full((20, 30, 1), 0.5)
    weights = np.array([[0.0, 1.0, 2.0], [3.0, 4.0, 9.0]])
    ends = color_range(np.append(np.full(200, 1.0), weights))
    assert (ends[0], ends[1] < 9) == (0.0, True)
    shown = overlay(image, weights, (0.0, 4.0))
    assert shown.shape == (20, 30, 3)
    bright = shown.mean(axis=-1)[5::10, 5::10].ravel()
    assert (np.diff(bright) > 0).tolist() == [True, True, True, True, False]  # 9 is off the scale
    assert 0 <= shown.min() <= shown.max() <= 1


def test_one_peak_does_not_darken_the_rest() -> None:
    maps = np.ones((1, 16, 16))
    maps[0, 5, 4] = maps[0, 0, 3] = 30.0  # as in the rollout of a trained model
    assert color_range(maps + np.linspace(0, 1, 256).reshape(16, 16))[1] < 3


def test_names_are_whole_or_shortened_in_the_middle() -> None:
    assert fitted("astronaut.png", 1, 8) == "astronaut.png"
    assert fitted("a $b_1$ c.png", 1, 8) == "a $b_1$ c.png"
    short = fitted("x" * 200 + "y.png", 2, 8)
    assert 20 < len(short) < 40
    assert (short[:3], short[-5:], short.count("…")) == ("xxx", "y.png", 1)
    assert len(fitted("W" * 60, 2, 8)) < len(short)  # by their width
    assert fitted("a\nb.png", 2, 8) == r"a\nb.png"
    assert fitted(os.fsdecode(b"caf\xe9.png"), 2, 8) == r"caf\udce9.png"
    unknown = fitted("\U0001fbf9.png", 2, 8)  # of a block that no font of ours has
    assert unknown == r"\U0001fbf9.png"


@pytest.mark.parametrize(("num_heads", "size"), [(1, (30, 90)), (6, (60, 20)), (16, (30, 30))])
def test_all_heads_and_names_are_inside_the_picture(num_heads: int, size: tuple[int, int]) -> None:
    names, images = ["photo.png", "W" * 300 + ".png"], np.zeros((2, *size, 1))
    maps = np.ones((2, num_heads, 3, 3))
    heads, flow = draw_heads(images, maps, names), draw_rollout(images, maps[:, 0], names)
    titles = [axis.get_title() for axis in heads.axes]
    assert [titles.count(f"head {n + 1}") for n in range(num_heads)] == [2] * num_heads
    for figure in (heads, flow):
        figure.draw_without_rendering()
        texts = [text for axis in figure.axes for text in (*axis.texts, axis.title)]
        texts += [axis.xaxis.label for axis in figure.axes]
        boxes = [text.get_window_extent() for text in texts if text.get_text().strip()]
        assert len(boxes) >= 3  # names, and the label of the scale
        assert all(min(box.x0, box.y0) >= 0 for box in boxes)
        assert all(box.x1 <= figure.bbox.x1 for box in boxes)


def test_how_many_of_how_many_images_are_drawn_is_said(
    model, tmp_path, caplog, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(10):
        Image.fromarray(np.full((16, 24, 3), 20 * number, np.uint8)).save(
            os.fsencode(folder) + b"/\xe9%d.png" % number
        )
    with caplog.at_level(logging.INFO):
        visualize(model, [str(folder)], what=["rollout", "attention_distance"], output="out")
    said = [line for line in caplog.messages if line.startswith("Wrote")]
    assert said == [
        "Wrote out/attention_distance.png.",
        "Wrote out/rollout.png: 8 of 10 images, evenly spaced.",
    ]


def test_what_a_model_lacks_is_said(tmp_path, photos, caplog):
    resnet = saved(tmp_path / "resnet", name="bit", resnet_layers=(1,), resnet_width_factor=1)
    with caplog.at_level(logging.INFO):
        drawn = visualize(resnet, [str(photos)], output=str(tmp_path / "a"), against=resnet)
    check(drawn, ("filters",))
    assert (
        "No positions.png: the model has no learned position embedding of each token."
        in caplog.messages
    )
    assert "No rollout.png: the model has no attention." in caplog.messages
    with pytest.raises(UserError, match="nothing to draw for heads"):
        visualize(resnet, [str(photos)], output=str(tmp_path / "b"), what=["heads"])
    gap = {"classifier": "gap", "position_embedding": "sincos2d", "hidden_size": 32}
    check(visualize(saved(tmp_path / "gap", **gap), output=str(tmp_path / "c")), ("filters",))


def test_mistakes_are_named(tmp_path: Path, photos: Path) -> None:
    for what, images, message in (
        ("rolout", [], "--what='rolout' is unknown. Did you mean 'rollout'"),
        ("heads", [], "--what=heads needs images"),
        ("cka", [str(photos)], "--what=cka needs --against"),
    ):
        with pytest.raises(UserError, match=message):
            visualize("nowhere", images, what=[what], output=str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
