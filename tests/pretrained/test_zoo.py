"""The table of checkpoints: complete, consistent, and what it says about itself."""

import collections
import csv
import json
import re
from pathlib import Path

import pytest

from tests import golden
from tests.tiny import Script
from vit_jax.data.class_names import LABELS, class_names, wordnet_ids
from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError
from vit_jax.models.create import create_model
from vit_jax.pretrained.zoo import augreg, augreg_names
from vit_jax.pretrained.zoo import entries as zoo
from vit_jax.trees import count_parameters

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = zoo.entries()


def test_families_are_complete() -> None:
    """The page has their numbers."""
    families = collections.Counter(entry.family for entry in ENTRIES.values())
    page = (ROOT / "docs" / "weights.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w+-]+)/` \| (\d+) \|", page, re.MULTILINE)
    assert {family: int(count) for family, count in listed} == families


def test_every_row_is_consistent() -> None:
    assert len({entry.url for entry in ENTRIES.values()}) == len(ENTRIES)
    for entry in ENTRIES.values():
        assert re.fullmatch(r"[\w+.-]+/[\w+.-]+", entry.name)
        assert re.fullmatch(r"(gs|https|hf)://[\w.-]+/[\w+./-]+", entry.url), entry.url
        assert entry.format in ("npz", "npz_published", "big_vision", "timm", "huggingface")
        patch = entry.variant.partition("/")[2]  # ResNets have none
        patch = entry.attributes.get("patch_size", 1 if entry.variant == "R+Ti/16" else patch or 1)
        crops = re.search(r"so400m.patch14.*384", entry.name)  # six pixels too many
        assert crops or entry.resolution % int(patch) == 0, entry.name
        if entry.labels:
            assert entry.num_classes == LABELS[entry.labels], entry.name
        assert re.fullmatch(r"[0-9a-f]*", entry.sha256)
        if entry.family == "deit":
            assert len(entry.sha256) == 8
            assert entry.url.endswith(f"-{entry.sha256}.pth")
        for accuracy in entry.accuracy:
            assert 60 < accuracy.percent < 91
            assert accuracy.source
            assert accuracy.by in ("head", "linear", "k-NN", "zero-shot", "attentive probe")
            assert accuracy.by != "head" or entry.num_classes in (1000, 21843)
        create_model(**entry.model)  # knows the variant and takes the attributes


def test_preprocessing_gives_what_the_model_takes() -> None:
    by_spec = {row.preprocess: row.resolution for row in ENTRIES.values() if row.preprocess}
    for spec, resolution in by_spec.items():
        assert f"{resolution}" in spec
        text = repr(parse(spec))
        last = re.findall(r"(?:Resize|CentralCrop)\(height=(\d+), width=(\d+|None)", text)[-1]
        assert int(last[0]) == resolution
        assert last[1] in (last[0], "None")
        # None of Google's own weights was trained on another mean and deviation.
        formats = {entry.format for entry in ENTRIES.values() if entry.preprocess == spec}
        assert "Normalize" not in text or formats <= {"timm", "huggingface"}, spec


def test_the_published_size_is_that_of_the_model() -> None:
    """Confirms classes, resolution and tanh layer, each of which would change the size."""
    for entry in ENTRIES.values():
        if bounds := entry.size_bounds:
            copies = 3 if entry.name == "sam/ViT-S_16" else 1  # with both moments of Adam
            shape = (1, entry.resolution, entry.resolution, 3)
            model = golden.scanned(create_model(**entry.model))
            num_parameters = count_parameters(golden.abstract_params(model, shape))
            # The container adds some 200 to 400 bytes per array.
            overhead = 250_000 * copies
            assert bounds[0] - overhead <= 4 * copies * num_parameters <= bounds[1], entry.name


