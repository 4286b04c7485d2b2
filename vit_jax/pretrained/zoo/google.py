"""Rows of the zoo: Google's checkpoints, in the buckets vit_models and big_vision.

Sizes of imagenet21k, imagenet21k+imagenet2012 and sam: listing of the buckets in the official
vit_jax.ipynb; of augreg: table in the official README. Whether a file has the tanh layer before
its head, and the resolution of the two ViT-B_8, follow from the size, which a test recomputes.

"timm" in a source means pytorch-image-models, results/results-imagenet.csv: measured on these
weights after conversion, with timm's preprocessing (bicubic; 0.9 of the side at 224 pixels).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vit_jax.models.variants import get_variant
from vit_jax.pretrained.zoo import augreg
from vit_jax.pretrained.zoo.entry import Accuracy, ZooEntry, read_top1
from vit_jax.pretrained.zoo.torch import TIMM_TOP1

_README = "official README"
_NOT_IN_PAPER = "In the bucket, but in none of the official tables."


def _paper(percent: float) -> Accuracy:
    return Accuracy(percent, "2010.11929 table 5; may be another run than the file's")


def _timm(name: str) -> Accuracy:
    return Accuracy(TIMM_TOP1[name], f"timm, {name}")


def _entry(name: str, **fields: Any) -> ZooEntry:
    """A file of gs://vit_models, whose name tells the architecture: ViT-B_16-224, R50+ViT-B_16."""
    file = name.partition("/")[2].removesuffix("-224")
    return ZooEntry(
        name=name,
        url=f"gs://vit_models/{name}.npz",
        format="npz_published",
        variant=file.replace("ViT-", "").replace("_", "/"),
        **fields,
    )


def _imagenet21k(file: str, size: str, note: str = "") -> ZooEntry:
    zero_head = "For fine-tuning: the published head is all zeros (vision_transformer issue 10)."
    entry = _entry(
        f"imagenet21k/{file}",
        resolution=224,
        num_classes=21843,
        preprocess="official_eval(224)",
        labels="imagenet21k",
        size=size,
        note=f"{zero_head} {note}".strip(),
    )
    return dataclasses.replace(entry, representation_size=get_variant(entry.variant)["hidden_size"])


def _fine_tuned(file: str, size: str, *accuracy: Accuracy, note: str = "") -> ZooEntry:
    resolution = 224 if file.endswith("-224") else 384
    return _entry(
        f"imagenet21k+imagenet2012/{file}",
        resolution=resolution,
        preprocess=f"official_eval({resolution})",
        size=size,
        accuracy=accuracy,
        note=note,
    )


_TIMM_B16, _TIMM_B16_224, _TIMM_L32, _TIMM_R50 = (
    _timm(f"vit_{name}.orig_in21k_ft_in1k")
    for name in ("base_patch16_384", "base_patch16_224", "large_patch32_384", "base_r50_s16_384")
)
_README_B16_224, _README_L16_224 = (Accuracy(x, f"{_README}, expected") for x in (81.2, 82.7))
_ISSUE_39 = Accuracy(85.082, "vision_transformer issue 39, images squeezed to 384x384")
_VIT = (
    _imagenet21k("ViT-B_16", "393.69 MiB"),
    _imagenet21k("ViT-B_32", "400.01 MiB"),
    _imagenet21k("ViT-L_16", "1.22 GiB"),
    _imagenet21k("ViT-L_32", "1.23 GiB"),
    _imagenet21k("ViT-H_14", "2.46 GiB"),
    _imagenet21k("R50+ViT-B_16", "439.85 MiB"),
    _imagenet21k("ViT-B_8", "393.72 MiB", _NOT_IN_PAPER),
    _imagenet21k("R26+ViT-B_32", "450.23 MiB", _NOT_IN_PAPER),
    _imagenet21k("R50+ViT-L_32", "1.31 GiB", _NOT_IN_PAPER),
    _fine_tuned("ViT-B_16", "331.4 MiB", _TIMM_B16, _paper(83.97)),
    _fine_tuned("ViT-B_16-224", "330.29 MiB", _README_B16_224, _TIMM_B16_224),
    _fine_tuned("ViT-B_32", "336.89 MiB", _paper(81.28)),
    _fine_tuned("ViT-L_16", "1.14 GiB", _paper(85.15)),
    _fine_tuned("ViT-L_16-224", "1.13 GiB", _README_L16_224),
    _fine_tuned("ViT-L_32", "1.14 GiB", _TIMM_L32, _paper(80.99)),
    _fine_tuned("R50+ViT-B_16", "377.57 MiB", _ISSUE_39, _TIMM_R50),
    _fine_tuned("ViT-B_8", "334.78 MiB", note=f"{_NOT_IN_PAPER} No accuracy is published."),
)


