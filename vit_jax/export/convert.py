"""Weights of any format in any other, checked on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data import preprocess
from vit_jax.data.ops import CentralCrop, Decode, Normalize, Resize, ResizeSmall, ValueRange
from vit_jax.errors import UserError, check_known
from vit_jax.export.card import write_card
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.models.create import create_model, role_of
from vit_jax.parameters.names import flatten_names, unflatten_names
from vit_jax.pretrained.formats.table import FORMATS
from vit_jax.workdir.checkpoints import CheckpointManager
from vit_jax.workdir.description import MODEL_FILE, Description, InputSettings

ORBAX = "orbax"
FORMAT_NAMES = (*FORMATS, ORBAX)
# big_vision's class token is the sum of two parameters of ours, so that float32 rounds differently
# once; everything else is moved and not computed.
LOGITS_TOLERANCE = 1e-5
_SUFFIXES = (".npz", ".json", ".md")  # of a file, what describes it, and its card


def convert_checkpoint(
    source: str,
    destination: str,
    *,
    format: str,
    drop_head: bool = False,
    **model_options: Any,
) -> dict[str, Any]:
    """Reads `source`, writes `destination`, reads that again and compares.

    Args:
      source: of the model, see `load_model`, which takes `model_options`: `image_size` to
        interpolate positions; `num_heads` and `grid` where the file does not tell.
      destination: a file NAME.npz, beside which NAME.json and NAME.md (the model card) are written;
        or, for timm, huggingface and orbax, a folder. It must not exist.
      format: one of `FORMAT_NAMES`.
      drop_head: leave head and pre_logits out; the model gives its representation.

    Returns:
      A report for JSON: `source`, `source_format`, `destination`, `format`, `files`,
      `num_parameters`, `arrays` (what became of each), `notes` (what the format cannot say),
      `parameters_identical`, `max_logits_difference`.

    Raises:
      UserError: see `load_model`; the format cannot hold the model; the destination exists or
        cannot be written; or what was written does not give the same logits (it is removed).
    """
    check_known("--format", format, FORMAT_NAMES)
    target = Path(os.path.expanduser(destination))
    check_destination(target, format)
    model = load_model(source, **model_options)
    if drop_head:
        model = without_head(model)
    flat = flatten_names(model.params)
    with unfinished(target) as path:
        notes = write(path, format, flat, model.description)
        check = compare(model, load_model(path))
        write_card(path, model, format)
    files = target.rglob("*") if target.is_dir() else map(target.with_suffix, _SUFFIXES)
    return {
        "source": source,
        "source_format": model.format,
        "destination": str(target),
        "format": format,
        "num_parameters": sum(array.size for array in flat.values()),
        "arrays": model.report,
        "notes": [*lost_conventions(format, model.description), *notes],
        "files": sorted(str(file) for file in files if file.is_file()),
        **check,
    }


def check_destination(target: Path, format: str) -> None:
    """Raises UserError unless it is new, and named like what the format writes."""
    is_file = format != ORBAX and not FORMATS[format].is_folder
    if is_file != (target.suffix == ".npz"):
        what = "a file, call it NAME.npz" if is_file else "a folder; leave the ending out"
        raise UserError(f"{target}: --format={format} writes {what}.")
    for path in map(target.with_suffix, _SUFFIXES if is_file else [target.suffix]):
        if path.exists():
            raise UserError(f"{path} exists; remove it, or choose another destination.")


def report_text(report: dict[str, Any]) -> str:
    """The report of `convert_checkpoint` for people."""
    arrays = report["arrays"]
    same = "bit for bit the same" if report["parameters_identical"] else "the same function"
    lines = [
        f"{report['source']} ({report['source_format']}) -> "
        f"{report['destination']} ({report['format']})",
        f"  {report['num_parameters']:,} parameters in {len(arrays['loaded'])} arrays as they are"
        + (f", {len(arrays['adapted'])} adapted" if arrays["adapted"] else ""),
        *(f"  adapted {name}: {how}" for name, how in arrays["adapted"].items()),
        *(f"  left out {name}: {why}" for name, why in arrays["dropped"].items()),
        *(f"  note: {note}" for note in report["notes"]),
        f"  read again: {same}; logits differ by {report['max_logits_difference']:.2g}",
        *(f"  wrote {file}" for file in report["files"]),
    ]
    return "\n".join(lines)


def write(
    path: Path, format: str, params: dict[str, np.ndarray], description: Description
) -> list[str]:
    """Writes flat parameters and their description, in whatever files the format has.

    Returns:
      What the format cannot say of the preprocessing.
    """
    if format == ORBAX:
        path.mkdir()
        manager = CheckpointManager(path, every_steps=1, keep=1)
        manager.save(0, {"params": jax.tree.map(jnp.asarray, unflatten_names(params))})
        manager.close()
        description.write(path / MODEL_FILE)
        return []
    row = FORMATS[format]
    settings, notes = input_settings(description)
    row.write(path, params, description, settings)
    of_torch = format in ("timm", "huggingface")
    if of_torch:  # which have positions as parameters only
        sizes = {**description.model, "position_embedding": "learned"}
        description = dataclasses.replace(description, model=sizes)
    description.write(path / MODEL_FILE if row.is_folder else path.with_suffix(".json"))
    return notes if of_torch else []


def input_settings(description: Description) -> tuple[InputSettings, list[str]]:
    """What timm and Hugging Face store of the preprocessing, and notes on what they cannot.

    Ops that they have no words for (a random one, another order) become a plain resize.
    """
    height, width, channels = description.image_shape
    half = (0.5,) * channels
    settings = InputSettings("bilinear", (height, width), None, mean=half, std=half)
    lost, notes = [], []

    def per_channel(value: Any) -> tuple[float, ...]:
        return value if isinstance(value, tuple) else (value,) * channels

    for op in preprocess.parse(description.eval_preprocess).ops:
        if isinstance(op, Resize | ResizeSmall):
            method = "bicubic" if "bicubic" in op.method else "bilinear"
            resize = op.size if isinstance(op, ResizeSmall) else op.shape
            settings = dataclasses.replace(settings, resize=resize, method=method)
            if "pillow" not in op.method:
                notes.append("resizing there is antialiased, as Pillow does it; here it is not.")
        elif isinstance(op, CentralCrop):
            settings = dataclasses.replace(settings, crop=op.shape)
        elif isinstance(op, Normalize):
            mean, std = per_channel(op.mean), per_channel(op.std)
            settings = dataclasses.replace(settings, mean=mean, std=std)
        elif isinstance(op, ValueRange):  # (x - mean) / std = x * (high - low) + low
            scale = 1.0 / (op.high - op.low)
            mean, std = per_channel(-op.low * scale), per_channel(scale)
            settings = dataclasses.replace(settings, mean=mean, std=std)
        elif not isinstance(op, Decode):
            lost.append(type(op).__name__)
    if lost:
        notes.append(f"of the preprocessing, {', '.join(lost)} is not written.")
    return settings, notes


def lost_conventions(name: str, description: Description) -> list[str]:
    """What a reader of the format other than ours will not know of the model, in sentences."""
    model = description.model
    if "gelu" not in model:
        return []  # a ResNet has none of what follows
    classifier, epsilon = model["classifier"], model["layer_norm_epsilon"]
    fixed = model["position_embedding"] == "sincos2d"
    notes = []
    if name in ("npz_published", "big_vision", "npz"):
        if model["gelu"] != "tanh":
            notes += [f"gelu={model['gelu']} is said beside the file only; Google's has tanh."]
        if classifier.endswith("unpooled"):
            notes += [f"classifier={classifier} is said beside the file only."]
    if name != "huggingface" and epsilon != 1e-6:
        notes += [f"layer_norm_epsilon={epsilon:g} has no place in this format (1e-6)."]
    if name == "npz_published" and classifier == "map":
        notes += ["The official code has no attention pooling; big_vision has."]
    if name == "big_vision" and (classifier == "token" or fixed):
        notes += ["timm reads big_vision's files without class token, with learned positions."]
    if name in ("timm", "huggingface") and fixed:
        notes += ["The fixed positions are written as learned ones: this format has no others."]
    if name != "huggingface" and description.probabilities_by != "softmax":
        notes += [f"probabilities_by={description.probabilities_by} is said beside the file only."]
    if name == "huggingface" and len(set(description.class_names)) < len(description.class_names):
        notes += ["Classes of one name share an entry of label2id; id2label has them all."]
    return notes


def without_head(model: Model) -> Model:
    """The same model up to its representation."""
    flat = flatten_names(model.params)
    dropped = {
        name: "left out as asked (--drop_head)"
        for name in flat
        if role_of(name) in ("head", "pre_logits")
    }
    if not dropped:
        raise UserError(f"--drop_head: {model.source} has no head.")
    sizes = {**model.description.model, "num_classes": 0, "representation_size": None}
    report = {
        **model.report,
        "loaded": [name for name in model.report["loaded"] if name not in dropped],
        "dropped": {**model.report["dropped"], **dropped},
    }
    return dataclasses.replace(
        model,
        module=create_model(**sizes),
        params=unflatten_names({name: a for name, a in flat.items() if name not in dropped}),
        description=dataclasses.replace(model.description, model=sizes, class_names=()),
        report=report,
    )


def compare(expected: Model, found: Model) -> dict[str, Any]:
    """Whether two models hold the same parameters, and how far their logits are apart.

    Returns:
      `parameters_identical` (bit for bit) and `max_logits_difference` on two seeded images.

    Raises:
      UserError: logits differ by more than `LOGITS_TOLERANCE` of their deviation.
    """
    a, b = flatten_names(expected.params), flatten_names(found.params)
    identical = a.keys() == b.keys() and all(
        a[name].shape == b[name].shape and a[name].tobytes() == b[name].tobytes() for name in a
    )
    shape = (2, *expected.description.image_shape)
    images = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    before, after = (
        np.asarray(compute_logits(each.module, each.params, images)) for each in (expected, found)
    )
    difference = float(np.max(np.abs(before - after)))
    if not difference <= LOGITS_TOLERANCE * max(1.0, float(np.std(before))):
        raise UserError(
            f"{found.source} was written and read again, and its logits differ by {difference:.2g} "
            f"from those of {expected.source}; it was removed. Please report this."
        )
    return {"parameters_identical": identical, "max_logits_difference": difference}


@contextlib.contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """A path of the same name in a folder beside it, of which all files are moved to the target's.

    The target itself comes last, and after an error nothing does.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        yield Path(scratch) / target.name
        for name in sorted(os.listdir(scratch), key=lambda name: name == target.name):
            os.replace(Path(scratch) / name, target.parent / name)


@functools.partial(jax.jit, static_argnums=0)
def compute_logits(module: Any, params: Any, images: Any) -> jax.Array:
    """Of the model's input [B, H, W, C]: float32 [B, K]."""
    return module.apply({"params": params}, images, train=False)
