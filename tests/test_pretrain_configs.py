"""configs/pretrain.py against the paper's tables 3, 5 and 6."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from configs import flexivit, pretrain
from tests.recipes import PRETRAINING, settings
from vit_jax.data.preprocess import parse
from vit_jax.data.sources import resolve_split
from vit_jax.errors import UserError
from vit_jax.train import train_and_evaluate
from vit_jax.training.schedule import to_steps

# Paper, table 3: epochs, learning rate, decay of the rate, weight decay, dropout.
TABLE_3: list[tuple[str, str, tuple[int, ...], float, str, float, float]] = [
    ("B/16", "jft", (7,), 8e-4, "linear", 0.1, 0.0),
    ("B/32", "jft", (7,), 8e-4, "linear", 0.1, 0.0),
    ("L/32", "jft", (7,), 6e-4, "linear", 0.1, 0.0),
    ("L/16", "jft", (7, 14), 4e-4, "linear", 0.1, 0.0),
    ("H/14", "jft", (14,), 3e-4, "linear", 0.1, 0.0),
    ("R50x1", "jft", (7,), 1e-3, "linear", 0.1, 0.0),
    ("R50x2", "jft", (7,), 1e-3, "linear", 0.1, 0.0),
    ("R101x1", "jft", (7,), 8e-4, "linear", 0.1, 0.0),
    ("R152x1", "jft", (7,), 6e-4, "linear", 0.1, 0.0),
    ("R152x2", "jft", (7,), 6e-4, "linear", 0.1, 0.0),
    ("R50+B/16", "jft", (7,), 8e-4, "linear", 0.1, 0.0),
    ("R50+B/32", "jft", (7,), 8e-4, "linear", 0.1, 0.0),
    ("R50+L/32", "jft", (7,), 2e-4, "linear", 0.1, 0.0),
    ("R50+L/16", "jft", (7, 14), 4e-4, "linear", 0.1, 0.0),
    ("B/16", "imagenet21k", (90,), 1e-3, "linear", 0.03, 0.1),
    ("B/32", "imagenet21k", (90,), 1e-3, "linear", 0.03, 0.1),
    ("L/16", "imagenet21k", (30, 90), 1e-3, "linear", 0.03, 0.1),
    ("L/32", "imagenet21k", (30, 90), 1e-3, "linear", 0.03, 0.1),
    ("B/16", "imagenet2012", (300,), 3e-3, "cosine", 0.3, 0.1),
    ("B/32", "imagenet2012", (300,), 3e-3, "cosine", 0.3, 0.1),
    ("L/16", "imagenet2012", (300,), 3e-3, "cosine", 0.3, 0.1),
    ("L/32", "imagenet2012", (300,), 3e-3, "cosine", 0.3, 0.1),
]


@pytest.mark.parametrize(
    ("variant", "dataset", "epochs", "rate", "schedule", "decay", "dropout"), TABLE_3
)
def test_table_3(variant, dataset, epochs, rate, schedule, decay, dropout):
    config = pretrain.get_config(f"{variant},{dataset}")
    is_resnet = "+" not in variant and variant.startswith("R")
    assert settings(config) == PRETRAINING | {
        "split": "full[51200:]" if dataset == "imagenet21k" else "train",
        "epochs": max(epochs),
        "dropout_rate": dropout,
        # Paper, section 3.1: a hidden layer as wide as the model.
        "representation_size": None if is_resnet else config.model.hidden_size,
        "head_bias_init": -10.0,
        "label_smoothing": 1e-4 if dataset == "imagenet2012" else 0.0,
        "learning_rate": rate,
        "weight_decay": decay,
        "clip_norm": 1.0 if dataset == "imagenet2012" else None,
        "momentum_dtype": "float32",
        "schedule": schedule,
        "splits": {
            "jft": {"test": "test"},
            "imagenet21k": {"test": "full[:25600]", "validation": "full[25600:51200]"},
            "imagenet2012": {"test": "validation"},
        }[dataset],
    }
    for length in epochs:
        shorter = pretrain.get_config(f"{variant},{dataset},{length}")
        assert settings(shorter) == settings(config) | {"epochs": length}


# Steps in thousands, of 4096 images: the sizes of the data over the batch.
@pytest.mark.parametrize(
    ("argument", "thousands"),
    [
        ("B/16,imagenet2012", 93.8),
        ("B/16,imagenet21k", 310.8),  # 312 of all images; 51,200 are held out
        ("B/16,jft", 517.8),
        ("H/14,jft", 1035.6),
    ],
)
def test_steps(argument: str, thousands: float) -> None:
    config = pretrain.get_config(argument)
    num_examples = pretrain.DATASETS[config.dataset.name].num_examples
    batch_size = config.dataset.batch_size
    steps = to_steps(**config.duration, num_examples=num_examples, batch_size=batch_size)
    assert round(steps / 1000, 1) == thousands


def test_flexivit() -> None:
    """big_vision's configs/proj/flexivit: i21k_sup.py and i1k_deit3_distill.py."""
    both = {"representation_size": None, "epochs": 90.0, "weight_decay": 0.1, "clip_norm": 1.0}
    both |= {"momentum_dtype": "bfloat16"}
    config = flexivit.get_config("B,imagenet21k")
    assert settings(config) == PRETRAINING | both | {
        "split": "full[51200:]",
        "preprocess": "official_train(240)|randaug(2, 10)",
        "eval_preprocess": "big_vision_eval(240, resize=272)",
        "head_bias_init": -10.0,
        "learning_rate": 1e-3,  # and decay of 1e-4, which is not multiplied by it
        "mixup_alpha": 0.2,
        "splits": {"test": "full[:25600]", "validation": "full[25600:51200]"},
    }
    sides = (5, 6, 8, 10, 12, 15, 16, 20, 24, 30)
    assert {*config.train_step.patch_sizes} == {240 // side for side in sides}
    distilled = settings(flexivit.get_config("B,imagenet2012"))
    normalize = "normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"
    assert distilled == PRETRAINING | both | {
        "split": "train[:99%]",
        "preprocess": f"decode|inception_crop(240)|flip_lr|{normalize}",
        "eval_preprocess": f"decode|resize_small(272)|central_crop(240)|{normalize}",
        "batch_size": 1024,
        "head_bias_init": 0.0,
        "learning_rate": 1e-4,
        "warmup_steps": 5_000,
        "mixup_alpha": 1.0,
        "name": "soft_distillation",
        "teacher": "deit3/deit_3_base_384_1k",
        "temperature": 1.0,
        "weight": 1.0,
        "splits": {"test": "validation"},
    }
    with pytest.raises(UserError, match="must be SIZE,DATASET"):
        flexivit.get_config("B/16,imagenet2012")


@pytest.mark.parametrize("name", pretrain.DATASETS)
def test_runs_can_be_planned_without_the_data(name: str) -> None:
    data = pretrain.DATASETS[name]
    (part,) = resolve_split(data.split, data.splits, data.splits.__getitem__)
    assert part.stop - part.start == data.num_examples
    config = pretrain.get_config(f"B/16,{name}")
    assert config.dataset.split == data.split
    for evaluator in config.evaluators.values():
        assert resolve_split(evaluator.split, data.splits, data.splits.__getitem__)


@pytest.mark.parametrize(
    ("argument", "like", "same"),
    [
        ("S/16,jft", "B/16,jft", True),
        ("R26+S/32,jft", "R50+B/32,jft", True),
        ("L/14,jft", "L/16,jft", True),
        ("L/14,jft", "L/32,jft", False),
        ("R200x3,jft", "R152x2,jft", True),
        ("H/14,imagenet21k", "L/16,imagenet21k", True),
        ("S/16,/data/photos", "S/16,imagenet2012", True),
        ("S/16,jft_3b", "S/16,jft", True),
        ("S/16,imagenet21k:1.0.0", "S/16,imagenet21k", True),
        ("R50x1,imagenet2012", "B/16,imagenet2012", False),  # no place for dropout
    ],
)
def test_rows_that_are_not_in_the_table(argument: str, like: str, same: bool) -> None:
    one, other = (settings(pretrain.get_config(name)) for name in (argument, like))
    numbers = ("learning_rate", "weight_decay", "dropout_rate", "epochs", "schedule", "clip_norm")
    assert ([one[key] for key in numbers] == [other[key] for key in numbers]) == same


def test_data_of_ones_own() -> None:
    for path in ("/data/photos", "./a,b/photos"):
        config = pretrain.get_config(f"S/16,{path}")
        assert (config.dataset.name, config.dataset.split) == (path, "train")
        assert config.evaluators.test.split == "test"
        assert config.duration.epochs == 300
    assert pretrain.get_config("S/16,/data/photos,20").duration.epochs == 20
    # JFT's rows say what to give, at the first thing that opens the data.
    config = pretrain.get_config("B/16,jft")
    config.loader.num_workers = 0
    with pytest.raises(UserError, match=r"dataset\.name='jft'.* path of an image folder"):
        train_and_evaluate(config, "unused")


LAUNCHES = {"B/16": ("bfloat16", False, "none", 1), "R152x2": ("bfloat16", False, "none", 1)}
LAUNCHES |= {"R50x3": ("bfloat16", False, "full", 4), "L/16": ("bfloat16", True, "full", 1)}
LAUNCHES |= {"H/14": ("bfloat16", True, "full", 4), "G/14": ("bfloat16", True, "full", 4)}


@pytest.mark.parametrize("variant", LAUNCHES)
def test_what_a_large_model_needs_to_fit(variant: str) -> None:
    config = pretrain.get_config(f"{variant},imagenet21k")
    scan = "scan" in config.model and config.model.scan  # a ResNet's blocks differ
    launch = (config.model.dtype, scan, config.model.remat, config.mesh.fsdp)
    assert launch == LAUNCHES[variant]
    # The docstring's gigabytes follow from these.
    assert config.loader.to_dict() == {"num_workers": 8, "num_threads": 4, "prefetch": 1}
    workers, batches = config.loader.num_workers, config.loader.num_threads + 1
    total = workers * batches * config.dataset.batch_size * 224 * 224 * 3
    assert (round(total / 1e9), round(total / 32 / 1e9, 1)) == (25, 0.8)


def test_every_model_has_a_resolution_that_its_tokens_divide() -> None:
    rng = np.random.default_rng(0)
    for variant, pixels in (("B/16", 224), ("H/14", 224), ("B/15", 210), ("R50x1", 224)):
        config = pretrain.get_config(f"{variant},imagenet2012")
        for spec in (config.dataset.preprocess, config.dataset.eval_preprocess):
            image = {"image": np.zeros((300, 400, 3), np.uint8)}
            assert parse(spec)(image, rng)["image"].shape == (pixels, pixels, 3)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        ("B/16,imagenet2012", "74.79 by itself .*; 77.91 on ImageNet"),
        ("L/32,imagenet2012", "66.90? by itself .*; 71.16 on ImageNet"),
        ("L/16,imagenet21k", "49.90? by itself .*; 85.15 on ImageNet"),
        ("L/16,imagenet21k,30", ""),
        ("L/16,jft,7", "86.30? on ImageNet"),
        ("L/16,jft", "87.12 on ImageNet"),
        ("R152x2,jft,14", "85.56 on ImageNet"),
    ],
)
def test_published_accuracies(config: str, published: str) -> None:
    text = pretrain.get_config(config).sweep.published
    assert re.match(published, text) if published else text == ""