def test_the_names_of_timm_and_hugging_face() -> None:
    for name in (
        "vit_base_patch14_dinov2.lvd142m",  # timm's own name
        "hf://timm/vit_base_patch14_dinov2.lvd142m",
        "facebook/dinov2-base",
        "hf://facebook/dinov2-base",
        "dinov2/dinov2_vitb14",
    ):
        entry = zoo.get_entry(name)
        assert (entry.variant, entry.model["num_classes"]) == ("DINOv2-B/14", 0)
        assert [accuracy.percent for accuracy in entry.on_imagenet] == [84.5, 82.1]
        assert entry.imagenet_top1 is None  # it has no head of its own
    for name, meant in (
        ("vit_base_patch14_dinov2", r"Did you mean 'timm/vit_base_patch14_dinov2\.lvd142m'\?"),
        ("facebook/dinov2-bas", r"Did you mean 'facebook/dinov2-base'\?"),
    ):
        with pytest.raises(UserError, match=meant):
            zoo.get_entry(name)
    assert len(zoo.list_models("*dino*")) > 40


def test_a_name_of_augreg_says_it_all() -> None:
    entry = zoo.augreg_entry(
        "R50_L_32-i21k-30ep-lr_0.001-aug_strong2-wd_0.03-do_0.1-sd_0.1"
        "--oxford_iiit_pet-steps_2k-lr_0.003-res_384.npz"
    )
    assert (entry.variant, entry.resolution, entry.num_classes) == ("R50+L/32", 384, 37)
    assert (entry.labels, entry.preprocess) == ("", "official_eval(384)")
    variants = {entry.variant for entry in ENTRIES.values() if entry.family == "augreg"}
    assert set(augreg_names.MODELS.values()) == variants
    name = "B_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0"
    for wrong in (name.replace("none", "huge"), f"{name}--mnist-steps_2k-lr_0.003-res_224"):
        assert not augreg_names.is_file_name(wrong)
        with pytest.raises(UserError, match="is not an AugReg file"):
            zoo.augreg_entry(wrong)


COLUMNS = ["name", "ds", "epochs", "lr", "aug", "wd", "do", "sd", "best_val", "final_val"]
COLUMNS += ["final_test", "adapt_ds", "adapt_lr", "adapt_steps", "adapt_resolution"]
COLUMNS += ["adapt_final_val", "adapt_final_test", "params", "infer_samples_per_sec", "filename"]
COLUMNS += ["adapt_filename"]


def write_index(path: Path) -> Path:
    """An index.csv in the true format: upstream runs of Ti/16, each with 4 fine-tunings.

    The upstream run that is best on its validation set (light1) is neither the best on the test
    set nor the one whose fine-tunings are best; likewise for the fine-tunings.
    """
    upstream = [  # ds, aug, final_val, final_test
        ("i21k", "none", "0.31", "0.39"),
        ("i21k", "light1", "0.36", "0.30"),
        ("i1k", "strong1", "0.70", "0.69"),
        ("i21k", "strong2", "", ""),  # never finished
    ]
    tuning = [  # lr, resolution, adapt_final_val, adapt_final_test
        ("0.01", "224", "0.71", "0.70"),
        ("0.03", "224", "0.72", "0.69"),
        ("0.01", "384", "0.76", "0.80"),
        ("0.03", "384", "0.78", "0.77"),
    ]
    rows = [COLUMNS]
    for ds, aug, val, test in upstream:
        name = f"Ti_16-{ds}-300ep-lr_0.001-aug_{aug}-wd_0.1-do_0.0-sd_0.0"
        for lr, size, tuned_val, tuned_test in tuning:
            tuned = f"{name}--imagenet2012-steps_20k-lr_{lr}-res_{size}"
            run = ["Ti/16", ds, "300", "0.001", aug, "0.1", "0.0", "0.0", val, val, test]
            run += ["imagenet2012", lr, "20000", size, tuned_val, tuned_test, "5.7", "610"]
            rows.append([*run, name, tuned])
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


