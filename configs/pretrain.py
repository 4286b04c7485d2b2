"""Pre-training as in the paper's table 3 (2010.11929).

    python scripts/train.py --config=configs/pretrain.py:B/16,imagenet2012 --workdir=/tmp/b16
    python scripts/train.py --config=configs/pretrain.py:L/16,imagenet21k,30 --workdir=...
    python scripts/train.py --config=configs/pretrain.py:H/14,jft \\
        --config.dataset.name=/data/photos --workdir=...
    python scripts/train.py --config=configs/pretrain.py:S/16,/path/to/folder --workdir=...
    python scripts/plan.py --config=configs/pretrain.py:H/14,imagenet21k --topology=v5e:8x8

The argument is VARIANT,DATASET[,EPOCHS]:
  VARIANT  a key of `models.create.VARIANTS`. Table 3 has B/16, B/32, L/16, L/32, H/14,
           R50+B/16, R50+B/32, R50+L/16, R50+L/32, R50x1, R50x2, R101x1, R152x1, R152x2.
  DATASET  imagenet2012  ImageNet-1k, trained on all of `train` and tested on `validation`.
           imagenet21k   the release of 2011 (14,197,122 images) from scripts/prepare_data.py,
                         in big_vision's splits of `full`: the first 25,600 test, the next
                         25,600 validate.
           jft, jft_3b   JFT-300M's settings, planned with the size of JFT-300M or JFT-3B, for your
                         own data: JFT was never published. Set --config.dataset.name to data with
                         the splits `train` and `test`.
           any other TFDS name or the path of an image folder with the splits `train` and `test`:
           ImageNet-1k's settings. A version may follow a name: imagenet2012:5.1.0.
  EPOCHS   default: the table's; if it has two (7 and 14, 30 and 90), the longer.

All rows: batch 4096, 224 pixels, 10,000 steps of linear warm-up, Adam with b1 0.9 and b2 0.999,
decoupled weight decay. Training images are the official code's: a random box of 5 to 100 % of the
area, flips, range [-1, 1] (its issues 53 and 235), no other augmentation; but photographs are
rotated by their EXIF tag, which the official code ignores (as exif=False does). Evaluation
uses the central 224 pixels of the image with its short side at 256, as in big_vision.

                rate            weight decay  dropout  schedule  clipping  epochs
  imagenet2012  3e-3            0.3           0.1      cosine    1         300
  imagenet21k   1e-3            0.03          0.1      linear    -         90 (B), 30 or 90 (L)
  jft           `JFT` below     0.1           0.0      linear    -         7 or 14

Weight decay is multiplied by the learning rate: 0.1 here is the paper's 0.1 and that of PyTorch's
AdamW, and 0.1 * rate in big_vision. The paper does not say which parameters decay; here kernels do,
as in big_vision (optimizer.decay_parameters="all": what the paper's optimizer does by default).
Clipping is stated only for ImageNet; big_vision also clips at 1 on ImageNet-21k. `linear` ends at
1e-5 (official code, issue 2), `cosine` at 0 (scenic's recipe for ImageNet-1k: at 1e-5).

Loss: not given in the paper. The authors state a sigmoid cross-entropy, summed over classes, for
ImageNet-21k and JFT with head bias -10 (issues 2 and 34); their ImageNet-1k recipe
(scenic, imagenet_vit_config.py) has the same with label smoothing 1e-4. The head has a hidden layer
of the model's width with tanh (section 3.1); ResNets have neither it nor dropout.
DeiT-distilled-* and MAE-*, which other objectives train, are rejected.

Sharpness-aware, as in "When Vision Transformers Outperform ResNets" (2106.01548) with equal images,
or with GSAM: configs/sam.py, at twice the cost. The first author perturbs each of 64 chips by its
own images and uses a larger rho for fewer of them (official code, issue 153); here the batch is
perturbed as a whole. Never run at scale.

Rows that table 3 does not have borrow its numbers: on JFT, Transformers and hybrids up to width
768 those of B/16, width 1024 of L/16, wider ones of H/14 (epochs included), ResNets those of their
depth (R200x3 those of R152x1; table 6 trains it for 14 epochs: R200x3,jft,14). On ImageNet-21k all
models have the same numbers; H/14's checkpoint was published (table 5) without its settings. For
ImageNet-1k the table has only Transformers: hybrids and ResNets use the same, which is our choice.

Ours, for launching on a pod: bfloat16 computation (parameters, Adam's moments and the loss are
float32); from width 1024 on, the blocks are scanned and save only their inputs (model.scan,
model.remat="full"); from width 1152 on, the state is split over 4 devices (mesh.fsdp=4); ResNets of
width factor 3 and more (R50x3, R101x3, R152x4, R200x3) have model.remat="full" and mesh.fsdp=4.
Each host reads with 8 processes of 4 threads, which hold up to 5 batches of its share each: 25 GB
if one host reads all 4096 images, 0.8 GB on each of 32. Lower loader.num_workers for less.
scripts/plan.py says what fits, and what to change.

Hours: paper, table 2, in TPUv3-core-days: H/14 on JFT 2,500, L/16 on JFT (14 epochs) 680, L/16 on
ImageNet-21k 230 (about 30 days on a TPUv3-8). For other rows only the arithmetic is published
(table 6); scripts/plan.py predicts times. Expected accuracy of the unchanged recipe is in
`config.sweep.published`: of the pre-trained model itself if the authors gave it (issue 62), and
fine-tuned (tables 5 and 6).
"""