def _augreg(
    model: str,
    recipe: str,
    *,
    lr: float,
    size: str = "",
    top1: float | None = None,
    resolution: int = 384,
    note: str = "",
) -> tuple[ZooEntry, ZooEntry]:
    """The recommended file of one architecture, and its fine-tuning on ImageNet."""
    file = f"{model}-i21k-300ep-lr_0.001-{recipe}"
    tuned = augreg.entry(f"{file}--imagenet2012-steps_20k-lr_{lr}-res_{resolution}")
    accuracy = () if top1 is None else (Accuracy(top1, _README),)
    name = f"augreg/{model}"
    return (
        dataclasses.replace(augreg.entry(file), name=name, size=size, note=note),
        dataclasses.replace(tuned, name=f"{name}-imagenet2012", accuracy=accuracy, note=note),
    )


# Best of each architecture by upstream validation accuracy, as the official README lists them.
_AUGREG = (
    *_augreg("L_16", "aug_strong1-wd_0.1-do_0.0-sd_0.0", size="1243 MiB", lr=0.01, top1=85.59),
    *_augreg("B_16", "aug_medium1-wd_0.1-do_0.0-sd_0.0", size="391 MiB", lr=0.03, top1=85.49),
    *_augreg("S_16", "aug_light1-wd_0.03-do_0.0-sd_0.0", size="115 MiB", lr=0.03, top1=83.73),
    *_augreg("R50_L_32", "aug_medium1-wd_0.1-do_0.1-sd_0.1", size="1337 MiB", lr=0.01, top1=85.99),
    *_augreg("R26_S_32", "aug_light1-wd_0.1-do_0.0-sd_0.0", size="170 MiB", lr=0.01, top1=83.85),
    *_augreg("Ti_16", "aug_none-wd_0.03-do_0.0-sd_0.0", size="37 MiB", lr=0.03, top1=78.22),
    *_augreg("B_32", "aug_light1-wd_0.1-do_0.0-sd_0.0", size="398 MiB", lr=0.01, top1=83.59),
    *_augreg("S_32", "aug_none-wd_0.1-do_0.0-sd_0.0", size="118 MiB", lr=0.01, top1=79.58),
    *_augreg("R_Ti_16", "aug_none-wd_0.03-do_0.0-sd_0.0", size="40 MiB", lr=0.03, top1=75.40),
    *_augreg(
        "B_8",
        "aug_medium2-wd_0.1-do_0.0-sd_0.0",
        lr=0.03,
        resolution=224,
        note="Not in the README's table; the choice is that of the official augreg notebook. "
        "Its accuracy is not published (a third party reports 85.95).",
    ),
)


def _from_scratch(name: str, size: str = "", *accuracy: Accuracy, note: str) -> ZooEntry:
    return _entry(
        name,
        resolution=224,
        preprocess="big_vision_eval(224, 256)",
        classifier="gap" if name.startswith("gsam/") else "token",
        size=size,
        accuracy=accuracy,
        note=f"Trained on ImageNet alone with {note}",
    )


