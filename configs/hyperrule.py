"""Fine-tuning by the BiT-HyperRule of Big Transfer (BiT, 1912.11370, section 3.3).

    python scripts/finetune.py --config=configs/hyperrule.py:R50x1,cifar10 \\
        --config.pretrained.source=bit/BiT-M-R50x1 --workdir=/tmp/cifar10

The argument is VARIANT,DATASET[,small]:
  VARIANT  a key of `models.create.VARIANTS`.
  DATASET  as in configs/finetune.py; for data that are not listed there the images of `train` are
           counted when the recipe is read.
  small    its images have fewer than 96 x 96 pixels. Known of CIFAR, SVHN, EuroSAT and dSprites.

One rule for all data, no search (official code, bit_hyperrule.py):

  images            resized to  cropped to      examples         steps   rate / 10 after   mixup
  under 96 x 96 px     160         128          under 20,000       500   200, 300, 400     -
  larger               512         480          under 500,000   10,000   3,000 6,000 9,000  0.1
                                                more            20,000   6,000 12,000 18,000 0.1

SGD with momentum 0.9, rate 0.003, batch 512, warm-up of 500 steps (100 of 500), flips, no weight
decay, no clipping. Tested on the image resized to the crop's size. On VTAB's SVHN and structured
tasks images are neither cropped nor flipped, as in configs/finetune.py.

Expected from BiT-M (README of google-research/big_transfer; CIFAR with batch 128 and rate 0.001):
R50x1: ImageNet 80.68, CIFAR-10 97.3, CIFAR-100 86.4; R152x2: 85.15, 98.5, 91.2. R50x1 on ImageNet
needs 4 parts of a batch on eight V100 (--config.train_step.accumulation_steps=4); hours are not
published.
"""

from ml_collections import ConfigDict

from configs import finetune
from vit_jax.config import set_kind
from vit_jax.data.datasets import create_dataset
from vit_jax.errors import UserError

NUM_EXAMPLES = {
    "imagenet2012": 1_281_167,
    "cifar10": 50_000,
    "cifar100": 50_000,
    "oxford_iiit_pet": 3_680,
    "oxford_flowers102": 1_020,
    **{f"vtab/{task}": 1_000 for task in finetune.VTAB},
}
SMALL = ("cifar10", "cifar100", "svhn_cropped", "eurosat", "dsprites")  # TFDS names
# Examples below which a row is used; warm-up, ends of the other rates, steps.
SCHEDULES = {
    20_000: (100, 200, 300, 400, 500),
    500_000: (500, 3_000, 6_000, 9_000, 10_000),
    float("inf"): (500, 6_000, 12_000, 18_000, 20_000),
}
PUBLISHED = {
    "R50x1": {"imagenet2012": 80.68, "cifar10": 97.3, "cifar100": 86.4},
    "R152x2": {"imagenet2012": 85.15, "cifar10": 98.5, "cifar100": 91.2},
}


def get_config(argument: str = "R50x1,cifar10") -> ConfigDict:
    variant, _, dataset = argument.removesuffix(",small").partition(",")
    if not dataset:
        raise UserError(
            f"configs/hyperrule.py:{argument} must be VARIANT,DATASET[,small], such as "
            "R50x1,cifar10."
        )
    config, task = finetune.fine_tuning(variant), finetune.find_task(dataset)
    finetune.set_task(config, task)
    config.optimizer.momentum_dtype = "float32"
    config.optimizer.clip_norm = None
    is_small = argument.endswith(",small") or task.dataset.partition("/")[0] in SMALL
    larger, pixels = (160, 128) if is_small else (512, 480)
    crop = f"decode|resize({larger})|random_crop({pixels})|flip_lr"
    config.dataset.preprocess = crop if task.crops else f"official_eval({pixels})"
    config.dataset.eval_preprocess = f"official_eval({pixels})"
    num_examples = NUM_EXAMPLES.get(dataset) or count(task)
    row = next(row for below, row in SCHEDULES.items() if num_examples < below)
    warmup_steps, *decays, steps = row
    config.duration.steps = steps
    decay_at = tuple(step / steps for step in decays)
    set_kind(config, "schedule", "staircase", decay_at=decay_at, warmup_steps=warmup_steps)
    config.schedule.learning_rate = 0.003
    config.sweep.learning_rates = (0.003,)
    config.mix.mixup_alpha = 0.0 if num_examples < 20_000 else 0.1
    published = PUBLISHED.get(variant, {}).get(dataset)
    config.sweep.published = f"{published} from BiT-M (big_transfer's README)" if published else ""
    return config


def count(task: finetune.Task) -> int:
    """Number of training examples of data that have to be looked at."""
    return create_dataset(name=task.dataset, split=task.split, preprocess="decode").num_examples
