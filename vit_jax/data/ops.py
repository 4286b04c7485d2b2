"""The ops that preprocess.py chains: decoding, geometry, value ranges.

An op is a frozen dataclass whose fields are its arguments; it maps (example, rng) to an example:
{"image": uint8 [H, W, C] (bytes before `decode`), "label": int, ...}, to which it may add arrays
under other keys. Sizes are in pixels.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import cv2
import numpy as np

from vit_jax.data.decode import WHITE, Box, Method, crop, decode_box, decode_image, resize
from vit_jax.data.pillow_reader import Background
from vit_jax.data.sources import describe
from vit_jax.errors import UserError

Example = dict[str, Any]
Rng = np.random.Generator
Size = int | tuple[int, int]  # of a square, or (height, width)
Rounding = Literal["nearest", "down"]

# Per channel, over the pixels of ImageNet's training images divided by 255.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_ROUND: dict[str, Callable[[float], int]] = {"nearest": round, "down": int}
_MAX_SIDE = 8192


class Op:
    """Base class of all ops."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the dataset that it reads besides image and label, as text in the example."""
        return ()

    def __call__(self, example: Example, rng: Rng) -> Example:
        raise NotImplementedError


# Keys of maps of an image's pixels: uint8 classes [H, W] and float32 values [H, W], and what stands
# for none in each.
LABEL_MAP, IGNORED = "label_map", 255
MAPS = {LABEL_MAP: IGNORED, "value_map": np.nan}


class ImageOp(Op):
    """An op that changes only the image, and moves the pixels of its maps alike."""

    apply: Callable[..., np.ndarray]  # of (image, rng)
    # Whether pixels change their places; None: who knows, so images must have no maps.
    moves: ClassVar[bool | None] = None

    def __call__(self, example: Example, rng: Rng) -> Example:
        maps = {key: example[key] for key in MAPS if key in example}
        if not maps:
            return {**example, "image": self.apply(example["image"], rng)}
        if self.moves is None:
            raise UserError(f"preprocess: {self} cannot move {', '.join(maps)} as the image.")
        again = copy.deepcopy(rng)  # the same random numbers for image and maps
        moved = {"image": self.apply(example["image"], rng)}
        for key, pixels in maps.items() if self.moves else ():
            # Without interpolation, which would invent classes and depths.
            places = self.move(pixels[..., None], copy.deepcopy(again), "nearest", MAPS[key])
            moved[key] = places[..., 0]
        return {**example, **moved}

    def move(self, image: np.ndarray, rng: Rng, method: Method, fill: float) -> np.ndarray:
        """`apply` with this interpolation; `fill`: of pixels from outside of the image."""
        raise NotImplementedError


class MovingOp(ImageOp):
    """An op that moves pixels, by `move`."""

    moves = True
    method: Method = "bilinear"

    def apply(self, image: np.ndarray, rng: Rng) -> np.ndarray:
        return self.move(image, rng, self.method, 0.0)


def check_maps(example: Example) -> None:
    """Raises ValueError for a map of another size than the pixels of its image."""
    image = example["image"]
    for key in MAPS if isinstance(image, np.ndarray) else ():
        if key in example and example[key].shape != image.shape[:2]:
            sizes = f"{describe(image)} and its {key} {describe(example[key])}"
            raise ValueError(f"the image {sizes} differ in size; if EXIF turns it: exif=False")


VIEWS = ("image", "image_2", "local")  # keys of an example's pixels; see `DinoCrops`


class ScalingOp(ImageOp):
    """An op on the values of all pixels, whatever they show: [..., H, W, C]."""

    moves = False

    def __call__(self, example: Example, rng: Rng) -> Example:
        scaled = {key: self.apply(example[key], rng) for key in VIEWS if key in example}
        return {**example, **scaled}


def pair(size: Size) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def check_sides(**values: Size) -> None:
    for name, value in values.items():
        if not 1 <= min(pair(value)) <= max(pair(value)) <= _MAX_SIDE:
            raise ValueError(f"{name}={value!r} must be from 1 to {_MAX_SIDE} pixels")


def check_range(name: str, value: tuple[float, float], limit: float = np.inf) -> None:
    if not 0 < value[0] <= value[1] <= limit:
        raise ValueError(f"{name}={value!r} must be (low, high) with 0 < low <= high <= {limit:g}")


