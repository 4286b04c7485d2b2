"""Pre-training and fine-tuning as in "How to train your ViT?" (AugReg, 2106.10270).

    python scripts/train.py --workdir=... \\
        --config=configs/augreg.py:B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0
    python scripts/train.py --config=configs/augreg.py:pretrain,B/16,imagenet2012 --workdir=...
    SOURCE=gs://vit_models/augreg/B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz
    python scripts/finetune.py --config=configs/augreg.py:B/16,oxford_iiit_pet \\
        --config.pretrained.source=$SOURCE --workdir=/tmp/pets

Pre-training
------------
The argument is the name of a published file without `.npz`, which encodes its recipe (a suffix
`--...` selects its fine-tuning, starting from the published weights); or
`pretrain,VARIANT,DATASET[,300ep][,AUGMENTATION][,wd_0.1][,do_0.1][,sd_0.1][,lr_0.001]`:
  VARIANT       as below.
  DATASET       imagenet2012 (trained on 99 %, the rest validates), imagenet21k (the splits of
                configs/pretrain.py); any other TFDS name or the path of an image folder, with the
                splits `train` and `test`, with ImageNet's settings.
  300ep         epochs: 300 on ImageNet, 30 and 300 on ImageNet-21k in the paper; default 300.
  AUGMENTATION  none, light1, light2, medium1, medium2, strong1, strong2: RandAugment's layers and
                magnitude, and mixup's alpha, see `augreg_grid.py`. light1 is not a no-op: at
                magnitude 0 some of RandAugment's operations still change the image. Files have
                light0 and light1 where the paper's table has light1 and light2; we map them in
                that order.
  wd, do, sd    weight decay 0.1 or 0.03; dropout and stochastic depth, which in the paper are both
                0.0 or both 0.1: give both or neither.
Defaults are those of the checkpoint that the official README recommends (ImageNet-21k), or of
big_vision's configs/vit_i1k.py with decay 0.1 (ImageNet); other models use those of B/16. The
paper's grid of 28 is 7 augmentations x 2 decays x (neither or both of dropout and depth).

Batch 4096, 224 pixels (the official code's crop and flip, then RandAugment), Adam with b1 0.9,
b2 0.999 and the first moment in bfloat16 (big_vision), peak rate 0.001, 10,000 steps of warm-up,
cosine to 0, clipping at norm 1. Weight decay is decoupled, multiplied by the learning rate, and
for kernels only (big_vision's 1e-4 is our 0.1). Stochastic depth increases linearly from 0 to the
last block; mixup draws one coefficient per batch. Loss: sigmoid cross-entropy summed over classes,
without smoothing; head bias -10 on ImageNet-21k, -6.9 = -ln(1000) on all other data,
whatever their number of classes. No hidden layer before the head on ImageNet-21k; on all other data
a tanh layer, as in big_vision on ImageNet (some of the published files have it). The class
token is used, as in all published files (big_vision's configs/vit_i21k.py averages tokens). For
launching, see configs/pretrain.py.

Expected accuracy: `config.sweep.published` has the paper's table 3, the best of the grid, for the
unchanged recipe. Hours are not published; scripts/plan.py predicts them.

Fine-tuning (table 4)
---------------------
The argument is VARIANT,DATASET[,RESOLUTION[,STEPS]]:
  VARIANT     Ti/16, S/32, S/16, B/32, B/16, B/8, L/16, R+Ti/16, R26+S/32, R50+L/32 were published;
              any key of `models.create.VARIANTS` works.
  DATASET     imagenet2012, cifar100, oxford_iiit_pet, resisc45, kitti (distance to the nearest
              vehicle, as in VTAB); any other TFDS name, or the path of an image folder.
  RESOLUTION  384 (default; 224 for B/8, published at 224 only) or 224 pixels in the paper.
  STEPS       one of the dataset's schedules, see `TASKS`; default: the longest. Other data: 500
              steps, 100 of warm-up, rate 0.03: the defaults of the official configs/augreg.py.

SGD with momentum 0.9 stored in bfloat16, batch 512, cosine decay, clipping at norm 1; no weight
decay, no dropout, no augmentation beyond the official code's crop and flip. Unlike the first
paper, this one does not train again with the held-out data: `dataset.split` excludes them.

Expected ImageNet accuracy of the unchanged recipe (in `config.sweep.published`; official README
and table 3): at 384 pixels B/16 85.49, L/16 85.59, S/16 83.73, Ti/16 78.22. The learning rate for
ImageNet is the one of the published checkpoint. The paper does not state how long fine-tuning
takes; the official README's 6.5 hours for B/16 on ImageNet at 384 pixels, on a node of A100 GPUs,
are for as many steps.
"""

import re
from typing import NamedTuple

from ml_collections import ConfigDict

from configs import augreg_grid, pretrain
from configs.finetune import fine_tuning, parse_argument
from vit_jax.config import evaluator
from vit_jax.errors import UserError
from vit_jax.pretrained.zoo import augreg_names