import re
from typing import NamedTuple

from ml_collections import ConfigDict

from configs import finetune
from vit_jax.config import evaluator, section, set_kind
from vit_jax.config import get_config as default_config
from vit_jax.errors import UserError
from vit_jax.models.create import MODELS, get_variant


class Data(NamedTuple):
    """A data set's properties known to recipes. With its sizes runs can be planned without it."""

    split: str  # for training
    num_examples: int  # of `split`
    num_classes: int
    splits: dict[str, int]  # examples of every stored split
    test: str = "test"
    validation: str = ""
    every_steps: int = 5_000  # steps between evaluations


# By dataset.name. ImageNet-21k: images of the release of 2011, which has 21,841 classes, while
# the published heads have 21,843. These are for planning: a run uses the counts of its data.
# JFT-300M: 303M images (paper, section 4.1; its 18k classes are 18,291 in 1707.02968). JFT-3B:
# nearly 3 billion images (2106.04560), 29,593 classes (big_vision). The sizes of `test` are ours.
DATASETS: dict[str, Data] = {
    "imagenet2012": Data(
        split="train",
        num_examples=1_281_167,
        num_classes=1_000,
        splits={"train": 1_281_167, "validation": 50_000},
        test="validation",
        every_steps=2_500,
    ),
    "imagenet21k": Data(
        split="full[51200:]",
        num_examples=14_145_922,
        num_classes=21_843,
        splits={"full": 14_197_122},
        test="full[:25600]",
        validation="full[25600:51200]",
    ),
    "jft": Data(
        split="train",
        num_examples=303_000_000,
        num_classes=18_291,
        splits={"train": 303_000_000, "test": 50_000},
    ),
    "jft_3b": Data(
        split="train",
        num_examples=3_000_000_000,
        num_classes=29_593,
        splits={"train": 3_000_000_000, "test": 50_000},
    ),
}
OTHER = Data(
    split="train", num_examples=0, num_classes=0, splits={}, every_steps=1_000
)  # the folder's sizes

