"""configs/augreg.py: the 28 settings of 2106.10270, and the names of the published files."""

import itertools

import pytest

from configs import augreg, augreg_grid
from configs.augreg_grid import Setting
from tests.recipes import PRETRAINING, settings
from vit_jax.errors import UserError
from vit_jax.pretrained.zoo import augreg_names
from vit_jax.pretrained.zoo.entries import augreg_entry, entries
from vit_jax.training.schedule import to_steps

# Figure 4 and big_vision's configs/vit_i21k.py: RandAugment, mixup's alpha.
AUGMENTATIONS = {
    "none": ("", 0.0),
    "light1": ("|randaug(2, 0)", 0.0),
    "light2": ("|randaug(2, 10)", 0.2),
    "medium1": ("|randaug(2, 15)", 0.2),
    "medium2": ("|randaug(2, 15)", 0.5),
    "strong1": ("|randaug(2, 20)", 0.5),
    "strong2": ("|randaug(2, 20)", 0.8),
}
GRID = list(itertools.product(AUGMENTATIONS, (0.1, 0.03), (0.0, 0.1)))


def parse_file_name(name: str) -> Setting:
    return augreg_grid.setting_of(augreg_names.parse(name))


def file_name(setting: Setting) -> str:
    """What the collection calls the checkpoint of a point of the grid, without `.npz`."""
    model = setting.variant.replace("+", "_").replace("/", "_")
    data = {"imagenet2012": "i1k", "imagenet21k": "i21k"}[setting.dataset]
    in_files = {"light1": "light0", "light2": "light1"}
    augmentation = in_files.get(setting.augmentation, setting.augmentation)
    return (
        f"{model}-{data}-{setting.epochs}ep-lr_{setting.learning_rate}-aug_{augmentation}"
        f"-wd_{setting.weight_decay}-do_{setting.dropout_rate}-sd_{setting.stochastic_depth_rate}"
    )


@pytest.mark.parametrize(("augmentation", "decay", "rate"), GRID)
def test_all_28_settings(augmentation: str, decay: float, rate: float) -> None:
    """On ImageNet-21k with the larger decay, on ImageNet with the other."""
    dataset = "imagenet21k" if decay == 0.1 else "imagenet2012"
    options = f"{augmentation},wd_{decay},do_{rate},sd_{rate}"
    config = augreg.get_config(f"pretrain,B/16,{dataset},300ep,{options}")
    randaug, mixup = AUGMENTATIONS[augmentation]
    on_21k = dataset == "imagenet21k"
    assert settings(config) == PRETRAINING | {
        "split": "full[51200:]" if on_21k else "train[:99%]",
        "preprocess": f"official_train(224){randaug}",
        "epochs": 300,
        "dropout_rate": rate,
        "representation_size": None if on_21k else 768,
        "head_bias_init": -10.0 if on_21k else -6.9,
        "stochastic_depth_rate": rate,
        "mixup_alpha": mixup,
        "learning_rate": 0.001,
        "weight_decay": decay,
        "clip_norm": 1.0,
        "momentum_dtype": "bfloat16",
        "splits": {"test": "full[:25600]", "validation": "full[25600:51200]"}
        if on_21k
        else {"test": "validation", "validation": "train[99%:]"},
    }
    # The file of the same setting is the same recipe.
    setting = Setting("B/16", dataset, 300, augmentation, decay, rate, rate)
    name = file_name(setting)
    assert parse_file_name(name) == setting
    assert augreg.get_config(name).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        (
            "R26_S_32-i21k-300ep-lr_0.001-aug_light0-wd_0.03-do_0.1-sd_0.1",
            Setting("R26+S/32", "imagenet21k", 300, "light1", 0.03, 0.1, 0.1),
        ),
        (
            "R_Ti_16-i21k-30ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0",
            Setting("R+Ti/16", "imagenet21k", 30, "none", 0.03, 0.0, 0.0),
        ),
        (
            "Ti_16-i1k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0",
            Setting("Ti/16", "imagenet2012", 300, "light2", 0.1, 0.0, 0.0),
        ),
    ],
)
def test_published_file_names(name: str, setting: Setting) -> None:
    assert parse_file_name(name) == setting
    assert file_name(setting) == name
    assert augreg.get_config(f"{name}.npz").to_dict() == augreg.get_config(name).to_dict()


def test_what_is_left_out_is_as_in_the_recommended_files() -> None:
    urls = [entry.url for entry in entries().values() if "/augreg/" in entry.url]
    names = [url.rpartition("/")[2] for url in urls]
    pretrained = {name.partition("--")[0].removesuffix(".npz") for name in names}
    assert len(pretrained) == len(augreg_grid.BEST["imagenet21k"])
    for name in pretrained:
        setting = parse_file_name(name)
        short = f"pretrain,{setting.variant},imagenet21k"
        assert augreg_grid.parse_setting(short) == setting
        assert augreg.get_config(short).to_dict() == augreg.get_config(name).to_dict()
    # big_vision's configs/vit_i1k.py.
    assert {
        variant: augreg_grid.parse_setting(f"pretrain,{variant},imagenet2012")[3:]
        for variant in ("Ti/16", "S/32", "S/16", "B/32", "B/16", "L/16")
    } == {
        "Ti/16": ("light1", 0.1, 0.0, 0.0, 0.001),
        "S/32": ("medium1", 0.1, 0.0, 0.0, 0.001),
        **dict.fromkeys(("S/16", "B/32", "B/16", "L/16"), ("medium2", 0.1, 0.0, 0.0, 0.001)),
    }


