"""A head that is kept answers in the data's classes."""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import fixtures_data
from tests.pretrained.test_adopt import config_for
from tests.saved_models import save_model
from vit_jax.data.class_names import class_names, wordnet_ids
from vit_jax.data.memory import open_given
from vit_jax.errors import UserError
from vit_jax.export.convert import convert_checkpoint
from vit_jax.inference.load import load_model
from vit_jax.parameters.sharding import create_mesh
from vit_jax.run import create_run

NAMES = ("dog", "bee", "cat", "ant")


def photos(folder: Path, *names: str) -> str:
    classes = dict.fromkeys(names, 2)
    return str(fixtures_data.write_folder(folder / "photos", {"train": classes, "test": classes}))


def kept(source: str, data: str, open_dataset: Any = None, **overrides: Any) -> dict[str, Any]:
    """Parameters before the first update, for the data's classes."""
    config = config_for(
        source,
        dataset__name=data,
        dataset__split="train",
        dataset__batch_size=8,
        evaluators__test__split="test",
        pretrained__reset_head=False,
        **overrides,
    )
    start = create_run(config, create_mesh(), open_dataset).start
    assert start.load is not None
    return start.load()


@pytest.mark.parametrize("format", ["npz", "huggingface", "timm"])
@pytest.mark.parametrize("data", [("ant", "bee", "cat", "dog"), ("ant", "bee", "cat")])
def test_outputs_are_matched_by_class_name(format, data, tmp_path, caplog):
    source = str(save_model(tmp_path / "npz", class_names=NAMES))
    before = load_model(source).params["head"]
    if format != "npz":
        convert_checkpoint(source, str(tmp_path / format), format=format)
        source = str(tmp_path / format)
    with caplog.at_level(logging.INFO):
        after = kept(source, photos(tmp_path, *data))["head"]
    order = [NAMES.index(name) for name in data]
    for name in ("kernel", "bias"):
        np.testing.assert_array_equal(after[name], before[name][..., order])
    assert re.search(r"adapted: head/\w+, head/\w+ \(outputs matched by class name\)", caplog.text)


@pytest.mark.parametrize("objective", ["classification", "hard_distillation", "multi_label"])
def test_in_every_head_and_objective(objective: str, tmp_path: Path) -> None:
    source = str(save_model(tmp_path / "run", class_names=NAMES, name="deit", num_heads=2))
    before = load_model(source).params
    options: dict[str, Any] = {"model__name": "deit", "objective__name": objective}
    if objective == "hard_distillation":
        options["objective__teacher"] = source
    if objective == "multi_label":
        (tmp_path / "t.csv").write_text(
            "path,labels,split\n"
            + "".join(
                f"photos/{split}/{name}/000.jpg,{name},{split}\n"
                for split in ("train", "test")
                for name in sorted(NAMES)
            )
        )
        options["evaluators__test__name"] = "average_precision"
    data = photos(tmp_path, *NAMES)
    after = kept(source, str(tmp_path / "t.csv") if objective == "multi_label" else data, **options)
    for head in ("head", "head_dist"):
        expected = before[head]["kernel"][:, [3, 1, 2, 0]]
        np.testing.assert_array_equal(after[head]["kernel"], expected)


def test_names_that_do_not_match_are_an_error(tmp_path: Path) -> None:
    source = str(save_model(tmp_path / "run", class_names=NAMES))
    data = photos(tmp_path, "ant", "bee", "cat", "wolf")
    message = r"^pretrained.source=.*1 of the dataset's 4 classes .*'wolf'.*reset_head=True starts"
    with pytest.raises(UserError, match=message):
        kept(source, data)


@pytest.mark.parametrize("names", [NAMES, ()])
def test_without_names_label_i_is_output_i(names, tmp_path, caplog):
    """Of arrays, or of weights: as before, with a line."""
    source = str(save_model(tmp_path / "run", class_names=names, num_classes=4))
    before = load_model(source).params["head"]
    pixels, labels = np.zeros((8, 16, 16, 3), np.uint8), np.arange(8) % 4
    data = {"train": (pixels, labels), "test": (pixels, labels)}
    with caplog.at_level(logging.INFO):
        after = kept(source, "mine", open_given(data, "mine"))["head"]
    np.testing.assert_array_equal(after["kernel"], before["kernel"])
    assert "using class n as output n" in caplog.text


def test_imagenets_folders_match_its_names(tmp_path: Path) -> None:
    """WordNet ids are the names of its folders; the model says what they mean in words."""
    ids, words = wordnet_ids("imagenet2012"), class_names("imagenet2012")
    source = str(save_model(tmp_path / "run", class_names=tuple(words)))
    before = load_model(source).params["head"]
    after = kept(source, photos(tmp_path, *ids[5:8]))["head"]
    np.testing.assert_array_equal(after["kernel"], before["kernel"][:, 5:8])
