"""`glyphs`, data for pre-training: letters and digits drawn from the fonts shipped with matplotlib.

Example i is a pure function of (seed, i): a font, a character and random distortions. They resemble
the scans of `digits`: bright strokes on black that fill the height of the image. A glyph is stored
as a signed distance field of its outline: warping the field and thresholding it at a random level
gives smooth edges at any stroke width (0.1 ms per example and core up to 32 pixels). Other
versions of matplotlib, Pillow, OpenCV or numpy may change pixels by one grey level.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from vit_jax.data.pipeline import example_rng
from vit_jax.data.preprocess import evaluate_calls
from vit_jax.data.sources import Request, SlicedSource
from vit_jax.errors import import_extra

# Glyphs have equal height: characters that differ only in size or typeface share a class.
_CHARACTERS = (
    "0Oo 1 2 3 4 5 6 7 8 9 A a B b Cc D d E e F f G g H h Il i "
    "J j Kk L M m N n Pp Q q R r Ss T t Uu Vv Ww Xx Y y Zz"
)
CLASSES: tuple[str, ...] = tuple(_CHARACTERS.split())
# Letters that look like none of the above, nor like each other.
_GREEK_CYRILLIC = "Γ Δ Θ Λ Ξ Π Σ Φ Ψ Ω α β γ δ ε ζ η λ μ ξ σ τ φ ω "  # noqa: RUF001
_GREEK_CYRILLIC += "Б Д Ж И Л Ц Ч Ш Щ Ъ Ы Ь Э Ю Я Ђ"  # noqa: RUF001


class Face(NamedTuple):
    """A font file, and the characters it has at the code points of `0`, `A` and `a`."""

    file: str
    starts: str = "0Aa"

    def character(self, char: str) -> str:
        if not char.isascii():
            return char
        first = "0" if char.isdigit() else "A" if char.isupper() else "a"
        return chr(ord(self.starts["0Aa".index(first)]) + ord(char) - ord(first))


def _family(name: str, *styles: str) -> tuple[Face, ...]:
    return tuple(Face(f"{name}{style}.ttf") for style in styles)


# By family: all weights and slants of one design, so that no design is in both splits.
TRAIN_FAMILIES: tuple[tuple[Face, ...], ...] = (
    _family("DejaVuSans", "", "-Bold", "-Oblique", "-BoldOblique"),
    _family("DejaVuSansMono", "", "-Bold", "-Oblique", "-BoldOblique"),
    _family("DejaVuSerif", "", "-Bold", "-Italic", "-BoldItalic"),
    _family("STIXGeneral", "", "Bol", "Italic", "BolIta"),
    (  # STIX's mathematical sans-serif, regular and bold
        Face("STIXGeneral.ttf", "\U0001d7e2\U0001d5a0\U0001d5ba"),
        Face("STIXGeneral.ttf", "\U0001d7ec\U0001d5d4\U0001d5ee"),
    ),
    (Face("STIXGeneral.ttf", "\U0001d7f6\U0001d670\U0001d68a"),),  # its typewriter
)
TEST_FAMILIES = (_family("cm", "r10", "b10", "ti10", "ss10", "tt10"),)  # Computer Modern
# Classes, and families to train and to test with, by alphabet. Of the above only DejaVu and STIX
# have other alphabets.
ALPHABETS = {
    "latin": (CLASSES, TRAIN_FAMILIES, TEST_FAMILIES),
    "greek_cyrillic": (tuple(_GREEK_CYRILLIC.split()), TRAIN_FAMILIES[:3], TRAIN_FAMILIES[3:4]),
}

# The random distortions. Lengths are fractions of the image's side, ranges are uniform. Tuned by
# eye and by how well an SVM trained on drawn digits does on the first 600 scans (not the test's).
ROTATION = np.deg2rad(10.0)  # maximum, either sign
SHEAR = 0.15  # maximum, either sign
SHIFT = 0.04  # maximum, either sign, per axis
HEIGHT = (0.85, 1.02)
ASPECT = 0.25  # the width varies by a factor exp(+-ASPECT)
TYPICAL_ASPECT = 0.6  # width / height of a scan ...
NARROWING = 0.35  # ... and how far a glyph's aspect ratio may move towards it (exponent)
HALF_STROKE = (0.05, 0.1)
MAX_THINNING = 0.35  # of the font's stroke: more would erase a bold serif's hairlines
WOBBLE = 0.04  # standard deviation of the displacement of a 4 x 4 net over the image

FIELD_GLYPH = 64  # longer side of a glyph in its distance field, cells
FIELD_MARGIN = 16  # around it, cells
FIELD_UNIT = 128  # stored steps per cell
FINE = 4  # pixels per cell and axis in the bitmap that the field is computed from
MIN_CANVAS = 32  # smaller images are downscaled from this canvas


class Field(NamedTuple):
    """Signed distance field of a glyph, in cells of the field."""

    distance: np.ndarray  # int16 [96, 96], positive inside, in steps of 1 / FIELD_UNIT
    height: float  # of the glyph's bounding box, centred
    width: float
    half_stroke: float  # mean distance from the middle of a stroke to its edge


@functools.cache  # at most 1,500 fields of 18 kB per process; workers draw their own
def _field(face: Face, char: str) -> Field:
    drawing = _drawing(face, char)
    scale = FINE * FIELD_GLYPH / max(drawing.shape)
    height, width = (max(1, round(side * scale)) for side in drawing.shape)
    drawing = cv2.resize(drawing, (width, height), interpolation=cv2.INTER_LINEAR)
    side = FINE * (FIELD_GLYPH + 2 * FIELD_MARGIN)
    outside = np.ones((side, side), np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    outside[top : top + height, left : left + width] = drawing <= 127
    distance = np.negative(cv2.distanceTransform(outside, cv2.DIST_L2, 5))
    around = slice(top - 2, top + height + 2), slice(left - 2, left + width + 2)  # of the strokes
    distance[around] += cv2.distanceTransform(1 - outside[around], cv2.DIST_L2, 5)
    # Pixels on both sides of the outline have distance 1; it is twice as long as the stroke.
    outline = np.count_nonzero(np.abs(distance) <= 1) / 2
    half_stroke = np.count_nonzero(outside == 0) / outline / FINE
    cells = cv2.resize(distance, (side // FINE, side // FINE), interpolation=cv2.INTER_AREA) / FINE
    cells = np.round(cells * FIELD_UNIT).astype(np.int16)
    return Field(cells, height / FINE, width / FINE, half_stroke)


def _drawing(face: Face, char: str) -> np.ndarray:
    """The character cropped to its bounding box, uint8 [H, W], strokes 255."""
    from PIL import Image, ImageDraw

    font = _font(face.file)
    text = face.character(char)
    left, top, right, bottom = font.getbbox(text)
    image = Image.new("L", (int(right - left) + 2, int(bottom - top) + 2))
    ImageDraw.Draw(image).text((1 - left, 1 - top), text, font=font, fill=255)
    drawing = np.asarray(image)
    rows, columns = np.nonzero(drawing > 127)
    return drawing[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]


@functools.cache  # 21 files of 6.5 MB together
def _font(name: str) -> Any:
    from PIL import ImageFont

    matplotlib = import_extra("dataset.name='glyphs'", "matplotlib", "embedded")
    path = Path(matplotlib.get_data_path(), "fonts", "ttf", name)
    with path.open("rb") as file:  # given a path, Pillow would search system fonts too
        return ImageFont.truetype(file, FINE * FIELD_GLYPH)


@dataclasses.dataclass(frozen=True)
class GlyphSource:
    """`source[i]`: `image` uint8 [size, size, 1], `label` i % num_classes, `caption` its name."""

    classes: tuple[str, ...]
    families: tuple[tuple[Face, ...], ...]  # each drawn equally often
    size: int
    num_examples: int
    seed: int  # for all randomness; two seeds share no image

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> dict[str, Any]:
        label = index % len(self.classes)
        rng = example_rng(self.seed, index)
        family = _pick(self.families, rng)
        field = _field(_pick(family, rng), _pick(self.classes[label], rng))
        image = _render(field, self.size, rng)[:, :, None]  # [S, S, 1]
        return {"image": image, "label": label, "caption": self.classes[label]}


def _pick(items: Any, rng: np.random.Generator) -> Any:
    return items[int(rng.random() * len(items))]


def _render(field: Field, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draws a glyph with random distortions, uint8 [size, size]."""
    canvas = size * -(-MIN_CANVAS // size)
    x, y, cells_per_pixel = _sample_points(field, canvas, rng)
    distance = cv2.remap(field.distance, x, y, cv2.INTER_LINEAR, None, cv2.BORDER_REPLICATE)
    # In pixels of the canvas.
    distance = distance.astype(np.float32) / np.float32(FIELD_UNIT * cells_per_pixel)
    own = field.half_stroke / cells_per_pixel
    distance += max(rng.uniform(*HALF_STROKE) * canvas - own, -MAX_THINNING * own)
    # The edge fades from black to white over one pixel.
    image = (np.clip(distance + 0.5, 0.0, 1.0) * 255).astype(np.uint8)
    return cv2.resize(image, (size, size), interpolation=cv2.INTER_AREA)


def _sample_points(
    field: Field, canvas: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, float]:
    """x and y in the field of each canvas pixel, float32 [S, S]; mean cells per pixel."""
    height = rng.uniform(*HEIGHT) * canvas
    blend = NARROWING * rng.random()
    aspect = (field.width / field.height) ** (1 - blend) * TYPICAL_ASPECT**blend
    width = min(height * aspect * np.exp(rng.uniform(-ASPECT, ASPECT)), canvas)
    angle, shear, right, down = rng.uniform(-1, 1, 4) * (ROTATION, SHEAR, SHIFT, SHIFT)
    stretch_x, stretch_y = field.width / width, field.height / height
    cos, sin = np.cos(angle), np.sin(angle)
    # The inverse of: scale the glyph, shear it, rotate it, shift it.
    to_field = np.array([[stretch_x, 0], [0, stretch_y]]) @ [[1, shear], [0, 1]]
    to_field = (to_field @ [[cos, sin], [-sin, cos]]).astype(np.float32)  # [2, 2]

    pixels = np.arange(canvas, dtype=np.float32) - np.float32((canvas - 1) / 2)
    across = (pixels - np.float32(right * canvas))[None, :]  # [1, S]
    along = (pixels - np.float32(down * canvas))[:, None]  # [S, 1]
    net = rng.standard_normal((4, 4, 2), np.float32) * np.float32(WOBBLE * canvas)
    wobble = cv2.resize(net, (canvas, canvas), interpolation=cv2.INTER_CUBIC)  # [S, S, 2]
    centre = np.float32((FIELD_GLYPH + 2 * FIELD_MARGIN - 1) / 2)
    x = to_field[0, 0] * across + to_field[0, 1] * along + centre
    y = to_field[1, 0] * across + to_field[1, 1] * along + centre
    x += wobble[:, :, 0] * np.float32(stretch_x)
    y += wobble[:, :, 1] * np.float32(stretch_y)
    return x, y, float(np.sqrt(stretch_x * stretch_y))


def open_glyphs(request: Request) -> tuple[SlicedSource, tuple[str, ...]]:
    """Returns source and class names of `glyphs` or `glyphs(size=32, ...)`, see `glyph_splits`."""
    [splits] = evaluate_calls("dataset.name", request.name, {"glyphs": glyph_splits})
    return SlicedSource(splits, request.split), splits["train"].classes


def glyph_splits(
    *,
    size: int = 32,
    num_examples: int = 100_000,
    num_test: int = 5_000,
    seed: int = 0,
    alphabet: str = "latin",
) -> dict[str, GlyphSource]:
    """`train`, and `test` in a typeface that is not in `train`; `size` is in pixels.

    `alphabet`: `latin` or `greek_cyrillic`, 50 and 40 classes.
    """
    if not 4 <= size <= 1024 or min(num_examples, num_test) < 1 or seed < 0:
        raise ValueError("size must be 4 to 1024, counts positive, seed >= 0")
    if alphabet not in ALPHABETS:
        raise ValueError(f"alphabet={alphabet!r} must be one of {', '.join(ALPHABETS)}")
    classes, train, test = ALPHABETS[alphabet]
    return {
        "train": GlyphSource(classes, train, size, num_examples, 2 * seed),
        "test": GlyphSource(classes, test, size, num_test, 2 * seed + 1),
    }
