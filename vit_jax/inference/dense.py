"""Predictions for every pixel of images of any size, by windows that slide over them."""

import dataclasses
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import jax.numpy as jnp
import numpy as np

from vit_jax.console import watched
from vit_jax.data.decode import resize
from vit_jax.data.ops import Decode, Resize, ResizeSmall, ScalingOp
from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError
from vit_jax.files.paths import read_file, replacing, to_path
from vit_jax.inference.model import Model
from vit_jax.models.description import Description
from vit_jax.objectives.objective import scale_images

_OVERLAP = 1 / 3  # of neighbouring windows, as in mmsegmentation's sliding inference


def is_dense(model: Model) -> bool:
    """Whether it predicts every pixel."""
    return bool(model.module.outputs_per == "pixel")


def check_short_side(model: Model, short_side: int) -> None:
    """Raises UserError for an image that would be smaller than the model's windows."""
    least = min(model.description.image_shape[:2])
    if short_side and short_side < least:
        raise UserError(f"--short_side={short_side} must be at least the model's {least} pixels.")


def pixel_outputs(
    model: Model, image: np.ndarray, *, short_side: int = 0, batch_size: int = 8
) -> np.ndarray:
    """Mean outputs of the windows over an image, uint8 [H, W, C] -> float32 [h, w, K].

    The image is resized so that its short side has `short_side` pixels, by default the model's, and
    windows of the model's size slide over it.
    """
    height, width, _ = model.description.image_shape
    size = image.shape[:2]
    scale = max(height / size[0], width / size[1]) * max(short_side / min(height, width), 1.0)
    rows, columns = (max(a, round(b * scale)) for a, b in zip((height, width), size, strict=True))
    ops, rng = parse(model.description.eval_preprocess).ops, np.random.default_rng(0)
    methods = [op.method for op in ops if isinstance(op, Resize | ResizeSmall)]
    image = resize(image, rows, columns, methods[0] if methods else "pillow_bilinear")
    for op in ops:
        if isinstance(op, ScalingOp):
            image = op.apply(image, rng)
    pixels = np.asarray(scale_images(jnp.asarray(image)), np.float32)
    places = [
        (top, left)
        for top in _starts(pixels.shape[0], height)
        for left in _starts(pixels.shape[1], width)
    ]
    sums = np.zeros((*pixels.shape[:2], model.num_outputs), np.float32)
    counts = np.zeros((*pixels.shape[:2], 1), np.float32)
    for start in range(0, len(places), batch_size):
        part = places[start : start + batch_size]
        windows = np.stack([pixels[y : y + height, x : x + width] for y, x in part])
        outputs = model.logits(windows, batch_size=batch_size)
        for (y, x), output in zip(part, outputs, strict=True):
            sums[y : y + height, x : x + width] += output
            counts[y : y + height, x : x + width] += 1
    return sums / counts


