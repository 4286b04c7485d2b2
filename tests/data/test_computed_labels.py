"""Each computed label, on records that the real TFDS builders write."""

import io
import pickle

import numpy as np
import pytest

from tests import fixtures_data
from vit_jax.data.computed_labels import COMPUTED_LABELS
from vit_jax.data.datasets import create_dataset
from vit_jax.errors import UserError

# Distances of the objects of each example, and the class of the nearest.
CLEVR = (
    ((11.5, 7.0, 9.0), 0),
    ((8.0, 8.1, 8.2, 12.0), 0),  # a bound belongs to the class below it
    ((8.25, 9.0, 9.5), 1),
    ((9.5, 8.75, 9.1, 9.2, 9.3), 2),
    ((9.25, 10.0, 11.0), 3),
    ((9.75, 10.5, 11.0, 12.0, 13.0, 14.0), 4),
    ((10.25, 11.0, 12.0, 10.5, 11.5, 12.5, 13.0, 13.5, 14.0, 15.0), 5),
)
# (type, distance) of the objects; types 0 to 2 are vehicles.
KITTI = (
    ([("Car", 7.5), ("Van", 30.0)], 0),
    ([("Car", 8.0)], 0),
    ([("Pedestrian", 2.0), ("Truck", 12.0)], 1),
    ([("Van", 55.0), ("Tram", 6.0)], 2),
    ([("Pedestrian", 3.0), ("Cyclist", 9.0), ("Misc", 4.0)], 3),
    ([], 3),
)


def png(seed, size=(24, 40)):
    return io.BytesIO(fixtures_data.encoded(fixtures_data.picture(seed, size=size), "PNG"))


def clevr_example(split, index):
    distances = CLEVR[index][0] if split != "test" else ()
    same = {"color": 0, "material": 1, "shape": 2, "size": 1, "rotation": 0.5}
    same["3d_coords"] = [1.0, 2.0, 3.0]
    objects = [{**same, "pixel_coords": [200.0, 100.0, distance]} for distance in distances]
    return {"image": png(index), "file_name": f"{index}", "objects": objects, "question_answer": []}


def kitti_example(_split, index):
    from tensorflow_datasets.public_api import features

    same = {"truncated": 0.0, "occluded": 0, "alpha": 0.1, "rotation_y": 0.2}
    same |= {"bbox": features.BBox(0.1, 0.1, 0.2, 0.2), "dimensions": [1.0, 2.0, 3.0]}
    objects = [
        {**same, "type": kind, "location": [-4.0, 1.0, distance]}
        for kind, distance in KITTI[index][0]
    ]
    return {"image": png(index), "image/file_name": f"{index:06d}.png", "objects": objects}


def dsprites_example(_split, index):
    pixels = np.zeros((64, 64), np.uint8)
    pixels[10:20, index : index + 8] = 1
    return {
        "image": io.BytesIO(fixtures_data.encoded(pixels, "PNG")),
        "label_shape": 0,
        "label_scale": 5,
        "label_orientation": index,
        "label_x_position": index % 32,
        "label_y_position": 31,
        **{f"value_{key}": 0.0 for key in ("shape", "scale", "orientation")},
        **{f"value_{key}_position": 1.0 for key in "xy"},
    }


WRITERS = {
    "clevr": (clevr_example, {"train": len(CLEVR), "test": 1}),
    "dsprites": (dsprites_example, {"train": 40}),
    "kitti": (kitti_example, {"train": len(KITTI)}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("computed")
    for name, (example, sizes) in WRITERS.items():
        fixtures_data.tiny_tfds(name, path, sizes, example=example)
    return str(path)


def opened(root, label_key, name="", split="train"):
    name = name or COMPUTED_LABELS[label_key].dataset
    return create_dataset(
        name=name, split=split, preprocess="decode", data_dir=root, label_key=label_key
    )


def labels(root, label_key):
    """The labels in the order in which the examples were written."""
    dataset = pickle.loads(pickle.dumps(opened(root, label_key)))  # as a worker process gets it
    assert dataset.class_names == COMPUTED_LABELS[label_key].class_names
    key = {"clevr": "file_name", "kitti": "image/file_name", "dsprites": "label_orientation"}
    source = dataset.source
    rows = [(source.stored(i)[key[dataset.name]], source[i]["label"]) for i in range(len(source))]
    return [label for _, label in sorted(rows)]


def test_clevr(root):
    assert labels(root, "vtab_clevr_distance") == [label for _, label in CLEVR]
    assert labels(root, "vtab_clevr_count") == [len(objects) - 3 for objects, _ in CLEVR]
    assert len(COMPUTED_LABELS["vtab_clevr_count"].class_names) == 8
    names = ("0 to 8", "8 to 8.5", "8.5 to 9", "9 to 9.5", "9.5 to 10", "10 to 100")
    assert COMPUTED_LABELS["vtab_clevr_distance"].class_names == names
    # Its test split has no annotations; VTAB scores on `validation`.
    for key in ("vtab_clevr_count", "vtab_clevr_distance"):
        with pytest.raises(UserError, match="this split may have no labels"):
            _ = opened(root, key, split="test").source[0]


def test_kitti(root):
    assert labels(root, "vtab_kitti_distance") == [label for _, label in KITTI]
    names = ("0 to 8 m", "8 to 20 m", "above 20 m", "no vehicle")
    assert COMPUTED_LABELS["vtab_kitti_distance"].class_names == names


def test_dsprites(root):
    """Two positions to a class; of orientations two and three by turns, as floor(i / 2.5)."""
    assert labels(root, "vtab_dsprites_location") == [i % 32 // 2 for i in range(40)]
    assert labels(root, "vtab_dsprites_orientation") == [int(i / 2.5) for i in range(40)]
    image = opened(root, "vtab_dsprites_location").example(0, np.random.default_rng(0))["image"]
    assert (image.shape, image.dtype) == ((64, 64, 3), np.uint8)
    assert set(np.unique(image)) == {0, 255}  # white on black
    assert (image == 255).sum() == 3 * 10 * 8


def test_a_label_of_another_set_is_refused(root):
    with pytest.raises(UserError, match=r"vtab_kitti_distance' is for kitti"):
        opened(root, "vtab_kitti_distance", "clevr")
    with pytest.raises(UserError, match=r"vtab_clevr_count, vtab_clevr_distance\."):
        opened(root, "", "clevr")
