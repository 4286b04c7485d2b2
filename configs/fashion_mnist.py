"""Fashion-MNIST (1708.07747): 70,000 photographs of clothes, 28x28 pixels, in 10 classes.

    python scripts/train.py --config=configs/fashion_mnist.py:cpu --workdir=runs/fashion
    python scripts/train.py --config=configs/fashion_mnist.py:hybrid --workdir=runs/hybrid
    python scripts/train.py --config=configs/fashion_mnist.py:gpu --workdir=runs/gpu
    python scripts/finetune.py --config=configs/fashion_mnist.py:finetune,DINOv2-S/14 \\
        --config.pretrained.source=hf://facebook/dinov2-small --workdir=runs/finetune

The argument is RECIPE[,...]; the files are where Debian's package dataset-fashion-mnist puts them,
or in --config.dataset.name=FOLDER:
  cpu       a plain ViT from scratch: 6 layers of width 96, 16 patches of 7 pixels; 92.07 +- 0.25 %
            over five seeds, 40 minutes on one core
  hybrid    the same above the stem of a ResNet: one convolution, a norm and a maximum;
            93.05 +- 0.15 % over five seeds, an hour on one core
  gpu       a plain ViT from scratch: 12 layers of width 256, 49 patches of 4 pixels, bfloat16
  finetune,VARIANT[,PIXELS]   from trained weights, at 112 pixels by default; VARIANT is a key of
            `models.create.VARIANTS`, or the weights; at 56 pixels three passes have 92.7 % (one
            seed), 75 minutes on one core

docs/fashion_mnist.md has accuracies over seeds, times, the protocol and what was tried; `gpu` was
not run, nor `finetune` at 112 pixels.
"""

from ml_collections import ConfigDict

from configs.finetune import fine_tuning, pixels_per_token
from vit_jax.config import get_config as default_config
from vit_jax.config import set_kind
from vit_jax.errors import UserError

FOLDER = "/usr/share/datasets/fashion-mnist"
# Shifts of up to a pixel, which is 4 % of the side, and flips: clothes are centred and upright.
AUGMENT = "random_affine(0, 0.04)|flip_lr"


def get_config(argument: str = "cpu") -> ConfigDict:
    recipe, _, rest = argument.partition(",")
    if recipe == "finetune" and rest:
        return finetune(rest)
    recipes = {"cpu": cpu, "hybrid": hybrid, "gpu": gpu}
    if rest or recipe not in recipes:
        raise UserError(
            f"configs/fashion_mnist.py:{argument} must be {', '.join(recipes)} or "
            "finetune,VARIANT[,PIXELS]."
        )
    return recipes[recipe]()


def cpu() -> ConfigDict:
    config = default_config()
    config.model.update(patch_size=7, classifier="gap")
    config.model.update(num_layers=6, hidden_size=96, mlp_dim=192, num_heads=3)
    config.dataset.name = FOLDER
    config.dataset.preprocess = f"decode(channels=1)|{AUGMENT}"
    config.dataset.eval_preprocess = "decode(channels=1)"
    config.dataset.batch_size = 128
    config.duration.epochs = 25.0
    config.objective.label_smoothing = 0.1
    set_kind(config, "optimizer", "muon")
    config.optimizer.update(weight_decay=0.1, clip_norm=1.0)
    config.schedule.update(learning_rate=3e-3, warmup_steps=500)
    config.loader.num_threads = 1
    return config


def hybrid() -> ConfigDict:
    config = cpu()
    # The stem leaves a grid of 8x8 to patches of 2.
    config.model.update(resnet_layers=(), patch_size=2)
    config.duration.epochs = 20.0
    config.dataset.preprocess = f"decode(channels=1)|resize(32)|{AUGMENT}"
    config.dataset.eval_preprocess = "decode(channels=1)|resize(32)"
    return config


def gpu() -> ConfigDict:
    config = cpu()
    config.model.update(patch_size=4, hidden_size=256, num_layers=12, mlp_dim=1024, num_heads=4)
    config.model.update(dtype="bfloat16", stochastic_depth_rate=0.1)
    config.dataset.preprocess += "|random_erasing(0.25)"
    config.dataset.batch_size = 512
    config.duration.epochs = 80.0
    config.mix.cutmix_alpha = 1.0
    config.mix.probability = 0.5
    config.loader.update(num_workers=12, num_threads=1)
    return config


def finetune(argument: str) -> ConfigDict:
    weights, _, pixels = argument.rpartition(",")
    if not pixels.isdigit():
        weights, pixels = argument, "112"
    side = pixels_per_token(weights)
    if int(pixels) < side or int(pixels) % side:
        raise UserError(
            f"configs/fashion_mnist.py:finetune,{argument}: PIXELS={pixels} must be a multiple of "
            f"the side of a token, {side}."
        )
    config = fine_tuning(weights)
    set_kind(config, "optimizer", "adamw")
    config.optimizer.update(layer_decay=0.75, weight_decay=0.05, clip_norm=1.0)
    config.schedule.update(learning_rate=5e-4, warmup_steps=200)
    config.model.stochastic_depth_rate = 0.1
    config.objective.label_smoothing = 0.1
    config.dataset.name = FOLDER
    config.dataset.preprocess = f"decode|{AUGMENT}|resize({pixels})"
    config.dataset.eval_preprocess = f"decode|resize({pixels})"
    config.dataset.batch_size = 64
    config.duration.epochs = 10.0
    return config
