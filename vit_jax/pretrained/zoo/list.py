"""The official checkpoints by name: look them up, choose among them, print them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from vit_jax.errors import UserError, check_known, nearest
from vit_jax.models.variants import get_variant
from vit_jax.pretrained.zoo import augreg
from vit_jax.pretrained.zoo import google as zoo_google
from vit_jax.pretrained.zoo import torch as zoo_torch
from vit_jax.pretrained.zoo.class_names import class_names
from vit_jax.pretrained.zoo.entry import ZooEntry

_AUGREG = "augreg/"


@functools.cache
def entries() -> dict[str, ZooEntry]:
    """The rows of the zoo by name. Files of AugReg beyond the recommended ones are found all the
    same, see `find_entry`.
    """
    return {row.name: row for row in (*zoo_google.ROWS, *zoo_torch.ROWS)}


@functools.cache
def _by_url() -> dict[str, ZooEntry]:
    return {row.url: row for row in entries().values()}


def find_entry(name_or_url: str) -> ZooEntry | None:
    """The entry of a name or an address, or None.

    Besides the rows these are all files of AugReg, as augreg/FILE or gs://vit_models/augreg/FILE,
    with or without `.npz`.
    """
    found = entries().get(name_or_url) or _by_url().get(name_or_url)
    if found is not None:
        return found
    for prefix in (_AUGREG, augreg.FOLDER + "/"):
        file = name_or_url.removeprefix(prefix)
        if file != name_or_url and augreg.is_file_name(file):
            by_grammar = augreg.entry(file)
            return _by_url().get(by_grammar.url, by_grammar)  # a recommended one has a row
    return None


def get_entry(name: str) -> ZooEntry:
    """The entry called `name`.

    Raises:
      UserError: there is none; the message tells the nearest name.
    """
    found = find_entry(name)
    if found is not None:
        return found
    if name.startswith(_AUGREG) and "-" in name:
        return augreg.entry(name.removeprefix(_AUGREG))  # says what is wrong with it
    raise UserError(
        f"{name!r} is not in the zoo.{_nearest(name)} `python scripts/zoo.py list` lists it."
    )


def _nearest(name: str) -> str:
    """Names that may have been meant; people leave out the family."""
    without_family = [known for known in entries() if known.partition("/")[2] == name]
    if without_family:
        return f" Did you mean {' or '.join(map(repr, without_family))}?"
    return nearest(name, entries())


def filter_entries(
    *,
    family: str | None = None,
    variant: str | None = None,
    resolution: int | None = None,
    num_classes: int | None = None,
    min_accuracy: float | None = None,
) -> list[ZooEntry]:
    """Rows that agree with every argument that is given.

    Args:
      family: first part of the name.
      variant: key of models/variants.py.
      resolution: in pixels.
      num_classes: of the head.
      min_accuracy: least published ImageNet top-1, in percent; rows without one are left out.

    Raises:
      UserError: a value that no row has, or values that no row has together.
    """
    rows = list(entries().values())
    if variant is not None:
        get_variant(variant)  # says what is no variant at all
    wanted: dict[str, Any] = {"family": family, "variant": variant, "resolution": resolution}
    wanted["num_classes"] = num_classes
    wanted = {key: value for key, value in wanted.items() if value is not None}
    for key, value in wanted.items():
        known = sorted({getattr(row, key) for row in entries().values()})
        check_known(key, str(value), map(str, known))
        rows = [row for row in rows if getattr(row, key) == value]
    if min_accuracy is not None:
        wanted["min_accuracy"] = min_accuracy
        rows = [row for row in rows if (_imagenet(row) or 0.0) >= min_accuracy]
    if not rows:
        given = ", ".join(f"{key}={value}" for key, value in wanted.items())
        raise UserError(f"no checkpoint has all of {given}; drop one of these.")
    return rows


def _imagenet(row: ZooEntry) -> float | None:
    """Published ImageNet top-1 in percent."""
    return next((a.percent for a in row.accuracy if a.dataset == "imagenet2012"), None)


def to_json(entry: ZooEntry) -> dict[str, Any]:
    """All fields, for `json.dumps`."""
    return dataclasses.asdict(entry)


def table(rows: Iterable[ZooEntry]) -> str:
    """One line per entry, in aligned columns."""
    header = ("name", "variant", "pixels", "classes", "size", "ImageNet")
    lines = [header]
    for row in rows:
        accuracy = _imagenet(row)
        lines.append(
            (
                *(row.name, row.variant, str(row.resolution), str(row.num_classes)),
                *(row.size or "-", "-" if accuracy is None else f"{accuracy:.1f}"),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    aligned = (
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)  # text left, numbers right
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    return "\n".join(line.rstrip() for line in aligned)


def show(entry: ZooEntry) -> str:
    """Every field, and the commands that use the checkpoint."""
    fields = {
        "address": entry.url,
        "format": entry.format,
        "variant": entry.variant,
        "resolution": f"{entry.resolution}x{entry.resolution} pixels",
        "classes": _classes(entry),
        "pooling": entry.classifier,
        "tanh layer": f"{entry.representation_size} wide" if entry.representation_size else "none",
        "positions": entry.position_embedding,
        "preprocess": entry.preprocess,
        "size": entry.size or "not published",
        "sha256": f"begins with {entry.sha256}" if entry.sha256 else "not published",
    }
    lines = [entry.name, *(f"  {key:<11}{value}" for key, value in fields.items())]
    lines += [f"  {'accuracy':<11}{a.percent:g} % {a.dataset} ({a.source})" for a in entry.accuracy]
    lines += [f"  {'note':<11}{entry.note}"] if entry.note else []
    lines += ["", *(f"  python scripts/{command}" for command in _commands(entry))]
    return "\n".join(lines)


def _classes(entry: ZooEntry) -> str:
    if not entry.num_classes:
        return "0 (no head)"
    if not entry.labels:
        return f"{entry.num_classes} (names not known)"
    first, *_, last = class_names(entry.labels)
    return f"{entry.num_classes} ({first} ... {last})"


def _commands(entry: ZooEntry) -> list[str]:
    """Predicting and evaluating need a head that was trained; fine-tuning always works."""
    commands = [f"zoo.py get {entry.name}"]
    if entry.num_classes and entry.family != "imagenet21k":  # whose heads are zero
        commands.append(f"predict.py {entry.name} IMAGE...")
    if entry.labels == "imagenet2012":
        commands.append(f"evaluate.py {entry.name} --dataset=imagenet2012 --split=validation")
    return [
        *commands,
        f"finetune.py --config=configs/finetune.py:{entry.variant},cifar10 "
        f"--config.pretrained.source={entry.name} --workdir=/tmp/cifar10",
    ]
