"""Rows of the zoo: DeiT as its authors publish it, and what Hugging Face's hub holds.

DeiT: README_deit.md of facebookresearch/deit; the eight hex digits in a file's name begin its
SHA-256. Repositories of timm: the names in timm's default_cfgs; accuracies are those of
pytorch-image-models, results/results-imagenet.csv.
"""

from __future__ import annotations

from typing import Any

from vit_jax.models.variants import get_variant
from vit_jax.pretrained.formats.timm import ARCHITECTURES
from vit_jax.pretrained.zoo.entry import Accuracy, ZooEntry, read_top1

_DEIT_README = "README_deit.md of facebookresearch/deit"
_TIMM_RESULTS = "pytorch-image-models, results/results-imagenet.csv"
_SIZES = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H"}


def _deit(model: str, sha256: str, *, readme_top1: float, timm_top1: float) -> list[ZooEntry]:
    """The authors' file, whose hash begins so, and its conversions by Facebook and timm."""
    is_distilled, resolution = "distilled" in model, int(model[-3:])
    hub_name = f"facebook/{model.replace('_', '-')}"
    crop = 1.0 if resolution == 384 else 0.9
    common: dict[str, Any] = {
        "variant": f"DeiT{'-distilled' * is_distilled}-{_SIZES[model.split('_')[1]]}/16",
        "resolution": resolution,
    }
    return [
        ZooEntry(
            name=f"deit/{model}",
            url=f"https://dl.fbaipublicfiles.com/deit/{model}-{sha256}.pth",
            format="timm",
            preprocess=f"deit_eval({resolution})",
            sha256=sha256,
            accuracy=(Accuracy(readme_top1, _DEIT_README),),
            note="Trained for 1000 epochs." if is_distilled and resolution == 384 else "",
            **common,
        ),
        ZooEntry(
            name=hub_name,
            url=f"hf://{hub_name}",
            format="huggingface",
            preprocess=f"deit_eval({resolution})",
            accuracy=(Accuracy(readme_top1, f"{_DEIT_README}, before conversion"),),
            note=""
            if is_distilled
            else "The repository's own preprocessor_config.json scales with mean and deviation "
            "0.5; the weights were trained with ImageNet's, which is what preprocess does here.",
            **common,
        ),
        ZooEntry(
            name=f"timm/{model}.fb_in1k",
            url=f"hf://timm/{model}.fb_in1k",
            format="timm",
            preprocess=f"deit_eval({resolution}, {crop})",
            accuracy=(Accuracy(timm_top1, _TIMM_RESULTS),),
            **common,
        ),
    ]


_DEIT = [
    *_deit("deit_tiny_patch16_224", "a1311bcf", readme_top1=72.2, timm_top1=72.190),
    *_deit("deit_small_patch16_224", "cd65a155", readme_top1=79.9, timm_top1=79.856),
    *_deit("deit_base_patch16_224", "b5f2ef4d", readme_top1=81.8, timm_top1=81.980),
    *_deit("deit_base_patch16_384", "8de9b5d1", readme_top1=82.9, timm_top1=83.108),
    *_deit("deit_tiny_distilled_patch16_224", "b40b3cf7", readme_top1=74.5, timm_top1=74.538),
    *_deit("deit_small_distilled_patch16_224", "649709d9", readme_top1=81.2, timm_top1=81.204),
    *_deit("deit_base_distilled_patch16_224", "df68dfff", readme_top1=83.4, timm_top1=83.384),
    *_deit("deit_base_distilled_patch16_384", "d0272ac0", readme_top1=85.2, timm_top1=85.438),
]


def _on_google(repository: str, *accuracy: Accuracy) -> ZooEntry:
    """What Google has converted from its own file, a row of google.py."""
    _, size, patch, resolution, *in21k = repository.split("-")
    variant = f"{_SIZES[size]}/{patch.removeprefix('patch')}"
    file = f"ViT-{variant.replace('/', '_')}"
    origin, pooler = f"imagenet21k+imagenet2012/{file}{'-224' * (resolution == '224')}", ""
    if in21k:
        origin = f"imagenet21k/{file}"
        pooler = " No head; its pooler is the tanh layer before the head."
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
        accuracy=accuracy,
        note=f"Google's weights, converted; by their names those of {origin}.{pooler}",
    )