def test_selection_looks_at_validation_only(tmp_path: Path) -> None:
    index = augreg.read_index(write_index(tmp_path / "index.csv"))
    best = "Ti_16-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0"
    for name in ("Ti/16", "Ti_16"):
        entry = augreg.select(index, name=name)
        assert entry.name == f"augreg/{best}"
        assert entry.accuracy[0].percent == 36.0
    tuned = augreg.select(index, name="Ti/16", adapt_ds="imagenet2012")
    assert tuned.name == f"augreg/{best}--imagenet2012-steps_20k-lr_0.03-res_384"
    assert (tuned.accuracy[0].dataset, tuned.accuracy[0].percent) == ("imagenet2012", 77.0)
    small = augreg.select(index, name="Ti/16", adapt_ds="imagenet2012", resolution=224)
    assert small.name.endswith("lr_0.03-res_224")
    assert "strong1" in augreg.select(index, name="Ti/16", ds="i1k").name
    for choice, message in (
        ({"name": "B/16"}, "name='B/16' is unknown.* Known: Ti/16"),
        ({"name": "Ti/16", "ds": "i22k"}, "ds='i22k' is unknown. Did you mean 'i21k'"),
        ({"name": "Ti/16", "adapt_ds": "imagenet2012", "resolution": 512}, "Known: 224, 384"),
        ({"name": "Ti/16", "resolution": 384}, "add adapt_ds"),
    ):
        with pytest.raises(UserError, match=message):
            augreg.select(index, **choice)
    (tmp_path / "binary").write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(UserError, match="delete it, it is not an AugReg index"):
        augreg.read_index(tmp_path / "binary")


def test_class_names() -> None:
    names = class_names("imagenet2012")
    assert (names[0], names[281], names[999]) == ("tench", "tabby", "toilet tissue")
    for key, number in LABELS.items():
        names, ids = class_names(key), wordnet_ids(key)
        assert len(set(names)) == len(set(ids)) == number
        assert all(re.fullmatch(r"n\d{8}", wordnet_id) for wordnet_id in ids)
        assert all(name and name == name.strip() for name in names)
    # The larger set holds the smaller one but for one class, the teddy bear.
    assert set(wordnet_ids("imagenet2012")) - set(wordnet_ids("imagenet21k")) == {"n04399382"}
    with pytest.raises(UserError, match="labels='imagenet' is unknown.* Known: imagenet2012"):
        class_names("imagenet")


def test_filters() -> None:
    matches = zoo.filter_entries(family="augreg", variant="B/16", resolution=384)
    assert [entry.name for entry in matches] == ["augreg/B_16-imagenet2012"]
    assert matches[0].accuracy[0].percent == 85.49
    assert all(entry.num_classes == 21843 for entry in zoo.filter_entries(num_classes=21843))
    good = zoo.filter_entries(min_accuracy=86)
    assert good
    assert all(entry.accuracy[0].percent >= 86 for entry in good)
    for wrong, message in (
        ({"variant": "B/17"}, "variant='B/17' is unknown. Did you mean 'B/16'"),
        ({"resolution": 100}, "Known: 196, 224, 240"),
        ({"family": "sam", "num_classes": 21843}, "no checkpoint matches all of family=sam, num_"),
    ):
        with pytest.raises(UserError, match=message):
            zoo.filter_entries(**wrong)


def test_the_script(script: Script, tmp_path: Path) -> None:
    header, *lines = script("zoo.py", "list", "--variant=R50+B/16").stdout.splitlines()
    assert header.split() == ["name", "variant", "pixels", "classes", "size", "ImageNet", "by"]
    assert len(lines) == 4
    assert len({line.index("R50+B/16") for line in lines}) == 1  # aligned
    as_json = json.loads(script("zoo.py", "list", "--variant=R50+B/16", "--json").stdout)
    assert [row["name"] for row in as_json] == [line.split()[0] for line in lines]
    text = script("zoo.py", "show", "deit/deit_base_distilled_patch16_384").stdout
    for part in ("d0272ac0", "85.2 % imagenet2012", "deit_eval(384)", "predict.py"):
        assert part in text
    text = script("zoo.py", "show", "imagenet21k/ViT-B_16").stdout
    assert "predict.py" not in text  # its head is zero
    assert "finetune.py --config=configs/finetune.py:B/16,cifar10" in text
    path = tmp_path / "file.npz"
    path.touch()
    assert json.loads(script("zoo.py", "get", str(path), "--json").stdout)["path"] == str(path)
    for arguments in (("show", "nothing"), ("get", "/no/file.npz"), ("list", "--family=x")):
        result = script("zoo.py", *arguments)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
