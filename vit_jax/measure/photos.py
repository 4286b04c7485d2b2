"""JPEGs that cost a decoder what photographs cost it: like ImageNet's in sizes and in bytes."""

from __future__ import annotations

from collections.abc import Iterator

import cv2
import numpy as np

# (height, width), share: of ImageNet's training images two thirds are 500 x 375 or so.
SIZES = {
    (375, 500): 0.50,
    (500, 375): 0.18,
    (333, 500): 0.14,
    (500, 500): 0.08,
    (600, 800): 0.05,
    (240, 320): 0.05,
}
QUALITIES = (88, 95)
_TEXTURES, _SIDE = 4, 1200


def photographs(count: int, seed: int = 0) -> Iterator[tuple[bytes, int]]:
    """JPEG files of 90 KB on average, each with a label below 1000.

    Clouds whose spectrum falls as that of natural images does (1 / f), in pieces with edges
    between them, lit by a gradient, with the noise of a camera.
    """
    rng = np.random.default_rng(seed)
    textures = [_texture(rng) for _ in range(_TEXTURES)]
    sizes = rng.choice(len(SIZES), size=count, p=list(SIZES.values()))
    for size in sizes:
        height, width = list(SIZES)[size]
        image = _piece(rng, textures, height, width)
        for _ in range(rng.integers(1, 6)):  # things in front of it
            h, w = rng.integers(30, height), rng.integers(30, width)
            top, left = rng.integers(0, height - h + 1), rng.integers(0, width - w + 1)
            mask = np.zeros((h, w, 1), np.uint8)
            cv2.ellipse(mask, (w // 2, h // 2), (w // 2, h // 2), rng.uniform(0, 90), 0, 360, 1, -1)
            part = image[top : top + h, left : left + w]
            part[:] = np.where(mask, _piece(rng, textures, h, w), part)
        left_light, right_light = rng.uniform(0.6, 1.2, 2)
        image *= np.linspace(left_light, right_light, width, dtype=np.float32)[:, None]
        noise = rng.standard_normal((height, width, 1), np.float32)
        image += noise * np.float32(rng.uniform(0.5, 5.0))
        quality = int(rng.integers(*QUALITIES, endpoint=True))
        options = [cv2.IMWRITE_JPEG_QUALITY, quality]
        _, encoded = cv2.imencode(".jpg", image.clip(0, 255).astype(np.uint8), options)
        yield encoded.tobytes(), int(rng.integers(1000))


def _texture(rng: np.random.Generator) -> np.ndarray:
    """Colour noise with a 1 / f spectrum, float32 [S, S, 3] with mean 0 and deviation 1."""
    frequency = np.hypot(np.fft.fftfreq(_SIDE)[:, None], np.fft.rfftfreq(_SIDE)[None])
    frequency[0, 0] = np.inf
    planes = []
    for _ in range(3):
        phase = rng.normal(size=frequency.shape) + 1j * rng.normal(size=frequency.shape)
        plane = np.fft.irfft2(phase / frequency, (_SIDE, _SIDE))
        planes.append(plane / plane.std())
    common = planes[0]  # the channels of photographs differ little
    others = [0.9 * common + 0.3 * plane for plane in planes[1:]]
    return np.stack([common, *others], -1).astype(np.float32)


def _piece(
    rng: np.random.Generator, textures: list[np.ndarray], height: int, width: int
) -> np.ndarray:
    """A part of a texture, scaled, with a colour and a contrast of its own, [height, width, 3]."""
    zoom = rng.uniform(0.6, 1.4)
    h, w = round(height * zoom), round(width * zoom)
    top, left = rng.integers(0, _SIDE - h), rng.integers(0, _SIDE - w)
    texture = textures[rng.integers(len(textures))][top : top + h, left : left + w]
    scaled = cv2.resize(texture, (width, height), interpolation=cv2.INTER_AREA)
    return scaled * np.float32(rng.uniform(15, 60)) + rng.uniform(60, 190, 3).astype(np.float32)
