"""Model cards: a README.md that says what weights are, what they take and how to load them.

A card states what is known and says of the rest that it is not. It holds no date and no path of
this machine, so that the same weights get the same card.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from vit_jax.data import preprocess
from vit_jax.data.ops import Normalize, ValueRange
from vit_jax.errors import UserError
from vit_jax.files.atomic import read_json
from vit_jax.models.create import create_model
from vit_jax.parameters.names import count_parameters
from vit_jax.pretrained.cards.snippets import FORMATS, loading_snippet
from vit_jax.pretrained.fit.report import LoadReport
from vit_jax.pretrained.zoo.entry import ZooEntry
from vit_jax.pretrained.zoo.resolve import describe_source
from vit_jax.workdir.description import Description

# Tag and name of each kind of model.
_KINDS = {
    "vit": ("vision-transformer", "Vision Transformer (arXiv 2010.11929)"),
    "deit": ("vision-transformer", "distilled Vision Transformer (DeiT, arXiv 2012.12877)"),
    "bit": ("resnet", "pre-activation ResNet (BiT, arXiv 1912.11370)"),
}
_MOST_FILES = 20


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
    path, name = target.with_suffix(".md"), target.stem
    files = [target, target.with_suffix(".json")]
    if target.is_dir():
        path, name = target / "README.md", target.name
        files = sorted(file for file in target.rglob("*") if file != path)
    entry = describe_source(source)
    tag, kind = _KINDS[description.model["name"]]
    if None not in map(description.model.get, ["resnet_layers", "hidden_size"]):
        kind = f"hybrid of ResNet and {kind}"
    task = ["pipeline_tag: image-classification"] if description.model["num_classes"] else []
    sections = {
        "Use": f"```python\n{snippet or loading_snippet(format, target.name, description)}```",
        "Input": _input_text(description, inputs),
        "Classes": _class_text(description),
        "Accuracy": _accuracy_text(source, description, report, entry),
        "Origin": _origin_text(source, report, entry),
        "Files": _file_text(path.parent, files),
    }
    lines = ["---", "license: unknown", f"library_name: {FORMATS[format].library}", *task]
    lines += ["tags:", "- image-classification", f"- {tag}", "- vit_jax", "---", f"# {name}", ""]
    lines += [f"A {kind} as {FORMATS[format].text}, written by vit_jax.", ""]
    lines += [_table(["", ""], [*_model_rows(description), *(facts or {}).items()])]
    lines += [f"\n## {title}\n\n{text}" for title, text in sections.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _table(header: list[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _model_rows(description: Description) -> list[tuple[str, str]]:
    module = create_model(**description.model)
    images = jax.ShapeDtypeStruct((1, *description.image_shape), jnp.float32)
    params = jax.eval_shape(lambda x: module.init(jax.random.key(0), x, train=False), images)
    height, width, channels = description.image_shape
    sizes = description.model.items()
    cells = "Tokens" if description.model.get("patch_size") else "Feature map"
    return [
        ("Parameters", f"{count_parameters(params):,}"),
        ("Image", f"{height} x {width} pixels (height x width), {channels} channels"),
        (cells, f"{description.grid[0]} x {description.grid[1]}"),
        *((f"`{key}`", f"`{value}`") for key, value in sizes if value is not None),
    ]


def _input_text(description: Description, inputs: str) -> str:
    sizes = ", ".join(map(str, description.image_shape))
    text = inputs or f"float32 [batch, {sizes}], channels in the order RGB if there are three."
    if not description.eval_preprocess:
        return f"{text}\n\nHow the images were preprocessed in training is unknown."
    ops = preprocess.parse(description.eval_preprocess).ops
    steps = [f"`{op!r}`" for op in ops]
    if not any(isinstance(op, ValueRange | Normalize) for op in ops):
        steps.append("scale to [-1, 1]: `pixels / 127.5 - 1`")
    lines = [f"{number}. {step}" for number, step in enumerate(steps, start=1)]
    return "\n".join([text, "", f"Preprocessing, `{description.eval_preprocess}`:", "", *lines])


def _class_text(description: Description) -> str:
    num_classes, names = description.model["num_classes"], description.class_names
    if not num_classes:
        return "None: the model has no head."
    if not names:
        return f"{num_classes}; their names are unknown."
    shown = ", ".join(f"{index} {json.dumps(name)}" for index, name in enumerate(names[:10]))
    more = ", ... (all in the JSON file, under `class_names`)" if len(names) > 10 else ""
    return f"{num_classes}, by index: {shown}{more}."


def _accuracy_text(
    source: str, description: Description, report: LoadReport | None, entry: ZooEntry | None
) -> str:
    """What was measured on these very weights, by the run or by whoever published them."""
    rows: list[tuple[str, ...]] = []
    if not description.model["num_classes"] or (report and (report.adapted or report.reset)):
        pass
    elif entry is None:
        rows = _results_of_run(Path(source), description)
    elif (entry.resolution, entry.resolution) == description.image_shape[:2]:
        rows = [
            ("accuracy", f"{row.percent / 100:.4g}", row.dataset, "unknown", row.source)
            for row in entry.accuracy
        ]
    if not rows:
        return "Unknown: not measured on these weights."
    return _table(["metric", "value", "data set", "split", "measured by"], rows)


def _results_of_run(workdir: Path, description: Description) -> list[tuple[str, ...]]:
    """The last evaluations of a run that has ended; none where that is of another model."""
    try:
        trained = Description.from_json(read_json(workdir / "model.json"))
        results, config = (read_json(workdir / f"{name}.json") for name in ("results", "config"))
        same = (trained.image_shape, trained.class_names)
        if same != (description.image_shape, description.class_names):
            return []
        dataset = config["dataset"]["name"]
        dataset = Path(dataset).name if os.path.isabs(dataset) else dataset
        return [
            (metric, f"{results[key]:.4g}", dataset, config["evaluators"][name]["split"], "the run")
            for key in results
            for name, separator, metric in [key.partition("/")]
            if separator and metric != "num_examples"
        ]
    except (UserError, KeyError, TypeError, ValueError):
        return []  # no such folder; and a card is no place to complain of a damaged one


def _origin_text(source: str, report: LoadReport | None, entry: ZooEntry | None) -> str:
    lines = [f"Made from `{Path(source).name if Path(source).exists() else source}`."]
    if entry is not None:
        lines += [f"Published as `{entry.name}` at {entry.url}. {entry.note}".rstrip()]
    if report is not None:
        lines += ["", *(f"- {line}" for line in str(report).splitlines())]
    return "\n".join([*lines, "", "Data and procedure of the training are not recorded here."])


def _file_text(folder: Path, files: list[Path]) -> str:
    files = [file for file in files if file.is_file()]
    if len(files) > _MOST_FILES:
        return f"{len(files)} files, {sum(file.stat().st_size for file in files):,} bytes."
    rows = []
    for file in files:
        with open(file, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        rows.append((f"`{file.relative_to(folder)}`", f"{file.stat().st_size:,}", f"`{digest}`"))
    return _table(["file", "bytes", "SHA-256"], rows)
