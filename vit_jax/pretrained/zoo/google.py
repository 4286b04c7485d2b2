"""Rows of the zoo: Google's checkpoints, in the buckets vit_models and big_vision.

Sizes of imagenet21k, imagenet21k+imagenet2012 and sam: listing of the buckets in the official
vit_jax.ipynb; of augreg: table in the official README. Whether a file has the tanh layer before
its head, and the resolution of the two ViT-B_8, follow from the size, which a test recomputes.

"timm" in a source means pytorch-image-models, results/results-imagenet.csv: measured on these
weights after conversion, with timm's preprocessing (bicubic; 0.9 of the side at 224 pixels).
"""

from __future__ import annotations

import dataclasses

from vit_jax.models.variants import get_variant
from vit_jax.pretrained.zoo import augreg
from vit_jax.pretrained.zoo.entry import Accuracy, ZooEntry

_PAPER = "2010.11929 table 5; may be another run than the file's"
_README = "official README"
_TIMM = "timm, {}"

_ZERO_HEAD = "For fine-tuning: the published head is all zeros (vision_transformer issue 10)."


def _imagenet(percent: float, source: str) -> Accuracy:
    return Accuracy("imagenet2012", percent, source)


def _imagenet21k(file: str, variant: str, size: str, note: str = "") -> ZooEntry:
    return ZooEntry(
        name=f"imagenet21k/{file}",
        url=f"gs://vit_models/imagenet21k/{file}.npz",
        format="npz_published",
        variant=variant,
        resolution=224,
        num_classes=21843,
        preprocess="official_eval(224)",
        representation_size=get_variant(variant)["hidden_size"],
        labels="imagenet21k",
        size=size,
        note=f"{_ZERO_HEAD} {note}".strip(),
    )


def _fine_tuned(
    file: str, variant: str, resolution: int, size: str, *accuracy: Accuracy, note: str = ""
) -> ZooEntry:
    return ZooEntry(
        name=f"imagenet21k+imagenet2012/{file}",
        url=f"gs://vit_models/imagenet21k+imagenet2012/{file}.npz",
        format="npz_published",
        variant=variant,
        resolution=resolution,
        num_classes=1000,
        preprocess=f"official_eval({resolution})",
        labels="imagenet2012",
        size=size,
        accuracy=accuracy,
        note=note,
    )


_NOT_IN_PAPER = "In the bucket, but in none of the official tables."

_VIT = (
    _imagenet21k("ViT-B_16", "B/16", "393.69 MiB"),
    _imagenet21k("ViT-B_32", "B/32", "400.01 MiB"),
    _imagenet21k("ViT-L_16", "L/16", "1.22 GiB"),
    _imagenet21k("ViT-L_32", "L/32", "1.23 GiB"),
    _imagenet21k("ViT-H_14", "H/14", "2.46 GiB"),
    _imagenet21k("R50+ViT-B_16", "R50+B/16", "439.85 MiB"),
    _imagenet21k("ViT-B_8", "B/8", "393.72 MiB", _NOT_IN_PAPER),
    _imagenet21k("R26+ViT-B_32", "R26+B/32", "450.23 MiB", _NOT_IN_PAPER),
    _imagenet21k("R50+ViT-L_32", "R50+L/32", "1.31 GiB", _NOT_IN_PAPER),
    _fine_tuned(
        *("ViT-B_16", "B/16", 384, "331.4 MiB"),
        _imagenet(84.212, _TIMM.format("vit_base_patch16_384.orig_in21k_ft_in1k")),
        _imagenet(83.97, _PAPER),
    ),
    _fine_tuned(
        *("ViT-B_16-224", "B/16", 224, "330.29 MiB"),
        _imagenet(81.2, f"{_README}, expected"),
        _imagenet(81.782, _TIMM.format("vit_base_patch16_224.orig_in21k_ft_in1k")),
    ),
    _fine_tuned("ViT-B_32", "B/32", 384, "336.89 MiB", _imagenet(81.28, _PAPER)),
    _fine_tuned("ViT-L_16", "L/16", 384, "1.14 GiB", _imagenet(85.15, _PAPER)),
    _fine_tuned(
        *("ViT-L_16-224", "L/16", 224, "1.13 GiB"), _imagenet(82.7, f"{_README}, expected")
    ),
    _fine_tuned(
        *("ViT-L_32", "L/32", 384, "1.14 GiB"),
        _imagenet(81.508, _TIMM.format("vit_large_patch32_384.orig_in21k_ft_in1k")),
        _imagenet(80.99, _PAPER),
    ),
    _fine_tuned(
        *("R50+ViT-B_16", "R50+B/16", 384, "377.57 MiB"),
        _imagenet(85.082, "vision_transformer issue 39, images squeezed to 384x384"),
        _imagenet(84.988, _TIMM.format("vit_base_r50_s16_384.orig_in21k_ft_in1k")),
    ),
    _fine_tuned(
        *("ViT-B_8", "B/8", 384, "334.78 MiB"),
        note=f"{_NOT_IN_PAPER} No accuracy is published.",
    ),
)


