"""Fine-tuning with big_vision's transfer settings, which keep the aspect ratio of the images.

    python scripts/finetune.py --config=configs/transfer.py:B/32,cifar10 \\
        --config.pretrained.source=B_32.npz --workdir=/tmp/cifar10

The argument is VARIANT,DATASET[,CROP]:
  VARIANT  a key of `models.create.VARIANTS`.
  DATASET  imagenet2012, cifar10, cifar100, oxford_iiit_pet, oxford_flowers102, any other TFDS
           name, or the path of an image folder.
  CROP     resmall_crop (short side to 448 pixels, random 384 x 384), inception_crop (a box of
           random area and shape), resize_crop (resized to 448 x 448, random 384 x 384).

Batch 512, SGD with momentum 0.9 stored in bfloat16, cosine decay, clipping at norm 1, no weight
decay, random flips; evaluation uses the central 384 x 384 of the image with its short side at
448 pixels (378 for patches of 14). CROP and learning rate default to what big_vision's
configs/transfer.py found best on held-out data for AugReg's B/32. It trains on the rest, and does
not train again on the whole training split.

Expected accuracy there, mean and range of 5 runs of B/32, AugReg, ImageNet-21k: ImageNet 83.27
(83.22 to 83.33), CIFAR-10 98.55 (98.46 to 98.60), CIFAR-100 91.35 (91.09 to 91.62), Pets 93.78
(93.62 to 94.00), Flowers 99.43 (99.42 to 99.45). Neither times nor its grid of learning
rates are published; `config.sweep` has the one of AugReg's VTAB runs (2106.10270).
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from configs.finetune import fine_tuning, pixels_per_token
from vit_jax.config import evaluator
from vit_jax.errors import UserError
from vit_jax.kinds import check_known


class Task(NamedTuple):
    held_out: int  # percent at the end of `train`
    test: str
    steps: int
    warmup_steps: int
    crop: str = "resmall_crop"
    learning_rate: float = 0.01
    published: str = ""


TASKS: dict[str, Task] = {
    "imagenet2012": Task(
        held_out=1,
        test="validation",
        steps=20_000,
        warmup_steps=500,
        crop="inception_crop",
        learning_rate=0.03,
        published="83.27 (83.22 to 83.33)",
    ),
    "cifar10": Task(
        held_out=2,
        test="test",
        steps=10_000,
        warmup_steps=500,
        crop="resmall_crop",
        learning_rate=0.003,
        published="98.55 (98.46 to 98.60)",
    ),
    "cifar100": Task(
        held_out=2,
        test="test",
        steps=10_000,
        warmup_steps=500,
        crop="resmall_crop",
        learning_rate=0.01,
        published="91.35 (91.09 to 91.62)",
    ),
    "oxford_iiit_pet": Task(
        held_out=10,
        test="test",
        steps=500,
        warmup_steps=100,
        crop="inception_crop",
        learning_rate=0.003,
        published="93.78 (93.62 to 94.00)",
    ),
    "oxford_flowers102": Task(
        held_out=10,
        test="test",
        steps=500,
        warmup_steps=100,
        crop="inception_crop",
        learning_rate=0.003,
        published="99.43 (99.42 to 99.45)",
    ),
}
OTHER = Task(held_out=10, test="test", steps=2_500, warmup_steps=200)
LARGER = 448
CROPS = {
    "inception_crop": "inception_crop({0})",
    "resmall_crop": f"resize_small({LARGER})|random_crop({{0}})",
    "resize_crop": f"resize({LARGER})|random_crop({{0}})",
}


def get_config(argument: str = "B/32,cifar10") -> ConfigDict:
    variant, _, rest = argument.partition(",")
    dataset, _, crop = rest.rpartition(",")
    if not crop.endswith("_crop"):
        dataset, crop = rest, ""
    if not dataset:
        raise UserError(
            f"configs/transfer.py:{argument} must be VARIANT,DATASET[,CROP], such as B/32,cifar10."
        )
    task = TASKS.get(dataset, OTHER)
    crop = crop or task.crop
    check_known("CROP", crop, CROPS)
    stride = pixels_per_token(variant)
    resolution = 384 // stride * stride

    config = fine_tuning(variant)
    config.dataset.name = dataset
    config.dataset.split = f"train[:{100 - task.held_out}%]"
    config.dataset.preprocess = f"decode|{CROPS[crop].format(resolution)}|flip_lr"
    config.dataset.eval_preprocess = f"big_vision_eval({resolution}, resize={LARGER})"
    config.duration.steps = task.steps
    config.schedule.warmup_steps = task.warmup_steps
    config.schedule.learning_rate = task.learning_rate
    config.evaluators.test.split = task.test
    with config.unlocked():
        config.evaluators.validation = evaluator(f"train[{100 - task.held_out}%:]")
    config.sweep.learning_rates = (0.001, 0.003, 0.01, 0.03)
    config.sweep.train_split = config.dataset.split
    config.sweep.validation_split = config.evaluators.validation.split
    if variant == "B/32" and task.published:
        config.sweep.published = f"{task.published} from ImageNet-21k, AugReg (big_vision)"
    return config
