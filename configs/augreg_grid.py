"""The grid of "How to train your ViT?" (AugReg, 2106.10270): its points.

Not a recipe itself: configs/augreg.py is, and gives the sources of the numbers.
"""

import re
from typing import NamedTuple

from ml_collections import ConfigDict

from configs import pretrain
from vit_jax.errors import UserError
from vit_jax.pretrained.zoo import augreg_names

# RandAugment's layers and magnitude (none for 0 layers), and mixup's alpha.
AUGMENTATIONS: dict[str, tuple[int, int, float]] = {
    "none": (0, 0, 0.0),
    "light1": (2, 0, 0.0),
    "light2": (2, 10, 0.2),
    "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5),
    "strong1": (2, 20, 0.5),
    "strong2": (2, 20, 0.8),
}
# Defaults of AUGMENTATION, weight decay, dropout and stochastic depth.
BEST: dict[str, dict[str, tuple[str, float, float, float]]] = {
    "imagenet21k": {
        "L/16": ("strong1", 0.1, 0.0, 0.0),
        "B/16": ("medium1", 0.1, 0.0, 0.0),
        "S/16": ("light2", 0.03, 0.0, 0.0),
        "R50+L/32": ("medium1", 0.1, 0.1, 0.1),
        "R26+S/32": ("light2", 0.1, 0.0, 0.0),
        "Ti/16": ("none", 0.03, 0.0, 0.0),
        "B/32": ("light2", 0.1, 0.0, 0.0),
        "S/32": ("none", 0.1, 0.0, 0.0),
        "R+Ti/16": ("none", 0.03, 0.0, 0.0),
        "B/8": ("medium2", 0.1, 0.0, 0.0),
    },
    "imagenet2012": {
        "Ti/16": ("light1", 0.1, 0.0, 0.0),
        "S/32": ("medium1", 0.1, 0.0, 0.0),
        "S/16": ("medium2", 0.1, 0.0, 0.0),
        "B/32": ("medium2", 0.1, 0.0, 0.0),
        "B/16": ("medium2", 0.1, 0.0, 0.0),
        "L/16": ("medium2", 0.1, 0.0, 0.0),
    },
}

# Table 3, top-1 on ImageNet: pre-trained on it (by itself, fine-tuned at 384 pixels), and from 30
# and 300 epochs of ImageNet-21k, fine-tuned at 384 pixels.
TABLE_3: dict[str, tuple[float, float, float, float]] = {
    "L/16": (75.72, 77.21, 84.48, 85.59),
    "B/16": (79.84, 81.63, 83.46, 85.49),
    "S/16": (79.00, 80.70, 80.22, 83.73),
    "R50+L/32": (76.84, 76.71, 83.19, 85.99),
    "R26+S/32": (79.61, 81.55, 81.11, 83.85),
    "Ti/16": (72.59, 74.64, 74.20, 78.22),
    "B/32": (74.42, 76.60, 78.65, 83.59),
    "S/32": (72.07, 75.65, 75.74, 79.58),
    "R+Ti/16": (70.13, 73.48, 71.97, 75.40),
}


class Setting(NamedTuple):
    """A point of the paper's grid."""

    variant: str
    dataset: str
    epochs: int
    augmentation: str  # key of AUGMENTATIONS
    weight_decay: float
    dropout_rate: float
    stochastic_depth_rate: float
    learning_rate: float = 0.001


_OPTION = re.compile(rf"(\d+)(ep)|(wd|do|sd|lr)_(\d+(?:\.\d+)?)|({'|'.join(AUGMENTATIONS)})")


def pretraining(setting: Setting) -> ConfigDict:
    """The recipe for a point of the grid."""
    config = pretrain.pretraining(setting.variant, setting.dataset)
    dataset = pretrain.without_version(setting.dataset)
    layers, magnitude, config.mix.mixup_alpha = AUGMENTATIONS[setting.augmentation]
    if layers:
        config.dataset.preprocess += f"|randaug({layers}, {magnitude})"
    if dataset != "imagenet21k":
        config.model.head_bias_init = -6.9
        config.model.representation_size = config.model.hidden_size
    if dataset == "imagenet2012":
        config.dataset.split = "train[:99%]"
        pretrain.add_validation(config, "train[99%:]", config.evaluators.test.every_steps)
    config.model.dropout_rate = setting.dropout_rate
    config.model.stochastic_depth_rate = setting.stochastic_depth_rate
    config.duration.epochs = float(setting.epochs)
    config.schedule.learning_rate = setting.learning_rate
    config.optimizer.weight_decay = setting.weight_decay
    config.optimizer.momentum_dtype = "bfloat16"
    config.optimizer.clip_norm = 1.0
    config.sweep.published = _published(setting)
    return config


