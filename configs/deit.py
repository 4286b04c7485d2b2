"""Distillation through attention: DeiT (2012.12877).

    python scripts/train.py --config=configs/deit.py:DeiT-distilled-S/16,imagenet2012 \\
        --workdir=/tmp/deit

    python scripts/finetune.py --config=configs/deit.py:DeiT-B/16,imagenet2012,384 \\
        --config.pretrained.source=deit/deit_base_patch16_224 --workdir=/tmp/deit_384

    ./scripts/quickstart.sh
    python scripts/train.py --config=configs/deit.py:quickstart \\
        --config.objective.teacher=runs/quickstart/finetune --workdir=/tmp/deit

The argument is VARIANT,DATASET[,RESOLUTION]: VARIANT is a key of models.create.VARIANTS:
DeiT-distilled-Ti/16, -S/16, -B/16 with the distillation token, or any other, whose single head
learns from both; DATASET is a TFDS name or the path of an image folder with the splits `train` and
`validation` (ImageNet) or `test`; RESOLUTION, such as 384, fine-tunes (below). Or it is
`quickstart`: the small model of configs/quickstart.py on its 300 scans, a minute on two cores.

The teacher on imagenet2012 is the paper's, RegNetY-16GF (84M parameters, 82.9 %), downloaded from
the zoo (deit/regnety_160). Others need --config.objective.teacher: whatever
--config.pretrained.source takes, a work directory, a file of any format, hf://, a name from
`scripts/zoo.py list`. A teacher must have the same classes, in any order. It is resized to the
student's image size, sees the student's images as augmented and mixed, scaled as it was trained
(here by ImageNet's mean and deviation), and is not in checkpoints; a resumed run notices if it
changed.

The teacher's hard labels have half of the loss (equation 3). For soft ones, with temperature 3 and
weight 0.1 (equation 2): --config.objective.name=soft_distillation. Without a teacher:
--config.objective.name=classification with a DeiT-S/16.

300 epochs, AdamW with rate 5e-4 * batch / 512, weight decay 0.05, cosine decay, 5 epochs of warm-
up, label smoothing 0.1, stochastic depth 0.1, no dropout, no clipping; 3 draws of each image in a
batch, RandAugment 9 with probability 0.5, mixup 0.8, CutMix 1.0, random erasing 0.25 (table 9).
Differences: batches of 960, as 3 draws do not divide DeiT's 1024; RandAugment is
TensorFlow's `randaug(2, 9)` with a fixed magnitude, where DeiT draws timm's magnitudes around 9;
crops are bilinear.

Fine-tuning at another resolution (README_deit.md of facebookresearch/deit): 30 epochs at a constant
rate of 5e-6 * batch / 512 (its --min-lr is the same) after 5 epochs of warm-up, weight decay 1e-8,
the same augmentation, the head kept, positions interpolated bicubically. No stochastic depth: the
code fine-tuned in evaluation mode (main.py). Batches of 576 for its 512. With a distillation token
it needs the teacher again (paper, section 4), else it learns from the labels alone. Expected for
DeiT-B/16 at 384 pixels: 82.9 (README), 83.1 (paper, table 3).

Expected top-1 (table 3), distilled: Ti 74.5, S 81.2, B 83.4; without a teacher 72.2, 79.8, 81.8. B
took 53 hours on one node of 8 V100, 37 on two.
"""

from ml_collections import ConfigDict

from configs import pretrain, quickstart
from vit_jax.config import get_config as default_config
from vit_jax.config import section, set_kind
from vit_jax.errors import UserError
from vit_jax.models.create import get_variant

EPOCHS, WARMUP_EPOCHS = 300, 5
BATCH_SIZE = 960  # nearest to 1024 that is divisible by 3 draws and 64 devices
PUBLISHED = {"Ti/16": 74.5, "S/16": 81.2, "B/16": 83.4}
PREFIX = "DeiT-distilled-"
TUNING_EPOCHS, TUNING_BATCH_SIZE = 30, 576  # nearest to 512, as above


