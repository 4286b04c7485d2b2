"""torchvision's random transforms of Pillow images: same arguments, distributions and pixels.

As in torchvision, Pillow computes the pixels: equal factors give equal images. They are uint8
[H, W, 3], or [H, W, 1] for ops that do not change colour. DINO is 2104.14294 (`main_dino.py`),
DeiT III is 2204.07118 (`augment.py`).
"""

import dataclasses
import math
from typing import Any, Literal

import numpy as np

from vit_jax.data.decode import Box, Method
from vit_jax.data.ops import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Example,
    FlipLr,
    ImageOp,
    Op,
    RandomBox,
    Rng,
    Size,
    check_range,
    check_sides,
    pair,
)

_NORMALIZE = f"normalize({IMAGENET_MEAN}, {IMAGENET_STD})"


@dataclasses.dataclass(frozen=True)
class RandomResizedCrop(RandomBox):
    """Crops a random box and resizes it to `size`.

    Unlike inception_crop the box's share of the image is uniform in `area`, and its width / height
    log-uniform in `ratio`; after 10 draws that do not fit, it is the largest central box.
    """

    size: Size
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    method: Method = "pillow_bilinear"

    def sample_box(self, rng: Rng, height: int, width: int) -> Box:
        low, high = self.ratio
        for _ in range(10):
            pixels = rng.uniform(*self.area) * height * width
            aspect = math.exp(rng.uniform(math.log(low), math.log(high)))
            box_width = round(math.sqrt(pixels * aspect))
            box_height = round(math.sqrt(pixels / aspect))
            if 0 < box_width <= width and 0 < box_height <= height:
                top = int(rng.integers(0, height - box_height, endpoint=True))
                left = int(rng.integers(0, width - box_width, endpoint=True))
                return top, left, box_height, box_width
        box_height = max(1, min(height, round(width / low)))
        box_width = max(1, min(width, round(height * high)))
        return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


class PillowOp(ImageOp):
    """An op on Pillow images, applied with probability `p`."""

    p: float
    moves = False

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ValueError(f"p={self.p!r} must be in [0, 1]")

    def apply(self, image: np.ndarray, rng: Rng) -> np.ndarray:
        from PIL import Image

        if image.dtype != np.uint8:
            raise ValueError(f"{self} takes uint8: put it before value_range or normalize")
        if rng.random() >= self.p:
            return image
        picture = Image.fromarray(image if image.shape[2] > 1 else image[:, :, 0])
        return np.asarray(self.change(picture, rng)).reshape(image.shape)

    def change(self, picture: Any, rng: Rng) -> Any:
        """Returns a new Pillow image of the same mode, RGB or L."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ColorJitter(PillowOp):
    """Changes brightness, contrast, saturation and hue in random order, as `ColorJitter`.

    The first three are scaled by factors uniform within +-x of 1 (and not negative), the
    hue is shifted by up to +-`hue` of a full turn.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    p: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.brightness, self.contrast, self.saturation) < 0 or not 0 <= self.hue <= 0.5:
            raise ValueError(f"{self} must have amounts >= 0, and hue at most 0.5")

    def change(self, picture: Any, rng: Rng) -> Any:
        from PIL import Image, ImageEnhance

        kinds = ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color
        amounts = self.brightness, self.contrast, self.saturation
        factors = [rng.uniform(max(0.0, 1 - amount), 1 + amount) for amount in amounts]
        turn = rng.uniform(-self.hue, self.hue)
        for i in rng.permutation(4).tolist():
            if i < 3 and amounts[i]:
                picture = kinds[i](picture).enhance(factors[i])
            elif i == 3 and self.hue and picture.mode == "RGB":  # the HSV round trip changes pixels
                bands = np.array(picture.convert("HSV"))
                bands[:, :, 0] += np.uint8(int(turn * 255) % 256)  # wraps around
                picture = Image.frombytes("HSV", picture.size, bands.tobytes()).convert("RGB")
        return picture


