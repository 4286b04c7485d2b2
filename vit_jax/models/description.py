"""What is needed to use a set of parameters; stored next to them as `model.json`."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np

HALF = (0.5, 0.5, 0.5)
# How Pillow resizes, antialiased but for "nearest", and its numbers for that.
PILLOW_METHODS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}


@dataclasses.dataclass(frozen=True)
class InputSettings:
    """`eval_preprocess` in the form in which other libraries store it."""

    method: str  # a key of `PILLOW_METHODS`
    resize: int | tuple[int, int] | None  # the short side, or (height, width) of the whole image
    crop: tuple[int, int] | None  # (height, width) of the center crop afterwards
    mean: Sequence[float] = HALF  # per channel, for pixels in [0, 1]; with `std` 0.5: [-1, 1]
    std: Sequence[float] = HALF
    covers: bool = False  # `resize` keeps the aspect ratio and covers (height, width)
    rounding: Literal["nearest", "down"] = "nearest"  # of the crop's corner
    patchify: Any = None  # `ops.Patchify`, of images in shapes of their own


@dataclasses.dataclass(frozen=True)
class Similarity:
    """The logit of an image and a text, of two towers trained together: scale * cosine + bias."""

    scale: float  # exp(logit_scale) of CLIP
    bias: float | None = None  # of SigLIP, whose probabilities are by sigmoid; CLIP's by softmax


@dataclasses.dataclass(frozen=True)
class Values:
    """What a model of numbers predicts: exp(mean + std * output) if `log`, else without exp."""

    names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    log: bool = False

    def of(self, outputs: np.ndarray) -> np.ndarray:
        """Outputs [..., K] to values."""
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        values = np.asarray(outputs, np.float32) * std + mean
        return np.exp(values) if self.log else values


@dataclasses.dataclass(frozen=True)
class Description:
    """Metadata of a set of parameters, written with it as JSON."""

    model: dict[str, Any]  # for `create_model`: `name`, sizes, `classifier`, `num_classes`, ...
    image_shape: tuple[int, ...]  # [H, W, C] of the images that the positions fit; texts: [T]
    grid: Any  # (rows, columns) of tokens, or of a ResNet's last feature map; None for texts
    class_names: tuple[str, ...]  # in the order of the logits; () if unknown
    eval_preprocess: str  # ops from an image file to the model's input, see data/preprocess.py
    probabilities_by: str = "softmax"  # or "sigmoid"; "none" if outputs are not classes
    similarity: Similarity | None = None  # of a tower's embedding, if its pair's is known
    values: Values | None = None  # of outputs that are numbers
    # Of the model that is loaded by default, if its parameters are resized to it: `grid` and
    # `model` are then of the parameters, see `models.flexible`.
    patch_size: int | None = None

    @property
    def position_grid(self) -> Any:
        """Rows and columns of the positions, if a model interpolates them in its call."""
        return tuple(self.model.get("position_grid") or ()) or self.grid

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """The inverse of `to_json`.

        Raises:
          ValueError, KeyError, TypeError: `value` is not an output of `to_json`.
        """
        model = dict(value["model"])
        layers = [n for key, n in model.items() if key.endswith("layers") and n is not None]
        layers = [n for value in layers for n in (value if isinstance(value, list) else [value])]
        if not all(0 <= count <= 10_000 for count in layers):  # a corrupt file would never finish
            raise ValueError(f"{layers} layers; the maximum is 10000")
        by = value["probabilities_by"]
        if by not in ("softmax", "sigmoid", "none"):
            raise ValueError(f"probabilities_by={by!r} must be softmax, sigmoid or none")
        shape = tuple(int(size) for size in value["image_shape"])
        grid = value["grid"] and tuple(int(size) for size in value["grid"])
        if (len(shape), grid and len(grid)) not in ((3, 2), (1, None)):
            raise ValueError(f"image_shape={shape} and grid={grid} fit neither images nor texts")
        return cls(
            model=model,
            image_shape=shape,
            grid=grid,
            class_names=tuple(str(name) for name in value["class_names"]),
            eval_preprocess=str(value["eval_preprocess"]),
            probabilities_by=by,
            similarity=Similarity(**pair) if (pair := value.get("similarity")) else None,
            values=Values(**{**numbers, "names": tuple(map(str, numbers["names"]))})
            if (numbers := value.get("values"))
            else None,
            patch_size=int(size) if (size := value.get("patch_size")) else None,
        )


# In `model.json`: names of parameters that belong to the training objective, not to a model.
OBJECTIVE_PARAMETERS = "objective_parameters"


def parts_to_json(
    descriptions: Mapping[str, Description], objective_parameters: Iterable[str] = ()
) -> dict[str, Any]:
    """Contents of `model.json` for models by prefix; a single model, "", is stored as it is."""
    others = {OBJECTIVE_PARAMETERS: names} if (names := list(objective_parameters)) else {}
    if list(descriptions) == [""]:
        return {**descriptions[""].to_json(), **others}
    parts = {prefix: description.to_json() for prefix, description in descriptions.items()}
    return {"parts": parts, **others}


def parts_from_json(value: Any) -> dict[str, Description]:
    """The inverse of `parts_to_json`; raises what `Description.from_json` does."""
    parts = value.get("parts", {"": value})
    return {str(prefix): Description.from_json(part) for prefix, part in parts.items()}
