"""Model cards: a README.md that says what weights are, what they eat and how to load them.

A card states what is known and says of the rest that it is not. It holds no date and no path of
this machine, so that the same weights get the same card.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.data import preprocess
from vit_jax.models.create import create_model
from vit_jax.parameters.names import count_parameters
from vit_jax.pretrained.cards.results import UNKNOWN, Result, find_results
from vit_jax.pretrained.cards.snippets import LIBRARIES, snippet_for
from vit_jax.pretrained.fit.report import LoadReport
from vit_jax.pretrained.formats.description import Description
from vit_jax.pretrained.zoo.entry import ZooEntry
from vit_jax.pretrained.zoo.resolve import describe_source

CARD_FILE = "README.md"
MODEL_FILE = "model.json"
_MOST_FILES = 20
_FORMAT_NAMES = {
    "npz": "an `.npz` file with the official code's parameter names",
    "npz_published": "an `.npz` file named like Google's published ones",
    "big_vision": "an `.npz` file of big_vision",
    "timm": "a timm folder",
    "huggingface": "a Hugging Face folder",
    "orbax": "an Orbax checkpoint of vit_jax",
    "stablehlo": "a program for `jax.export` (StableHLO) and its parameters",
    "onnx": "an ONNX model",
}
# Attributes of models, as the card calls them.
_SIZES = {
    "patch_size": "patch",
    "hidden_size": "width",
    "num_layers": "layers",
    "mlp_dim": "MLP width",
    "num_heads": "heads",
    "resnet_layers": "ResNet units per stage",
    "resnet_width_factor": "ResNet width factor",
    "representation_size": "pre-logits width",
}
_CONVENTIONS = {
    "classifier": "Pooling",
    "position_embedding": "Position embeddings",
    "gelu": "GELU",
    "layer_norm_epsilon": "LayerNorm epsilon",
}


def write_card(
    target: str | os.PathLike[str],
    *,
    description: Description,
    format: str,
    source: str,
    report: LoadReport | None = None,
    results: Sequence[Result] | None = None,
    license: str = UNKNOWN,
    facts: Mapping[str, str] | None = None,
    inputs: str = "",
    snippet: str = "",
) -> Path:
    """Writes the card of weights that are complete on disk.

    Args:
      target: a folder, which gets README.md, or a file NAME.xyz, which gets NAME.md beside it.
      description: of the model.
      format: a key of `snippets.LIBRARIES`.
      source: what the weights were made from; of a local path only the last part is shown.
      report: what became of the source's arrays.
      results: measured on these very weights; None looks them up in the work directory or the zoo,
        if `source` is there and nothing of the model has been changed.
      license: as Hugging Face abbreviates it.
      facts: further rows of the table.
      inputs: what the model takes, if not floats scaled by the preprocessing.
      snippet: Python that loads the weights in the folder of the card, if not the format's own.

    Returns:
      The path of the card.
    """
    target = Path(target)
    is_folder = target.is_dir()
    path = target / CARD_FILE if is_folder else target.with_suffix(".md")
    name = target.name if is_folder else target.stem
    entry = describe_source(source)
    if results is None:
        results = find_results(source, description, report, entry)
    rows = {**_model_rows(description), **(facts or {})}
    sections = [
        _front_matter(description, format, license),
        f"# {name}\n\n{_summary(description, format)}",
        _table(rows),
        "## Use\n\n```python\n" + (snippet or snippet_for(format, target, description)) + "```",
        "## Input\n\n" + _input_text(description, inputs),
        "## Classes\n\n" + _class_text(description, is_folder, path),
        "## Accuracy\n\n" + _result_text(results),
        "## Origin\n\n" + _origin_text(source, report, entry),
        "## Files\n\n" + _file_text(target, path),
    ]
    path.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return path


def _front_matter(description: Description, format: str, license: str) -> str:
    """The YAML that Hugging Face reads."""
    kind = "resnet" if description.model["name"] == "bit" else "vision-transformer"
    tags = ["image-classification", kind, "vit_jax"]
    tags += [format] if format in ("onnx", "stablehlo") else []
    lines = ["---", f"license: {license}", f"library_name: {LIBRARIES[format]}"]
    lines += ["pipeline_tag: image-classification"] if description.model["num_classes"] else []
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _summary(description: Description, format: str) -> str:
    if description.model["name"] == "bit":
        kind = "pre-activation ResNet (BiT, arXiv 1912.11370)"
        return f"A {kind} as {_FORMAT_NAMES[format]}, written by vit_jax{_version()}."
    kind = "hybrid of ResNet and Vision Transformer"
    if description.model.get("resnet_layers") is None:
        kind = "Vision Transformer"
    if description.model["name"] == "deit":
        kind = "distilled Vision Transformer (DeiT)"
    return (
        f"A {kind} (arXiv 2010.11929) as {_FORMAT_NAMES[format]}, written by vit_jax{_version()}."
    )


def _version() -> str:
    try:
        return f" {importlib.metadata.version('vit_jax')}"
    except importlib.metadata.PackageNotFoundError:
        return ""  # run from its sources


def _model_rows(description: Description) -> dict[str, str]:
    module = create_model(**description.model)
    height, width, channels = description.image_shape
    images = jax.ShapeDtypeStruct((1, *description.image_shape), jnp.float32)
    params = jax.eval_shape(lambda x: module.init(jax.random.key(0), x, train=False), images)
    # Not every kind of model has every attribute.
    has = {key: getattr(module, key, None) for key in _SIZES}
    if has["resnet_width_factor"] == 1:  # nothing is wider than usual
        del has["resnet_width_factor"]
    shown = [f"{_SIZES[key]} {_by(value)}" for key, value in has.items() if value is not None]
    num_classes = module.num_classes
    cells, unit = ("Tokens", "patches") if has["patch_size"] else ("Feature map", "places")
    rows = {
        "Model": f"`{description.model['name']}`: {', '.join(shown)}",
        "Parameters": f"{count_parameters(params):,}",
        "Image": f"{height} x {width} pixels (height x width), {channels} channels",
        cells: f"{description.grid[0]} x {description.grid[1]} {unit}",
        "Output": f"logits of {num_classes} classes" if num_classes else "representation, no head",
    }
    for key, name in _CONVENTIONS.items():
        if hasattr(module, key):
            rows[name] = f"`{getattr(module, key)}`"
    return rows


def _by(size: Any) -> str:
    return " x ".join(map(str, size)) if isinstance(size, tuple) else str(size)


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {row} |" for name, row in rows.items())])


def _input_text(description: Description, inputs: str) -> str:
    height, width, channels = description.image_shape
    shape = f"[batch, {height}, {width}, {channels}]"
    text = inputs or f"float32 {shape}, channels in the order {'RGB' if channels == 3 else '1..C'}."
    if not description.eval_preprocess:
        return f"{text}\n\nHow the images were preprocessed in training is unknown."
    ops = preprocess.parse(description.eval_preprocess).ops
    steps = [f"{number}. {_op_text(op)}" for number, op in enumerate(ops, start=1)]
    if not any(isinstance(op, preprocess.ValueRange | preprocess.Normalize) for op in ops):
        steps.append(f"{len(steps) + 1}. scale to [-1, 1]: `pixels / 127.5 - 1`")
    recipe = f"In vit_jax's words: `{description.eval_preprocess}`. Step by step:"
    return f"{text}\n\n{recipe}\n\n" + "\n".join(steps)


def _op_text(op: Any) -> str:
    """One op in words; those that have none appear as they are written."""
    if isinstance(op, preprocess.Decode):
        turned = "turned upright by their EXIF tag" if op.exif else "EXIF orientation ignored"
        return f"decode to {op.channels} channel(s), {turned}; uint8"
    if isinstance(op, preprocess.Resize):
        return f"scale the whole image to {op.height} x {op.width or op.height}, `{op.method}`"
    if isinstance(op, preprocess.ResizeSmall):
        return f"scale the short side to {op.size}, `{op.method}`, keeping the aspect ratio"
    if isinstance(op, preprocess.CentralCrop):
        return f"cut {op.height} x {op.width or op.height} from the middle"
    if isinstance(op, preprocess.ValueRange):
        return f"scale [0, 255] to [{op.low:g}, {op.high:g}]"
    if isinstance(op, preprocess.Normalize):
        return f"`(pixels / 255 - mean) / std` with mean {op.mean}, std {op.std}"
    return f"`{op!r}`"


def _class_text(description: Description, is_folder: bool, path: Path) -> str:
    num_classes, names = description.model["num_classes"], description.class_names
    if not num_classes:
        return "None: the model has no head."
    if not names:
        return f"{num_classes}; their names are unknown."
    where = f"`{MODEL_FILE if is_folder else path.with_suffix('.json').name}`"
    shown = ", ".join(f"{index} {json.dumps(name)}" for index, name in enumerate(names[:10]))
    more = f", ... (all in {where} under `class_names`)" if len(names) > 10 else ""
    return f"{num_classes}, by index: {shown}{more}."


def _result_text(results: Sequence[Result]) -> str:
    if not results:
        return "Unknown: not measured on these weights."
    lines = ["| metric | value | data set | split | measured by |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.metric} | {row.value:.4g} | {row.dataset} | {row.split} | {row.origin} |"
        for row in results
    ]
    return "\n".join(lines)


def _origin_text(source: str, report: LoadReport | None, entry: ZooEntry | None) -> str:
    shown = Path(source).name if Path(source).exists() else source
    lines = [f"Made from `{shown}`."]
    if entry is not None:
        lines += [f"Published as `{entry.name}` at {entry.url}."]
        lines += [f"Note: {entry.note}"] if entry.note else []
    if report is not None:
        lines += ["", *(f"- {line}" for line in str(report).splitlines())]
    lines += ["", "Data and procedure of the training are not recorded here."]
    return "\n".join(lines)


def _file_text(target: Path, card: Path) -> str:
    """Size and hash of each file."""
    if target.is_dir():
        files = sorted(p for p in target.rglob("*") if p.is_file() and p != card)
    else:
        files = [p for p in (target, target.with_suffix(".json")) if p.is_file()]
    if len(files) > _MOST_FILES:
        total = sum(file.stat().st_size for file in files)
        return f"{len(files)} files, {total:,} bytes."
    lines = ["| file | bytes | SHA-256 |", "|---|---|---|"]
    for file in files:
        name = file.relative_to(target) if target.is_dir() else file.name
        with open(file, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        lines.append(f"| `{name}` | {file.stat().st_size:,} | `{digest}` |")
    return "\n".join(lines)