@dataclasses.dataclass(frozen=True)
class GaussianBlur(PillowOp):
    """Pillow's Gaussian blur; radius uniform in `sigma`, in pixels (DINO, DeiT III)."""

    p: float
    sigma: tuple[float, float] = (0.1, 2.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("sigma", self.sigma)

    def change(self, picture: Any, rng: Rng) -> Any:
        from PIL import ImageFilter

        return picture.filter(ImageFilter.GaussianBlur(rng.uniform(*self.sigma)))


@dataclasses.dataclass(frozen=True)
class Grayscale(PillowOp):
    """Luma in every channel, as `RandomGrayscale`."""

    p: float

    def change(self, picture: Any, _rng: Rng) -> Any:
        return picture.convert("L").convert(picture.mode)


@dataclasses.dataclass(frozen=True)
class Solarize(PillowOp):
    """Inverts values from `threshold` on, as `RandomSolarize`."""

    p: float
    threshold: int = 128

    def change(self, picture: Any, _rng: Rng) -> Any:
        from PIL import ImageOps

        return ImageOps.solarize(picture, self.threshold)


@dataclasses.dataclass(frozen=True)
class ThreeAugment(ImageOp):
    """DeiT III's 3-Augment (sec. 2.2): one of grayscale, solarize, blur, then colour jitter."""

    color_jitter: float = 0.3  # of brightness, contrast and saturation
    moves = False

    def apply(self, image: np.ndarray, rng: Rng) -> np.ndarray:
        chosen = (Grayscale(1.0), Solarize(1.0), GaussianBlur(1.0))[int(rng.integers(3))]
        return ColorJitter(*[self.color_jitter] * 3).apply(chosen.apply(image, rng), rng)


@dataclasses.dataclass(frozen=True)
class DinoCrops(Op):
    """DINO's views of an image: two large crops, `image` and `image_2`, and small ones, `local`.

    `local` is [num_local, h, w, C]. Each is cropped, mirrored, changed in colour and blurred with
    random numbers of its own; the second may be solarized. `photometric=False` only crops and
    mirrors, for small or grey images, `flip=False` does not mirror, for letters. DINOv2's areas are
    (0.32, 1) and (0.05, 0.32).
    """

    size: Size
    local_size: Size = 96
    num_local: int = 8
    area: tuple[float, float] = (0.4, 1.0)
    local_area: tuple[float, float] = (0.05, 0.4)
    photometric: bool = True
    flip: bool = True

    def __post_init__(self) -> None:
        check_sides(size=self.size, local_size=self.local_size)
        check_range("area", self.area, 1.0)
        check_range("local_area", self.local_area, 1.0)
        if self.num_local < 1:
            raise ValueError(f"num_local={self.num_local!r} must be at least 1")

    def __call__(self, example: Example, rng: Rng) -> Example:
        def view(size: Size, area: tuple[float, float], *last: ImageOp) -> np.ndarray:
            image = example["image"]
            color = (ColorJitter(0.4, 0.4, 0.2, 0.1, p=0.8), Grayscale(0.2), *last)
            crop = RandomResizedCrop(size, area, method="pillow_bicubic")
            for op in (crop, *[FlipLr()] * self.flip, *(color if self.photometric else ())):
                image = op.apply(image, rng)
            return image

        small = [
            view(self.local_size, self.local_area, GaussianBlur(0.5)) for _ in range(self.num_local)
        ]
        return {
            **example,
            "image": view(self.size, self.area, GaussianBlur(1.0)),
            "image_2": view(self.size, self.area, GaussianBlur(0.1), Solarize(0.2)),
            "local": np.stack(small),
        }


@dataclasses.dataclass(frozen=True)
class BlockMasks(Op):
    """Which patches iBOT masks in both large crops: int32 [2, M], filled up with -1.

    As DINOv2 does it: a crop is masked with probability `p`, and then a share of its patches from
    `share`, by blocks of random area and aspect (BEiT, 2106.08254). M is the largest number.
    """

    grid: Size  # rows and columns of patches
    share: tuple[float, float] = (0.1, 0.5)
    p: float = 0.5

    def __post_init__(self) -> None:
        check_range("share", self.share, 1.0)
        if not 0 <= self.p <= 1:
            raise ValueError(f"p={self.p!r} must be in [0, 1]")

    def __call__(self, example: Example, rng: Rng) -> Example:
        size = math.prod(pair(self.grid))
        numbers = np.full((2, int(self.share[1] * size)), -1, np.int32)
        for row in numbers:
            if rng.random() < self.p:
                count = int(rng.uniform(*self.share) * size)
                masked = np.flatnonzero(self._mask(count, rng))
                row[: len(masked)] = masked
        return {**example, "masked_patches": numbers}

    def _mask(self, count: int, rng: Rng) -> np.ndarray:
        """Bool, of the grid: blocks until at most `count` are masked, or 10 draws fail."""
        rows, columns = pair(self.grid)
        mask = np.zeros((rows, columns), bool)
        failures = 0
        while (left := count - mask.sum()) > 0 and failures < 10:
            area = rng.uniform(min(4, left), left)
            aspect = math.exp(rng.uniform(math.log(0.3), math.log(1 / 0.3)))
            height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            failures += 1
            if 0 < height < rows and 0 < width < columns:
                top = int(rng.integers(0, rows - height, endpoint=True))
                side = int(rng.integers(0, columns - width, endpoint=True))
                block = mask[top : top + height, side : side + width]
                if 0 < block.size - block.sum() <= left:
                    block[:] = True
                    failures = 0
        return mask


def deit3_train(size: int, simple_crop: bool = False, exif: bool = True) -> str:
    """DeiT III's training pipeline with 3-Augment; `simple_crop` (sec. 2.2) is for ImageNet-21k."""
    crop = f"random_resized_crop({size}, method='pillow_bicubic')"
    if simple_crop:
        crop = f"resize_small({size}, 'pillow_bicubic', 'down')|random_crop({size}, padding=4)"
    return f"decode(exif={exif})|{crop}|flip_lr|three_augment|{_NORMALIZE}"


def dino_train(size: Size, view: Literal[1, 2] = 1, exif: bool = True) -> str:
    """One of DINO's two global views."""
    crop = f"random_resized_crop({size}, (0.4, 1), method='pillow_bicubic')"
    color = "color_jitter(0.4, 0.4, 0.2, 0.1, p=0.8)|grayscale(0.2)"
    last = "gaussian_blur(1)" if view == 1 else "gaussian_blur(0.1)|solarize(0.2)"
    return f"decode(exif={exif})|{crop}|flip_lr|{color}|{last}|{_NORMALIZE}"