# Table 3, JFT-300M: learning rate, epochs.
JFT: dict[str, tuple[float, tuple[int, ...]]] = {
    "B/16": (8e-4, (7,)),
    "B/32": (8e-4, (7,)),
    "L/32": (6e-4, (7,)),
    "L/16": (4e-4, (7, 14)),
    "H/14": (3e-4, (14,)),
    "R50x1": (1e-3, (7,)),
    "R50x2": (1e-3, (7,)),
    "R101x1": (8e-4, (7,)),
    "R152x1": (6e-4, (7,)),
    "R152x2": (6e-4, (7,)),
    "R50+B/16": (8e-4, (7,)),
    "R50+B/32": (8e-4, (7,)),
    "R50+L/32": (2e-4, (7,)),
    "R50+L/16": (4e-4, (7, 14)),
}

# Top-1 in percent on the pre-training data, in the order of table 5 (issue 62).
UPSTREAM = {
    "imagenet21k": (47.88, 44.04, 49.90, 45.42, 49.06),
    "imagenet2012": (74.79, 69.19, 72.59, 66.90),
}
# Table 6: top-1 in percent on ImageNet, fine-tuned at 384 pixels, by model and epochs on JFT.
TABLE_6: dict[tuple[str, int], float] = {
    ("B/32", 7): 80.73,
    ("B/16", 7): 84.15,
    ("L/32", 7): 84.37,
    ("L/16", 7): 86.30,
    ("L/16", 14): 87.12,
    ("H/14", 14): 88.08,
    ("R50x1", 7): 77.54,
    ("R50x2", 7): 82.12,
    ("R101x1", 7): 80.67,
    ("R152x1", 7): 81.88,
    ("R152x2", 7): 84.97,
    ("R152x2", 14): 85.56,
    ("R200x3", 14): 87.22,
    ("R50+B/32", 7): 84.90,
    ("R50+B/16", 7): 85.58,
    ("R50+L/32", 7): 85.68,
    ("R50+L/16", 7): 86.60,
    ("R50+L/16", 14): 87.12,
}


def get_config(argument: str = "B/16,imagenet2012") -> ConfigDict:
    variant, dataset, epochs = parse_argument("pretrain", argument)
    config = pretraining(variant, dataset)
    dataset = without_version(dataset)
    is_jft = dataset in ("jft", "jft_3b")
    if is_jft:
        rate, published_epochs = JFT[row_of_jft(variant)]
        config.schedule.learning_rate = rate
        config.optimizer.weight_decay = 0.1
        set_kind(config, "schedule", "linear")
    elif dataset == "imagenet21k":
        config.schedule.learning_rate = 1e-3
        config.optimizer.weight_decay = 0.03
        set_kind(config, "schedule", "linear")
        published_epochs = (90,)
    else:
        config.schedule.learning_rate = 3e-3
        config.optimizer.weight_decay = 0.3
        config.optimizer.clip_norm = 1.0
        config.objective.label_smoothing = 1e-4
        published_epochs = (300,)
    if "dropout_rate" in config.model:
        config.model.dropout_rate = 0.0 if is_jft else 0.1
        config.model.representation_size = config.model.hidden_size
    config.duration.epochs = float(epochs or max(published_epochs))
    config.sweep.published = published(variant, dataset, int(config.duration.epochs))
    return config


def parse_argument(recipe: str, argument: str) -> tuple[str, str, int]:
    """Parts of `VARIANT,DATASET[,EPOCHS]`; 0 for epochs that are not given."""
    variant, _, rest = argument.partition(",")
    dataset, _, last = rest.rpartition(",")
    if not last.isdigit():
        dataset, last = rest, "0"
    if not dataset or (int(last) == 0 and dataset != rest):
        raise UserError(
            f"configs/{recipe}.py:{argument} must be VARIANT,DATASET[,EPOCHS], such as "
            f"B/16,imagenet2012 or L/16,imagenet21k,30. Datasets: {', '.join(DATASETS)}, another "
            "TFDS name or a folder."
        )
    return variant, dataset, int(last)


def without_version(dataset: str) -> str:
    """`imagenet2012` for `imagenet2012:5.1.0`: the key in `DATASETS` and the recipes."""
    return dataset.partition(":")[0]


