"""Rows of the zoo: DeiT as its authors publish it, and what Hugging Face's hub holds.

DeiT: README_deit.md of facebookresearch/deit; the eight hex digits in a file's name begin its
SHA-256. Repositories of timm: the names in timm's default_cfgs; accuracies are those of
pytorch-image-models, results/results-imagenet.csv.
"""

from __future__ import annotations

from vit_jax.models.variants import get_variant
from vit_jax.pretrained.zoo.entry import Accuracy, ZooEntry

_DEIT_README = "README_deit.md of facebookresearch/deit"
_TIMM_RESULTS = "pytorch-image-models, results/results-imagenet.csv"

# model: (variant, resolution, begin of the file's SHA-256, README's top-1, timm's top-1)
_DEIT_MODELS = {
    "deit_tiny_patch16_224": ("DeiT-Ti/16", 224, "a1311bcf", 72.2, 72.190),
    "deit_small_patch16_224": ("DeiT-S/16", 224, "cd65a155", 79.9, 79.856),
    "deit_base_patch16_224": ("DeiT-B/16", 224, "b5f2ef4d", 81.8, 81.980),
    "deit_base_patch16_384": ("DeiT-B/16", 384, "8de9b5d1", 82.9, 83.108),
    "deit_tiny_distilled_patch16_224": ("DeiT-distilled-Ti/16", 224, "b40b3cf7", 74.5, 74.538),
    "deit_small_distilled_patch16_224": ("DeiT-distilled-S/16", 224, "649709d9", 81.2, 81.204),
    "deit_base_distilled_patch16_224": ("DeiT-distilled-B/16", 224, "df68dfff", 83.4, 83.384),
    "deit_base_distilled_patch16_384": ("DeiT-distilled-B/16", 384, "d0272ac0", 85.2, 85.438),
}


def _deit(model: str) -> ZooEntry:
    variant, resolution, sha256, percent, _ = _DEIT_MODELS[model]
    return ZooEntry(
        name=f"deit/{model}",
        url=f"https://dl.fbaipublicfiles.com/deit/{model}-{sha256}.pth",
        format="timm",
        variant=variant,
        resolution=resolution,
        num_classes=1000,
        preprocess=f"deit_eval({resolution})",
        labels="imagenet2012",
        sha256=sha256,
        accuracy=(Accuracy("imagenet2012", percent, _DEIT_README),),
        note="Trained for 1000 epochs." if percent == 85.2 else "",
    )


def _deit_on_the_hub(model: str) -> ZooEntry:
    variant, resolution, _, percent, _ = _DEIT_MODELS[model]
    distilled = "distilled" in model
    return ZooEntry(
        name=f"facebook/{model.replace('_', '-')}",
        url=f"hf://facebook/{model.replace('_', '-')}",
        format="huggingface",
        variant=variant,
        resolution=resolution,
        num_classes=1000,
        preprocess=f"deit_eval({resolution})",
        labels="imagenet2012",
        accuracy=(Accuracy("imagenet2012", percent, f"{_DEIT_README}, before conversion"),),
        note=""
        if distilled
        else "The repository's own preprocessor_config.json scales with mean and deviation 0.5; "
        "the weights were trained with ImageNet's, which is what preprocess does here.",
    )


# repository: (variant, resolution, classes, the row of zoo_google.py that it was converted from)
_GOOGLE_MODELS = {
    "vit-base-patch16-224": ("B/16", 224, 1000, "imagenet21k+imagenet2012/ViT-B_16-224"),
    "vit-base-patch16-384": ("B/16", 384, 1000, "imagenet21k+imagenet2012/ViT-B_16"),
    "vit-base-patch32-384": ("B/32", 384, 1000, "imagenet21k+imagenet2012/ViT-B_32"),
    "vit-large-patch16-224": ("L/16", 224, 1000, "imagenet21k+imagenet2012/ViT-L_16-224"),
    "vit-large-patch16-384": ("L/16", 384, 1000, "imagenet21k+imagenet2012/ViT-L_16"),
    "vit-large-patch32-384": ("L/32", 384, 1000, "imagenet21k+imagenet2012/ViT-L_32"),
    "vit-base-patch16-224-in21k": ("B/16", 224, 0, "imagenet21k/ViT-B_16"),
    "vit-base-patch32-224-in21k": ("B/32", 224, 0, "imagenet21k/ViT-B_32"),
    "vit-large-patch16-224-in21k": ("L/16", 224, 0, "imagenet21k/ViT-L_16"),
    "vit-large-patch32-224-in21k": ("L/32", 224, 0, "imagenet21k/ViT-L_32"),
    "vit-huge-patch14-224-in21k": ("H/14", 224, 0, "imagenet21k/ViT-H_14"),
}


