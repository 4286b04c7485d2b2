"""VTAB-1k in configs/finetune.py: parts, labels and augmentation of its 19 tasks."""

import numpy as np
import pytest
import tensorflow_datasets as tfds

from configs import finetune
from vit_jax.data.computed_labels import COMPUTED_LABELS
from vit_jax.data.preprocess import parse
from vit_jax.data.sources import resolve_split


# Sizes of the TFDS sets, where the benchmark's val200 and test begin, and their sizes
# (google-research/task_adaptation and its tests).
def rows(
    train: int, validation: int, test: int, val200: tuple[str, int], start: str = "test"
) -> tuple[dict[str, int], tuple[str, int], tuple[str, int, int]]:
    """Sizes of the splits, beginning of val200, and the whole split that is the test part."""
    sizes = {"train": train, "validation": validation, "test": test}
    return sizes, val200, (start, 0, sizes[start])


FIRST = ("validation", 0)
_DSPRITES = ({"train": 737_280}, ("train", 589_824), ("train", 663_552, 73_728))
_SMALLNORB = ({"train": 24_300, "test": 24_300}, ("test", 0), ("test", 12_150, 12_150))
_CLEVR = rows(70_000, 15_000, 15_000, ("train", 63_000), "validation")
# Classes, of TFDS's features and of the benchmark's code; the splits.
VTAB_1K: dict[str, tuple[int, dict[str, int], tuple[str, int], tuple[str, int, int]]] = {
    "caltech101": (102, *rows(3060, 0, 6084, ("train", 2754))),
    "cifar100": (100, *rows(50_000, 0, 10_000, ("train", 45_000))),
    "dtd": (47, *rows(1880, 1880, 1880, FIRST)),
    "oxford_flowers102": (102, *rows(1020, 1020, 6149, FIRST)),
    "oxford_iiit_pet": (37, *rows(3680, 0, 3669, ("train", 2944))),
    "sun397": (397, *rows(76_128, 10_875, 21_750, FIRST)),
    "svhn": (10, *rows(73_257, 0, 26_032, ("train", 65_931))),
    "patch_camelyon": (2, *rows(262_144, 32_768, 32_768, FIRST)),
    "eurosat": (10, {"train": 27_000}, ("train", 16_200), ("train", 21_600, 5_400)),
    "resisc45": (45, {"train": 31_500}, ("train", 18_900), ("train", 25_200, 6_300)),
    "diabetic_retinopathy": (5, *rows(35_126, 10_906, 42_670, FIRST)),
    "clevr_count": (8, *_CLEVR),
    "clevr_distance": (6, *_CLEVR),
    "dmlab": (6, *rows(65_550, 22_628, 22_735, FIRST)),
    "dsprites_location": (16, *_DSPRITES),
    "dsprites_orientation": (16, *_DSPRITES),
    "kitti_distance": (4, *rows(6347, 423, 711, FIRST)),
    "smallnorb_azimuth": (18, *_SMALLNORB),
    "smallnorb_elevation": (9, *_SMALLNORB),
}


def parts(split: str, sizes: dict[str, int]) -> list[tuple[str, int, int]]:
    return [tuple(p) for p in resolve_split(split, sizes, sizes.__getitem__)]


def test_table_9_averages_to_what_table_2_says() -> None:
    assert np.mean(list(finetune.TABLE_9_L16.values())) == pytest.approx(72.72, abs=0.05)


@pytest.mark.parametrize("task", VTAB_1K)
def test_vtab_1k(task: str) -> None:
    config = finetune.get_config(f"B/16,vtab/{task}")
    classes, sizes, (validation, start), (test, test_start, test_size) = VTAB_1K[task]
    train800, val200 = ("train", 0, 800), (validation, start, start + 200)
    assert parts(config.dataset.split, sizes) == [train800, val200]
    assert parts(config.sweep.train_split, sizes) == [train800]
    assert parts(config.sweep.validation_split, sizes) == [val200]
    assert parts(config.evaluators.test.split, sizes) == [
        (test, test_start, test_start + test_size)
    ]
    assert config.duration.steps == 2_500
    assert config.sweep.learning_rates == (0.01,)
    assert config.schedule.learning_rate == 0.01
    # The label exists, and has as many classes as the benchmark says.
    label_key = config.dataset.label_key
    if label_key in COMPUTED_LABELS:
        assert COMPUTED_LABELS[label_key].dataset == config.dataset.name.partition(":")[0]
        num_classes = len(COMPUTED_LABELS[label_key].class_names)
    else:
        features = tfds.builder(config.dataset.name, data_dir="/none").info.features
        num_classes = features[label_key or "label"].num_classes
    assert num_classes == classes


def test_vtab_is_complete_and_keeps_labels_intact() -> None:
    assert list(finetune.VTAB) == list(finetune.TABLE_9_L16) == list(VTAB_1K)
    structured = list(VTAB_1K)[11:]
    for task in VTAB_1K:
        train = finetune.get_config(f"B/16,vtab/{task}").dataset.preprocess
        augmented = "crop" in train and "flip_lr" in train
        assert augmented == (task not in ("svhn", *structured)), task
        image = parse(train)({"image": np.zeros((96, 64, 3), np.uint8)}, np.random.default_rng(0))
        assert image["image"].shape == (384, 384, 3)


def test_caltech_has_the_same_images_with_and_without_its_stray_file() -> None:
    """The benchmark's tests count 3060 for training, TFDS since then one less."""
    validation = finetune.VTAB["caltech101"].held_out
    for count, start in ((3060, 2754), (3059, 2753)):
        assert start == 90 * count // 100
        assert parts(validation, {"train": count}) == [("train", start, start + 200)]
