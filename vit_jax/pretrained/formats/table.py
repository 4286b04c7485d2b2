"""The weight formats as one table: how each is recognised, read and written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.files.atomic import write_arrays, write_json
from vit_jax.models.create import MODELS
from vit_jax.pretrained.files.array_file import Container, read_arrays
from vit_jax.pretrained.files.safetensors import write_safetensors
from vit_jax.pretrained.fit.mismatch import BIT_STEM_KERNEL, image_kernel
from vit_jax.pretrained.formats import big_transfer, google, huggingface, timm, timm_config
from vit_jax.pretrained.formats.pytorch import Settings, known_heads, with_learned_positions
from vit_jax.pretrained.formats.rows import Row, match_rows, read_match, write_match
from vit_jax.pretrained.formats.stored import Stored
from vit_jax.workdir.description import Description, InputSettings

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
# Constants that PyTorch modules carry along.
_BUFFERS = ("num_batches_tracked", "relative_position_index", "position_ids")


@dataclasses.dataclass(frozen=True)
class Format:
    """One way to write parameters.

    Attributes:
      is_folder: whether it is a folder with weights and configuration, or one file.
      writer: (path, flat parameters, description, input settings) -> the files written.
      kinds: of `MODELS` that it has a place for.
    """

    is_folder: bool
    writer: Callable[[Path, dict[str, np.ndarray], Description, InputSettings], list[Path]]
    kinds: tuple[str, ...]

    def write(
        self,
        path: Path,
        params: dict[str, np.ndarray],
        description: Description,
        inputs: InputSettings,
    ) -> list[Path]:
        """Writes a model; UserError for a kind that the format has no place for."""
        kind = description.model["name"]
        if kind not in self.kinds:
            able = [name for name, row in FORMATS.items() if kind in row.kinds]
            raise UserError(
                f"this format has no place for a model of model.name={kind!r}; --format="
                f"{', '.join(able)} or orbax have."
            )
        return self.writer(path, params, description, inputs)


def recognise(container: Container) -> str:
    """`google`, `big_transfer`, `timm` or `huggingface`, by the names in the file.

    Raises:
      UserError: names of no known model.
    """
    names = set(container.arrays)
    if google.find_prefix(names) is not None:
        return "google"
    if big_transfer.is_big_transfer(names):
        return "big_transfer"
    if huggingface.find_prefix(names) is not None:
        return "huggingface"
    if timm_config.is_timm(names):
        return "timm"
    shown = ", ".join(list(container.arrays)[:4])
    raise UserError(
        f"{container.path} holds {len(names)} arrays ({shown}, ...), whose names are those of no "
        "Vision Transformer or ResNet known here: Google's .npz, BiT, big_vision, timm, Hugging "
        "Face ViT or DeiT."
    )


def read_container(
    container: Container,
    *,
    settings: dict[str, Any] | None = None,
    preprocessor: dict[str, Any] | None = None,
    num_heads: int | None = None,
    default_heads: int | None = None,
    grid: tuple[int, int] | None = None,
) -> Stored:
    """Reads a file of any format into our names.

    Args:
      container: the open file.
      settings: the `config.json` beside it, if there is one.
      preprocessor: the `preprocessor_config.json` beside it, if there is one.
      num_heads: of the attention, which files of PyTorch do not tell; None asks `settings`, then
        the table of known sizes, then `default_heads`.
      default_heads: see there.
      grid: rows and columns of the file's tokens, where they are no square.

    Raises:
      UserError: see the readers.
    """
    kind = recognise(container)
    try:
        if kind == "google":
            stored = google.read_google(container, grid=grid)
        elif kind == "big_transfer":
            stored = big_transfer.read_big_transfer(container)
        elif kind == "huggingface":
            told = huggingface.read_settings(settings or {}, preprocessor or {})
            heads = _choose_heads(container, num_heads, told.num_heads, default_heads)
            stored = _read_huggingface(container, told, heads)
        else:
            told = timm_config.read_settings(settings or {})
            heads = _choose_heads(container, num_heads, told.num_heads, default_heads)
            stored = _read_timm(container, told, heads)
        for name, array in stored.params.items():
            if array.dtype != np.float32:
                raise UserError(f"{name} has type {array.dtype}; parameters are floats.")
    except UserError as error:
        if str(container.path) in str(error):
            raise
        raise UserError(f"{container.path}: {error}") from error
    return stored


def _choose_heads(
    container: Container, asked: int | None, told: int | None, default: int | None
) -> int:
    """Raises UserError if nothing tells, or if what is asked for is not what the file says."""
    if asked and told and asked != told:
        raise UserError(f"num_heads={asked}, but {CONFIG_FILE} says {told}; leave it out.")
    heads = asked or told or known_heads(container) or default
    if heads is None:
        raise UserError(
            "nothing tells the number of attention heads, and its width is that of no size known "
            "here; give it (num_heads, --num_heads)."
        )
    return heads


def _read_rows(
    container: Container, rows: tuple[Row, ...], told: Settings, num_heads: int, name: str
) -> Stored:
    """Arrays by a table of rows, and what the files beside them say."""
    matches, left = match_rows(rows, container.arrays, side="theirs")
    dropped = {n: "a constant, no parameter" for n in left if n.split(".")[-1] in _BUFFERS}
    stored = Stored(
        name,
        {},
        dropped,
        tuple(n for n in left if n not in dropped),
        conventions=told.conventions,
        image_size=told.image_size,
        class_names=told.class_names,
        eval_preprocess=told.eval_preprocess,
    )
    found = read_arrays(container, [theirs for match in matches for theirs in match.theirs])
    for match in matches:
        arrays = tuple(found.pop(theirs) for theirs in match.theirs)
        try:
            stored.params.update(read_match(match, arrays, num_heads))
            for theirs in match.theirs:
                if (dtype := container.arrays[theirs].dtype) != "float32":
                    stored.changed |= dict.fromkeys(match.ours, f"{dtype} as float32")
        except (ValueError, IndexError) as error:
            shapes = ", ".join(f"{n} {a.shape}" for n, a in zip(match.theirs, arrays, strict=True))
            raise UserError(f"{shapes} cannot be {', '.join(match.ours)}: {error}.") from error
    return stored


def _read_huggingface(container: Container, told: Settings, num_heads: int) -> Stored:
    prefix = huggingface.find_prefix(container.arrays)
    assert prefix is not None
    refactored = any(n.startswith(f"{prefix}layers.") for n in container.arrays)
    # A DeiT fine-tuned with one head is a ViT but for its name.
    if prefix == "deit." and "classifier.weight" in container.arrays:
        raise UserError(
            "a DeiTForImageClassification, whose only head stands on the class token beside a "
            "distillation token, is no model of ours; DeiTForImageClassificationWithTeacher is."
        )
    rows = huggingface.rows(prefix=prefix, refactored=refactored)
    stored = _read_rows(container, rows, told, num_heads, "huggingface")
    for name in ("pre_logits/kernel", "pre_logits/bias"):
        if name in stored.params and {"head/kernel", "dist"} & stored.params.keys():
            del stored.params[name]
            stored.dropped[name] = "the pooler, which stands beside the head and not before it"
    return stored


def _read_timm(container: Container, told: Settings, num_heads: int) -> Stored:
    rows = timm.rows(stem_only="patch_embed.backbone.conv.weight" in container.arrays)
    stored = _read_rows(container, rows, told, num_heads, "timm")
    timm_config.check_supported(stored, told.pooling)
    return stored


def to_names(
    rows: tuple[Row, ...], params: dict[str, np.ndarray], name: str
) -> dict[str, np.ndarray]:
    """Our flat names -> theirs, contiguous.

    Raises:
      UserError: a parameter that the format has no name for.
    """
    matches, left = match_rows(rows, params, side="ours")
    if left:
        raise UserError(f"--format={name} has no place for {', '.join(left)}.")
    arrays: dict[str, np.ndarray] = {}
    for match in matches:
        arrays.update(write_match(match, tuple(params[ours] for ours in match.ours)))
    return {n: np.ascontiguousarray(a) for n, a in arrays.items()}


def _write_plain(
    path: Path, params: dict[str, np.ndarray], description: Description, inputs: InputSettings
) -> list[Path]:
    return [write_arrays(path, params)]


def _write_published(
    path: Path, params: dict[str, np.ndarray], description: Description, inputs: InputSettings
) -> list[Path]:
    if image_kernel(params) == BIT_STEM_KERNEL:
        return [write_arrays(path, to_names(big_transfer.ROWS, params, "npz_published"))]
    return [write_arrays(path, google.to_published(params))]


def _write_big_vision(
    path: Path, params: dict[str, np.ndarray], description: Description, inputs: InputSettings
) -> list[Path]:
    return [write_arrays(path, google.to_big_vision(params))]


def _write_timm(
    path: Path, params: dict[str, np.ndarray], description: Description, inputs: InputSettings
) -> list[Path]:
    config = timm_config.to_config(params, description, inputs)
    params = with_learned_positions(params, description)
    rows = timm.rows(stem_only=description.model["resnet_layers"] == ())
    return _write_folder(path, to_names(rows, params, "timm"), {CONFIG_FILE: config})


def _write_huggingface(
    path: Path, params: dict[str, np.ndarray], description: Description, inputs: InputSettings
) -> list[Path]:
    settings = {
        CONFIG_FILE: huggingface.to_config(description),
        PREPROCESSOR_FILE: huggingface.to_preprocessor(inputs),
    }
    params = with_learned_positions(params, description)
    if "pre_logits/kernel" in params and "head/kernel" in params:
        raise UserError(
            "--format=huggingface has no layer between pooling and head: a model with pre_logits "
            "can be written without its head (--drop_head), as a ViTModel whose pooler it is."
        )
    prefix = f"{description.model['name']}."  # as transformers calls them too
    arrays = to_names(huggingface.rows(prefix=prefix, refactored=False), params, "huggingface")
    if not description.model["num_classes"]:  # the bare model
        arrays = {n.removeprefix(prefix): a for n, a in arrays.items()}
    return _write_folder(path, arrays, settings)


def _write_folder(
    path: Path, arrays: dict[str, np.ndarray], settings: dict[str, dict[str, Any]]
) -> list[Path]:
    path.mkdir(parents=True, exist_ok=True)
    write_safetensors(path / WEIGHTS_FILE, arrays, {"format": "pt"})
    for name, value in settings.items():
        write_json(path / name, value)
    return [path / WEIGHTS_FILE, *(path / name for name in settings)]


def lost_conventions(name: str, description: Description) -> list[str]:
    """What a reader of the format other than ours will not know of the model, in sentences."""
    if "gelu" not in description.model:
        return []  # a ResNet has none of what follows
    gelu, epsilon = (description.model[key] for key in ("gelu", "layer_norm_epsilon"))
    notes = []
    if name in ("npz_published", "big_vision", "npz") and gelu != "tanh":
        notes.append(f"gelu={gelu} is said beside the file only; Google's code computes tanh.")
    if name in ("npz_published", "big_vision", "npz", "timm") and epsilon != 1e-6:
        notes.append(f"layer_norm_epsilon={epsilon:g} has no place in this format (1e-6).")
    classifier, positions = description.model["classifier"], description.model["position_embedding"]
    if name == "npz_published" and classifier == "map":
        notes.append("The official code has no attention pooling; big_vision has.")
    if name in ("npz", "npz_published", "big_vision") and classifier.endswith("unpooled"):
        notes.append(f"classifier={classifier} is said beside the file only.")
    if name == "big_vision" and (classifier == "token" or positions == "sincos2d"):
        notes.append("timm reads big_vision's files without class token, with learned positions.")
    if name in ("timm", "huggingface") and positions == "sincos2d":
        notes.append("The fixed positions are written as learned ones: this format has no others.")
    if name == "huggingface" and len(set(description.class_names)) < len(description.class_names):
        notes.append("Classes of one name share an entry of label2id; id2label has them all.")
    return notes


def read_json_beside(path: Path, name: str) -> dict[str, Any]:
    """The JSON object called `name` in the folder of `path`; {} where there is none."""
    file = path.parent / name
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged, not a JSON file: {error}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{file} holds no JSON object.")
    return value


FORMATS: dict[str, Format] = {
    "npz": Format(False, _write_plain, kinds=tuple(MODELS)),
    "npz_published": Format(False, _write_published, kinds=("vit", "bit")),
    "big_vision": Format(False, _write_big_vision, kinds=("vit", "bit")),
    "timm": Format(True, _write_timm, kinds=("vit", "deit")),
    "huggingface": Format(True, _write_huggingface, kinds=("vit", "deit")),
}