class Task(NamedTuple):
    """Splits of a dataset, and {steps: steps of warm-up}."""

    train: str
    validation: str
    schedules: dict[int, int]
    test: str = "test"
    learning_rates: tuple[float, ...] = (0.001, 0.003, 0.01)
    learning_rate: float = 0.01
    label_key: str = ""


TASKS: dict[str, Task] = {
    "imagenet2012": Task(
        train="train[:99%]",
        validation="train[99%:]",
        test="validation",
        schedules={20_000: 500},
        learning_rates=(0.01, 0.03),
        learning_rate=0.03,
    ),
    "cifar100": Task(
        train="train[:98%]", validation="train[98%:]", schedules={2_500: 200, 10_000: 500}
    ),
    "oxford_iiit_pet": Task(
        train="train[:90%]", validation="train[90%:]", schedules={500: 100, 2_500: 200}
    ),
    "resisc45": Task(
        train="train[:60%]",
        validation="train[60%:80%]",
        test="train[80%:]",
        schedules={2_500: 200, 10_000: 500},
    ),
    "kitti": Task(
        train="train",
        validation="validation",
        schedules={500: 100, 2_500: 200},
        label_key="vtab_kitti_distance",
    ),
}
OTHER = Task(
    train="train[:90%]",
    validation="train[90%:]",
    schedules={500: 100},
    learning_rates=(0.001, 0.003, 0.01, 0.03),
    learning_rate=0.03,
)

# ImageNet, from ImageNet-21k: learning rate of the published checkpoint, top-1 at 224 pixels; at
# 384 pixels it is the last column of `augreg_grid.TABLE_3`.
IMAGENET: dict[str, tuple[float, float]] = {
    "L/16": (0.01, 83.98),
    "B/16": (0.03, 83.96),
    "S/16": (0.03, 80.46),
    "R50+L/32": (0.01, 82.74),
    "R26+S/32": (0.01, 80.81),
    "Ti/16": (0.03, 73.75),
    "B/32": (0.01, 79.13),
    "S/32": (0.01, 73.47),
    "R+Ti/16": (0.03, 69.69),
}
# Default resolution of models that were not published at 384 pixels.
RESOLUTION = {"B/8": 224}


def get_config(argument: str = "B/16,oxford_iiit_pet") -> ConfigDict:
    if argument.startswith("pretrain,"):
        return augreg_grid.pretraining(augreg_grid.parse_setting(argument))
    if re.match(rf"\w+-({'|'.join(augreg_names.DATASETS)})-", argument):
        return _of_file(argument)
    # Of two numbers at the end, the last is the steps.
    rest, _, last = argument.rpartition(",")
    with_steps = last.isdigit() and rest.rpartition(",")[2].isdigit()
    variant, dataset, resolution = parse_argument(
        "augreg",
        rest if with_steps else argument,
        default=RESOLUTION.get(argument.partition(",")[0], 384),
    )
    known = pretrain.without_version(dataset)
    task = TASKS.get(known, OTHER)
    steps = int(last) if with_steps else max(task.schedules)
    if steps not in task.schedules:
        raise UserError(
            f"configs/augreg.py:{argument}: schedules for {dataset} are "
            f"{' and '.join(map(str, task.schedules))} steps; set other ones with "
            "--config.duration.steps and --config.schedule.warmup_steps."
        )
    config = fine_tuning(variant)
    config.dataset.name = dataset
    config.dataset.label_key = task.label_key
    config.dataset.split = task.train
    config.dataset.preprocess = f"official_train({resolution})"
    config.dataset.eval_preprocess = f"official_eval({resolution})"
    config.duration.steps = steps
    config.schedule.warmup_steps = task.schedules[steps]
    config.schedule.learning_rate = task.learning_rate
    config.evaluators.test.split = task.test
    with config.unlocked():
        config.evaluators.validation = evaluator(task.validation)
    config.sweep.learning_rates = task.learning_rates
    config.sweep.train_split = task.train
    config.sweep.validation_split = task.validation
    if known == "imagenet2012" and variant in IMAGENET:
        config.schedule.learning_rate, at_224 = IMAGENET[variant]
        at_384 = augreg_grid.TABLE_3[variant][-1]
        config.sweep.published = {
            384: f"{at_384} from ImageNet-21k (official README)",
            224: f"{at_224} from ImageNet-21k (2106.10270, table 3)",
        }.get(resolution, "")
    return config


def _of_file(file: str) -> ConfigDict:
    """The pre-training of a published file, or the fine-tuning in its name's suffix."""
    name = augreg_names.parse(file)
    setting = augreg_grid.setting_of(name)
    if not name.adapt_dataset:
        return augreg_grid.pretraining(setting)
    steps = augreg_names.STEPS[name.adapt_steps]
    config = get_config(f"{name.variant},{name.adapt_dataset},{name.resolution},{steps}")
    config.schedule.learning_rate = name.adapt_rate
    config.pretrained.source = f"gs://vit_models/augreg/{name.upstream}.npz"
    config.sweep.published = ""  # table 3 is for the best files; index.csv has each one's accuracy
    return config
