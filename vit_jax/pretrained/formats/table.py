"""The weight formats as one table: how each is detected, read and written."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.ops import CentralCrop
from vit_jax.errors import UserError, naming
from vit_jax.files.paths import read_object, reading, write_arrays, write_json
from vit_jax.models.create import MODELS
from vit_jax.models.description import Description, InputSettings
from vit_jax.models.tokens import sincos2d
from vit_jax.models.vit import POSITIONS
from vit_jax.pretrained.arrays import write_safetensors
from vit_jax.pretrained.formats import (
    google,
    huggingface,
    huggingface_write,
    stored,
    text_towers,
    timm,
    timm_others,
    timm_write,
    translations,
)
from vit_jax.pretrained.formats.huggingface_config import PREPROCESSOR, read_processor
from vit_jax.pretrained.formats.names import numbers
from vit_jax.pretrained.formats.stored import Arrays, Beside, Holds, Stored
from vit_jax.pretrained.formats.vit_parts import DECODER_HEADS
from vit_jax.pretrained.infer import num_prefix_tokens
from vit_jax.wording import list_names

# Whether arrays, or this part of them, are of a naming scheme; and its reader.
Detect = Callable[[Arrays, str], bool]
Read = Callable[[Arrays, Beside], Stored]


class Format(NamedTuple):
    """How a format is recognised and read, and which models it holds."""

    readers: tuple[tuple[Detect, Read], ...]
    holds: tuple[Holds, ...]
    is_folder: bool = False

    def choose(self, model: Mapping[str, Any]) -> Holds:
        """The class for a model with these attributes; UserError if the format cannot store it."""
        of_kind = [holds for holds in self.holds if holds.wrong(model) != ["name"]]
        nearest = min(of_kind or self.holds, key=lambda holds: len(holds.wrong(model)))
        wrong = nearest.wrong(model)
        if not wrong:
            return nearest
        text = ", ".join(f"model.{key}={model[key]!r}" for key in wrong)
        if nearest.name:
            text += f": {nearest.name}, the nearest class, has other values"
        elif wrong != ["name"]:
            text += f", only {', '.join(map(repr, nearest.values[wrong[0]]))}"
        able = [name for name, row in FORMATS.items() if not all(h.wrong(model) for h in row.holds)]
        formats = ", ".join(able)
        raise UserError(f"this format cannot store {text}; use --format={formats} or orbax.")

    def write(
        self, path: Path, params: Arrays, description: Description, inputs: InputSettings | None
    ) -> Path:
        """Writes a model and returns the weight file; UserError: the format cannot store it."""
        write = self.choose(description.model).write
        if not self.is_folder:
            return write_arrays(path, write(params))
        # Folder formats of others only have learned positions.
        if description.model.get("position_embedding") == "sincos2d":
            table = sincos2d(description.grid, description.model["hidden_size"])
            padding = ((0, 0), (num_prefix_tokens(params, description.model["name"]), 0), (0, 0))
            params = {**params, POSITIONS: np.pad(table, padding)}  # [1, P + h*w, D]
        arrays, settings = write(params, description, inputs)
        path.mkdir(parents=True, exist_ok=True)
        write_safetensors(path / stored.WEIGHTS_FILE, arrays, {"format": "pt"})
        for name, value in settings.items():
            write_json(path / name, value)
        return path / stored.WEIGHTS_FILE


# Recognised in this order. Names that are only others for those of these: `translations.py`.
FORMATS: dict[str, Format] = {
    # One reader tells Google's apart.
    "npz": Format(((google.detect, google.read),), google.NPZ),
    "npz_published": Format((), google.PUBLISHED),
    "big_vision": Format((), google.BIG_VISION),
    "timm": Format(
        ((timm.is_vit, timm.read_vit), (timm_others.detect, timm_others.read)),
        timm_write.TIMM + timm_others.OTHERS,
        is_folder=True,
    ),
    "huggingface": Format(
        ((huggingface.detect, huggingface.read), (text_towers.detect, text_towers.read)),
        huggingface_write.HUGGINGFACE + text_towers.TEXTS,
        is_folder=True,
    ),
}


def read_weights(path: Path, arrays: Arrays, **known: Any) -> Stored:
    """Arrays of a file of any format in our names; `known` are fields of `Beside`."""
    beside = Beside(*_read_settings(path, known.get("part", "")), **known)
    with naming(str(path)), reading("it"):  # also arrays of shapes that do not fit each other
        if beside.part == "txt" and "text_config" in beside.settings:
            text_towers.check_class(beside.settings)
        similarity = stored.similarity(arrays)
        found = _recognise(arrays, beside.part)
        if found.read is None:
            names = list_names(list(found.arrays), 4)
            raise UserError(f"{names}: names match no supported Vision Transformer or ResNet.")
        weights = found.read(found.arrays, beside)
        weights.similarity = similarity
        weights.posemb = found.posemb or weights.posemb
        if found.posemb == "dinov2" and not beside.settings:
            weights.ops, _ = read_processor({}, "dinov2", None)
        if found.posemb in ("dinov2", "bicubic"):  # they crop by torchvision
            for i, op in enumerate(weights.ops or ()):
                if weights.ops and isinstance(op, CentralCrop):
                    weights.ops[i] = dataclasses.replace(op, rounding="nearest")
        taken = MODELS[weights.kind].input
        is_text = taken == "text"
        if stored.TOWERS.get(beside.part, taken) != taken:
            wanted = stored.TOWERS[beside.part]
            raise UserError(f"it has no tower of {wanted}s ({beside.part!r}), only of {taken}s.")
        model_args = beside.settings.get("model_args") or {}
        stated = model_args.get("depth") or beside.settings.get("num_hidden_layers")
        depth = len(numbers(f"{MODELS[weights.kind].blocks}_{{}}/", weights.params))
        if stated and stated != depth:
            raise UserError(f"config.json has {stated} blocks, but the file has {depth}.")
        weights.dropped |= found.dropped
        if not beside.settings and FORMATS[weights.format].is_folder:
            weights.lacks, weights.assumed = "config.json", _guesses(weights, beside)
        elif weights.format == "huggingface" and not (beside.preprocessor or is_text):
            weights.lacks = PREPROCESSOR
    return weights


def _read_settings(path: Path, part: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a model and of its images beside a file, or what stands for them."""
    if path.name not in stored.FOLDER_FILES:
        return {}, {}

    def content(name: str) -> dict[str, Any]:
        file = path.parent / name
        return read_object(file) if file.is_file() else {}

    if path.name.startswith("open_clip"):
        settings = content(translations.OPEN_CLIP_CONFIG)
        return translations.open_clip_settings(settings, part) if settings else ({}, {})
    processor = content("processor_config.json")  # where transformers 5 looks first
    return content("config.json"), processor.get("image_processor") or content(PREPROCESSOR)


