"""configs/deit3.py, configs/sam.py and DeiT's fine-tuning against the published commands."""

import pytest

from configs import deit, deit3, sam
from tests.recipes import settings
from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError
from vit_jax.models.create import create_model

# README_revenge.md: --lr --drop-path --weight-decay --epochs --input-size --mixup --smoothing.
COMMANDS = {
    "S/16,imagenet2012": (4e-3, 0.05, 0.05, 800, 224, 0.8, 0.0),
    "B/16,imagenet2012": (3e-3, 0.2, 0.05, 800, 192, 0.8, 0.0),
    "L/16,imagenet2012": (3e-3, 0.45, 0.05, 800, 192, 0.8, 0.0),
    "H/14,imagenet2012": (3e-3, 0.6, 0.05, 800, 160, 0.8, 0.0),
    "L/16,imagenet21k": (1e-3, 0.3, 0.02, 240, 224, 0.0, 0.1),
    "H/14,imagenet21k": (1e-3, 0.5, 0.02, 90, 128, 0.0, 0.1),
    "H/14,finetune": (1e-5, 0.55, 0.1, 20, 224, 0.8, 0.1),
    "S/16,finetune,384": (1e-5, 0.0, 0.1, 20, 384, 0.8, 0.1),
    "B/16,finetune_21k": (3e-4, 0.15, 0.02, 50, 224, 0.0, 0.1),
}


@pytest.mark.parametrize("argument", list(COMMANDS))
def test_the_commands_of_deit_iii(argument: str) -> None:
    config = deit3.get_config(argument)
    recipe, name = settings(config), argument.split(",")[1]
    keys = ("learning_rate", "stochastic_depth_rate", "weight_decay", "epochs")
    *numbers, pixels, mixup, smoothing = COMMANDS[argument]
    assert [recipe[key] for key in keys] == numbers
    assert (recipe["mixup_alpha"], recipe["label_smoothing"]) == (mixup, smoothing)
    assert recipe["cutmix_alpha"] == 1.0
    assert config.model.stochastic_depth_shape == "constant"
    assert recipe["loss"] == ("binary" if name == "imagenet2012" else "softmax")
    tuned = name == "finetune"
    assert recipe["optimizer"] == ("adamw" if tuned else "lamb")
    assert recipe["schedule"] == ("constant" if tuned else "cosine")
    assert recipe["eps"] == 1e-8
    assert recipe["batch_size"] == {"imagenet2012": 2112, "finetune": 512}.get(name, 2048)
    assert recipe["repeated_augmentation"] == (3 if name == "imagenet2012" else 1)
    assert f"({pixels}" in recipe["preprocess"]
    images = {"imagenet21k": 14_145_922}.get(name, 1_281_167)
    assert config.schedule.warmup_steps == 5 * images // config.dataset.batch_size
    patch = config.model.patch_size
    sizes = {op.shape for op in parse(recipe["preprocess"]).ops if hasattr(op, "shape")}
    assert (pixels // patch * patch,) * 2 in sizes or pixels % patch == 0
    assert create_model(**config.model, num_classes=1000)


def test_what_deit_iii_published() -> None:
    accuracies = [
        deit3.get_config(argument).sweep.published.partition(" ")[0]
        for argument in ("S/16,imagenet2012", "B/16,imagenet2012", "B/16,finetune,384")
    ]
    assert accuracies == ["81.4", "", "85.0"]
    assert not deit3.get_config("S/16,imagenet2012,400").sweep.published
    assert deit3.get_config("S/16,imagenet2012,400").duration.epochs == 400.0


@pytest.mark.parametrize("argument", ["", "B/16", "Ti/16,imagenet2012", "B/16,finetune,x"])
def test_other_arguments_of_deit_iii(argument: str) -> None:
    with pytest.raises(UserError, match="configs/deit3.py:.* must be SIZE/PATCH,STAGE"):
        deit3.get_config(argument)


def test_deit_at_384_pixels() -> None:
    config = deit.get_config("DeiT-B/16,imagenet2012,384")
    recipe = settings(config)
    assert recipe["learning_rate"] == pytest.approx(5e-6 * 576 / 512)
    assert (recipe["weight_decay"], recipe["epochs"]) == (1e-8, 30.0)
    assert recipe["schedule"] == "constant"
    assert (recipe["stochastic_depth_rate"], recipe["name"]) == (0.0, "classification")
    assert "inception_crop(384, " in recipe["preprocess"]
    assert "big_vision_eval(384, resize=438)" in recipe["eval_preprocess"]
    assert not config.pretrained.reset_head
    distilled = deit.get_config("DeiT-distilled-S/16,imagenet2012,384")
    assert distilled.objective.name == "hard_distillation"


def test_gsam_is_big_visions() -> None:
    config = sam.get_config("gsam,B/32")
    recipe = settings(config)
    assert dict(config.gradient) == {"name": "gsam", "rho_max": 0.6, "rho_min": 0.1, "alpha": 0.6}
    # big_vision: linear_end 0.01 of the rate, wd 0.001 of the schedule's peak of 1.
    assert recipe["linear_end"] == 0.01 * recipe["learning_rate"]
    assert recipe["weight_decay"] * recipe["learning_rate"] == pytest.approx(0.001)
    assert (recipe["classifier"], recipe["representation_size"]) == ("gap", None)
    assert (recipe["head_bias_init"], recipe["loss"], recipe["epochs"]) == (-10.0, "sigmoid", 300.0)
    assert recipe["splits"]["validation"] == "train[99%:]"


def test_sam_by_model() -> None:
    mixer = sam.get_config("sam,Mixer-B/16")
    assert dict(mixer.gradient) == {"name": "sam", "rho": 0.6}
    config = sam.get_config("sam,B/16,90")
    assert config.model.representation_size is None
    assert (config.gradient.rho, config.duration.epochs) == (0.2, 90.0)
    for argument in ("sam", "adam,B/16", "sam,B/8", "gsam,B/32,x"):
        with pytest.raises(UserError, match=r"configs/sam.py"):
            sam.get_config(argument)
