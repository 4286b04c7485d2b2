"""Model cards: what weights are, what they take and the Python that loads them (tests run it).

A card states what is known. It holds no date and no path of this machine, so that the same weights
get the same card.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import jax

from vit_jax.data import preprocess
from vit_jax.data.ops import Normalize, ValueRange
from vit_jax.inference.model import Model
from vit_jax.pretrained.fit.adapt import report_text
from vit_jax.pretrained.zoo.resolve import describe_source

_CARD = """\
---
license: unknown
library_name: {library}{pipeline}
tags: [image-classification, {tag}, vit_jax]
---
# {name}

A {kind} as {format}, written by vit_jax.

| | |
|---|---|
{facts}

## Use

```python
{snippet}```

## Input

{inputs}

{preprocessing}

## Classes

{classes}

## Origin

{origin}

Data and procedure of the training are not recorded here.
"""

# Tag and name of each kind of model.
_KINDS = {
    "vit": ("vision-transformer", "Vision Transformer (arXiv 2010.11929)"),
    "deit": ("vision-transformer", "distilled Vision Transformer (DeiT, arXiv 2012.12877)"),
    "bit": ("resnet", "pre-activation ResNet (BiT, arXiv 1912.11370)"),
}
# Library that loads a format, in Hugging Face's spelling, and what it is called.
CARD_FORMATS = {
    "npz": ("vit_jax", "an `.npz` file with the official code's parameter names"),
    "npz_published": ("vit_jax", "an `.npz` file named like Google's published ones"),
    "big_vision": ("vit_jax", "an `.npz` file of big_vision"),
    "timm": ("timm", "a timm folder"),
    "huggingface": ("transformers", "a Hugging Face folder"),
    "orbax": ("vit_jax", "an Orbax checkpoint of vit_jax"),
    "stablehlo": ("jax", "a `jax.export` program (StableHLO), with parameters"),
    "onnx": ("onnx", "an ONNX model"),
}
# What loads it, by library.
_SNIPPETS = {
    "vit_jax": """\
import numpy as np
from vit_jax.inference.load import load_model

model = load_model("{name}")
images = np.zeros({shape}, np.float32)
logits = model.module.apply({{"params": model.params}}, images, train=False)
""",
    "timm": """\
import timm
import torch

model = timm.create_model("local-dir:{name}", pretrained=True).eval()
images = torch.zeros({torch_shape})
logits = model(images)
""",
    "transformers": """\
import torch
from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("{name}").eval()
images = torch.zeros({torch_shape})
logits = model(images).logits
""",
    "jax": """\
import jax
import jax.export
import numpy as np

with open("model.stablehlo", "rb") as file:
    model = jax.export.deserialize(bytearray(file.read()))
params = dict(np.load("params.npz"))
images = np.zeros({shape}, np.{dtype})
{output} = jax.jit(model.call)(params, images)
""",
    "onnx": """\
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
images = np.zeros({shape}, np.{dtype})
[{output}] = session.run(["{output}"], {{"images": images}})
""",
}


def write_card(
    target: str | os.PathLike[str],
    model: Model,
    format: str,
    *,
    facts: Mapping[str, str] | None = None,
    inputs: str = "",
    shape: tuple[int, ...] = (),
    dtype: str = "float32",
    output: str = "logits",
) -> Path:
    """Writes the card of weights that are complete on disk, and returns its path.

    Args:
      target: a folder, which gets README.md, or a file NAME.xyz, which gets NAME.md beside it.
      model: what was written; of a local path as its source only the last part is shown.
      format: a key of `CARD_FORMATS`.
      facts: further rows of the table.
      inputs: what the model takes, if not floats scaled by the preprocessing.
      shape, dtype: of the images in the lines that load it; [1, H, W, C] if not given.
      output: name of the result in these lines.
    """
    target, description, (library, text) = Path(target), model.description, CARD_FORMATS[format]
    height, width, channels = description.image_shape
    num_classes = description.model["num_classes"]
    tag, kind = _KINDS[description.model["name"]]
    if None not in map(description.model.get, ["resnet_layers", "hidden_size"]):
        kind = f"hybrid of ResNet and {kind}"
    floats = f"float32 [batch, {height}, {width}, {channels}], channels in the order RGB if there "
    # Without a head these libraries need other classes.
    is_bare = library in ("timm", "transformers") and not num_classes
    snippet = _SNIPPETS["vit_jax" if is_bare else library].format(
        name=target.name,
        shape=shape or (1, height, width, channels),
        torch_shape=(1, channels, height, width),
        dtype=dtype,
        output=output,
    )
    card = _CARD.format(
        library=library,
        pipeline="\npipeline_tag: image-classification" if num_classes else "",
        tag=tag,
        name=target.name if target.is_dir() else target.stem,
        kind=kind,
        format=text,
        facts="\n".join(f"| {k} | {v} |" for k, v in {**_facts(model), **(facts or {})}.items()),
        snippet=snippet,
        inputs=inputs or f"{floats}are three.",
        preprocessing=_preprocessing_text(description.eval_preprocess),
        classes=_class_text(num_classes, description.class_names),
        origin=_origin_text(model),
    )
    path = target / "README.md" if target.is_dir() else target.with_suffix(".md")
    path.write_text(card, encoding="utf-8")
    return path


def _facts(model: Model) -> dict[str, str]:
    description = model.description
    height, width, channels = description.image_shape
    cells = "Tokens" if description.model.get("patch_size") else "Feature map"
    return {
        "Parameters": f"{sum(leaf.size for leaf in jax.tree.leaves(model.params)):,}",
        "Image": f"{height} x {width} pixels (height x width), {channels} channels",
        cells: f"{description.grid[0]} x {description.grid[1]}",
        **{f"`{k}`": f"`{v}`" for k, v in description.model.items() if v is not None},
    }


def _preprocessing_text(spec: str) -> str:
    if not spec:
        return "How the images were preprocessed in training is unknown."
    has_scale = any(isinstance(op, ValueRange | Normalize) for op in preprocess.parse(spec).ops)
    return f"Preprocessing: `{spec}`{'' if has_scale else ', then `pixels / 127.5 - 1`'}."


def _class_text(num_classes: int, names: tuple[str, ...]) -> str:
    if not names:
        return f"{num_classes}; their names are unknown." if num_classes else "None: no head."
    shown = (f"{i} {json.dumps(name, ensure_ascii=False)}" for i, name in enumerate(names[:10]))
    more = ", ... (all in the JSON file, under `class_names`)" if len(names) > 10 else ""
    return f"{num_classes}, by index: {', '.join(shown)}{more}."


def _origin_text(model: Model) -> str:
    source = Path(model.source)
    lines = [f"Made from `{source.name if source.exists() else model.source}`."]
    if (entry := describe_source(model.source)) is not None:
        lines += [f"Published as `{entry.name}` at {entry.url}. {entry.note}".rstrip()]
        pixels = entry.resolution
        lines += [f"\nPublished accuracy at {pixels} pixels: {each}." for each in entry.accuracy]
    lines += ["", *(f"- {line}" for line in report_text(model.report).splitlines())]
    return "\n".join(lines)
