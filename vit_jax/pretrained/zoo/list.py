"""The published checkpoints by name: look them up, choose among them, print them.

`checkpoints.jsonl` has a line per checkpoint, with the fields of `ZooEntry` that differ from their
defaults. Its sources:

* Sizes of imagenet21k, imagenet21k+imagenet2012 and sam: listing of the buckets in the official
  vit_jax.ipynb; of augreg: table in the official README, which lists the best of each architecture
  by upstream validation accuracy. Whether a file has the tanh layer before its head, and the
  resolution of the two ViT-B_8, follow from the size, which a test recomputes.
* "timm" in the source of an accuracy means pytorch-image-models, results/results-imagenet.csv:
  measured on these weights after conversion, with timm's preprocessing (bicubic; 0.9 of the side at
  224 pixels). Repositories of timm: the names in timm's default_cfgs.
* DeiT: README_deit.md of facebookresearch/deit; the eight hex digits in a file's name begin its
  SHA-256.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vit_jax.errors import UserError, check_known, nearest
from vit_jax.models import augreg_names
from vit_jax.pretrained.zoo import augreg
from vit_jax.pretrained.zoo.class_names import class_names
from vit_jax.pretrained.zoo.entry import Accuracy, ZooEntry


@functools.cache
def entries() -> dict[str, ZooEntry]:
    """The rows of the zoo by name; `find_entry` also knows AugReg's other files."""
    text = (Path(__file__).parent / "checkpoints.jsonl").read_text(encoding="utf-8")
    found = {}
    for line in text.splitlines():
        fields = json.loads(line)
        accuracy = tuple(Accuracy(*each) for each in fields.pop("accuracy", ()))
        found[fields["name"]] = ZooEntry(**fields, accuracy=accuracy)
    return found


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


def list_models(pattern: str = "*") -> list[str]:
    """Names for `load_model` that match a shell pattern, such as `*L/16*`; case does not count."""
    return [name for name in entries() if fnmatch.fnmatch(name.lower(), pattern.lower())]


def filter_entries(*, min_accuracy: float | None = None, **fields: Any) -> list[ZooEntry]:
    """Rows that agree with every argument that is not None.

    Args:
      min_accuracy: least published ImageNet top-1, in percent; rows without one are left out.
      **fields: of `ZooEntry`, or its `family`.

    Raises:
      UserError: a value that no row has, or values that no row has together.
    """
    rows = list(entries().values())
    given = {key: value for key, value in fields.items() if value is not None}
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
    """Every field that is known, and the commands that use the checkpoint."""
    fields = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    fields["accuracy"] = "; ".join(map(str, entry.accuracy))
    if entry.labels:
        names = class_names(entry.labels)
        fields["labels"] = f"{entry.labels} ({names[0]} ... {names[-1]})"
    lines = [f"  {name:<21}{value}" for name, value in fields.items() if value not in ("", None)]
    return "\n".join([*lines, "", *(f"  python scripts/{each}" for each in _commands(entry))])


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
