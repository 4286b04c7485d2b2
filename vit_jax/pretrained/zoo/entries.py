"""The published checkpoints by name: what is known of each, look-up and filtering.

`checkpoints.jsonl` has the fields of a `ZooEntry` that differ from their defaults. Its sources:

* Sizes of imagenet21k, imagenet21k+imagenet2012, sam, and Mixers trained with SAM and GSAM: listing
  of the buckets in the official vit_jax.ipynb; of augreg: the official README. A file's tanh layer
  before its head, and the resolution of the two ViT-B_8, follow from the size (a test says so).
* "timm" in the source of an accuracy: pytorch-image-models, results/results-imagenet.csv, of these
  weights after conversion, with timm's preprocessing. Its hub: resolution, preprocessing, licence
  from pretrained_cfg, attributes from its modules (timm 1.0.31).
* DeiT, MAE: README_deit.md, README_revenge.md, README.md and FINETUNE.md of facebookresearch; the
  eight hex digits in the name of a DeiT's file begin its SHA-256.
* Linear, k-NN and zero-shot accuracies: tables of the repository that the source names, of the
  weights before timm or Hugging Face converted them.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit_jax.data.class_names import LABELS
from vit_jax.errors import UserError
from vit_jax.kinds import check_known
from vit_jax.models.create import MODELS, VARIANTS, get_variant, variant_called
from vit_jax.pretrained.zoo import augreg_names
from vit_jax.wording import nearest

AUGREG = "gs://vit_models/augreg"  # 50,000 files
_UNITS = {"MiB": 2**20, "GiB": 2**30}


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """A published top-1 accuracy in percent, of this very file unless `source` says otherwise."""

    percent: float
    source: str
    dataset: str = "imagenet2012"
    by: str = "head"  # the file's own; or `linear`, `k-NN`, `zero-shot`, ... on its features

    def __str__(self) -> str:
        by = "" if self.by == "head" else f" by {self.by}"
        return f"{self.percent:g} % {self.dataset}{by} ({self.source})"


@dataclasses.dataclass(frozen=True)
class ZooEntry:
    """One checkpoint; "" for anything unknown or unpublished."""

    name: str  # family/model
    url: str  # gs://, https:// or hf://
    format: str  # npz or npz_published (Google's), big_vision, timm or huggingface
    variant: str  # key of create.VARIANTS; "" if `attributes` has all sizes
    resolution: int  # image side in pixels that its position embeddings match
    preprocess: str = ""  # ops with which its accuracy is measured; "": the file's
    num_classes: int = 1000  # 0 without a head
    classifier: str = "token"  # or gap
    representation_size: int | None = None  # width of the tanh layer before the head
    position_embedding: str = "learned"  # or sincos2d
    # Of the model, where they are not the variant's.
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    labels: str = "imagenet2012"  # key of `data.class_names.LABELS`
    size: str = ""  # as published, such as "393.69 MiB"
    sha256: str = ""  # of the file in hex, or its prefix
    accuracy: tuple[Accuracy, ...] = ()  # first the one to reproduce
    licence: str = ""  # if it restricts use
    note: str = ""  # what users must know, and what is unverified

    @property
    def family(self) -> str:
        return self.name.partition("/")[0]

    @property
    def imagenet_top1(self) -> float | None:
        """Published ImageNet top-1 of its own head, in percent."""
        return next((row.percent for row in self.on_imagenet if row.by == "head"), None)

    @property
    def on_imagenet(self) -> list[Accuracy]:
        return [accuracy for accuracy in self.accuracy if accuracy.dataset == "imagenet2012"]

    @property
    def size_bounds(self) -> tuple[int, int] | None:
        """Minimum and maximum bytes that `size` may mean; None if unknown."""
        if not self.size:
            return None
        number, unit = self.size.split()
        digit = 10.0 ** -len(number.partition(".")[2])  # rounded by some, truncated by others
        scale = _UNITS[unit]
        return int((float(number) - digit) * scale), int((float(number) + digit) * scale)

    @property
    def model(self) -> dict[str, Any]:
        """Keyword arguments of `create_model` for these weights."""
        sizes = (get_variant(self.variant) if self.variant else {}) | {**self.attributes}
        keys = {"classifier", "representation_size", "position_embedding"}
        keys = {"num_classes"} | (keys & MODELS[sizes["name"]].keys.keys())
        return {key: getattr(self, key) for key in keys} | sizes


@functools.cache
def entries() -> dict[str, ZooEntry]:
    """The zoo's rows by name; `find_entry` also finds AugReg's other files."""
    text = (Path(__file__).parent / "checkpoints.jsonl").read_text(encoding="utf-8")
    rows = {}
    for line in text.splitlines():
        fields = json.loads(line)
        fields["accuracy"] = tuple(Accuracy(*row) for row in fields.get("accuracy", ()))
        attributes = fields.get("attributes", {}).items()
        fields["attributes"] = {k: tuple(v) if isinstance(v, list) else v for k, v in attributes}
        rows[fields["name"]] = ZooEntry(**fields)
    return rows


def augreg_entry(file: str) -> ZooEntry:
    """Derives an entry from the name of an AugReg file, with or without `.npz`; else UserError."""
    file = file.removesuffix(".npz")
    parts = augreg_names.parse(file)
    labels = augreg_names.DATASETS[parts.data]
    num_classes = LABELS[labels]
    if parts.adapt_dataset:
        num_classes = augreg_names.ADAPTATION[parts.adapt_dataset]
        labels = "imagenet2012" if parts.adapt_dataset == "imagenet2012" else ""
    note = "May have a tanh layer before its head: ImageNet-only files exist with and without."
    return ZooEntry(
        name=f"augreg/{file}",
        url=f"{AUGREG}/{file}.npz",
        format="npz_published",
        variant=parts.variant,
        resolution=parts.resolution,
        num_classes=num_classes,
        preprocess=f"official_eval({parts.resolution})",
        labels=labels,
        note=note if parts.data == "i1k" and not parts.adapt_dataset else "",
    )


def find_entry(name_or_url: str) -> ZooEntry | None:
    """The entry of a name or an address, including any AugReg file; or None."""
    known = {row.url: row for row in entries().values()} | entries()
    for name in (name_or_url, f"timm/{name_or_url}"):
        if name in known:
            return known[name]
    folder, _, file = name_or_url.rpartition("/")
    if folder not in ("augreg", AUGREG) or not augreg_names.is_file_name(file):
        return None
    entry = augreg_entry(file)
    return known.get(entry.url, entry)  # recommended ones have a row


def entry_of_file(name: str) -> ZooEntry | None:
    """The only entry whose address ends in this file name, or whose name it has; or None."""
    stem = name.rpartition(".")[0]
    rows = entries().values()
    found = [row for row in rows if name == row.url.rpartition("/")[2]]
    found = found or [row for row in rows if stem == row.name.rpartition("/")[2]]
    return found[0] if len(found) == 1 else None


def get_entry(name: str) -> ZooEntry:
    """The entry called `name`; UserError with the nearest name if there is none."""
    entry = find_entry(name)
    if entry is not None:
        return entry
    if name.startswith("augreg/") and "-" in name:
        return augreg_entry(name.removeprefix("augreg/"))  # raises a specific error
    # The family may be omitted, and what follows the architecture in timm's names.
    meant = [repr(n) for n in entries() if f"{n.partition('/')[2]}.".startswith(f"{name}.")]
    has_family = name.partition("/")[0] in {row.family for row in entries().values()}
    size = name if name in VARIANTS else "" if meant or has_family else variant_called(name)
    if size:
        text = f"{name!r} is a model without weights; `python scripts/zoo.py list --variant={size}`"
        raise UserError(f"{text} lists weights, create_model({size!r}, ...) makes a new model.")
    hint = f" Did you mean {' or '.join(meant)}?" if meant else nearest(name, entries())
    text = f"{name!r} is not in the zoo, and there is no such file or folder.{hint}"
    raise UserError(f"{text} `python scripts/zoo.py list` lists the zoo.")


def list_models(pattern: str = "*") -> list[str]:
    """Names for `load_model` that match a shell pattern, such as `*L/16*`, ignoring case."""
    return [name for name in entries() if fnmatch.fnmatch(name.lower(), pattern.lower())]


def filter_entries(*, min_accuracy: float | None = None, **fields: Any) -> list[ZooEntry]:
    """Rows with these `fields` (None: any), and ImageNet accuracy in percent; UserError: none."""
    rows = list(entries().values())
    filters = {key: value for key, value in fields.items() if value is not None}
    for key, value in filters.items():
        known = sorted({getattr(row, key) for row in entries().values()})
        check_known(key, str(value), map(str, known))
        rows = [row for row in rows if getattr(row, key) == value]
    if min_accuracy is not None:
        filters["min_accuracy"] = min_accuracy
        rows = [row for row in rows if (row.imagenet_top1 or 0.0) >= min_accuracy]
    if not rows:
        text = ", ".join(f"{key}={value}" for key, value in filters.items())
        raise UserError(f"no checkpoint matches all of {text}; drop one.")
    return rows