def parse_setting(argument: str) -> Setting:
    """`pretrain,VARIANT,DATASET,...` to a point of the grid.

    Raises:
      UserError: a part is missing, unknown, repeated or 0ep; or only one of do and sd is given.
    """
    variant, _, rest = argument.removeprefix("pretrain,").partition(",")
    dataset, given = rest, {}
    while match := _OPTION.fullmatch(dataset.rpartition(",")[2]):
        dataset = dataset.rpartition(",")[0]
        length, ep, key, number, name = match.groups()
        option = ep or key or "aug"
        if option in given:
            raise UserError(
                f"configs/augreg.py:{argument} gives {option} twice, also as {match[0]}; keep one."
            )
        given[option] = length or number or name
    if not dataset or ("," in dataset and "/" not in dataset):
        raise UserError(
            f"configs/augreg.py:{argument} must be pretrain,VARIANT,DATASET and any of 300ep, "
            f"{', '.join(AUGMENTATIONS)}, wd_0.1, do_0.1, sd_0.1, lr_0.001."
        )
    if ("do" in given) != ("sd" in given):
        missing = "sd" if "do" in given else "do"
        raise UserError(
            f"configs/augreg.py:{argument} must give {missing}_RATE too: dropout (do) and "
            "stochastic depth (sd) go together, in the paper both at 0.0 or both at 0.1."
        )
    epochs = int(given.get("ep", 300))
    if not epochs:
        raise UserError(f"configs/augreg.py:{argument}: {given['ep']}ep must be 1ep or more.")
    is_21k = pretrain.without_version(dataset) == "imagenet21k"
    rows = BEST["imagenet21k" if is_21k else "imagenet2012"]
    augmentation, *rates = rows.get(variant, rows["B/16"])
    defaults = {**dict(zip(("wd", "do", "sd"), rates, strict=True)), "lr": 0.001}
    decay, dropout, depth, rate = (float(given.get(key, defaults[key])) for key in defaults)
    return Setting(
        variant,
        dataset,
        epochs,
        augmentation=given.get("aug", augmentation),
        weight_decay=decay,
        dropout_rate=dropout,
        stochastic_depth_rate=depth,
        learning_rate=rate,
    )


def setting_of(name: augreg_names.FileName) -> Setting:
    """The grid point of a published file, or of the file that it was fine-tuned from."""
    return Setting(
        name.variant,
        augreg_names.DATASETS[name.data],
        name.epochs,
        augmentation=name.augmentation,
        weight_decay=name.weight_decay,
        dropout_rate=name.dropout_rate,
        stochastic_depth_rate=name.dropout_rate,
        learning_rate=name.learning_rate,
    )


def _published(setting: Setting) -> str:
    """Table 3's best accuracies in percent for a model, data and length, or ""."""
    data = pretrain.without_version(setting.dataset)
    point = (setting.augmentation, setting.weight_decay, setting.dropout_rate)
    best = BEST.get(data, {}).get(setting.variant)
    is_best = best == (*point, setting.stochastic_depth_rate) and setting.learning_rate == 0.001
    if setting.variant not in TABLE_3 or not is_best:
        return ""
    by_itself, from_1k, from_21k_30, from_21k_300 = TABLE_3[setting.variant]
    source = "fine-tuned at 384 pixels (best of the grid: 2106.10270, table 3)"
    if (data, setting.epochs) == ("imagenet2012", 300):
        return f"{by_itself} by itself; {from_1k} {source}"
    if data == "imagenet21k" and setting.epochs in (30, 300):
        return f"{from_21k_300 if setting.epochs == 300 else from_21k_30} on ImageNet, {source}"
    return ""
