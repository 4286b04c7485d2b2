"""Model cards: a README.md that says what weights are, what they take and how to load them.

A card states what is known. It holds no date and no path of this machine, so that the same weights
get the same card.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from vit_jax.data import preprocess
from vit_jax.data.ops import Normalize, ValueRange
from vit_jax.models.create import create_model
from vit_jax.parameters.initial import abstract_params
from vit_jax.parameters.names import count_parameters
from vit_jax.pretrained.cards.snippets import FORMATS, loading_snippet
from vit_jax.pretrained.fit.report import LoadReport
from vit_jax.pretrained.zoo.resolve import describe_source
from vit_jax.workdir.description import Description

# Tag and name of each kind of model.
_KINDS = {
    "vit": ("vision-transformer", "Vision Transformer (arXiv 2010.11929)"),
    "deit": ("vision-transformer", "distilled Vision Transformer (DeiT, arXiv 2012.12877)"),
    "bit": ("resnet", "pre-activation ResNet (BiT, arXiv 1912.11370)"),
}


def write_card(
    target: str | os.PathLike[str],
    *,
    description: Description,
    format: str,
    source: str,
    report: LoadReport | None = None,
    facts: Mapping[str, str] | None = None,
    inputs: str = "",
    snippet: str = "",
) -> Path:
    """Writes the card of weights that are complete on disk, and returns its path.

    Args:
      target: a folder, which gets README.md, or a file NAME.xyz, which gets NAME.md beside it.
      description: of the model.
      format: a key of `snippets.FORMATS`.
      source: what the weights were made from; of a local path only the last part is shown.
      report: what became of the source's arrays.
      facts: further rows of the table.
      inputs: what the model takes, if not floats scaled by the preprocessing.
      snippet: Python that loads the weights in the folder of the card, if not the format's own.
    """
    target = Path(target)
    path = target / "README.md" if target.is_dir() else target.with_suffix(".md")
    name = target.name if target.is_dir() else target.stem
    num_classes = description.model["num_classes"]
    tag, kind = _KINDS[description.model["name"]]
    if None not in map(description.model.get, ["resnet_layers", "hidden_size"]):
        kind = f"hybrid of ResNet and {kind}"
    shape = ", ".join(map(str, description.image_shape))
    takes = inputs or f"float32 [batch, {shape}], channels in the order RGB if there are three."
    snippet = snippet or loading_snippet(format, target.name, description)
    lines = ["---", "license: unknown", f"library_name: {FORMATS[format].library}"]
    lines += ["pipeline_tag: image-classification"] if num_classes else []
    lines += ["tags:", "- image-classification", f"- {tag}", "- vit_jax", "---", f"# {name}", ""]
    lines += [f"A {kind} as {FORMATS[format].text}, written by vit_jax.", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in _facts(description).items()]
    lines += [f"| {key} | {value} |" for key, value in (facts or {}).items()]
    lines += ["", "## Use", "", f"```python\n{snippet}```"]
    lines += ["", "## Input", "", takes, "", _preprocessing_text(description.eval_preprocess)]
    lines += ["", "## Classes", "", _class_text(num_classes, description.class_names)]
    lines += ["", "## Origin", "", _origin_text(source, report)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _facts(description: Description) -> dict[str, str]:
    module = create_model(**description.model)
    params = abstract_params(module, description.image_shape)
    height, width, channels = description.image_shape
    cells = "Tokens" if description.model.get("patch_size") else "Feature map"
    return {
        "Parameters": f"{count_parameters(params):,}",
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
    shown = ", ".join(
        f"{index} {json.dumps(name, ensure_ascii=False)}" for index, name in enumerate(names[:10])
    )
    more = ", ... (all in the JSON file, under `class_names`)" if len(names) > 10 else ""
    return f"{num_classes}, by index: {shown}{more}."


def _origin_text(source: str, report: LoadReport | None) -> str:
    lines = [f"Made from `{Path(source).name if Path(source).exists() else source}`."]
    if (entry := describe_source(source)) is not None:
        lines += [f"Published as `{entry.name}` at {entry.url}. {entry.note}".rstrip()]
        lines += [
            f"\nPublished accuracy at {entry.resolution} pixels: {a}." for a in entry.accuracy
        ]
    if report is not None:
        lines += ["", *(f"- {line}" for line in str(report).splitlines())]
    return "\n".join([*lines, "", "Data and procedure of the training are not recorded here."])
