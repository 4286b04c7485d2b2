"""The pictures are written, and what cannot be is said."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.saved_models import save_model
from vit_jax.errors import UserError
from vit_jax.inference.visualize import OF_IMAGES, OF_PARAMETERS, visualize


def saved(folder: Path, **model: Any) -> str:
    """With tokens of 8 pixels: a grid of 2 x 3."""
    return str(save_model(folder, image_size=(16, 24), num_classes=10, **model))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(5):
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
    found = visualize(model, [str(photos)], output=str(tmp_path), against=model, batch_size=2)
    check(found, (*OF_PARAMETERS, *OF_IMAGES))
    only = visualize(model, [str(photos / "$0$.png")], output=str(tmp_path), what=["rollout"])
    check(only, ("rollout",))


def test_without_images(tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        check(visualize(model, output=str(tmp_path)), OF_PARAMETERS)
    assert "Without --images: only filters and positions." in caplog.messages


def test_what_a_model_lacks_is_said(
    tmp_path: Path, photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resnet = saved(tmp_path / "resnet", name="bit", resnet_layers=(1,), resnet_width_factor=1)
    with caplog.at_level(logging.INFO):
        found = visualize(resnet, [str(photos)], output=str(tmp_path / "a"), against=resnet)
    check(found, ("filters",))
    assert "No positions.png: it has no learned positions." in caplog.messages
    assert "No rollout.png: no attention." in caplog.messages
    with pytest.raises(UserError, match="nothing of heads to draw"):
        visualize(resnet, [str(photos)], output=str(tmp_path / "b"), what=["heads"])
    gap = {"classifier": "gap", "position_embedding": "sincos2d", "hidden_size": 32}
    plain = saved(tmp_path / "gap", **gap)
    found = visualize(plain, output=str(tmp_path / "c"))
    check(found, ("filters",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"what": ["rolout"]}, "--what='rolout' is unknown. Did you mean 'rollout'"),
        ({"what": ["heads"]}, "--what=heads needs --images"),
        ({"what": ["cka"], "images": ["PHOTOS"]}, "--what=cka needs --against"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, photos: Path, arguments: dict[str, Any], message: str
) -> None:
    if "images" in arguments:
        arguments = {**arguments, "images": [str(photos)]}
    with pytest.raises(UserError, match=message):
        visualize("nowhere", output=str(tmp_path / "none"), **arguments)
    assert not (tmp_path / "none").exists()
