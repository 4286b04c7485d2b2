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
_SIDE = 1200


def photographs(count: int, seed: int = 0) -> Iterator[tuple[bytes, int]]:
    """JPEG files of about 100 KB on average, each with a label below 1000.

    A piece of a cloud whose spectrum falls as that of natural images does (1 / f), with a contrast
    and a brightness of its own and the noise of a camera.
    """
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(_SIDE)[:, None], np.fft.rfftfreq(_SIDE)[None])
    frequency[0, 0] = np.inf
    phase = rng.normal(size=(2, 3, *frequency.shape))
    planes = np.fft.irfft2((phase[0] + 1j * phase[1]) / frequency, (_SIDE, _SIDE))
    planes[1:] = planes[0] + 0.3 * planes[1:]  # the channels of photographs differ little
    cloud = (planes / planes.std()).transpose(1, 2, 0).astype(np.float32)  # [S, S, 3]
    for number in rng.choice(len(SIZES), size=count, p=list(SIZES.values())):
        height, width = list(SIZES)[number]
        top, left = rng.integers(0, _SIDE - height), rng.integers(0, _SIDE - width)
        image = cloud[top : top + height, left : left + width] * rng.uniform(15, 60)
        image = image + rng.uniform(60, 190, 3)
        image += rng.uniform(0.5, 7.0) * rng.standard_normal((height, width, 1), np.float32)
        options = [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(88, 96))]
        _, encoded = cv2.imencode(".jpg", image.clip(0, 255).astype(np.uint8), options)
        yield encoded.tobytes(), int(rng.integers(1000))
