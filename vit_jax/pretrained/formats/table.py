"""The weight formats as one table: how each is detected, read and written."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError, list_names
from vit_jax.files.paths import read_object, write_arrays, write_json
from vit_jax.models.description import Description, InputSettings
from vit_jax.models.tokens import sincos2d
from vit_jax.models.variants import SIZES
from vit_jax.models.vit import POSITIONS
from vit_jax.pretrained.arrays import write_safetensors
from vit_jax.pretrained.formats import (
    facebook,
    google,
    huggingface,
    huggingface_modern,
    huggingface_names,
    mae,
    open_clip,
    timm,
    timm_config,
    timm_mixer,
    timm_resnet,
)
from vit_jax.pretrained.formats.rows import block_numbers, numbers
from vit_jax.pretrained.formats.stored import OTHER_FILES, TORCH_FILE, WEIGHTS_FILE, Holds, Stored
from vit_jax.pretrained.infer import num_prefix_tokens

Params = dict[str, np.ndarray]


class Format(NamedTuple):
    """How to write flat parameters, by the kinds of `MODELS` that it can represent; None: all."""

    kinds: Mapping[str, Holds] | None
    is_folder: bool = False

    def holds(self, model: Mapping[str, Any]) -> Holds:
        """How a model with these attributes is written; UserError if the format cannot store it."""
        kind = model["name"]
        found = _own(model) if self.kinds is None else self.kinds.get(kind)
        if found is None:
            raise UserError(
                f"this format cannot store model.name={kind!r}; use {_formats_for(model)}."
            )
        for key, values in found.values.items():
            if model[key] not in values:
                raise UserError(
                    f"this format cannot store model.{key}={model[key]!r}, only "
                    f"{', '.join(map(repr, values))}; use {_formats_for(model)}."
                )
        return found

    def write(
        self, path: Path, params: Params, description: Description, inputs: InputSettings | None
    ) -> Path:
        """Writes a model and returns the weight file; UserError if the format cannot store it.

        `inputs` is only used for folders.
        """
        convert = self.holds(description.model).convert
        if not self.is_folder:
            return write_arrays(path, convert(params))
        # Folder formats of others only have learned positions.
        if description.model.get("position_embedding") == "sincos2d":
            table = sincos2d(description.grid, description.model["hidden_size"])
            padding = ((0, 0), (num_prefix_tokens(params, description.model["name"]), 0), (0, 0))
            params = {**params, POSITIONS: np.pad(table, padding)}  # [1, P + h*w, D]
        arrays, settings = convert(params, description, inputs)
        path.mkdir(parents=True, exist_ok=True)
        write_safetensors(path / WEIGHTS_FILE, arrays, {"format": "pt"})
        for name, value in settings.items():
            write_json(path / name, value)
        return path / WEIGHTS_FILE


def _own(model: Mapping[str, Any]) -> Holds:
    """Our own names, which the official code reads too; its conventions are in no JSON file."""
    assumed = {**google.ASSUMED, "position_embedding": "learned"}
    return Holds(dict, assumed={key: assumed[key] for key in assumed if key in model})


def _formats_for(model: Mapping[str, Any]) -> str:
    """The formats that can store a model."""
    able = []
    for name, row in FORMATS.items():
        holds = Holds(dict) if row.kinds is None else row.kinds.get(model["name"])
        if holds and all(model[key] in values for key, values in holds.values.items()):
            able.append(name)
    return f"--format={', '.join(able)} or orbax"


FORMATS: dict[str, Format] = {
    "npz": Format(None),
    "npz_published": Format(google.PUBLISHED),
    "big_vision": Format(google.BIG_VISION),
    "timm": Format(timm.TIMM | timm_mixer.TIMM_MIXERS | timm_resnet.TIMM_RESNETS, is_folder=True),
    "huggingface": Format(huggingface.HUGGINGFACE | huggingface_modern.MODERN, is_folder=True),
}


def read_weights(
    path: Path,
    arrays: Params,
    num_heads: int | None = None,
    default_heads: int | None = None,
    grid: tuple[int, int] | None = None,
    part: str = "",
) -> Stored:
    """Converts `arrays` of the file `path` to our names; detects the format by their names.

    If `num_heads` is None, it comes from the `config.json` beside the file, else the table of known
    sizes, else `default_heads`. `grid`, rows and columns of tokens, is needed if not square; `part`
    selects one of several models in the file.
    """
    in_folder = path.name.startswith((WEIGHTS_FILE, TORCH_FILE, *OTHER_FILES))
    names = ["config.json", "preprocessor_config.json"]
    if path.name.startswith("open_clip"):
        names = [open_clip.CONFIG, ""]
    files = (path.parent / file for file in names)
    settings, preprocessor = (read_object(f) if in_folder and f.is_file() else {} for f in files)
    if "model_cfg" in settings:
        settings, preprocessor = open_clip.settings_of(settings)
    try:
        heads = 0  # a ResNet has none, and names and shapes say all
        _reject_quantised(arrays)
        arrays, others = _unwrap(huggingface_names.from_flax(arrays), part)
        for translate in (facebook.to_timm, open_clip.to_others):
            arrays, dropped = translate(arrays)
            others |= dropped
        if google.find_prefix(arrays, part) is not None:
            stored = google.read_google(arrays, grid=grid, part=part)
        elif any(name.startswith("resnet/root_block/") for name in arrays):
            stored = google.read_big_transfer(arrays)
        elif huggingface_names.find_kind(arrays) is not None:
            stored = huggingface.begin(arrays, settings, preprocessor, num_heads)
            default_heads = default_heads or huggingface.likely_heads(arrays)
            heads = _choose_heads(arrays, num_heads, stored.num_heads, default_heads)
            huggingface.read_huggingface(stored, arrays, heads, settings)
        elif timm.is_timm(arrays):
            timm.check_names(arrays)
            stored = timm_config.read_settings(settings)
            stated = stored.num_heads or num_heads or timm.heads_by_name(arrays, settings)
            heads = _choose_heads(arrays, num_heads, stated, default_heads)
            timm.read_timm(stored, arrays, heads, settings, grid)
        elif timm_mixer.is_mixer(arrays):
            stored, heads = timm_config.read_settings(settings), 1
            timm_mixer.read_mixer(stored, arrays)
        elif timm_resnet.is_resnet(arrays):
            stored = timm_config.read_settings(settings)
            timm_resnet.read_resnet(stored, arrays)
        else:
            raise UserError(
                f"it holds {len(arrays)} arrays ({', '.join(list(arrays)[:4])}, ...), whose names "
                "match no supported Vision Transformer or ResNet: Google's .npz, BiT, "
                "big_vision, timm, transformers, open_clip, DINO, DINOv2."
            )
        model_args = settings.get("model_args") or {}
        stated = model_args.get("depth") or settings.get("num_hidden_layers")
        if stated and stated != (found := len(block_numbers(stored.params))):
            raise UserError(f"config.json has {stated} blocks, but the file has {found}.")
        stored.dropped |= others
        if heads and not settings and stored.format in ("timm", "huggingface"):
            _log_guesses(path, stored, "" if num_heads or heads == 1 else f"num_heads={heads}")
    except UserError as error:
        if str(path) in str(error):
            raise
        raise UserError(f"{path}: {error}") from error
    return stored


# Prefixes that libraries put before the names of a model they save.
_WRAPPERS = ("_orig_mod", "module", "model", "backbone", "base_encoder", "encoder", "net")


def _is_known(names: Collection[str], part: str = "") -> bool:
    is_bit = any(name.startswith("resnet/root_block/") for name in names)
    found = (google.find_prefix(names, part), huggingface_names.find_kind(names))
    is_timm = any((timm.is_timm(names), timm_mixer.is_mixer(names), timm_resnet.is_resnet(names)))
    return is_bit or is_timm or open_clip.is_open_clip(names) or found != (None, None)


def _unwrap(arrays: Params, part: str) -> tuple[Params, dict[str, str]]:
    """The arrays of a wrapped model, under its own names; and notes on the others.

    A wrapper's prefix is common to all names, or the only one of `_WRAPPERS` with a known model.
    """
    prefix, rest = "", arrays
    while not _is_known(rest, part):
        held: dict[str, Params] = {}
        for name, array in rest.items():
            outer, _, inner = name.partition(".")
            held.setdefault(outer, {})[inner] = array
        if len(held) > 1:
            held = {n: x for n, x in held.items() if n in _WRAPPERS and _is_known(x)}
        if len(held) != 1 or "" in next(iter(held.values())):
            return arrays, {}
        [(outer, rest)] = held.items()
        prefix += f"{outer}."
    if prefix:
        logging.warning("Stripped the wrapper's prefix %r from all names.", prefix)
    return rest, {n: "outside the model" for n in arrays if not n.startswith(prefix)}


_QUANTISED = re.compile(
    r".*\.(SCB|absmax|quant_map|q(weight|zeros)|weight_(scale|zero_point|packed).*|weight\.quant_.*)"
)


def _reject_quantised(arrays: Params) -> None:
    for name, array in arrays.items():
        is_small = array.dtype.itemsize == 1 and name.endswith((".weight", "/kernel"))
        if is_small or _QUANTISED.fullmatch(name):
            raise UserError(
                f"its weights are quantised ({name}, {array.dtype}), which is not supported; save "
                "them as float16, bfloat16 or float32."
            )


def _log_guesses(path: Path, stored: Stored, heads: str) -> None:
    """Logs one line with what names and shapes do not show, without a config.json."""
    known = [f"{key}={value}" for key, value in stored.conventions.items()]
    pooling = ["pooling by the class token"] if "cls" in stored.params else []
    decoder = [f"decoder_num_heads={mae.HEADS}"] if "mask_token" in stored.params else []
    guesses = [*filter(None, [heads]), *decoder, *known, *pooling, "pre-norm blocks"]
    logging.warning("%s: no config.json found; guessed: %s.", path, list_names(guesses, 9))


def _choose_heads(
    arrays: Params, num_heads: int | None, stated: int | None, default: int | None
) -> int:
    """Raises UserError if it cannot be inferred, or if `num_heads` contradicts the file."""
    if num_heads and stated and num_heads != stated:
        raise UserError(f"num_heads={num_heads}, but config.json says {stated}; leave it out.")
    if heads := num_heads or stated:
        return heads
    blocks = numbers(r"(?:blocks|layers?)\.(\d+)\.", arrays)
    shapes = {array.shape for array in arrays.values()}
    for name, (width, depth, mlp_dim, heads) in SIZES.items():
        if len(blocks) == depth and (mlp_dim, width) in shapes:
            logging.info("Assuming %d attention heads, as in %s.", heads, name)
            return heads
    if default:
        return default
    raise UserError(
        "cannot infer num_heads: it is not in the file, and the sizes match no known model; "
        "give it (num_heads, --num_heads)."
    )