def _starts(length: int, window: int) -> list[int]:
    """Where windows begin along one side: evenly spaced, all of it covered."""
    count = 1 + -(-(length - window) // max(1, round(window * (1 - _OVERLAP))))
    return [round(i * (length - window) / max(count - 1, 1)) for i in range(count)]


def resized(outputs: np.ndarray, size: tuple[int, int]) -> Iterator[np.ndarray]:
    """Each output [h, w] of [h, w, K] as [H, W], linear between pixels."""
    for k in range(outputs.shape[-1]):
        channel = np.ascontiguousarray(outputs[..., k])
        yield cv2.resize(channel, size[::-1], interpolation=cv2.INTER_LINEAR)


def best_classes(outputs: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The class of each pixel of an image of that size, uint8 [H, W]; one class at a time."""
    highest, classes = np.full(size, -np.inf, np.float32), np.zeros(size, np.uint8)
    for k, channel in enumerate(resized(outputs, size)):
        better = channel > highest
        classes[better], highest[better] = k, channel[better]
    return classes


def values_of(outputs: np.ndarray, size: tuple[int, int], description: Description) -> np.ndarray:
    """The value of each pixel, float32 [H, W]."""
    assert description.values is not None
    return description.values.of(np.stack([*resized(outputs, size)], axis=-1))[..., 0]


@dataclasses.dataclass(frozen=True)
class PixelWriter:
    """Predicts images and writes, if `folder` is given, their maps and overlays there."""

    model: Model
    paths: Sequence[str]
    folder: str = ""
    short_side: int = 0
    batch_size: int = 8

    def __post_init__(self) -> None:
        """Raises UserError if two images have one name, or a result would replace an image."""
        targets: dict[str, str] = {}
        images = {os.path.realpath(path) for path in self.paths}
        for path in self.paths if self.folder else ():
            for target in self._targets(path):
                other = targets.setdefault(str(target), path)
                if other != path or os.path.realpath(target) in images:
                    why = f"it would be of {other} and {path}: rename one, or predict them apart"
                    why = "that is an image" if other == path else why
                    raise UserError(f"--output={self.folder}: {target} cannot be written: {why}.")
            pixels, picture = self._targets(path)
            if pixels.exists() and not picture.exists():  # a mask that somebody made
                why = "is not a result of this script; choose an empty folder"
                raise UserError(f"--output={self.folder}: {pixels} {why}.")
        check_short_side(self.model, self.short_side)
        if self.folder:
            to_path(self.folder).mkdir(parents=True, exist_ok=True)

    def _targets(self, path: str) -> tuple[Path, Path]:
        """Of the map, and of the picture to look at."""
        stem, folder = Path(path).stem, to_path(self.folder)
        ending = ".png" if self.model.description.values is None else ".npy"
        return folder / f"{stem}{ending}", folder / f"{stem}.overlay.jpg"

    def rows(self) -> Iterator[dict[str, Any]]:
        """Of each image `shares` by class, or `values`: least, middle and greatest; or `error`."""
        description = self.model.description
        op = parse(description.eval_preprocess).ops[0]
        channels: Any = description.image_shape[2]
        decode, rng = op if isinstance(op, Decode) else Decode(channels), np.random.default_rng(0)
        for path in watched(self.paths, "image", len(self.paths)):
            try:
                yield {"image": path, **self._predict(path, decode.apply(read_file(path), rng))}
            except (ValueError, OSError, cv2.error) as error:
                yield {"image": path, "error": str(getattr(error, "strerror", None) or error)}

    def _predict(self, path: str, pixels: np.ndarray) -> dict[str, Any]:
        options: Any = {"short_side": self.short_side, "batch_size": self.batch_size}
        outputs = pixel_outputs(self.model, pixels, **options)
        size, description = pixels.shape[:2], self.model.description
        if description.values is not None:
            values = values_of(outputs, size, description)
            if self.folder:
                self._write(path, values, shaded(values))
            ends = np.percentile(values, (0, 50, 100)).tolist()
            return {"values": dict(zip(("min", "median", "max"), ends, strict=True))}
        classes = best_classes(outputs, size)
        if self.folder:
            self._write(path, classes, colored(classes, pixels))
        counts = np.bincount(classes.ravel(), minlength=outputs.shape[-1]) / classes.size
        names = description.class_names or [f"class {k}" for k in range(len(counts))]
        shares = sorted(zip(names, counts.tolist(), strict=True), key=lambda pair: -pair[1])
        return {"shares": {name: share for name, share in shares if share}}

    def _write(self, path: str, pixels: np.ndarray, overlay: np.ndarray) -> None:
        target, picture = self._targets(path)
        buffer = io.BytesIO()
        if target.suffix == ".npy":
            np.save(buffer, pixels)
        content = buffer.getvalue() or palette_png(pixels)
        shown = cv2.imencode(".jpg", cv2.cvtColor(overlay, cv2.COLOR_RGB2BGR))[1].tobytes()
        for path_of, data in ((target, content), (picture, shown)):
            with replacing(path_of) as temporary:
                temporary.write_bytes(data)


def palette() -> np.ndarray:
    """Pascal VOC's colours, uint8 [256, 3]: bits of the number, spread over the channels."""
    numbers, colors = np.arange(256), np.zeros((256, 3), np.int64)
    for bit in range(8):
        for channel in range(3):
            colors[:, channel] |= (numbers >> (3 * bit + channel) & 1) << (7 - bit)
    return colors.astype(np.uint8)


def palette_png(classes: np.ndarray) -> bytes:
    """Classes uint8 [H, W] as a PNG whose palette shows them."""
    from PIL import Image

    picture = Image.fromarray(classes)
    picture.putpalette(palette().tobytes())
    picture.save(buffer := io.BytesIO(), "PNG")
    return buffer.getvalue()


def colored(classes: np.ndarray, image: np.ndarray) -> np.ndarray:
    """The image in grey, each pixel tinted by its class, uint8 [H, W, 3]; class 0 keeps its own."""
    image = image if image.shape[2] == 3 else np.repeat(image, 3, axis=2)
    tint = (0.4 * image.mean(axis=2, keepdims=True) + 0.6 * palette()[classes]).astype(np.uint8)
    return np.where(classes[..., None] == 0, image, tint)


def shaded(values: np.ndarray) -> np.ndarray:
    """Values by colour, from the least (bright) to the greatest, uint8 [H, W, 3]."""
    low, high = np.percentile(values, (2, 98))
    levels = np.clip((values - low) / max(high - low, 1e-6), 0, 1)
    shaded = cv2.applyColorMap((255 * (1 - levels)).astype(np.uint8), cv2.COLORMAP_INFERNO)
    return cv2.cvtColor(shaded, cv2.COLOR_BGR2RGB)