def _augreg(
    model: str,
    recipe: str,
    size: str,
    lr: str,
    percent: float | None,
    resolution: int = 384,
    note: str = "",
) -> tuple[ZooEntry, ZooEntry]:
    """The recommended file of one architecture, and its fine-tuning on ImageNet."""
    file = f"{model}-i21k-300ep-lr_0.001-{recipe}"
    tuned = f"{file}--imagenet2012-steps_20k-lr_{lr}-res_{resolution}"
    accuracy = () if percent is None else (_imagenet(percent, _README),)
    return (
        dataclasses.replace(augreg.entry(file), name=f"augreg/{model}", size=size, note=note),
        dataclasses.replace(
            augreg.entry(tuned),
            name=f"augreg/{model}-imagenet2012",
            accuracy=accuracy,
            note=note,
        ),
    )


# Best of each architecture by upstream validation accuracy, as the official README lists them.
_AUGREG = (
    *_augreg("L_16", "aug_strong1-wd_0.1-do_0.0-sd_0.0", "1243 MiB", "0.01", 85.59),
    *_augreg("B_16", "aug_medium1-wd_0.1-do_0.0-sd_0.0", "391 MiB", "0.03", 85.49),
    *_augreg("S_16", "aug_light1-wd_0.03-do_0.0-sd_0.0", "115 MiB", "0.03", 83.73),
    *_augreg("R50_L_32", "aug_medium1-wd_0.1-do_0.1-sd_0.1", "1337 MiB", "0.01", 85.99),
    *_augreg("R26_S_32", "aug_light1-wd_0.1-do_0.0-sd_0.0", "170 MiB", "0.01", 83.85),
    *_augreg("Ti_16", "aug_none-wd_0.03-do_0.0-sd_0.0", "37 MiB", "0.03", 78.22),
    *_augreg("B_32", "aug_light1-wd_0.1-do_0.0-sd_0.0", "398 MiB", "0.01", 83.59),
    *_augreg("S_32", "aug_none-wd_0.1-do_0.0-sd_0.0", "118 MiB", "0.01", 79.58),
    *_augreg("R_Ti_16", "aug_none-wd_0.03-do_0.0-sd_0.0", "40 MiB", "0.03", 75.40),
    *_augreg(
        *("B_8", "aug_medium2-wd_0.1-do_0.0-sd_0.0", "", "0.03", None, 224),
        note="Not in the README's table; the choice is that of the official augreg notebook. "
        "Its accuracy is not published (a third party reports 85.95).",
    ),
)


def _sam(file: str, variant: str, size: str, *accuracy: Accuracy, note: str = "") -> ZooEntry:
    return ZooEntry(
        name=f"sam/{file}",
        url=f"gs://vit_models/sam/{file}.npz",
        format="npz_published",
        variant=variant,
        resolution=224,
        num_classes=1000,
        preprocess="big_vision_eval(224, 256)",
        labels="imagenet2012",
        size=size,
        accuracy=accuracy,
        note="Trained on ImageNet alone with SAM (2106.01548). That its accuracy is measured on "
        f"the middle of the image, as big_vision has it, is not verified. {note}".strip(),
    )


_SAM_PAPER = "2106.01548, as quoted in issue 83 of davda54/sam"

