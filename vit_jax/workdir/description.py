"""What a work directory holds: what one has to know of the parameters, and the results."""

from __future__ import annotations

import dataclasses
import logging
import os
import statistics
import zipfile
from typing import Any

import jax
import numpy as np

from vit_jax.errors import PassingError, UserError
from vit_jax.files.paths import read_object, set_aside, to_path, write_arrays, write_json
from vit_jax.models.create import MODELS, model_keys
from vit_jax.parameters.names import flatten_names, unstack_blocks
from vit_jax.workdir.metrics import read_metrics

# What a work directory holds.
CHECKPOINTS = "checkpoints"
MODEL_FILE = "model.json"  # a `Description`
PARAMETERS_FILE = "parameters.txt"
PARAMS_FILE = "params.npz"
RESULTS_FILE = "results.json"

HALF = (0.5, 0.5, 0.5)


@dataclasses.dataclass(frozen=True)
class InputSettings:
    """`eval_preprocess` in the terms in which other libraries store it.

    Attributes:
      method: `bilinear` or `bicubic`.
      resize: pixels of the short side, or (height, width) to which the whole image is scaled.
      crop: (height, width) cut from the middle afterwards, or None.
      mean, std: per channel, for pixels in [0, 1]; 0.5 and 0.5 give [-1, 1].
    """

    method: str
    resize: int | tuple[int, int]
    crop: tuple[int, int] | None
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF


MAX_LAYERS = 10_000


@dataclasses.dataclass(frozen=True)
class Description:
    """Goes with every set of parameters that we write, as JSON.

    Attributes:
      model: keyword arguments of `create_model`: `name`, sizes, `classifier`, `num_classes`, ...
      image_shape: [H, W, C] of the images that the position embeddings are for.
      grid: rows and columns of tokens; of a ResNet's last feature map, where there are none.
      class_names: one per class in the order of the logits; () where they are not known.
      eval_preprocess: ops from an image file to the model's input, see `data/preprocess.py`.
      probabilities_by: how logits become probabilities, `softmax` or `sigmoid`.
    """

    model: dict[str, Any]
    image_shape: tuple[int, int, int]
    grid: tuple[int, int]
    class_names: tuple[str, ...]
    eval_preprocess: str
    probabilities_by: str = "softmax"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Description:
        """The inverse of `to_json`.

        Raises:
          ValueError, KeyError, TypeError: `value` is not what `to_json` gives.
        """
        model = _own_keys(dict(value["model"]))
        layers = (model.get("num_layers") or 0, *(model.get("resnet_layers") or ()))
        if not all(0 <= each <= MAX_LAYERS for each in layers):
            raise ValueError(f"{layers} layers; at most {MAX_LAYERS} are built")
        by = value.get("probabilities_by", cls.probabilities_by)
        if by not in ("softmax", "sigmoid"):
            raise ValueError(f"probabilities_by={by!r} is neither softmax nor sigmoid")
        height, width, channels = (int(size) for size in value["image_shape"])
        rows, columns = (int(size) for size in value["grid"])
        return cls(
            model=model,
            image_shape=(height, width, channels),
            grid=(rows, columns),
            class_names=tuple(str(name) for name in value["class_names"]),
            eval_preprocess=str(value["eval_preprocess"]),
            probabilities_by=by,
        )

    def write(self, path: str | os.PathLike[str]) -> None:
        write_json(path, self.to_json())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Description:
        """Raises UserError where the file is missing, damaged or something else."""
        try:
            return cls.from_json(read_object(path))
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{path} does not describe a model ({error!r}); restore the file, or remove it "
                "and say the sizes yourself."
            ) from error


def _own_keys(model: dict[str, Any]) -> dict[str, Any]:
    """Without what other kinds of model have: older descriptions hold the keys of all kinds."""
    own = model_keys(model["name"])
    others = {key for kind in MODELS for key in model_keys(kind)} - set(own)
    return {key: value for key, value in model.items() if key not in others}


def write_params(path: str | os.PathLike[str], params: Any) -> None:
    """Writes a parameter tree (either form of the blocks) as `.npz`, float32, names as in Flax."""
    flat = flatten_names(unstack_blocks(params))
    write_arrays(path, {name: np.asarray(x, np.float32) for name, x in flat.items()})


def write_results(workdir: str, params: Any, results: dict[str, float]) -> dict[str, float]:
    """Writes `params.npz`, then `results.json`, whose existence means that the run has ended.

    Args:
      workdir: folder of the run.
      params: nested dict of host arrays.
      results: of the run; `images_per_second`, the median of its log, is added.

    Returns:
      What `results.json` holds.
    """
    rows = read_metrics(workdir)
    speeds = [row["images_per_second"] for row in rows if "images_per_second" in row]
    results = {"images_per_second": statistics.median(speeds) if speeds else 0.0, **results}
    if jax.process_index() == 0:
        folder = to_path(workdir)
        write_params(folder / PARAMS_FILE, params)
        write_json(folder / RESULTS_FILE, results)
        logging.info("Wrote %s.", folder / PARAMS_FILE)
    return results


def finished_results(workdir: str, total_steps: int) -> dict[str, float] | None:
    """What a run that has ended wrote; files that cannot be that are set aside."""
    path, params = to_path(workdir) / RESULTS_FILE, to_path(workdir) / PARAMS_FILE
    if not path.exists() or not params.exists():
        return None
    with params.open("rb") as file:
        whole = zipfile.is_zipfile(file)
    if not whole:
        set_aside(params, "is no file of parameters")
        return None
    try:
        results = read_object(path)
        if not all(type(value) in (int, float) for value in results.values()):
            raise UserError(f"{path} holds other values than numbers.")
    except PassingError:
        raise
    except UserError as error:
        set_aside(path, f"is none of a run's ({error})")
        return None
    return results if results.get("step") == total_steps else None
