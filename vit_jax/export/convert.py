"""Converts weights of any format to any other, and verifies the result."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data import preprocess
from vit_jax.data.ops import (
    CentralCrop,
    Decode,
    Normalize,
    Patchify,
    Resize,
    ResizeSmall,
    ValueRange,
)
from vit_jax.errors import UserError
from vit_jax.export.card import write_card
from vit_jax.files.paths import check_local, check_utf8, write_json
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.kinds import check_known
from vit_jax.models.description import Description, InputSettings
from vit_jax.models.vit import HEAD_NORM_EPSILON
from vit_jax.pretrained.fit.adapt import report_text as arrays_text
from vit_jax.pretrained.formats.stored import Arrays
from vit_jax.pretrained.formats.table import FORMATS
from vit_jax.trees import count_parameters, fingerprint, flatten_names, unflatten_names
from vit_jax.workdir.checkpoints import CheckpointManager
from vit_jax.workdir.description import MODEL_FILE

ORBAX = "orbax"
FORMAT_NAMES = (*FORMATS, ORBAX)
# big_vision's class token is the sum of two of our parameters, so float32 rounds differently
# once; everything else is moved, not computed.
LOGITS_TOLERANCE = 1e-5
_SUFFIXES = (".npz", ".json", ".md")  # of a file, what describes it, and its card


def convert_checkpoint(
    source: str, destination: str, *, format: str, drop_head: bool = False, **model_options: Any
) -> dict[str, Any]:
    """Reads `source`, writes `destination`, reads that back and compares.

    Args:
      source: of the model, see `load_model`, which takes `model_options`.
      destination: a file NAME.npz, with NAME.json and NAME.md (the model card) next to it;
        or, for timm, huggingface and orbax, a folder. It must not exist, or be empty.
      format: one of `FORMAT_NAMES`.
      drop_head: omit head and pre_logits; the model returns its representation.

    Returns the result of `finish`, `notes` (what the format cannot store), `parameters_identical`.
    UserError: see `load_model`; the format cannot store the model; the destination exists; or the
    written model gives different logits (it is removed).
    """
    check_known("--format", format, FORMAT_NAMES)
    check_local("destination", destination)
    check_utf8("destination", destination)
    target = Path(os.path.expanduser(destination))
    check_destination(target, format, is_file=format != ORBAX and not FORMATS[format].is_folder)
    model = load_model(source, **model_options)
    if drop_head:
        model = model.without_head()
    images = model.sample(2)
    with unfinished(target) as path:
        write(path, format, flatten_names(model.params), model.description)
        again = load_model(path)
        before, after = (compute_logits(x.module, x.params, images) for x in (model, again))
        tolerance = LOGITS_TOLERANCE * max(1.0, float(np.std(before)))
        check = check_same([(before, after)], destination, tolerance, "in the logits")
        notes = lost_conventions(format, model.description)
        facts = {"Elsewhere": " ".join(notes)} if notes else None
        return {
            **finish(path, target, model, format, check, facts=facts),
            "notes": notes,
            "parameters_identical": fingerprint(model.params) == fingerprint(again.params),
        }


def check_destination(target: Path, format: str, *, is_file: bool = False) -> None:
    """Raises UserError unless it is new or an empty folder, with a suitable name."""
    if is_file != (target.suffix == ".npz"):
        what = "a file, name it NAME.npz" if is_file else "a folder; omit the extension"
        raise UserError(f"{target}: --format={format} writes {what}.")
    for path in map(target.with_suffix, _SUFFIXES) if is_file else (target,):
        if path.exists() and (is_file or not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} exists; delete it, or choose another destination.")


def check_same(
    pairs: Iterable[tuple[Any, Any]], what: str, tolerance: float, unit: str
) -> dict[str, Any]:
    """The largest difference of pairs; UserError above `tolerance`, or for other shapes."""
    worst = 0.0
    for expected, actual in pairs:
        is_alike = (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        difference = np.max(np.abs(actual - expected)) if is_alike else np.inf
        worst = float(np.maximum(worst, difference))  # unlike max, propagates NaN
    if not worst <= tolerance:
        text = f"{what} was written and read back, and differs by {worst:.2g} {unit}"
        raise UserError(f"{text} (allowed: {tolerance:.2g}); it was removed. Please report this.")
    return {"max_difference": worst, "tolerance": tolerance, "unit": unit}


def finish(
    path: Path, target: Path, model: Model, format: str, check: dict[str, Any], **card: Any
) -> dict[str, Any]:
    """Writes the card of the result at `path`, which will become `target`; returns the report."""
    write_card(path, model, format, check, **card)
    files = (file.relative_to(path.parent) for file in path.parent.rglob("*") if file.is_file())
    return {
        "source": model.source,
        "source_format": model.format,
        "destination": str(target),
        "format": format,
        "files": sorted(str(target.parent / file) for file in files),
        "num_parameters": count_parameters(model.params),
        "arrays": model.report,
        **check,
    }


def report_text(report: dict[str, Any]) -> str:
    """The report of `convert_checkpoint` or `export_model` as text."""
    lines = [
        f"{report['source']} ({report['source_format']}) -> "
        f"{report['destination']} ({report['format']}), {report['num_parameters']:,} parameters",
        *arrays_text(report["arrays"]).splitlines(),
        *(f"note: {note}" for note in report.get("notes", ())),
        f"read back: differs by {report['max_difference']:.2g} {report['unit']} "
        f"(at most {report['tolerance']:.2g})",
        *(["parameters: bit-identical"] if report.get("parameters_identical") else ()),
        *(f"wrote {file}" for file in report["files"]),
    ]
    return "\n  ".join(lines)


def write(path: Path, format: str, params: Arrays, description: Description) -> None:
    """Writes flat parameters and their description, in the files of the format."""
    if format == ORBAX:
        path.mkdir()
        manager = CheckpointManager(path, every_steps=1, keep=1)
        manager.save(0, {"params": jax.tree.map(jnp.asarray, unflatten_names(params))})
        manager.close()
        write_json(path / MODEL_FILE, description.to_json())
        return
    row = FORMATS[format]
    if format != "npz":
        params, description = fold_head_norm(params, description)
    row.write(path, params, description, input_settings(description)[0] if row.is_folder else None)
    # Folders only have positions as parameters.
    if row.is_folder and "position_embedding" in description.model:
        sizes = {**description.model, "position_embedding": "learned"}
        description = dataclasses.replace(description, model=sizes)
    if row.is_folder:
        copy_tokenizer(description, path)
    beside = path / MODEL_FILE if row.is_folder else path.with_suffix(".json")
    write_json(beside, description.to_json())


def copy_tokenizer(description: Description, folder: Path) -> None:
    """Puts the vocabulary of a text tower beside its weights, where it is found again."""
    spec = description.eval_preprocess
    for op in preprocess.parse(spec).ops if spec else ():
        vocab = Path(getattr(op, "vocab", ""))
        if vocab.is_file():
            for file in (vocab, vocab.with_name("tokenizer_config.json")):
                if file.is_file():
                    shutil.copyfile(file, folder / file.name)


def fold_head_norm(params: Arrays, description: Description) -> tuple[Arrays, Description]:
    """The same model without `head_norm`: its statistics become part of the head.

    W' = W / sqrt(var + epsilon) and b' = b - mean W', since only our code has a norm there.
    """
    if "head_norm/mean" not in params:
        return params, description
    params, model = dict(params), {**description.model, "head_norm": False}
    mean, var = params.pop("head_norm/mean"), params.pop("head_norm/var")
    kernel = params["head/kernel"] / np.sqrt(var + HEAD_NORM_EPSILON)[:, None]  # [D, K]
    params |= {"head/kernel": kernel, "head/bias": params["head/bias"] - mean @ kernel}
    return params, dataclasses.replace(description, model=model)


def input_settings(description: Description) -> tuple[InputSettings, list[str]]:
    """What timm and Hugging Face store of the preprocessing, and notes on what is lost."""
    if description.grid is None:
        return InputSettings("bilinear", None, None), []  # of texts: not used
    height, width, channels = description.image_shape
    half, lost, notes = (0.5,) * channels, [], []
    settings = InputSettings("bilinear", (height, width), None, half, half)

    def per_channel(value: Any) -> tuple[float, ...]:
        return value if isinstance(value, tuple) else (value,) * channels

    for op in preprocess.parse(description.eval_preprocess).ops:
        change: dict[str, Any] = {}
        match op:
            case Resize() | ResizeSmall():
                theirs = {"area": "box"}.get(op.method, op.method.removeprefix("pillow_"))
                size = op.size if isinstance(op, ResizeSmall) else op.shape
                covers = isinstance(op, ResizeSmall) and isinstance(size, tuple)
                change = {"method": theirs, "resize": size, "covers": covers}
                if op.method in ("bilinear", "bicubic", "area"):  # nearest is the same
                    which = f"resizing by {op.method!r} becomes Pillow's {theirs}, antialiased"
                    equal = f"train with 'pillow_{theirs}' for equal ones"
                    notes.append(f"{which}: large photos look different there; {equal}.")
            case Patchify():
                theirs = op.method.removeprefix("pillow_")
                change = {"method": theirs, "resize": None, "patchify": op}
            case CentralCrop():
                change = {"crop": op.shape, "rounding": op.rounding}
            case Normalize():
                change = {"mean": per_channel(op.mean), "std": per_channel(op.std)}
            case ValueRange():  # (x - mean) / std = x * (high - low) + low
                scale = 1.0 / (op.high - op.low)
                change = {"mean": per_channel(-op.low * scale), "std": per_channel(scale)}
            case Decode() if op.exif or op.background is not None:
                done = "photos are turned upright and transparent pixels composed on a background"
                notes.append(f"{done} here; there, do so before.")
            case _ if not isinstance(op, Decode):
                lost.append(type(op).__name__)
        settings = dataclasses.replace(settings, **change)
    if lost:
        notes.append(f"not stored of the preprocessing: {', '.join(lost)}.")
    return settings, notes


def lost_conventions(name: str, description: Description) -> list[str]:
    """What other readers of the format will not know about the model, in sentences."""
    model, by = description.model, description.probabilities_by
    if name == ORBAX:
        return []  # ours stores everything
    is_folder = FORMATS[name].is_folder
    settings, notes = input_settings(description) if is_folder else (None, [])
    theirs = "nearest" if name == "timm" else "down"  # as torchvision; as transformers
    if settings and settings.crop and settings.rounding != theirs:
        here = settings.rounding
        notes.append(f"corners of crops are rounded {here} here, {theirs} there: off by a pixel.")
    if is_folder and model.get("position_embedding", "learned") != "learned":
        notes.append("Fixed positions are stored as learned ones: this format has no others.")
    for key, assumed in FORMATS[name].choose(model).assumed.items():
        if model.get(key, assumed) != assumed:
            notes.append(f"{key}={model[key]} is only kept beside the file; others use {assumed}.")
    if name != "huggingface" and by != "softmax":
        notes.append(f"probabilities_by={by} is only kept beside the file.")
    return notes


@contextlib.contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """A temporary path beside it; on success all files of its folder are moved, the target last."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        yield Path(scratch) / target.name
        for name in sorted(os.listdir(scratch), key=lambda name: name == target.name):
            os.replace(Path(scratch) / name, target.parent / name)


@functools.partial(jax.jit, static_argnums=0)  # compiled once for equal modules
def compute_logits(module: Any, params: Any, images: Any) -> Any:
    """Of the model's input [B, H, W, C]: float32 [B, K], or the representation without a head."""
    return module.apply({"params": params}, images, train=False)