def row_of_jft(variant: str) -> str:
    """The row of `JFT` whose numbers a variant uses."""
    if variant in JFT:
        return variant
    resnet = re.fullmatch(r"R(\d+)x\d+", variant)
    if resnet:
        depth = int(resnet[1])
        return "R50x1" if depth <= 50 else "R101x1" if depth <= 101 else "R152x1"
    sizes = get_variant(variant)
    return ("B/16", "L/16", "H/14")[MODELS[sizes["name"]].scale(sizes)]


def published(variant: str, dataset: str, epochs: int) -> str:
    """The accuracies in percent that the authors published for a run, or ""."""
    if dataset == "jft" and (variant, epochs) in TABLE_6:
        fine_tuned = TABLE_6[variant, epochs]
        return f"{fine_tuned} on ImageNet, fine-tuned at 384 pixels (2010.11929, table 6)"
    if dataset not in UPSTREAM or epochs != (300 if dataset == "imagenet2012" else 90):
        return ""
    column = dict(zip(finetune.TABLE_5_MODELS, UPSTREAM[dataset], strict=False))
    if variant not in column:
        return ""
    fine_tuned = finetune.TABLE_5["imagenet2012"][dataset == "imagenet2012"][
        finetune.TABLE_5_MODELS.index(variant)
    ]
    return (
        f"{column[variant]} by itself (official code, issue 62); {fine_tuned} on ImageNet, "
        "fine-tuned at 384 pixels (2010.11929, table 5)"
    )


def pretraining(variant: str, dataset: str, *, objective: str = "classification") -> ConfigDict:
    """The common part of all pre-training recipes: model, data, evaluation, launch; no numbers yet.

    Sigmoid loss, bias -10, batch 4096, 10,000 steps of warm-up, Adam: `get_config` and the recipes
    of later papers set the rest, or override. UserError: a variant that another objective trains.
    """
    config = default_config()
    config.model = section("model", **get_variant(variant))
    needed = MODELS[config.model.name].objective
    if needed != objective:
        raise UserError(
            f"model variant {variant} is pre-trained with objective.name={needed!r}, which this "
            "recipe does not have; use the recipe of its paper (docs/systems.md)."
        )
    config.model.head_bias_init = -10.0
    _launch(config)

    data = DATASETS.get(without_version(dataset), OTHER)
    config.dataset.name = dataset
    config.dataset.split = data.split
    config.dataset.batch_size = 4096
    # 224 pixels, or the largest smaller multiple of the token size; a ResNet has none.
    stride = finetune.pixels_per_token(variant)
    pixels = 224 // stride * stride
    config.dataset.preprocess = f"official_train({pixels})"
    config.dataset.eval_preprocess = f"big_vision_eval({pixels}, resize={round(pixels * 8 / 7)})"
    config.evaluators.test.split = data.test
    config.evaluators.test.every_steps = 0 if data.validation else data.every_steps
    if data.validation:
        add_validation(config, data.validation, data.every_steps)

    config.objective.loss = "sigmoid"
    config.schedule.warmup_steps = 10_000
    config.checkpoint.every_steps = 1_000
    return config


def _launch(config: ConfigDict) -> None:
    """How `config.model` is computed, stored and fed: our choice, by the model's size."""
    scale = MODELS[config.model.name].scale(config.model)
    config.model.dtype = "bfloat16"
    if scale >= 1:
        config.model.remat = "full"
    if "scan" in config.model:
        config.model.scan = scale >= 1
    if scale >= 2:
        config.mesh.fsdp = 4
    # A worker holds a batch per thread, and one in transfer.
    config.loader.num_workers = 8
    config.loader.num_threads = 4
    config.loader.prefetch = 1


def add_validation(config: ConfigDict, split: str, every_steps: int) -> None:
    """Evaluates accuracy on held-out training data during training."""
    with config.unlocked():
        config.evaluators.validation = evaluator(split, every_steps=every_steps)
