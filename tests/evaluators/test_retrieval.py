"""Recall of texts and images, against ranks by hand."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image

from vit_jax.data.datasets import create_dataset
from vit_jax.data.pipeline import example_rng
from vit_jax.evaluators.retrieval import recalls


def test_recall_of_several_captions_by_hand() -> None:
    rng = np.random.default_rng(0)
    image_of = np.array([0, 1, 2, 0, 3, 1, *range(4, 24)])  # two captions of images 0 and 1
    images, texts = rng.normal(size=(2, 26, 4))
    images = images[np.unique(image_of, return_index=True)[1]][image_of]  # the same for each
    images, texts = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (images, texts))
    texts[:8] = 0.9 * images[:8] + 0.1 * texts[:8]
    scores = images[np.unique(image_of, return_index=True)[1]] @ texts.T  # [24, 26]
    expected = dict.fromkeys(("image_to_text", "text_to_image"), ())
    for image, row in enumerate(scores):
        order = np.argsort(-row)
        expected["image_to_text"] += (min(np.flatnonzero(image_of[order] == image)),)
    for text, column in enumerate(scores.T):
        order = np.argsort(-column)
        expected["text_to_image"] += (np.flatnonzero(order == image_of[text])[0],)
    found = recalls(images, texts, image_of)
    for way, ranks in expected.items():
        for k in (1, 5, 10):
            share = np.mean([rank < k for rank in ranks])
            assert 0 < share < 1
            assert found[f"{way}_recall_{k}"] == share
    assert found["num_examples"] == 26


def test_a_collapsed_model_finds_nothing() -> None:
    same = np.full((12, 4), 0.5)
    found = recalls(same, same, np.arange(12))
    assert found["text_to_image_recall_10"] == found["image_to_text_recall_10"] == 0.0


def test_captions_in_a_list_are_drawn_and_rows_of_a_file_are_one_image(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    for name in ("a", "b"):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    paths, captions = ["a.png", "b.png"], [["ant", "bee", "cat"], ["dog"]]
    table = pyarrow.table({"path": paths, "caption": captions, "split": ["train"] * 2})
    parquet.write_table(table, tmp_path / "lists.parquet")
    ops = "decode|tokenize('caption', 'characters', 4)"
    options = {"split": "train", "preprocess": ops, "needs": ("image", "text")}
    dataset = create_dataset(name=str(tmp_path / "lists.parquet"), **options)
    letters = {
        tuple(dataset.example(index, example_rng(0, step))["text"].tolist())
        for step in range(20)
        for index in range(2)
    }
    assert len(letters) == 4
    assert dataset.element_spec["text"].shape == (4,)
    assert dataset.fingerprint
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        rows = [
            [path, caption] for path, some in zip(paths, captions, strict=True) for caption in some
        ]
        csv.writer(file).writerows(
            [["path", "caption", "split"], *([*row, "train"] for row in rows)]
        )
    source = create_dataset(name=str(tmp_path / "rows.csv"), **options).source
    assert (len(source), len({*source.file_ids()})) == (4, 2)