def _google(repository: str) -> ZooEntry:
    variant, resolution, num_classes, origin = _GOOGLE_MODELS[repository]
    accuracy = {
        "vit-base-patch16-224": (Accuracy("imagenet2012", 81.31, "transformers issue 28264"),)
    }
    return ZooEntry(
        name=f"google/{repository}",
        url=f"hf://google/{repository}",
        format="huggingface",
        variant=variant,
        resolution=resolution,
        num_classes=num_classes,
        preprocess=f"huggingface_eval({resolution})",
        representation_size=None if num_classes else get_variant(variant)["hidden_size"],
        labels="imagenet2012" if num_classes else "",
        accuracy=accuracy.get(repository, ()),
        note=f"Google's weights, converted; by their names those of {origin}."
        + ("" if num_classes else " No head; its pooler is the tanh layer before the head."),
    )


def _on_timm(repository: str, variant: str, tag: str, percent: float | None = None) -> ZooEntry:
    """A repository that timm's author converted from Google's files."""
    resolution = int(repository.rpartition("_")[2])
    num_classes, labels = {
        "augreg_in21k": (21843, "imagenet21k"),
        "orig_in21k": (0, ""),
    }.get(tag, (1000, "imagenet2012"))
    accuracy = () if percent is None else (Accuracy("imagenet2012", percent, _TIMM_RESULTS),)
    return ZooEntry(
        name=f"timm/{repository}.{tag}",
        url=f"hf://timm/{repository}.{tag}",
        format="timm",
        variant=variant,
        resolution=resolution,
        num_classes=num_classes,
        preprocess="timm_eval(384, 1.0)" if resolution == 384 else f"timm_eval({resolution})",
        labels=labels,
        accuracy=accuracy,
        note="No head, nor the tanh layer before it." if tag == "orig_in21k" else "",
    )


def _deit_on_timm(model: str) -> ZooEntry:
    variant, resolution, _, _, percent = _DEIT_MODELS[model]
    return ZooEntry(
        name=f"timm/{model}.fb_in1k",
        url=f"hf://timm/{model}.fb_in1k",
        format="timm",
        variant=variant,
        resolution=resolution,
        num_classes=1000,
        preprocess=f"deit_eval({resolution}, {1.0 if resolution == 384 else 0.9})",
        labels="imagenet2012",
        accuracy=(Accuracy("imagenet2012", percent, _TIMM_RESULTS),),
    )


_AUGREG_21K, _TUNED_21K, _AUGREG_1K = "augreg_in21k", "augreg_in21k_ft_in1k", "augreg_in1k"
_ORIGINAL, _TUNED_ORIGINAL = "orig_in21k", "orig_in21k_ft_in1k"

