"""MLP-Mixer on ImageNet-1k (2105.01601), by big_vision's recipe (its configs/mlp_mixer_i1k.py).

    python scripts/train.py --config=configs/mixer.py:B/16,300 --workdir=/tmp/mixer
    python scripts/train.py --config=configs/mixer.py:quickstart --workdir=/tmp/mixer

The argument is SIZE/PATCH[,EPOCHS]: S/32, S/16, B/32, B/16, L/32, L/16 or H/14, and 300 epochs by
default. Or it is `quickstart`: a small model on the 300 scans of
configs/quickstart.py, two minutes on two cores.

Batches of 4096, 224 pixels, the official code's crop and flip, RandAugment of 2 operations at
magnitude 15, mixup with alpha 0.5 (one coefficient per batch); Adam, rate 0.001, 10,000 steps of
warm-up, linear to 1e-5, clipping at norm 1, weight decay 0.1 (decoupled and multiplied by the
learning rate: big_vision's 1e-4); sigmoid loss with head bias -6.9; stochastic depth
0.1. Trained on 99 % of `train`; the rest validates, `validation` tests: the central 224 pixels of
the image with its short side at 256. bfloat16 computation and reader processes are
ours, see configs/pretrain.py.

Published for B/16: 76.3 % in 2 h 11 min on a TPU v3-128; for 60 epochs 70.5 % in 27 min.

A Mixer takes images of one size: configs/finetune.py:Mixer-B/16,cifar10,224 fine-tunes it; 384
pixels are rejected.
"""

from ml_collections import ConfigDict

from configs import pretrain, quickstart
from vit_jax.config import section, set_kind
from vit_jax.errors import UserError

PUBLISHED = {("B/16", 300): 76.3, ("B/16", 60): 70.5}


def get_config(argument: str = "B/16,300") -> ConfigDict:
    if argument == "quickstart":
        return small()
    variant, _, number = argument.partition(",")
    if number and not number.isdigit():
        raise UserError(f"configs/mixer.py:{argument} must be SIZE/PATCH[,EPOCHS], or quickstart.")
    epochs = int(number or 300)
    config = pretrain.pretraining(f"Mixer-{variant}", "imagenet2012")
    config.dataset.split = "train[:99%]"
    pretrain.add_validation(config, "train[99%:]", config.evaluators.test.every_steps)
    config.dataset.preprocess += "|randaug(2, 15)"
    config.mix.mixup_alpha = 0.5
    config.duration.epochs = float(epochs)
    config.model.stochastic_depth_rate = 0.1
    config.model.head_bias_init = -6.9
    set_kind(config, "schedule", "linear", linear_end=1e-5)
    config.schedule.learning_rate = 1e-3
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    if (variant, epochs) in PUBLISHED:
        config.sweep.published = f"{PUBLISHED[variant, epochs]} (big_vision)"
    return config


def small() -> ConfigDict:
    config = quickstart.get_config("scratch")
    sizes = {"patch_size": 4, "hidden_size": 128, "num_layers": 4}
    config.model = section("model", "mixer", **sizes, tokens_mlp_dim=64, channels_mlp_dim=256)
    return config