@pytest.mark.parametrize("argument", ["B/16", "B/16,", "B/16,imagenet2012,0"])
def test_arguments_that_make_no_sense(argument: str) -> None:
    with pytest.raises(UserError, match=r"VARIANT,DATASET\[,EPOCHS\].*imagenet21k, jft"):
        pretrain.get_config(argument)
    with pytest.raises(UserError, match="Did you mean"):
        pretrain.get_config("B/17,imagenet2012")
    with pytest.raises(UserError, match="pre-trained with objective.name='hard_distillation'"):
        pretrain.get_config("DeiT-distilled-S/16,imagenet2012")


RECIPES = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))


def commands(docstring: str) -> list[list[str]]:
    """The words of every command of a docstring, as a shell reads what is pasted."""
    lines = docstring.replace("\\\n", "").splitlines()
    return [shlex.split(line) for line in lines if line.lstrip().startswith("python ")]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_commands_of_docstrings_can_be_pasted(recipe: Path) -> None:
    docstring = ast.get_docstring(ast.parse(recipe.read_text(encoding="utf-8"))) or ""
    lines = commands(docstring)
    assert bool(lines) == (recipe.stem not in ("augreg_grid", "suites"))
    recipes = set()
    for python, script, *words in lines:
        assert (python, (recipe.parents[1] / script).is_file()) == ("python", True)
        assert [word for word in words if not re.fullmatch(r"--[\w.]+=.+", word)] == []
        flags = dict(word.removeprefix("--").split("=", 1) for word in words)
        name, _, argument = flags.pop("config").partition(":")
        module = importlib.import_module(name.removesuffix(".py").replace("/", "."))
        recipes.add(module.__name__.removeprefix("configs."))
        config = module.get_config(*([argument] if argument else []))
        for key, value in flags.items():
            if key.startswith("config."):  # else a flag of the script
                config.update_from_flattened_dict({key.removeprefix("config."): value})
            for variable in re.findall(r"\$(\w+)", value):
                assert re.search(rf"^ *{variable}=\S+$", docstring, re.MULTILINE)
    assert not lines or recipe.stem in recipes  # others are what follows it