def get_config(argument: str = "DeiT-distilled-S/16,imagenet2012") -> ConfigDict:
    if argument == "quickstart":
        return small()
    variant, _, rest = argument.partition(",")
    dataset, _, last = rest.rpartition(",")
    if not last.isdigit():
        dataset, last = rest, ""
    if not dataset:
        raise UserError(
            f"configs/deit.py:{argument} must be VARIANT,DATASET[,RESOLUTION], such as "
            f"{PREFIX}S/16,imagenet2012, or quickstart."
        )
    config = pre_training(variant, dataset)
    return fine_tuning(config, variant, dataset, int(last)) if last else config


def pre_training(variant: str, dataset: str) -> ConfigDict:
    config = default_config()
    config.model = section("model", **get_variant(variant))
    set_kind(config, "objective", "hard_distillation")
    data = pretrain.DATASETS.get(pretrain.without_version(dataset), pretrain.OTHER)
    if dataset == "imagenet2012":
        config.objective.teacher = "deit/regnety_160"
    config.dataset.name = dataset
    config.dataset.split = data.split
    config.dataset.batch_size = BATCH_SIZE
    config.dataset.repeated_augmentation = 3
    config.dataset.preprocess = (
        "decode|inception_crop(224, (0.08, 1.0))|flip_lr|randaug(2, 9)|random_erasing(0.25)"
    )
    config.dataset.eval_preprocess = "big_vision_eval(224, resize=256)"
    config.evaluators.test.split = data.test
    config.evaluators.test.every_steps = data.every_steps
    config.duration.epochs = float(EPOCHS)
    config.mix.mixup_alpha = 0.8
    config.mix.cutmix_alpha = 1.0
    config.objective.label_smoothing = 0.1
    config.schedule.learning_rate = 5e-4 * BATCH_SIZE / 512
    config.optimizer.weight_decay = 0.05
    images = data.num_examples or pretrain.DATASETS["imagenet2012"].num_examples
    config.schedule.warmup_steps = WARMUP_EPOCHS * images // BATCH_SIZE
    if "stochastic_depth_rate" in config.model:
        config.model.stochastic_depth_rate = 0.1
    config.loader.num_workers = 8
    config.loader.num_threads = 4
    config.loader.prefetch = 1
    size = variant.removeprefix(PREFIX)
    if dataset == "imagenet2012" and variant.startswith(PREFIX):
        config.sweep.published = f"{PUBLISHED[size]} with a RegNetY-16GF (2012.12877, table 3)"
    return config


def fine_tuning(config: ConfigDict, variant: str, dataset: str, pixels: int) -> ConfigDict:
    if not variant.startswith(PREFIX):
        set_kind(config, "objective", "classification")
    config.dataset.batch_size = TUNING_BATCH_SIZE
    config.dataset.preprocess = config.dataset.preprocess.replace("(224,", f"({pixels},")
    config.dataset.eval_preprocess = f"big_vision_eval({pixels}, resize={pixels * 8 // 7})"
    config.duration.epochs = float(TUNING_EPOCHS)
    set_kind(config, "schedule", "constant")
    config.schedule.learning_rate = 5e-6 * TUNING_BATCH_SIZE / 512
    images = pretrain.DATASETS.get(dataset, pretrain.DATASETS["imagenet2012"]).num_examples
    config.schedule.warmup_steps = WARMUP_EPOCHS * images // TUNING_BATCH_SIZE
    config.optimizer.weight_decay = 1e-8
    config.model.stochastic_depth_rate = 0.0
    config.pretrained.posemb = "bicubic"
    config.pretrained.reset_head = False
    is_published = (variant, dataset, pixels) == ("DeiT-B/16", "imagenet2012", 384)
    config.sweep.published = "82.9 (README_deit.md)" if is_published else ""
    return config


def small() -> ConfigDict:
    config = quickstart.get_config("scratch")
    set_kind(config, "model", "deit")
    set_kind(config, "objective", "hard_distillation")
    config.mix.mixup_alpha = 0.2
    return config