_SAM = "SAM (2106.01548). That its accuracy is measured on the middle of the image, as big_vision "
_SAM += "has it, is not verified."
_UNVERIFIED_SAM = f"{_SAM} Accuracy not verified."
_GSAM = "GSAM (2203.08065); neither class token nor tanh layer (vision_transformer pull request "
_GSAM += "215). Accuracy not verified: timm's author found it very poor (timm issue 1302)."
_UNVERIFIED_GSAM = f"{_GSAM} That the file has this name is not verified."
_SAM_B16 = Accuracy(79.9, "2106.01548, as quoted in issue 83 of davda54/sam")
_TIMM_SAM_B16, _TIMM_SAM_B32 = (_timm(f"vit_base_patch{n}_224.sam_in1k") for n in (16, 32))
_SHARPNESS_AWARE = (
    _from_scratch("sam/ViT-B_16", "330.3 MiB", _SAM_B16, _TIMM_SAM_B16, note=_SAM),
    _from_scratch("sam/ViT-B_32", "336.61 MiB", _TIMM_SAM_B32, note=_SAM),
    _from_scratch("sam/ViT-L_16", "1.13 GiB", note=_UNVERIFIED_SAM),
    _from_scratch("sam/ViT-L_32", "1.14 GiB", note=_UNVERIFIED_SAM),
    _from_scratch(
        "sam/ViT-S_16",
        "252.57 MiB",
        note=f"{_UNVERIFIED_SAM} The file is three times as large as the parameters; it "
        "probably holds the state of the optimizer too (not verified).",
    ),
    _from_scratch("gsam/ViT-B_16", note=_GSAM),
    _from_scratch("gsam/ViT-B_32", note=_UNVERIFIED_GSAM),
    _from_scratch("gsam/ViT-S_16", note=_UNVERIFIED_GSAM),
    _from_scratch("gsam/ViT-S_32", note=_UNVERIFIED_GSAM),
)


def _better_plain_vit(epochs: int, *, top1: float) -> ZooEntry:
    return ZooEntry(
        name=f"big_vision/vit_s16_i1k_{epochs}ep",
        url=f"gs://big_vision/vit_s16_i1k_{epochs}ep.npz",
        format="big_vision",
        variant="S/16",
        resolution=224,
        preprocess="big_vision_eval(224, 256)",
        classifier="gap",
        representation_size=384,
        position_embedding="sincos2d",
        accuracy=(Accuracy(top1, "2205.01580, full recipe; may be another run than the file's"),),
    )


# By size and pre-training.
_DEIT_III = """
       1k         21k
small  81.4/83.4  83.1/84.8
base   83.8/85.0  85.7/86.7
large  84.9/85.8  87.0/87.7
"""


def _deit_iii(size: str, data: str, resolution: int, *, top1: float) -> ZooEntry:
    model = f"{size}_{resolution}_{data}"
    pretrained = ", pre-trained on ImageNet-21k" if data == "21k" else ""
    return ZooEntry(
        name=f"big_vision/bv_deit_3_{model}",
        url=f"gs://big_vision/zoo/deit3/bv_deit_3_{model}.npz",
        format="big_vision",
        variant={"small": "S/16", "base": "B/16", "large": "L/16"}[size],
        resolution=resolution,
        preprocess=f"timm_eval({resolution}, 1.0)",
        accuracy=(Accuracy(top1, "README_revenge.md of facebookresearch/deit, before conversion"),),
        note=f"DeiT III converted by big_vision to inputs in [-1, 1]{pretrained}.",
    )


_BIG_VISION = (
    _better_plain_vit(90, top1=76.5),
    _better_plain_vit(150, top1=78.5),
    _better_plain_vit(300, top1=80.0),
    *(_deit_iii(*key, top1=top1) for key, top1 in read_top1(_DEIT_III).items()),
)

ROWS = (*_VIT, *_AUGREG, *_SHARPNESS_AWARE, *_BIG_VISION)