def test_parts_of_the_short_form_come_in_any_order() -> None:
    parts = "sd_0.1,lr_0.003,strong2,30ep,do_0.0"
    setting = augreg_grid.parse_setting(f"pretrain,S/16,imagenet21k,{parts}")
    assert setting == Setting("S/16", "imagenet21k", 30, "strong2", 0.03, 0.0, 0.1, 0.003)
    own = augreg.get_config("pretrain,M/16,/data/a,b,light1,wd_0.03")
    assert (own.dataset.name, own.dataset.split) == ("/data/a,b", "train")
    assert own.optimizer.weight_decay == 0.03
    assert own.model.head_bias_init == -6.9
    versioned = augreg.get_config("pretrain,S/16,imagenet2012:5.1.0")
    assert versioned.dataset.name == "imagenet2012:5.1.0"
    assert settings(versioned) == settings(augreg.get_config("pretrain,S/16,imagenet2012"))


def test_steps_and_published_accuracies() -> None:
    config = augreg.get_config("pretrain,B/16,imagenet2012")
    # 99 % of the images, 300 times, over 4096.
    assert to_steps(**config.duration, num_examples=1_268_355, batch_size=4096) == 92_897
    assert config.sweep.published.startswith("79.84 by itself; 81.63 fine-tuned at 384 pixels")
    for length, accuracy in (("30ep", "83.46"), ("300ep", "85.49"), ("90ep", "")):
        config = augreg.get_config(f"pretrain,B/16,imagenet21k,{length}")
        assert config.sweep.published[:5] == accuracy
    for point in ("strong2", "wd_0.5", "do_0.1,sd_0.1", "lr_0.01"):  # not the best of the grid
        assert not augreg.get_config(f"pretrain,B/16,imagenet2012,{point}").sweep.published
    # Of ImageNet-21k, 300 epochs, the official README has the same in the table for fine-tuning.
    assert list(augreg.IMAGENET) == list(augreg_grid.TABLE_3)
    for pixels, published in ((384, "78.22 from"), (224, "73.75 from"), (256, "")):
        config = augreg.get_config(f"Ti/16,imagenet2012:5.1.0,{pixels}")
        assert config.sweep.published[:10] == published
        assert (config.schedule.learning_rate, config.duration.steps) == (0.03, 20_000)


def test_the_name_of_a_fine_tuned_file_is_its_fine_tuning() -> None:
    upstream = "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0"
    config = augreg.get_config(f"{upstream}--oxford_iiit_pet-steps_0k-lr_0.003-res_224")
    expected = augreg.get_config("B/16,oxford_iiit_pet,224,500")
    expected.schedule.learning_rate = 0.003
    expected.pretrained.source = f"gs://vit_models/augreg/{upstream}.npz"
    assert config.to_dict() == expected.to_dict()
    assert config.model.head_bias_init == 0.0


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("pretrain,B/16", "must be pretrain,VARIANT,DATASET .* strong2, wd_0.1"),
        ("pretrain,B/16,imagenet21k,medum1", "must be .* none, light1, light2"),
        ("pretrain,B/17,imagenet21k", "Did you mean"),
        ("pretrain,B/16,imagenet21k,wd_0.1,wd_0.03", "gives wd twice"),
        ("pretrain,B/16,imagenet21k,0ep", "0ep must be 1ep or more"),
        ("pretrain,B/16,imagenet21k,do_0.1", "must give sd_RATE too"),
        ("pretrain,B/16,imagenet21k,sd_0.1", "must give do_RATE too"),
        ("pretrain,DeiT-distilled-B/16,imagenet21k", "objective.name='hard_distillation'"),
    ],
)
def test_arguments_that_make_no_sense(argument: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        augreg.get_config(argument)


FILE = "B_16-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0"


@pytest.mark.parametrize(
    ("part", "other", "message"),
    [
        ("B_16", "X_16", "models: .*B_16"),
        ("none", "light2", "aug: none, light0, light1, medium1"),
        ("300ep", "17ep", "not an AugReg file"),
        ("i21k-300ep", "i1k-30ep", "i1k: 300ep only"),
        ("sd_0.0", "sd_0.1", r"do_0\.1-sd_0\.1"),
        ("sd_0.0", "sd_0.0--cifar100-steps_3k-lr_0.01-res_224", "steps: 0k, 2k, 10k, 20k"),
        ("sd_0.0", "sd_0.0--mnist-steps_2k-lr_0.01-res_224", "fine-tuned on: imagenet2012"),
    ],
)
def test_names_that_no_file_has(part: str, other: str, message: str) -> None:
    """The recipe and the zoo agree on what a name is."""
    wrong = FILE.replace(part, other)
    assert augreg_names.is_file_name(FILE)
    assert not augreg_names.is_file_name(wrong)
    for read in (augreg.get_config, augreg_entry):
        with pytest.raises(UserError, match=message):
            read(wrong)