_TIMM = (
    _on_timm("vit_tiny_patch16_224", "Ti/16", _AUGREG_21K),
    _on_timm("vit_tiny_patch16_224", "Ti/16", _TUNED_21K, 75.452),
    _on_timm("vit_tiny_patch16_384", "Ti/16", _TUNED_21K, 78.438),
    _on_timm("vit_small_patch32_224", "S/32", _AUGREG_21K),
    _on_timm("vit_small_patch32_224", "S/32", _TUNED_21K, 76.010),
    _on_timm("vit_small_patch32_384", "S/32", _TUNED_21K, 80.476),
    _on_timm("vit_small_patch16_224", "S/16", _AUGREG_21K),
    _on_timm("vit_small_patch16_224", "S/16", _TUNED_21K, 81.402),
    _on_timm("vit_small_patch16_384", "S/16", _TUNED_21K, 83.814),
    _on_timm("vit_small_patch16_224", "S/16", _AUGREG_1K, 78.842),
    _on_timm("vit_small_patch16_384", "S/16", _AUGREG_1K, 81.130),
    _on_timm("vit_base_patch32_224", "B/32", _AUGREG_21K),
    _on_timm("vit_base_patch32_224", "B/32", _TUNED_21K, 80.732),
    _on_timm("vit_base_patch32_384", "B/32", _TUNED_21K, 83.358),
    _on_timm("vit_base_patch32_224", "B/32", _AUGREG_1K, 74.908),
    _on_timm("vit_base_patch32_384", "B/32", _AUGREG_1K, 78.750),
    _on_timm("vit_base_patch16_224", "B/16", _AUGREG_21K),
    _on_timm("vit_base_patch16_224", "B/16", _TUNED_21K, 84.534),
    _on_timm("vit_base_patch16_384", "B/16", _TUNED_21K, 86.010),
    _on_timm("vit_base_patch16_224", "B/16", _AUGREG_1K, 79.154),
    _on_timm("vit_base_patch16_384", "B/16", _AUGREG_1K, 81.102),
    _on_timm("vit_base_patch8_224", "B/8", _AUGREG_21K),
    _on_timm("vit_base_patch8_224", "B/8", _TUNED_21K, 85.838),
    _on_timm("vit_large_patch16_224", "L/16", _AUGREG_21K),
    _on_timm("vit_large_patch16_224", "L/16", _TUNED_21K, 85.856),
    _on_timm("vit_large_patch16_384", "L/16", _TUNED_21K, 87.096),
    _on_timm("vit_tiny_r_s16_p8_224", "R+Ti/16", _AUGREG_21K),
    _on_timm("vit_tiny_r_s16_p8_224", "R+Ti/16", _TUNED_21K, 71.800),
    _on_timm("vit_tiny_r_s16_p8_384", "R+Ti/16", _TUNED_21K, 75.962),
    _on_timm("vit_small_r26_s32_224", "R26+S/32", _AUGREG_21K),
    _on_timm("vit_small_r26_s32_224", "R26+S/32", _TUNED_21K, 81.856),
    _on_timm("vit_small_r26_s32_384", "R26+S/32", _TUNED_21K, 84.066),
    _on_timm("vit_large_r50_s32_224", "R50+L/32", _AUGREG_21K),
    _on_timm("vit_large_r50_s32_224", "R50+L/32", _TUNED_21K, 84.434),
    _on_timm("vit_large_r50_s32_384", "R50+L/32", _TUNED_21K, 86.188),
    _on_timm("vit_base_patch32_224", "B/32", _ORIGINAL),
    _on_timm("vit_base_patch16_224", "B/16", _ORIGINAL),
    _on_timm("vit_large_patch32_224", "L/32", _ORIGINAL),
    _on_timm("vit_large_patch16_224", "L/16", _ORIGINAL),
    _on_timm("vit_huge_patch14_224", "H/14", _ORIGINAL),
    _on_timm("vit_base_r50_s16_224", "R50+B/16", _ORIGINAL),
    _on_timm("vit_base_patch16_224", "B/16", _TUNED_ORIGINAL, 81.782),
    _on_timm("vit_base_patch16_384", "B/16", _TUNED_ORIGINAL, 84.212),
    _on_timm("vit_large_patch32_384", "L/32", _TUNED_ORIGINAL, 81.508),
    _on_timm("vit_base_r50_s16_384", "R50+B/16", _TUNED_ORIGINAL, 84.988),
    _on_timm("vit_base_patch32_224", "B/32", "sam_in1k", 73.704),
    _on_timm("vit_base_patch16_224", "B/16", "sam_in1k", 80.246),
)

ROWS = (
    *map(_deit, _DEIT_MODELS),
    *map(_deit_on_the_hub, _DEIT_MODELS),
    *map(_google, _GOOGLE_MODELS),
    *map(_deit_on_timm, _DEIT_MODELS),
    *_TIMM,
)
