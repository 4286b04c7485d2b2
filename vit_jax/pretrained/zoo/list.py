"""The published checkpoints by name: look them up, choose among them, print them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from vit_jax.errors import UserError, check_known, nearest
from vit_jax.models import augreg_names
from vit_jax.models.variants import get_variant
from vit_jax.pretrained.zoo import augreg, google, torch
from vit_jax.pretrained.zoo.class_names import class_names
from vit_jax.pretrained.zoo.entry import ZooEntry


@functools.cache
def entries() -> dict[str, ZooEntry]:
    """The rows of the zoo by name; `find_entry` also knows AugReg's other files."""
    rows = (*google.ROWS, *torch.ROWS)
    families = list(dict.fromkeys(row.family for row in rows))
    return {row.name: row for row in sorted(rows, key=lambda row: families.index(row.family))}


def find_entry(name_or_url: str) -> ZooEntry | None:
    """The entry of a name or an address, or None.

    Besides the rows these are all files of AugReg, as augreg/FILE or gs://vit_models/augreg/FILE,
    with or without `.npz`.
    """
    by_url = {row.url: row for row in entries().values()}
    found = entries().get(name_or_url) or by_url.get(name_or_url)
    folder, _, file = name_or_url.rpartition("/")
    if found is None and folder in ("augreg", augreg.FOLDER) and augreg_names.is_file_name(file):
        found = augreg.entry(file)
        return by_url.get(found.url, found)  # a recommended one has a row
    return found


def get_entry(name: str) -> ZooEntry:
    """The entry called `name`.

    Raises:
      UserError: there is none; the message tells the nearest name.
    """
    found = find_entry(name)
    if found is not None:
        return found
    if name.startswith("augreg/") and "-" in name:
        return augreg.entry(name.removeprefix("augreg/"))  # says what is wrong with it
    # People leave out the family.
    meant = [repr(known) for known in entries() if known.partition("/")[2] == name]
    hint = f" Did you mean {' or '.join(meant)}?" if meant else nearest(name, entries())
    raise UserError(f"{name!r} is not in the zoo.{hint} `python scripts/zoo.py list` lists it.")


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
    if variant is not None:
        get_variant(variant)  # says what is no variant at all
    given: dict[str, Any] = {"family": family, "variant": variant, "resolution": resolution}
    given = {k: v for k, v in {**given, "num_classes": num_classes}.items() if v is not None}
    rows = list(entries().values())
    for key, value in given.items():
        known = sorted({getattr(row, key) for row in entries().values()})
        check_known(key, str(value), map(str, known))
        rows = [row for row in rows if getattr(row, key) == value]
    if min_accuracy is not None:
        given["min_accuracy"] = min_accuracy
        rows = [row for row in rows if (row.imagenet_top1 or 0.0) >= min_accuracy]
    if not rows:
        text = ", ".join(f"{key}={value}" for key, value in given.items())
        raise UserError(f"no checkpoint has all of {text}; drop one of these.")
    return rows


def table(rows: Iterable[ZooEntry]) -> str:
    """One line per entry, in aligned columns: text left, numbers right."""
    lines = [("name", "variant", "pixels", "classes", "size", "ImageNet")]
    for row in rows:
        top1 = "-" if row.imagenet_top1 is None else f"{row.imagenet_top1:.1f}"
        cells = (row.name, row.variant, str(row.resolution), str(row.num_classes))
        lines.append((*cells, row.size or "-", top1))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{'<<>>>>'[i]}{width}}}" for i, width in enumerate(widths))
    return "\n".join(form.format(*line) for line in lines)


def show(entry: ZooEntry) -> str:
    """Every field, and the commands that use the checkpoint."""
    classes = str(entry.num_classes) if entry.num_classes else "0 (no head)"
    if entry.num_classes:
        names = class_names(entry.labels) if entry.labels else ()
        classes += f" ({names[0]} ... {names[-1]})" if names else " (names not known)"
    fields = {
        "address": entry.url,
        "format": entry.format,
        "variant": entry.variant,
        "resolution": f"{entry.resolution}x{entry.resolution} pixels",
        "classes": classes,
        "pooling": entry.classifier,
        "tanh layer": f"{entry.representation_size} wide" if entry.representation_size else "none",
        "positions": entry.position_embedding,
        "preprocess": entry.preprocess,
        "size": entry.size or "not published",
        "sha256": f"begins with {entry.sha256}" if entry.sha256 else "not published",
    }
    lines = [entry.name, *(f"  {key:<11}{value}" for key, value in fields.items())]
    lines += [f"  {'accuracy':<11}{accuracy}" for accuracy in entry.accuracy]
    lines += [f"  {'note':<11}{entry.note}"] if entry.note else []
    lines += ["", *(f"  python scripts/{command}" for command in _commands(entry))]
    return "\n".join(lines)


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