_SAM = (
    _sam(
        *("ViT-B_16", "B/16", "330.3 MiB"),
        _imagenet(79.9, _SAM_PAPER),
        _imagenet(80.246, _TIMM.format("vit_base_patch16_224.sam_in1k")),
    ),
    _sam(
        *("ViT-B_32", "B/32", "336.61 MiB"),
        _imagenet(73.704, _TIMM.format("vit_base_patch32_224.sam_in1k")),
    ),
    _sam("ViT-L_16", "L/16", "1.13 GiB", note="Accuracy not verified."),
    _sam("ViT-L_32", "L/32", "1.14 GiB", note="Accuracy not verified."),
    _sam(
        *("ViT-S_16", "S/16", "252.57 MiB"),
        note="Accuracy not verified. The file is three times as large as the parameters; it "
        "probably holds the state of the optimizer too (not verified).",
    ),
)


def _gsam(file: str, variant: str, note: str = "") -> ZooEntry:
    return ZooEntry(
        name=f"gsam/{file}",
        url=f"gs://vit_models/gsam/{file}.npz",
        format="npz_published",
        variant=variant,
        resolution=224,
        num_classes=1000,
        preprocess="big_vision_eval(224, 256)",
        classifier="gap",
        labels="imagenet2012",
        note="Trained on ImageNet alone with GSAM (2203.08065); neither class token nor tanh layer "
        "(vision_transformer pull request 215). Accuracy not verified: timm's author found it very "
        f"poor (timm issue 1302). {note}".strip(),
    )


_GSAM_NAME = "That the file has this name is not verified."

_GSAM = (
    _gsam("ViT-B_16", "B/16"),
    _gsam("ViT-B_32", "B/32", _GSAM_NAME),
    _gsam("ViT-S_16", "S/16", _GSAM_NAME),
    _gsam("ViT-S_32", "S/32", _GSAM_NAME),
)


def _better_plain_vit(epochs: int, percent: float) -> ZooEntry:
    return ZooEntry(
        name=f"big_vision/vit_s16_i1k_{epochs}ep",
        url=f"gs://big_vision/vit_s16_i1k_{epochs}ep.npz",
        format="big_vision",
        variant="S/16",
        resolution=224,
        num_classes=1000,
        preprocess="big_vision_eval(224, 256)",
        classifier="gap",
        representation_size=384,
        position_embedding="sincos2d",
        labels="imagenet2012",
        accuracy=(
            _imagenet(percent, "2205.01580, full recipe; may be another run than the file's"),
        ),
    )


def _deit_iii(
    size: str, variant: str, resolution: int, pretrained: str, percent: float
) -> ZooEntry:
    file = f"bv_deit_3_{size}_{resolution}_{pretrained}"
    return ZooEntry(
        name=f"big_vision/{file}",
        url=f"gs://big_vision/zoo/deit3/{file}.npz",
        format="big_vision",
        variant=variant,
        resolution=resolution,
        num_classes=1000,
        preprocess=f"timm_eval({resolution}, 1.0)",
        labels="imagenet2012",
        accuracy=(
            _imagenet(percent, "README_revenge.md of facebookresearch/deit, before conversion"),
        ),
        note="DeiT III converted by big_vision to inputs in [-1, 1]"
        + (", pre-trained on ImageNet-21k." if pretrained == "21k" else "."),
    )


_BIG_VISION = (
    _better_plain_vit(90, 76.5),
    _better_plain_vit(150, 78.5),
    _better_plain_vit(300, 80.0),
    _deit_iii("small", "S/16", 224, "1k", 81.4),
    _deit_iii("small", "S/16", 384, "1k", 83.4),
    _deit_iii("base", "B/16", 224, "1k", 83.8),
    _deit_iii("base", "B/16", 384, "1k", 85.0),
    _deit_iii("large", "L/16", 224, "1k", 84.9),
    _deit_iii("large", "L/16", 384, "1k", 85.8),
    _deit_iii("small", "S/16", 224, "21k", 83.1),
    _deit_iii("small", "S/16", 384, "21k", 84.8),
    _deit_iii("base", "B/16", 224, "21k", 85.7),
    _deit_iii("base", "B/16", 384, "21k", 86.7),
    _deit_iii("large", "L/16", 224, "21k", 87.0),
    _deit_iii("large", "L/16", 384, "21k", 87.7),
)

ROWS = (*_VIT, *_AUGREG, *_SAM, *_GSAM, *_BIG_VISION)
