"""Masked autoencoders: pre-training and fine-tuning on ImageNet-1k (MAE, 2111.06377).

    python scripts/train.py --config=configs/mae.py:B/16,imagenet2012 --workdir=/tmp/mae
    python scripts/finetune.py --config=configs/mae.py:finetune,B/16,imagenet2012 \\
        --config.pretrained.source=/tmp/mae --workdir=/tmp/mae_imagenet

    python scripts/train.py --config=configs/mae.py:quickstart --workdir=/tmp/mae
    python scripts/finetune.py --config=configs/quickstart.py:finetune \\
        --config.pretrained.source=/tmp/mae --workdir=/tmp/mae_digits
    python scripts/finetune.py --config=configs/mae.py:linear,quickstart \\
        --config.pretrained.source=/tmp/mae --workdir=/tmp/mae_linear

The argument is [finetune,|linear,]VARIANT,DATASET: VARIANT is B/16, L/16 or H/14, DATASET a TFDS
name or the path of an image folder with the splits `train` and `validation` (ImageNet) or `test`.
Or it is `quickstart`: the small model of configs/quickstart.py with a decoder of 2 blocks on the
drawn letters, about two minutes on two cores. Its test loss is 0.60; each place's mean patch of the
test set has 0.70, zero 0.86. Fine-tuned, 89.0 % of the digits (from scratch 84.4; one seed).
`linear,quickstart` classifies the letters with the frozen result: 57.5 % after 600 updates, 50.6 %
without the batch norm before the head; scripts/probe.py 64.3 %.
Any other recipe fine-tunes the result too, and the authors' files (`scripts/zoo.py list
--family=mae`): the decoder is dropped, and the fixed positions become trainable, as in their code.

Pre-training (PRETRAIN.md of facebookresearch/mae, which repeats the paper's settings): 75 % masked,
normalised pixels as targets; AdamW with rate 1.5e-4 * batch / 256, b2 0.95, weight decay 0.05,
batch 4096, 40 epochs of warm-up, cosine decay; bicubic crops of 20 to 100 % of the area, flips; no
dropout, stochastic depth or clipping. 1600 epochs as the published models;
--config.duration.epochs=800 is the default of the paper's ablations. Their optimizer decays the
class and mask token too; ours decays kernels.

Fine-tuning (FINETUNE.md there): AdamW with rate `blr` * batch / 256, batch 1024, weight decay 0.05,
5 epochs of warm-up, cosine decay, layer-wise decay of the rate, stochastic depth, label smoothing
0.1, mixup 0.8, CutMix 1.0, random erasing 0.25:
          blr     layer decay  stochastic depth  epochs
  B/16    5e-4    0.65         0.1               100
  L/16    1e-3    0.75         0.2               50
  H/14    1e-3    0.75         0.3               50
The mean of the patches is classified, behind a new norm, as in their code; `modern_vit` has both.
Differences: RandAugment is TensorFlow's `randaug(2, 9)`, where they use timm's
`rand-m9-mstd0.5-inc1`; the head starts at 0, not at 2e-5, and the rate ends at 0, not at 1e-6.

Linear probing (main_linprobe.py there): the encoder is frozen; LARS with rate 0.1 * batch / 256,
batch 16384, 90 epochs, 10 of warm-up, cosine decay, no weight decay; random crops and flips only.
The head is behind a batch norm without affine parameters (`model.head_norm`), with the statistics
of the batch in training and their running averages in evaluation. Their head starts at a deviation
of 0.01, ours at 0.
scripts/probe.py --kinds=linear_probe is the fast alternative: logistic regression by L-BFGS.

Expected top-1 on ImageNet at 224 pixels, after 1600 epochs: fine-tuned B/16 83.6, L/16 85.9,
H/14 86.9 (at 448 pixels 87.8; README.md there); linear 68.0, 75.8, 76.6 (FINETUNE.md).
800 epochs of L/16 take 42 hours on 64 V100 (PRETRAIN.md); fine-tuning takes 7 hours for B/16 and 9
for L/16 on 32 V100, 13 for H/14 on 64 (FINETUNE.md).
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from configs import pretrain, quickstart
from vit_jax.config import set_kind
from vit_jax.errors import UserError
from vit_jax.kinds import check_known

NORMALIZE = "normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"  # as in their code


class Size(NamedTuple):
    """Fine-tuning of one size, and its result."""

    learning_rate: float  # for batches of 256
    layer_decay: float
    stochastic_depth_rate: float
    epochs: int
    published: float
    linear: float  # probe of the frozen encoder


SIZES = {
    "B/16": Size(5e-4, 0.65, 0.1, 100, 83.6, 68.0),
    "L/16": Size(1e-3, 0.75, 0.2, 50, 85.9, 75.8),
    "H/14": Size(1e-3, 0.75, 0.3, 50, 86.9, 76.6),
}


def get_config(argument: str = "B/16,imagenet2012") -> ConfigDict:
    first, _, rest = argument.partition(",")
    tune, warmup_epochs = STAGES.get(first, (mask, 40))
    variant, _, dataset = (argument if tune is mask else rest).partition(",")
    if variant == "quickstart" and tune is not finetune and not dataset:
        return small() if tune is mask else small_linear()
    if not dataset:
        raise UserError(
            f"configs/mae.py:{argument} must be [finetune,|linear,]VARIANT,DATASET, such as "
            "B/16,imagenet2012, or [linear,]quickstart."
        )
    check_known("VARIANT", variant, SIZES)
    name, objective = (f"MAE-{variant}", "mae") if tune is mask else (variant, "classification")
    config = pretrain.pretraining(name, dataset, objective=objective)
    config.dataset.eval_preprocess = "deit_eval(224)"
    config.model.head_bias_init = 0.0
    config.optimizer.weight_decay = 0.05
    tune(config, SIZES[variant])
    known = pretrain.DATASETS.get(pretrain.without_version(dataset))
    images = known.num_examples if known else pretrain.DATASETS["imagenet2012"].num_examples
    config.schedule.warmup_steps = warmup_epochs * images // config.dataset.batch_size
    if dataset == "imagenet2012":
        size, is_linear = SIZES[variant], tune is linear
        result = f"{size.linear} linear" if is_linear else f"{size.published} fine-tuned"
        config.sweep.published = f"{result} (facebookresearch/mae)"
    return config


def mask(config: ConfigDict, size: Size) -> None:
    """Pre-training."""
    del size  # the same for all
    set_kind(config, "objective", "mae")
    crop = "random_resized_crop(224, (0.2, 1.0), method='pillow_bicubic')"
    config.dataset.preprocess = f"decode|{crop}|flip_lr|{NORMALIZE}"
    config.duration.epochs = 1600.0
    config.schedule.learning_rate = 1.5e-4 * config.dataset.batch_size / 256
    config.optimizer.b2 = 0.95


def finetune(config: ConfigDict, size: Size) -> None:
    pooling = {"classifier": "gap", "final_norm": "pooled"}
    set_kind(config, "model", "modern_vit", gelu="exact", **pooling)
    config.model.stochastic_depth_rate = size.stochastic_depth_rate
    config.objective.loss = "softmax"
    config.objective.label_smoothing = 0.1
    config.dataset.batch_size = 1024
    crop = "random_resized_crop(224, method='pillow_bicubic')"
    config.dataset.preprocess = (
        f"decode|{crop}|flip_lr|randaug(2, 9)|{NORMALIZE}|random_erasing(0.25)"
    )
    config.mix.mixup_alpha = 0.8
    config.mix.cutmix_alpha = 1.0
    config.duration.epochs = float(size.epochs)
    config.schedule.learning_rate = size.learning_rate * config.dataset.batch_size / 256
    config.optimizer.layer_decay = size.layer_decay


def linear(config: ConfigDict, size: Size) -> None:
    del size  # the same for all
    config.model.gelu = "exact"
    config.dataset.batch_size = 16384
    crop = "random_resized_crop(224, method='pillow_bicubic')"
    config.dataset.preprocess = f"decode|{crop}|flip_lr|{NORMALIZE}"
    config.duration.epochs = 90.0
    probe(config, learning_rate=0.1 * config.dataset.batch_size / 256)


def probe(config: ConfigDict, *, learning_rate: float) -> None:
    config.objective.loss = "softmax"
    config.model.head_norm = True
    set_kind(config, "optimizer", "lars", freeze="(?!head/).*", weight_decay=0.0, clip_norm=None)
    config.schedule.learning_rate = learning_rate


# By the first part of the argument; and epochs of warm-up.
STAGES = {"finetune": (finetune, 5), "linear": (linear, 10)}


def small_linear() -> ConfigDict:
    config = quickstart.get_config("pretrain")
    config.dataset.name = "glyphs(size=12, num_examples=20_000)"
    config.duration.steps = 600
    probe(config, learning_rate=6.4)  # as published: steps are relative to the head's norm
    return config


def small() -> ConfigDict:
    config = quickstart.get_config("pretrain")
    sizes = {"hidden_size": 64, "num_layers": 2, "mlp_dim": 256, "num_heads": 4}
    decoder = {f"decoder_{key}": value for key, value in sizes.items()}
    set_kind(config, "model", "mae", **decoder)
    set_kind(config, "objective", "mae")
    config.optimizer.b2 = 0.95
    config.duration.steps = 800
    return config
