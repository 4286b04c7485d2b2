"""Rows of the zoo: DeiT as its authors publish it, and what Hugging Face's hub holds.

DeiT: README_deit.md of facebookresearch/deit; the eight hex digits in a file's name begin its
SHA-256. Repositories of timm: the names in timm's default_cfgs; accuracies are those of
pytorch-image-models, results/results-imagenet.csv.
"""

from __future__ import annotations

from typing import NamedTuple

from vit_jax.models.variants import get_variant
from vit_jax.pretrained.zoo.entry import Accuracy, ZooEntry

_DEIT_README = "README_deit.md of facebookresearch/deit"
_TIMM_RESULTS = "pytorch-image-models, results/results-imagenet.csv"
_SIZES = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H"}


class _DeiT(NamedTuple):
    model: str
    sha256: str  # how it begins
    readme_top1: float
    timm_top1: float

    @property
    def variant(self) -> str:
        family = "DeiT-distilled" if "distilled" in self.model else "DeiT"
        return f"{family}-{_SIZES[self.model.split('_')[1]]}/16"

    @property
    def resolution(self) -> int:
        return int(self.model[-3:])


_DEIT = (
    _DeiT("deit_tiny_patch16_224", "a1311bcf", readme_top1=72.2, timm_top1=72.190),
    _DeiT("deit_small_patch16_224", "cd65a155", readme_top1=79.9, timm_top1=79.856),
    _DeiT("deit_base_patch16_224", "b5f2ef4d", readme_top1=81.8, timm_top1=81.980),
    _DeiT("deit_base_patch16_384", "8de9b5d1", readme_top1=82.9, timm_top1=83.108),
    _DeiT("deit_tiny_distilled_patch16_224", "b40b3cf7", readme_top1=74.5, timm_top1=74.538),
    _DeiT("deit_small_distilled_patch16_224", "649709d9", readme_top1=81.2, timm_top1=81.204),
    _DeiT("deit_base_distilled_patch16_224", "df68dfff", readme_top1=83.4, timm_top1=83.384),
    _DeiT("deit_base_distilled_patch16_384", "d0272ac0", readme_top1=85.2, timm_top1=85.438),
)


def _published(deit: _DeiT) -> ZooEntry:
    return ZooEntry(
        name=f"deit/{deit.model}",
        url=f"https://dl.fbaipublicfiles.com/deit/{deit.model}-{deit.sha256}.pth",
        format="timm",
        variant=deit.variant,
        resolution=deit.resolution,
        preprocess=f"deit_eval({deit.resolution})",
        sha256=deit.sha256,
        accuracy=(Accuracy(deit.readme_top1, _DEIT_README),),
        note="Trained for 1000 epochs." if deit.model == "deit_base_distilled_patch16_384" else "",
    )


def _on_facebook(deit: _DeiT) -> ZooEntry:
    name = f"facebook/{deit.model.replace('_', '-')}"
    return ZooEntry(
        name=name,
        url=f"hf://{name}",
        format="huggingface",
        variant=deit.variant,
        resolution=deit.resolution,
        preprocess=f"deit_eval({deit.resolution})",
        accuracy=(Accuracy(deit.readme_top1, f"{_DEIT_README}, before conversion"),),
        note=""
        if "distilled" in name
        else "The repository's own preprocessor_config.json scales with mean and deviation 0.5; "
        "the weights were trained with ImageNet's, which is what preprocess does here.",
    )


def _deit_on_timm(deit: _DeiT) -> ZooEntry:
    crop = 1.0 if deit.resolution == 384 else 0.9
    return ZooEntry(
        name=f"timm/{deit.model}.fb_in1k",
        url=f"hf://timm/{deit.model}.fb_in1k",
        format="timm",
        variant=deit.variant,
        resolution=deit.resolution,
        preprocess=f"deit_eval({deit.resolution}, {crop})",
        accuracy=(Accuracy(deit.timm_top1, _TIMM_RESULTS),),
    )


# repository: the row of google.py that it was converted from
_GOOGLE = {
    "vit-base-patch16-224": "imagenet21k+imagenet2012/ViT-B_16-224",
    "vit-base-patch16-384": "imagenet21k+imagenet2012/ViT-B_16",
    "vit-base-patch32-384": "imagenet21k+imagenet2012/ViT-B_32",
    "vit-large-patch16-224": "imagenet21k+imagenet2012/ViT-L_16-224",
    "vit-large-patch16-384": "imagenet21k+imagenet2012/ViT-L_16",
    "vit-large-patch32-384": "imagenet21k+imagenet2012/ViT-L_32",
    "vit-base-patch16-224-in21k": "imagenet21k/ViT-B_16",
    "vit-base-patch32-224-in21k": "imagenet21k/ViT-B_32",
    "vit-large-patch16-224-in21k": "imagenet21k/ViT-L_16",
    "vit-large-patch32-224-in21k": "imagenet21k/ViT-L_32",
    "vit-huge-patch14-224-in21k": "imagenet21k/ViT-H_14",
}
_GOOGLE_ACCURACY = {"vit-base-patch16-224": (Accuracy(81.31, "transformers issue 28264"),)}


def _on_google(repository: str) -> ZooEntry:
    _, size, patch, resolution, *in21k = repository.split("-")
    variant = f"{_SIZES[size]}/{patch.removeprefix('patch')}"
    pooler = " No head; its pooler is the tanh layer before the head." if in21k else ""
    return ZooEntry(
        name=f"google/{repository}",
        url=f"hf://google/{repository}",
        format="huggingface",
        variant=variant,
        resolution=int(resolution),
        preprocess=f"huggingface_eval({resolution})",
        num_classes=0 if in21k else 1000,
        representation_size=get_variant(variant)["hidden_size"] if in21k else None,
        labels="" if in21k else "imagenet2012",
        accuracy=_GOOGLE_ACCURACY.get(repository, ()),
        note=f"Google's weights, converted; by their names those of {_GOOGLE[repository]}."
        + pooler,
    )


