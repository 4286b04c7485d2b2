"""Evaluations in papers as lists of tasks, for scripts/evaluate_paper.py.

fewshot   least squares on 1, 5, 10 and 25 images per class (section 4.1), on the data sets of
          big_vision's configs/common_fewshot.py. The paper shows its own as curves (figure 4).
imagenet  an ImageNet classifier on ImageNet, V2 (1902.10811), -A (1907.07174) and -R
          (2006.16241), the latter two over the 200 classes that they have. ObjectNet is not in
          TFDS: give its folder as a data set, with ImageNet's class names.
transfer  fine-tuning on the data sets of table 5 by configs/finetune.py: the learning rate is
          chosen on held-out data.
vtab      the 19 tasks of VTAB-1k (1910.04867) by configs/finetune.py, one setting for all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from configs import finetune
from vit_jax.errors import UserError
from vit_jax.kinds import check_known
from vit_jax.models.create import variant_of

# name: (dataset, images to fit, images to measure)
FEW_SHOT = {
    "caltech101": ("caltech101", "train", "test"),
    "cars196": ("cars196", "train", "test"),
    "cifar100": ("cifar100", "train", "test"),
    "dtd": ("dtd", "train", "test"),
    "oxford_iiit_pet": ("oxford_iiit_pet", "train", "test"),
    "uc_merced": ("uc_merced", "train[:1000]", "train[1000:]"),
    # The first 65,000 contain at least 30 images of each class.
    "imagenet2012": ("imagenet2012", "train[:65000]", "validation"),
}
# name: (dataset, split, classes to choose from)
IMAGENET = {
    "imagenet2012": ("imagenet2012", "validation", "all"),
    "imagenet_v2": ("imagenet_v2/matched-frequency", "test", "all"),
    "imagenet_a": ("imagenet_a", "test", "present"),
    "imagenet_r": ("imagenet_r", "test", "present"),
}
NATURAL, SPECIALIZED = 7, 4  # of VTAB's tasks in table 9's order; the others are structured
SUITES = ("fewshot", "imagenet", "transfer", "vtab")


def tasks(
    suite: str, model: Mapping[str, Any], datasets: Sequence[str], resolution: int | None
) -> list[dict[str, Any]]:
    """The tasks of a suite: `name`, `group`, `kind`, `published` and the kind's `settings`.

    Args:
      model: attributes as in `model.json`.
      datasets: of the suite, or others: TFDS names and image folders with train and test; () for
        all of the suite.
      resolution: for fine-tuning; None for 384, or the nearest multiple of the token size.

    Raises:
      UserError: no such suite or task.
    """
    check_known("--suite", suite, SUITES)
    variant = variant_of(model)
    tasks: list[dict[str, Any]] = []
    if suite == "fewshot":
        for name in datasets or FEW_SHOT:
            dataset, train, test = FEW_SHOT.get(name, (name, "train", "test"))
            settings = {"dataset": dataset, "train_split": train, "split": test}
            tasks.append(_task(name, "few_shot", settings))
    elif suite == "imagenet":
        for name in datasets or IMAGENET:
            dataset, split, classes = IMAGENET.get(name, (name, "test", "present"))
            settings = {"dataset": dataset, "split": split, "classes": classes}
            tasks.append(_task(name, "evaluate", settings))
    else:
        known = finetune.VTAB if suite == "vtab" else finetune.DATASETS
        for name in datasets or known:
            if suite == "vtab":
                check_known("VTAB task", name, known)
            config = _fine_tuning(model, variant, name, suite, resolution)
            group = _vtab_group(name) if suite == "vtab" else ""
            published = config.sweep.published
            tasks.append(_task(name, "fine_tune", {"config": config}, group, published))
    return tasks


def _task(
    name: str, kind: str, settings: dict[str, Any], group: str = "", published: str = ""
) -> dict[str, Any]:
    return {
        "name": name,
        "group": group,
        "kind": kind,
        "published": published,
        "settings": settings,
    }


def _vtab_group(name: str) -> str:
    place = list(finetune.VTAB).index(name)
    if place < NATURAL:
        return "natural"
    return "specialized" if place < NATURAL + SPECIALIZED else "structured"


def _fine_tuning(
    model: Mapping[str, Any], variant: str, name: str, suite: str, resolution: int | None
) -> Any:
    dataset = f"vtab/{name}" if suite == "vtab" else name
    sizes = finetune.taken_over(model)
    side = finetune.token_side(sizes)
    resolution = resolution or 384 // side * side
    if resolution % side:
        raise UserError(f"--image_size={resolution} is not divisible by tokens of {side} pixels.")
    config = finetune.fine_tuning_of(sizes)
    return finetune.on_dataset(config, variant, dataset, resolution)
