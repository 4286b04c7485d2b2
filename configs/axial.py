"""Axial attention (2010.11929, appendix D.6): Axial-ViT and Axial-ResNet.

    python scripts/train.py --config=configs/axial.py:B/16,jft --workdir=/tmp/axial
    python scripts/train.py --config=configs/axial.py:R50x1 --workdir=/tmp/axial_resnet
    python scripts/train.py --config=configs/axial.py:quickstart --workdir=/tmp/axial
    python scripts/train.py --config=configs/axial.py:R50x1,quickstart --workdir=/tmp/axial_resnet

The argument is VARIANT[,DATASET[,EPOCHS]], or `quickstart`: a small Axial-ViT on the 300 scans of
configs/quickstart.py, two minutes on two cores. `R50x1,quickstart` is an Axial-ResNet of two units
on the same scans, by the optimizer of R50x1: test loss 0.51 (2.30 for chance), accuracy 88.7 %.

B/32, B/16  Axial-ViT: the settings of ViT-B in table 3, by configs/pretrain.py with the same data
            (`jft` by default). Figure 13 shows 5-shot accuracy over compute: both are better than
            their ViT and cost more; no number is printed. Per image of 224 pixels ours take 33.5
            (B/16; ViT 17.6) and 8.5 (B/32; ViT 4.4) billion multiply-adds, by models/flops.py.
R50x1       Axial-ResNet-50 on ImageNet-1k, by scenic's imagenet_axial_resnet_config.py: batches of
            2048, 130 epochs, SGD with momentum 0.9, rate 0.1 * 2048 / 256 = 0.8 after 7 epochs of
            warm-up, cosine to 0, clipping at norm 1, weight decay 1e-3 of kernels (decoupled and
            multiplied by the rate), sigmoid loss with head bias -10. Crop, flip and evaluation are
            those of configs/pretrain.py. The paper says that it reproduced Wang et al.'s accuracy
            (2003.07853) and that the model is slow on TPUs; it gives no number, and the model
            differs from theirs (stem, widths). For other data, set --config.dataset.name.

Hours: not published. scripts/plan.py --topology=v5e:8x8 predicts 3.4 hours for R50x1 (152 ms per
update, by memory bandwidth; 9.9 of 15.75 GiB). Never run at scale.
"""

from ml_collections import ConfigDict

from configs import pretrain, quickstart
from vit_jax.config import section, set_kind
from vit_jax.errors import UserError

RESNET_EPOCHS, RESNET_WARMUP_EPOCHS, RESNET_BATCH = 130, 7, 2048


def get_config(argument: str = "B/16") -> ConfigDict:
    variant, _, rest = argument.partition(",")
    if variant == "quickstart":
        return small()
    if variant == "R50x1" and rest in ("", "quickstart"):
        return small_resnet() if rest else resnet()
    if variant not in ("B/32", "B/16"):
        raise UserError(
            f"configs/axial.py:{argument} must be B/32 or B/16[,DATASET[,EPOCHS]], "
            "R50x1[,quickstart] or quickstart."
        )
    config = pretrain.get_config(f"Axial-{variant},{rest or 'jft'}")
    config.sweep.published = ""
    return config


def resnet() -> ConfigDict:
    config = pretrain.pretraining("Axial-R50x1", "imagenet2012")
    config.dataset.batch_size = RESNET_BATCH
    config.duration.epochs = float(RESNET_EPOCHS)
    set_sgd(config)
    num_examples = pretrain.DATASETS["imagenet2012"].num_examples
    config.schedule.warmup_steps = RESNET_WARMUP_EPOCHS * (num_examples // RESNET_BATCH)
    return config


def set_sgd(config: ConfigDict) -> None:
    set_kind(config, "optimizer", "sgd", weight_decay=1e-3, clip_norm=1.0)
    config.schedule.learning_rate = 0.1 * config.dataset.batch_size / 256


def small_resnet() -> ConfigDict:
    config = quickstart.get_config("scratch")
    config.model = section("model", "axial_resnet", resnet_layers=(1, 1), resnet_width_factor=1)
    set_sgd(config)
    return config


def small() -> ConfigDict:
    config = quickstart.get_config("scratch")
    sizes = {"patch_size": 4, "hidden_size": 128, "num_layers": 2, "mlp_dim": 256, "num_heads": 4}
    config.model = section("model", "axial_vit", **sizes)
    return config