_TIMM_VARIANTS = {
    "vit_tiny_patch16": "Ti/16",
    "vit_small_patch32": "S/32",
    "vit_small_patch16": "S/16",
    "vit_base_patch32": "B/32",
    "vit_base_patch16": "B/16",
    "vit_base_patch8": "B/8",
    "vit_large_patch16": "L/16",
    "vit_tiny_r_s16_p8": "R+Ti/16",
    "vit_small_r26_s32": "R26+S/32",
    "vit_large_r50_s32": "R50+L/32",
    "vit_large_patch32": "L/32",
    "vit_huge_patch14": "H/14",
    "vit_base_r50_s16": "R50+B/16",
}
# Repositories that timm's author converted from Google's files: ImageNet top-1.
TIMM_TOP1 = {
    "vit_tiny_patch16_224.augreg_in21k": None,
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k": 75.452,
    "vit_tiny_patch16_384.augreg_in21k_ft_in1k": 78.438,
    "vit_small_patch32_224.augreg_in21k": None,
    "vit_small_patch32_224.augreg_in21k_ft_in1k": 76.010,
    "vit_small_patch32_384.augreg_in21k_ft_in1k": 80.476,
    "vit_small_patch16_224.augreg_in21k": None,
    "vit_small_patch16_224.augreg_in21k_ft_in1k": 81.402,
    "vit_small_patch16_384.augreg_in21k_ft_in1k": 83.814,
    "vit_small_patch16_224.augreg_in1k": 78.842,
    "vit_small_patch16_384.augreg_in1k": 81.130,
    "vit_base_patch32_224.augreg_in21k": None,
    "vit_base_patch32_224.augreg_in21k_ft_in1k": 80.732,
    "vit_base_patch32_384.augreg_in21k_ft_in1k": 83.358,
    "vit_base_patch32_224.augreg_in1k": 74.908,
    "vit_base_patch32_384.augreg_in1k": 78.750,
    "vit_base_patch16_224.augreg_in21k": None,
    "vit_base_patch16_224.augreg_in21k_ft_in1k": 84.534,
    "vit_base_patch16_384.augreg_in21k_ft_in1k": 86.010,
    "vit_base_patch16_224.augreg_in1k": 79.154,
    "vit_base_patch16_384.augreg_in1k": 81.102,
    "vit_base_patch8_224.augreg_in21k": None,
    "vit_base_patch8_224.augreg_in21k_ft_in1k": 85.838,
    "vit_large_patch16_224.augreg_in21k": None,
    "vit_large_patch16_224.augreg_in21k_ft_in1k": 85.856,
    "vit_large_patch16_384.augreg_in21k_ft_in1k": 87.096,
    "vit_tiny_r_s16_p8_224.augreg_in21k": None,
    "vit_tiny_r_s16_p8_224.augreg_in21k_ft_in1k": 71.800,
    "vit_tiny_r_s16_p8_384.augreg_in21k_ft_in1k": 75.962,
    "vit_small_r26_s32_224.augreg_in21k": None,
    "vit_small_r26_s32_224.augreg_in21k_ft_in1k": 81.856,
    "vit_small_r26_s32_384.augreg_in21k_ft_in1k": 84.066,
    "vit_large_r50_s32_224.augreg_in21k": None,
    "vit_large_r50_s32_224.augreg_in21k_ft_in1k": 84.434,
    "vit_large_r50_s32_384.augreg_in21k_ft_in1k": 86.188,
    "vit_base_patch32_224.orig_in21k": None,
    "vit_base_patch16_224.orig_in21k": None,
    "vit_large_patch32_224.orig_in21k": None,
    "vit_large_patch16_224.orig_in21k": None,
    "vit_huge_patch14_224.orig_in21k": None,
    "vit_base_r50_s16_224.orig_in21k": None,
    "vit_base_patch16_224.orig_in21k_ft_in1k": 81.782,
    "vit_base_patch16_384.orig_in21k_ft_in1k": 84.212,
    "vit_large_patch32_384.orig_in21k_ft_in1k": 81.508,
    "vit_base_r50_s16_384.orig_in21k_ft_in1k": 84.988,
    "vit_base_patch32_224.sam_in1k": 73.704,
    "vit_base_patch16_224.sam_in1k": 80.246,
}


def _on_timm(repository: str) -> ZooEntry:
    model, _, tag = repository.partition(".")
    architecture, _, resolution = model.rpartition("_")
    num_classes, labels = 1000, "imagenet2012"
    if tag == "augreg_in21k":
        num_classes, labels = 21843, "imagenet21k"
    elif tag == "orig_in21k":
        num_classes, labels = 0, ""
    top1 = TIMM_TOP1[repository]
    return ZooEntry(
        name=f"timm/{repository}",
        url=f"hf://timm/{repository}",
        format="timm",
        variant=_TIMM_VARIANTS[architecture],
        resolution=int(resolution),
        preprocess="timm_eval(384, 1.0)" if resolution == "384" else f"timm_eval({resolution})",
        num_classes=num_classes,
        labels=labels,
        accuracy=() if top1 is None else (Accuracy(top1, _TIMM_RESULTS),),
        note="" if num_classes else "No head, nor the tanh layer before it.",
    )


ROWS = (
    *map(_published, _DEIT),
    *map(_on_facebook, _DEIT),
    *map(_on_google, _GOOGLE),
    *map(_deit_on_timm, _DEIT),
    *map(_on_timm, TIMM_TOP1),
)