# Prefixes that libraries put before all names.
_WRAPPERS = ("_orig_mod", "module", "model", "backbone", "base_encoder", "encoder", "net")


class _Recognised(NamedTuple):
    """The arrays of a model in names of the table, what was dropped and why, and their reader."""

    arrays: Arrays
    dropped: dict[str, str]
    posemb: str  # of the library whose names were translated, or ""
    read: Read | None


def _recognise(arrays: Arrays, part: str) -> _Recognised:
    """A wrapper's prefix is common to all names, or the only of `_WRAPPERS` with a known model."""
    prefix, inside = "", arrays
    while (recognised := _translate(inside, part)).read is None:
        wrapped: dict[str, Arrays] = {}
        for name, array in inside.items():
            outer, _, inner = name.partition(".")
            wrapped.setdefault(outer, {})[inner] = array
        if len(wrapped) > 1:
            known = [name for name in _WRAPPERS if name in wrapped]
            wrapped = {n: wrapped[n] for n in known if _translate(wrapped[n], "").read}
        if len(wrapped) != 1 or "" in next(iter(wrapped.values())):
            return _translate(arrays, part)
        [(outer, inside)] = wrapped.items()
        prefix += f"{outer}."
    if prefix:
        logging.warning("Stripped the wrapper's prefix %r from all names.", prefix)
    outside = {n: "outside the model" for n in arrays if not n.startswith(prefix)}
    return recognised._replace(dropped=outside | recognised.dropped)


def _translate(arrays: Arrays, part: str) -> _Recognised:
    """As `_recognise`, of a model that is not wrapped."""
    dropped, posemb = dict[str, str](), ""
    for translate, resized in translations.TRANSLATORS.items():
        before = arrays
        arrays, others = translate(arrays)
        dropped |= others
        posemb = posemb if arrays is before else resized
    arrays, others = text_towers.choose_tower(arrays, part)
    dropped |= others
    readers = (reader for row in FORMATS.values() for reader in row.readers)
    read = next((read for detect, read in readers if detect(arrays, part)), None)
    return _Recognised(arrays, dropped, posemb, read)


def _guesses(weights: Stored, beside: Beside) -> list[str]:
    """What names and shapes do not show, without a config.json."""
    if not MODELS[weights.kind].blocks:
        return []
    guesses = []
    if (weights.num_heads or 1) > 1 and not beside.num_heads:
        guesses += [f"num_heads={weights.num_heads}"]
    if "mask_token" in weights.params:
        guesses += [f"decoder_num_heads={DECODER_HEADS}"]
    guesses += [f"{key}={value}" for key, value in weights.conventions.items()]
    if "cls" in weights.params and "classifier" not in weights.conventions:
        guesses += ["pooling by the class token"]
    return [*guesses, "pre-norm blocks"]
