"""Maps of pixels: folders and tables of others, classes by number and colour, moves with images."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from vit_jax.data.datasets import create_dataset
from vit_jax.data.map_files import ClassTable, read_labels
from vit_jax.data.ops import MAPS, ImageOp, MovingOp
from vit_jax.data.preprocess import OPS, parse
from vit_jax.errors import UserError
from vit_jax.inference.dense import palette

CLASSES = "back\nleaf\nstem\n"
RNG = np.random.default_rng(0)


def opened(name: Path, split: str = "train", key: str = "label_map", **options: Any) -> Any:
    needs = ("image", key)
    return create_dataset(name=str(name), split=split, preprocess="decode", needs=needs, **options)


def labels(seed: int, size: tuple[int, int] = (6, 8)) -> np.ndarray:
    """With every class, and a pixel of none."""
    made = np.random.default_rng(seed).integers(0, 3, size).astype(np.uint8)
    made[0, :4] = 0, 1, 2, 255
    return made


def write(path: Path, pixels: np.ndarray, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(pixels)
    if mode == "P":
        picture.putpalette(palette().tobytes())
    picture.save(path)


def write_pairs(images: Path, maps: Path, names: str, mode: str | None = None) -> None:
    for i, name in enumerate(names.split()):
        write(images / f"{name}.jpg", np.full((6, 8, 3), 90, np.uint8))
        write(maps / f"{name}.png", labels(i), mode)


def ade20k(root: Path) -> None:
    for split, names in (("training", "a b"), ("validation", "c")):
        write_pairs(root / "images" / split, root / "annotations" / split, names)
    lines = ["Idx\tRatio\tTrain\tVal\tName", "1\t0.1\t1\t1\tback", "2\t0.1\t1\t1\tleaf, leaves"]
    (root / "objectInfo150.txt").write_text("\n".join(lines))


def voc(root: Path) -> None:
    write_pairs(root / "JPEGImages", root / "SegmentationClass", "a b c", "P")
    for name in "abc":  # boxes, which are no maps
        (root / "Annotations").mkdir(exist_ok=True)
        (root / f"Annotations/{name}.xml").write_text("<annotation/>")
    write(root / "JPEGImages" / "unlabelled.jpg", np.zeros((6, 8, 3), np.uint8))
    (root / "ImageSets/Segmentation").mkdir(parents=True)
    for split, names in (("train", "a b"), ("val", "c")):
        (root / f"ImageSets/Segmentation/{split}.txt").write_text(names.replace(" ", "\n"))


def splits_first(root: Path) -> None:
    for split, names in (("train", "a b"), ("val", "c")):
        write_pairs(root / split / "images", root / split / "masks", names)
    (root / "classes.txt").write_text(CLASSES)


def splits_last(root: Path) -> None:
    for split, names in (("train", "a b"), ("test", "c")):
        write_pairs(root / "imgs" / split, root / "labels" / split, names)
    (root / "classes.csv").write_text("name,number\nback,0\nleaf,1\nstem,2\n")


def as_table(root: Path) -> None:
    write_pairs(root / "photos", root / "truth", "a b c")
    splits = {"a": "train", "b": "train", "c": "test"}
    rows = ["path,mask,split", *(f"photos/{n}.jpg,truth/{n}.png,{splits[n]}" for n in splits)]
    (root / "t.csv").write_text("\n".join(rows))
    (root / "classes.txt").write_text(CLASSES)


@pytest.mark.parametrize("layout", [ade20k, voc, splits_first, splits_last, as_table])
def test_layouts_of_others(layout: Any, tmp_path: Path) -> None:
    layout(tmp_path)
    name = tmp_path / "t.csv" if layout is as_table else tmp_path
    train, test = opened(name).check(), opened(name, "test")
    assert (train.num_examples, test.num_examples) == (2, 1)
    assert len(train.class_names) == {ade20k: 2, voc: 21}.get(layout, 3)
    by_name = {Path(train.source.describe(i)).stem: train.example(i, RNG) for i in range(2)}
    for i, stem in enumerate("ab"):
        expected = labels(i)
        if layout is ade20k:  # 0 is no class there, 1 is the first
            expected = np.where(expected == 255, 255, expected - 1)
        np.testing.assert_array_equal(by_name[stem]["label_map"], expected)
    assert train.element_spec["label_map"].dtype == np.uint8
    before = train.fingerprint
    mask = next(path for path in tmp_path.rglob("a.png"))
    write(mask, labels(7, (6, 9)))
    assert opened(name).fingerprint != before


def test_without_splits_a_fifth_is_for_the_test(tmp_path: Path) -> None:
    write_pairs(tmp_path / "images", tmp_path / "masks", " ".join(f"x{i}" for i in range(20)))
    (tmp_path / "classes.txt").write_text(CLASSES)
    train, test = opened(tmp_path), opened(tmp_path, "test")
    assert train.num_examples + test.num_examples == 20
    assert 3 <= test.num_examples <= 5
    assert train.shared(test) == 0


def test_colours_of_a_table_and_pictures_in_grey_of_three_channels(tmp_path: Path) -> None:
    table = ClassTable(("sky", "road"), {0x0000FF: 0, 0x808080: 1, 0: 255}, has_colors=True)
    colors = np.array([[[0, 0, 255], [128, 128, 128], [0, 0, 0]]], np.uint8)
    write(tmp_path / "c.png", colors)
    assert read_labels(tmp_path / "c.png", table).tolist() == [[0, 1, 255]]
    write(tmp_path / "p.png", np.array([[0, 4]], np.uint8), "P")  # 4 is (0, 0, 128)
    by_palette = ClassTable(("sky", "road"), {0: 0, 128: 1}, has_colors=True)
    assert read_labels(tmp_path / "p.png", by_palette).tolist() == [[0, 1]]
    write(tmp_path / "g.png", np.repeat(np.array([[[1], [0], [255]]], np.uint8), 3, axis=2))
    numbers = ClassTable(("a", "b"), {0: 0, 1: 1})
    assert read_labels(tmp_path / "g.png", numbers).tolist() == [[1, 0, 255]]
    with pytest.raises(ValueError, match="it has colours: list them in classes.csv"):
        read_labels(tmp_path / "c.png", numbers)
    with pytest.raises(ValueError, match="the colours 0,0,128 of none of the 2 classes"):
        read_labels(tmp_path / "p.png", table)


def test_black_and_white_masks_need_a_line_that_says_that_white_is_an_object(
    tmp_path: Path,
) -> None:
    """Else 255, which usually is no class, would leave nothing to learn."""
    write(tmp_path / "images/a.jpg", np.zeros((2, 2, 3), np.uint8))
    write(tmp_path / "masks/a.png", np.array([[0, 255], [0, 0]], np.uint8))
    with pytest.raises(UserError, match=r"classes.csv .*; masks/a.png has the numbers 0, 255"):
        opened(tmp_path)
    (tmp_path / "classes.csv").write_text("back,0\nobject,255\n")
    example = opened(tmp_path, "train+test").example(0, RNG)
    assert example["label_map"].tolist() == [[0, 1], [0, 0]]


def test_maps_without_a_class_to_learn_are_refused_and_rare_ones_named(
    tmp_path: Path, caplog: Any
) -> None:
    write_pairs(tmp_path / "images", tmp_path / "masks", "a b c d e")
    (tmp_path / "classes.txt").write_text(CLASSES + "fruit\n")
    with caplog.at_level(logging.WARNING):
        opened(tmp_path, "train+test").check()
    assert "no pixel of fruit" in caplog.text
    assert "image numbers" not in caplog.text  # four classes for five images are no surprise
    for i in range(5):
        write(tmp_path / f"masks/{'abcde'[i]}.png", np.uint8([[0, 255]] * 48).reshape(6, 16)[:, :8])
    with pytest.raises(UserError, match=r"the maps have only 1 of the classes back, leaf, stem"):
        opened(tmp_path, "train+test").check()


def test_neighbours_of_maps_links_and_folders_of_scenes(tmp_path: Path, caplog: Any) -> None:
    """Files of labelling tools, a linked folder, folders that are no splits, an exact name."""
    (tmp_path / "classes.txt").write_bytes(b"\xef\xbb\xbf" + CLASSES.encode())
    write_pairs(tmp_path / "images/scene1", tmp_path / "elsewhere/scene1", "a b c")
    write_pairs(tmp_path / "images/scene2", tmp_path / "elsewhere/scene2", "a a_seg")
    (tmp_path / "masks").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/scene1/a.json").write_text("{}")
    data = opened(tmp_path, "train+test")
    assert data.class_names == ("back", "leaf", "stem")
    assert data.num_examples == 5
    write(tmp_path / "images/train/x.jpg", np.zeros((6, 8, 3), np.uint8))
    write(tmp_path / "masks/train/x.png", labels(0))
    write(tmp_path / "images/loose.jpg", np.zeros((6, 8, 3), np.uint8))
    with caplog.at_level(logging.WARNING):
        assert opened(tmp_path).num_examples == 1
    assert "not used, in no split: loose.jpg" in caplog.text
    write(tmp_path / "images/train/x.png", np.zeros((6, 8, 3), np.uint8))
    with pytest.raises(UserError, match=r"x.jpg and x.png have one name; rename one"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("classes.csv", "sky,300,0,0\nroad,1,1,1", "red, green and blue must be at most 255"),
        ("classes.csv", "sky,1\nroad,1", "two rows have the same number or colour"),
        ("classes.csv", "sky,1\nroad,1,1,1", "its rows must be name,number or name,red,green"),
        ("classes.txt", "sky\n\nroad", "'sky', '', 'road': they must be 2 to 255, each with a"),
        ("classes.txt", "sky", "1 classes of pixels, 'sky'"),
    ],
)
def test_lists_of_classes_with_mistakes(name: str, text: str, why: str, tmp_path: Path) -> None:
    write_pairs(tmp_path / "images", tmp_path / "masks", "a b")
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=why):
        opened(tmp_path)


def test_tables_of_others(tmp_path: Path) -> None:
    write_pairs(tmp_path / "photos", tmp_path / "wahrheit", "ä b")
    (tmp_path / "classes.txt").write_text(CLASSES)
    table = tmp_path / "t.csv"
    rows = "".join(f"photos/{n}.jpg,wahrheit/{n}.png,train\n" for n in "äb")
    table.write_text("path,mask,split\n" + rows, encoding="utf-8")
    assert opened(table).check().num_examples == 2
    table.write_text("path,mask\n")
    with pytest.raises(UserError, match="selects no examples"):
        opened(table)
    table.write_text("path,labels\nphotos/b.jpg,1.5\n")
    data = create_dataset(
        name=str(table),
        split="train+test",
        preprocess="decode",
        needs=("target",),
        label_key="labels",
    )
    assert data.example(0, RNG)["target"].tolist() == [1.5]


def test_values_are_kept_as_they_are_stored(tmp_path: Path) -> None:
    depth = np.array([[0, 700, 65535]], np.uint16)
    for name, ending in (("a", ".png"), ("b", ".npy"), ("c", ".tif")):
        write(tmp_path / f"images/{name}.jpg", np.zeros((1, 3, 3), np.uint8))
        target = tmp_path / f"depth/{name}_depth{ending}"
        target.parent.mkdir(exist_ok=True)
        if ending == ".npy":
            np.save(target, depth.astype(np.float32))
        else:
            Image.fromarray(depth if ending == ".png" else depth.astype(np.float32)).save(target)
    data = opened(tmp_path, "train+test", key="value_map")
    assert data.num_examples == 3
    for i in range(3):
        example = data.example(i, RNG)
        assert example["value_map"].dtype == np.float32
        np.testing.assert_array_equal(example["value_map"], depth)


def test_mistakes_are_one_line_before_training(tmp_path: Path, caplog: Any) -> None:
    splits_first(tmp_path)
    write(tmp_path / "train/masks/a.png", np.full((6, 8), 7, np.uint8))
    with pytest.raises(UserError, match=r"a.png: the numbers 7 of none of the 3 classes"):
        opened(tmp_path).check()
    (tmp_path / "train/masks/a.png").write_bytes(b"\x89PNG no picture")
    with pytest.raises(UserError, match=r"train/masks/a.png: cannot identify image file"):
        opened(tmp_path).check()
    write(tmp_path / "train/masks/a.png", labels(0, (8, 6)))
    chain = {"preprocess": "decode|resize(4)", "needs": ("image", "label_map")}
    turned = create_dataset(name=str(tmp_path), split="train", **chain)
    numbers = {Path(turned.source.describe(i)).stem: i for i in range(2)}
    with pytest.raises(UserError, match=r"label_map uint8 \[8, 6\] differ in size; if EXIF turns"):
        turned.example(numbers["a"], RNG)
    with pytest.raises(
        UserError, match=r"a.jpg is 6x8 and its label_map uint8 \[8, 6\]: they differ"
    ):
        opened(tmp_path).check()
    for spec in ("decode", "decode|normalize(0.5, 0.5)"):
        data = create_dataset(name=str(tmp_path), split="train", **{**chain, "preprocess": spec})
        with pytest.raises(UserError, match="differ in size"):
            data.example(numbers["a"], RNG)
    (tmp_path / "train/masks/b.png").rename(tmp_path / "train/masks/b_mask.png")
    (tmp_path / "train/masks/b_seg.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"b_mask.png and b_seg.png are of one image"):
        opened(tmp_path)
    (tmp_path / "train/masks/b_seg.png").unlink()
    (tmp_path / "train/masks/a.png").unlink()
    with caplog.at_level(logging.WARNING):
        assert opened(tmp_path).num_examples == 1
    assert "1 image without a map: a.jpg" in caplog.text
    with pytest.raises(UserError, match=r"expected the folders images/ and depth/, or train"):
        opened(tmp_path, key="value_map")
    with pytest.raises(UserError, match=r"'glyphs' has no label_map; folders and tables"):
        opened(Path("glyphs"))


# One setting of each op that moves pixels, for a picture of 40 x 60.
MOVES = {
    "resize": "resize(20, 90)",
    "resize_small": "resize_small(70)",
    "central_crop": "central_crop(30)",
    "corner_crop": "corner_crop(30)",
    "random_crop": "random_crop(36, padding=4)",
    "inception_crop": "inception_crop(40, (0.3, 1))",
    "random_resized_crop": "random_resized_crop(40, (0.3, 1))",
    "random_area": "random_area((0.4, 0.9))",
    "flip_lr": "flip_lr",
    "random_affine": "random_affine(20, 0.2, (0.8, 1.2), 10)",
}


@pytest.mark.parametrize("spec", MOVES.values())
def test_a_line_in_the_image_stays_a_line_of_the_map(spec: str) -> None:
    """A flip of one alone would put it elsewhere."""
    image, drawn = np.zeros((40, 60, 3), np.uint8), np.zeros((40, 60), np.uint8)
    cv2.line(image, (8, 5), (34, 33), (250, 250, 250), 5)
    cv2.line(drawn, (8, 5), (34, 33), 1, 5)
    example = {"image": image, "label_map": drawn, "value_map": 3 * drawn.astype(np.float32)}
    places = set()
    for seed in range(8):
        moved = parse(f"decode|{spec}")(example, np.random.default_rng(seed))
        seen, told = moved["image"][..., 0] > 125, moved["label_map"] == 1
        # They differ at the edge alone, where the image is interpolated.
        assert np.sum(seen & told) / np.sum(seen | told) > 0.75, (seed, spec)
        inside = moved["label_map"] < 255
        np.testing.assert_array_equal(moved["value_map"][inside], 3.0 * told[inside])
        assert np.all(np.isnan(moved["value_map"][~inside]))
        assert set(np.unique(moved["label_map"])) <= {0, 1, 255}
        places.add(moved["label_map"].tobytes())
    is_random = "random" in spec or spec.startswith(("inception", "flip"))
    assert len(places) > 1 if is_random else places == {moved["label_map"].tobytes()}
    assert moved["label_map"].tobytes() != drawn.tobytes() or "flip" in spec


def test_every_op_moves_maps_or_leaves_them_or_refuses() -> None:
    moving = {name for name, op in OPS.items() if isinstance(op, type) and issubclass(op, MovingOp)}
    assert moving == set(MOVES)
    example = {"image": np.zeros((8, 8, 3), np.uint8), "label_map": np.zeros((8, 8), np.uint8)}
    with pytest.raises(UserError, match=r"RandAug\(.* cannot move label_map as the image"):
        parse("decode|randaug(2, 10)")(example, RNG)
    for spec in ("color_jitter(0.4, 0.4, 0.2, 0.1)", "random_erasing(1.0)", "three_augment"):
        changed = parse(f"decode|{spec}")(example, RNG)
        np.testing.assert_array_equal(changed["label_map"], example["label_map"])
    left = {n for n, op in OPS.items() if isinstance(op, type) and issubclass(op, ImageOp)} - moving
    refusing = {name for name in left if OPS[name].moves is None}
    assert refusing == {"randaug"}


def test_images_without_maps_see_the_random_numbers_that_they_saw_before() -> None:
    image = np.random.default_rng(1).integers(0, 256, (40, 60, 3), np.uint8)
    spec = "decode|random_resized_crop(32)|flip_lr|random_affine(10)"
    plain = parse(spec)({"image": image}, np.random.default_rng(3))["image"]
    maps = {key: np.zeros((40, 60), np.asarray(fill).dtype) for key, fill in MAPS.items()}
    beside = parse(spec)({"image": image, **maps}, np.random.default_rng(3))["image"]
    np.testing.assert_array_equal(plain, beside)
    assert dataclasses.asdict(parse("flip_lr").ops[0]) == {}