_GOOGLE = [
    _on_google("vit-base-patch16-224", Accuracy(81.31, "transformers issue 28264")),
    _on_google("vit-base-patch16-384"),
    _on_google("vit-base-patch32-384"),
    _on_google("vit-large-patch16-224"),
    _on_google("vit-large-patch16-384"),
    _on_google("vit-large-patch32-384"),
    _on_google("vit-base-patch16-224-in21k"),
    _on_google("vit-base-patch32-224-in21k"),
    _on_google("vit-large-patch16-224-in21k"),
    _on_google("vit-large-patch32-224-in21k"),
    _on_google("vit-huge-patch14-224-in21k"),
]

# Repositories that timm's author converted from Google's files: ARCHITECTURE_RESOLUTION.TAG.
_TOP1 = """
                   augreg_in21k_ft_in1k  augreg_in1k    orig_in21k_ft_in1k  sam_in1k
vit_tiny_patch16   75.452/78.438         -/-            -/-                 -/-
vit_small_patch32  76.010/80.476         -/-            -/-                 -/-
vit_small_patch16  81.402/83.814         78.842/81.130  -/-                 -/-
vit_base_patch32   80.732/83.358         74.908/78.750  -/-                 73.704/-
vit_base_patch16   84.534/86.010         79.154/81.102  81.782/84.212       80.246/-
vit_base_patch8    85.838/-              -/-            -/-                 -/-
vit_large_patch16  85.856/87.096         -/-            -/-                 -/-
vit_large_patch32  -/-                   -/-            -/81.508            -/-
vit_tiny_r_s16_p8  71.800/75.962         -/-            -/-                 -/-
vit_small_r26_s32  81.856/84.066         -/-            -/-                 -/-
vit_base_r50_s16   -/-                   -/-            -/84.988            -/-
vit_large_r50_s32  84.434/86.188         -/-            -/-                 -/-
"""
TIMM_TOP1 = {
    f"{architecture}_{resolution}.{tag}": top1
    for (architecture, tag, resolution), top1 in read_top1(_TOP1).items()
}
# Whose pre-trained weights are there too, at 224 pixels and without an accuracy.
_IN21K = [name.removesuffix("_ft_in1k") for name in TIMM_TOP1 if "_224.augreg_in21k" in name]
_IN21K += ["vit_base_patch32_224.orig_in21k", "vit_base_patch16_224.orig_in21k"]
_IN21K += ["vit_large_patch32_224.orig_in21k", "vit_large_patch16_224.orig_in21k"]
_IN21K += ["vit_huge_patch14_224.orig_in21k", "vit_base_r50_s16_224.orig_in21k"]


def _on_timm(repository: str) -> ZooEntry:
    model, _, tag = repository.partition(".")
    architecture, _, resolution = model.rpartition("_")
    variants = {name: variant for variant, name in ARCHITECTURES.items()}
    labels = {"augreg_in21k": "imagenet21k", "orig_in21k": ""}.get(tag, "imagenet2012")
    num_classes = {"": 0, "imagenet21k": 21843}.get(labels, 1000)
    top1 = TIMM_TOP1.get(repository)
    return ZooEntry(
        name=f"timm/{repository}",
        url=f"hf://timm/{repository}",
        format="timm",
        variant=variants[architecture],
        resolution=int(resolution),
        preprocess="timm_eval(384, 1.0)" if resolution == "384" else f"timm_eval({resolution})",
        num_classes=num_classes,
        labels=labels,
        accuracy=() if top1 is None else (Accuracy(top1, _TIMM_RESULTS),),
        note="" if num_classes else "No head, nor the tanh layer before it.",
    )


ROWS = [*_DEIT, *_GOOGLE, *map(_on_timm, [*TIMM_TOP1, *_IN21K])]