@dataclasses.dataclass(frozen=True)
class Decode(ImageOp):
    """Image file -> uint8 [H, W, channels], see decode.py; `exif` turns photographs upright.

    `background`: what is below transparent pixels, a grey level or (red, green, blue), 0 to 255;
    None keeps the colours that they hide, as `.convert("RGB")` of timm and transformers does.
    Before a random box, only that is decoded. `reduced`: a JPEG file at 1/2, 1/4 or 1/8 if the box
    stays at least as large as its final size, see docs/preprocessing.md.
    """

    channels: Literal[1, 3] = 3
    exif: bool = True
    reduced: bool = False
    background: Background = WHITE
    moves = False

    def __post_init__(self) -> None:
        levels = () if self.background is None else np.ravel(self.background)
        if not all(0 <= level <= 255 for level in levels):
            raise ValueError(f"background={self.background!r} must be from 0 to 255, or None")

    def apply(self, image: bytes | np.ndarray, _rng: Rng) -> np.ndarray:
        return decode_image(
            image, channels=self.channels, exif=self.exif, background=self.background
        )


@dataclasses.dataclass(frozen=True)
class SizedOp(MovingOp):
    """An op whose output is height x width; square if width is not given."""

    height: int
    width: int | None = None

    def __post_init__(self) -> None:
        check_sides(height=self.height, width=self.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        return self.height, self.height if self.width is None else self.width


@dataclasses.dataclass(frozen=True)
class Resize(SizedOp):
    """Resizes to height x width, ignoring the aspect ratio."""

    method: Method = "bilinear"

    def move(self, image: np.ndarray, _rng: Rng, method: Method, _fill: float) -> np.ndarray:
        return resize(image, *self.shape, method)


@dataclasses.dataclass(frozen=True)
class ResizeSmall(MovingOp):
    """Resizes the short side to `size`; to cover a pair; keeping the aspect ratio."""

    size: Size
    method: Method = "area"
    rounding: Rounding = "nearest"  # of the long side; big_vision: nearest, torchvision: down

    def __post_init__(self) -> None:
        check_sides(size=self.size)

    def move(self, image: np.ndarray, _rng: Rng, method: Method, _fill: float) -> np.ndarray:
        shape, as_whole = image.shape[:2], _ROUND[self.rounding]
        if isinstance(self.size, int):
            height, width = (as_whole(side * self.size / min(shape)) for side in shape)
        else:  # in the order of timm's ResizeKeepRatio, for its rounding
            ratio = min(old / new for old, new in zip(shape, self.size, strict=True))
            height, width = (as_whole(side / ratio) for side in shape)
        return resize(image, height, width, method)


def _margins(image: np.ndarray, shape: tuple[int, int]) -> tuple[int, int]:
    """How many rows and columns a crop leaves over; ValueError if the image is too small."""
    (rows, columns), (height, width) = image.shape[:2], shape
    if rows < height or columns < width:
        crop = f"an image of {rows}x{columns} is smaller than the crop {height}x{width}"
        raise ValueError(f"{crop}; put resize_small before the crop")
    return rows - height, columns - width


@dataclasses.dataclass(frozen=True)
class CentralCrop(SizedOp):
    """Crops height x width from the centre."""

    rounding: Rounding = "down"  # of the corner; as big_vision; torchvision: nearest, half to even

    def move(self, image: np.ndarray, _rng: Rng, _method: Method, _fill: float) -> np.ndarray:
        top, left = (_ROUND[self.rounding](spare / 2) for spare in _margins(image, self.shape))
        return crop(image, top, left, *self.shape)


@dataclasses.dataclass(frozen=True)
class CornerCrop(SizedOp):
    """Crops height x width from the top left, e.g. to whole patches."""

    def move(self, image: np.ndarray, _rng: Rng, _method: Method, _fill: float) -> np.ndarray:
        _margins(image, self.shape)
        return crop(image, 0, 0, *self.shape)


@dataclasses.dataclass(frozen=True)
class RandomCrop(SizedOp):
    """Crops at a random position after reflecting `padding` pixels at each side, as torchvision."""

    padding: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.padding <= _MAX_SIDE:
            raise ValueError(f"padding={self.padding} must be from 0 to {_MAX_SIDE} pixels")

    def move(self, image: np.ndarray, rng: Rng, _method: Method, _fill: float) -> np.ndarray:
        if self.padding:
            image = np.pad(image, ((self.padding,) * 2, (self.padding,) * 2, (0, 0)), "reflect")
        spare = _margins(image, self.shape)
        top, left = (int(rng.integers(0, most, endpoint=True)) for most in spare)
        return crop(image, top, left, *self.shape)


class RandomBox(MovingOp):
    """An op that crops a random box and resizes it to `size`."""

    size: Size
    area: tuple[float, float]  # of the box, as a share of the image
    ratio: tuple[float, float]  # width / height
    method: Method

    def __post_init__(self) -> None:
        check_sides(size=self.size)
        check_range("area", self.area, 1.0)
        check_range("ratio", self.ratio)

    def sample_box(self, rng: Rng, height: int, width: int) -> Box:
        """A random box (top, left, height, width) inside an image of height x width."""
        raise NotImplementedError

    def move(self, image: np.ndarray, rng: Rng, method: Method, _fill: float) -> np.ndarray:
        box = crop(image, *self.sample_box(rng, *image.shape[:2]))
        return resize(box, *pair(self.size), method)

    def decode(self, image: bytes | np.ndarray, op: Decode, rng: Rng) -> np.ndarray:
        """`apply` to the image that `op` decodes, of which only the box is decoded."""
        box = decode_box(
            image,
            functools.partial(self.sample_box, rng),
            channels=op.channels,
            exif=op.exif,
            background=op.background,
            reduced_to=pair(self.size) if op.reduced else None,
        )
        return resize(box, *pair(self.size), self.method)


@dataclasses.dataclass(frozen=True)
class InceptionCrop(RandomBox):
    """Crops a random box and resizes it to `size`, bilinear without antialiasing."""

    size: Size
    area: tuple[float, float] = (0.05, 1.0)
    ratio: tuple[float, float] = (0.75, 1.33)  # torchvision has (3/4, 4/3)
    method = "bilinear"

    def sample_box(self, rng: Rng, height: int, width: int) -> Box:
        """As TensorFlow's `sample_distorted_bounding_box` in the official code.

        The aspect ratio is uniform in `ratio`, then the height (not the area) among those within
        `area`, so small crops are frequent; after 100 rejected draws it is the whole image.
        """
        low, high = self.area[0] * height * width, self.area[1] * height * width
        for _ in range(100):
            aspect = rng.uniform(*self.ratio)
            highest = min(round(math.sqrt(high / aspect)), int((width + 0.5) / aspect), height)
            lowest = min(round(math.sqrt(low / aspect)), highest)
            box_height = int(rng.integers(lowest, highest, endpoint=True))
            box_width = round(box_height * aspect)
            # Rounding both sides can leave the range slightly: one row of pixels corrects it.
            if box_height * box_width < low:
                box_height += 1
            elif box_height * box_width > high:
                box_height -= 1
            box_width = round(box_height * aspect)
            fits = 0 < box_height <= height and 0 < box_width <= width
            if fits and low <= box_height * box_width <= high:
                top = int(rng.integers(0, height - box_height, endpoint=True))
                left = int(rng.integers(0, width - box_width, endpoint=True))
                return top, left, box_height, box_width
        return 0, 0, height, width


@dataclasses.dataclass(frozen=True)
class RandomArea(MovingOp):
    """Crops a random box of a share of the image's area, and `ratio` times its aspect ratio."""

    area: tuple[float, float] = (0.3, 1.0)
    ratio: tuple[float, float] = (0.75, 1.33)

    def __post_init__(self) -> None:
        check_range("area", self.area, 1.0)
        check_range("ratio", self.ratio)

    def move(self, image: np.ndarray, rng: Rng, _method: Method, _fill: float) -> np.ndarray:
        share, stretch = rng.uniform(*self.area), math.exp(rng.uniform(*np.log(self.ratio)))
        scales = math.sqrt(share / stretch), math.sqrt(share * stretch)
        sides = zip(image.shape[:2], scales, strict=True)
        height, width = (min(max(round(side * scale), 1), side) for side, scale in sides)
        spare = _margins(image, (height, width))
        top, left = (int(rng.integers(0, most, endpoint=True)) for most in spare)
        return crop(image, top, left, height, width)


@dataclasses.dataclass(frozen=True)
class FlipLr(MovingOp):
    """Mirrors left and right with probability one half."""

    def move(self, image: np.ndarray, rng: Rng, _method: Method, _fill: float) -> np.ndarray:
        return cv2.flip(image, 1).reshape(image.shape) if rng.random() < 0.5 else image


@dataclasses.dataclass(frozen=True)
class RandomAffine(MovingOp):
    """Rotates and shears within +-degrees about the centre, shifts within +-translate of a side."""

    degrees: float = 0.0
    translate: float = 0.0
    scale: tuple[float, float] = (1.0, 1.0)
    shear: float = 0.0

    def __post_init__(self) -> None:
        if min(self.degrees, self.translate, self.shear) < 0 or self.shear >= 90:
            raise ValueError(f"{self} must have degrees, translate and shear >= 0, shear < 90")
        check_range("scale", self.scale)

    def move(self, image: np.ndarray, rng: Rng, method: Method, fill: float) -> np.ndarray:
        height, width = image.shape[:2]
        turn, down, right, shear = rng.uniform(-1, 1, 4)
        scale, angle = rng.uniform(*self.scale), math.radians(turn * self.degrees)
        slant = math.tan(math.radians(shear * self.shear))
        cos, sin = scale * math.cos(angle), scale * math.sin(angle)
        linear = np.array([[cos, cos * slant + sin], [-sin, cos - sin * slant]])
        centre = np.array([(width - 1) / 2, (height - 1) / 2])
        shift = np.array([right * self.translate * width, down * self.translate * height])
        offset = centre - linear @ centre + shift
        matrix = np.concatenate([linear, offset[:, None]], axis=1)  # [2, 3]
        flags = cv2.INTER_LINEAR if method == "bilinear" else cv2.INTER_NEAREST
        border: Any = {"flags": flags, "borderValue": (fill,) * 4}
        return cv2.warpAffine(image, matrix, (width, height), **border).reshape(image.shape)


@dataclasses.dataclass(frozen=True)
class ValueRange(ScalingOp):
    """uint8 [0, 255] -> float32 [low, high]; four times the bytes to transfer."""

    low: float = -1.0
    high: float = 1.0

    def apply(self, image: np.ndarray, _rng: Rng) -> np.ndarray:
        if image.dtype != np.uint8:
            raise ValueError(f"{self} takes uint8, not {image.dtype}: scale the values only once")
        scale = np.float32((self.high - self.low) / 255)
        return image.astype(np.float32) * scale + np.float32(self.low)


@dataclasses.dataclass(frozen=True)
class Normalize(ScalingOp):
    """uint8 -> float32 (image / 255 - mean) / std, with one number or one per channel."""

    mean: float | tuple[float, float, float]
    std: float | tuple[float, float, float]

    def __post_init__(self) -> None:
        if np.min(self.std) <= 0:
            raise ValueError(f"std={self.std!r} must be positive")

    def apply(self, image: np.ndarray, _rng: Rng) -> np.ndarray:
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        channels = image.shape[-1]
        if image.ndim == 2 and channels % 3 == 0:  # patches, each pixel by pixel
            mean, std = (np.resize(x, channels) if x.size == 3 else x for x in (mean, std))
        if image.dtype != np.uint8 or max(mean.size, std.size) not in (1, channels):
            raise ValueError(f"{self} takes uint8, a channel per number, not {describe(image)}")
        return (image / np.float32(255) - mean) / std


_MOST_LENGTHS = 5  # a program for each


@dataclasses.dataclass(frozen=True)
class Patchify(Op):
    """Resizes to at most `num_tokens` patches, nearly keeping the aspect ratio, and cuts them out.

    As SigLIP 2's NaFlex (2502.14786, section 2.4; transformers' `Siglip2ImageProcessor`): both
    sides are whole patches, and small images are enlarged. The image becomes uint8 [N, p * p * C],
    patches line by line and then zeros, and the example gets `grid`, its rows and columns. Of
    several numbers each batch of the training draws one; evaluations take the first.
    """

    num_tokens: int | tuple[int, ...]
    patch_size: int = 16
    method: Method = "pillow_bilinear"
    moves = True

    def __post_init__(self) -> None:
        check_sides(patch_size=self.patch_size)
        if not 1 <= len(self.lengths) <= _MOST_LENGTHS or min(self.lengths) < 1:
            most = f"a positive number, or up to {_MOST_LENGTHS} of them"
            raise ValueError(f"num_tokens={self.num_tokens!r} must be {most}")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of tokens of a batch's rows."""
        return self.num_tokens if isinstance(self.num_tokens, tuple) else (self.num_tokens,)

    @property
    def square(self) -> tuple[int, int]:
        """Rows and columns of the largest square."""
        side = math.isqrt(self.lengths[0])
        return side, side

    def __call__(self, example: Example, _rng: Rng) -> Example:
        image, size, most = example["image"], self.patch_size, self.lengths[0]
        if maps := MAPS.keys() & example.keys():
            raise UserError(f"preprocess: {self} has no patches of {min(maps)}.")
        rows, columns = grid_within(most, size, *image.shape[:2])
        image = resize(image, rows * size, columns * size, self.method)
        cells = image.reshape(rows, size, columns, size, -1).swapaxes(1, 2)
        patches = cells.reshape(rows * columns, -1)  # [h * w, p * p * C]
        patches = np.pad(patches, ((0, most - len(patches)), (0, 0)))
        return {**example, "image": patches, "grid": np.array([rows, columns], np.int32)}


@functools.lru_cache(maxsize=2**16)
def grid_within(most: int, size: int, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the largest image of that aspect ratio with at most so many patches.

    Both sides are rounded up to whole patches; bisection of the scale as in transformers.
    """
    low, high, tolerance, grid = 1e-6, 100.0, 1e-5, (1, 1)
    while high - low >= tolerance:
        scale = (low + high) / 2
        rows, columns = (max(math.ceil(side * scale / size), 1) for side in (height, width))
        if rows * columns <= most:
            low, grid = scale, (rows, columns)
        else:
            high = scale
    return grid
