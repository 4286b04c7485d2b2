"""The recipes for Fashion-MNIST train, on a small folder that passes for it."""

import re

import pytest

from benchmarks import fashion_mnist_timm
from configs import fashion_mnist
from tests.saved_models import save_model
from vit_jax.errors import UserError
from vit_jax.train import train_and_evaluate

TINY = {"hidden_size": 16, "num_layers": 1, "mlp_dim": 16, "num_heads": 2}


@pytest.mark.parametrize("recipe", ["hybrid", "gpu", "finetune"])  # `cpu` is part of both
def test_a_recipe_trains(recipe, fashion, tmp_path):
    argument = recipe
    if recipe == "finetune":
        source = save_model(tmp_path / "trained", class_names=("a", "b"), patch_size=8, **TINY)
        argument = f"finetune,{source},24"
    config = fashion_mnist.get_config(argument)
    assert config.dataset.name == fashion_mnist.FOLDER
    config.dataset.update(name=str(fashion), batch_size=16)
    config.model.update(TINY)
    config.loader.update(num_workers=0)
    config.duration.steps, config.schedule.warmup_steps = 3, 1
    results = train_and_evaluate(config, str(tmp_path / "run"))
    assert 0 <= results["test/accuracy"] <= 1
    assert (tmp_path / "run/model.json").exists()


def test_sizes_are_those_that_are_described():
    plain, hybrid, gpu = map(fashion_mnist.get_config, ("cpu", "hybrid", "gpu"))
    assert plain.model.resnet_layers is None
    assert gpu.model.resnet_layers is None
    assert hybrid.model.resnet_layers == ()
    for config, tokens in ((plain, 16), (hybrid, 16), (gpu, 49)):
        side = config.model.patch_size * (4 if config is hybrid else 1)
        pixels = 32 if config is hybrid else 28
        assert (pixels // side) ** 2 == tokens


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("laptop", "must be cpu, hybrid, gpu or finetune,VARIANT[,PIXELS]"),
        ("finetune", "must be cpu, hybrid, gpu or finetune,VARIANT[,PIXELS]"),
        ("cpu,56", "must be cpu, hybrid, gpu or finetune,VARIANT[,PIXELS]"),
        ("finetune,S/16,56", "PIXELS=56 must be a multiple of the side of a token, 16"),
        ("finetune,S/16,0", "PIXELS=0 must be a multiple"),
        ("finetune,X/16,64", "X/16"),
    ],
)
def test_a_wrong_argument_is_one_line(argument, words):
    with pytest.raises(UserError, match=re.escape(words)) as error:
        fashion_mnist.get_config(argument)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("recipe", [[], ["--light"]])
def test_the_model_of_timm_trains_in_the_same_way(recipe, fashion, capsys, monkeypatch):
    monkeypatch.setattr(fashion_mnist_timm, "BATCH_SIZE", 16)
    options = [f"--folder={fashion}", "--passes=1", "--threads=1", "--workers=0", *recipe]
    fashion_mnist_timm.main(fashion_mnist_timm.parser().parse_args(options))
    assert re.fullmatch(r"(light|DeiT's), seed 0: .* % in .* minutes\n", capsys.readouterr().out)
