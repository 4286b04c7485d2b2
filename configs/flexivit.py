"""One Vision Transformer for all patch sizes: FlexiViT (2212.08013).

    python scripts/train.py --config=configs/flexivit.py:B,imagenet2012 --workdir=/tmp/flexi
    python scripts/train.py --config=configs/flexivit.py:B,imagenet21k --workdir=/tmp/flexi
    python scripts/train.py --config=configs/flexivit.py:quickstart --workdir=/tmp/flexi

The argument is SIZE,DATASET: S, B or L on imagenet21k, supervised, or on imagenet2012, distilled
from a DeiT III of its size, from whose weights it starts (paper, sections 3.4 and 3.6; big_vision's
configs/proj/flexivit/i21k_sup.py and i1k_deit3_distill.py). Or it is `quickstart`: a small model on
the 300 scans of configs/quickstart.py, two minutes on two cores.

Each update draws one of ten patch sizes from 48 to 8 pixels, for images of 240 pixels. The
parameters are for patches of 32 pixels and a grid of 7x7, and are resized in the update. Evaluators
in training use patches of 16 pixels, the first of train_step.patch_sizes, and so does what loads
the run, but with --patch_size=N; scripts/patch_sizes.py makes a table and a plot of all.

* imagenet21k: 90 epochs, batches of 4096, the official code's crop and flip, RandAugment of 2
  operations at magnitude 10, mixup 0.2; sigmoid loss, head bias -10; Adam, rate 1e-3, 10,000 steps
  of warm-up, cosine, clipping at norm 1, weight decay 0.1 times the rate, momentum in bfloat16.
* imagenet2012: 90 epochs (the paper has 300, 600 and 1,200), batches of 1024, crops and flips,
  mixup 1.0; the KL divergence from the teacher, no labels; rate 1e-4, 5,000 steps of warm-up, the
  rest as above. Here the teacher sees the images of 240 pixels, in big_vision of 384.

bfloat16 and reader processes are ours, see configs/pretrain.py. Published for B on imagenet2012
after 300, 600 and 1,200 epochs at 240 pixels and patches of 16: 84.4, 84.6, 84.7 % (timm).
"""

from ml_collections import ConfigDict

from configs import pretrain, quickstart
from configs.deit3 import NORMALIZE
from vit_jax.config import set_kind
from vit_jax.errors import UserError

PIXELS = 240  # which all of these divide
PATCH_SIZES = (16, 48, 40, 30, 24, 20, 15, 12, 10, 8)
TEACHERS = {"S": "small", "B": "base", "L": "large"}


def get_config(argument: str = "B,imagenet2012") -> ConfigDict:
    if argument == "quickstart":
        return small()
    size, _, dataset = argument.partition(",")
    if size not in TEACHERS or dataset not in ("imagenet21k", "imagenet2012"):
        raise UserError(
            f"configs/flexivit.py:{argument} must be SIZE,DATASET with S, B or L, and imagenet21k "
            "or imagenet2012; or quickstart."
        )
    if dataset == "imagenet21k":
        config = pretrain.pretraining(f"{size}/32", dataset)
        config.dataset.preprocess = f"official_train({PIXELS})|randaug(2, 10)"
        config.dataset.eval_preprocess = f"big_vision_eval({PIXELS}, resize={PIXELS // 7 * 8})"
        config.mix.mixup_alpha = 0.2
        config.schedule.learning_rate = 1e-3
    else:
        config = distillation(size)
    config.train_step.patch_sizes = PATCH_SIZES
    config.duration.epochs = 90.0
    config.optimizer.update(weight_decay=0.1, clip_norm=1.0, momentum_dtype="bfloat16")
    return config


def distillation(size: str) -> ConfigDict:
    config = pretrain.pretraining(f"DeiT3-{size}/16", "imagenet2012")
    config.model.patch_size = 32
    source = f"deit3/deit_3_{TEACHERS[size]}_384_1k"
    config.pretrained.update(source=source, resize_patches=True, reset_head=False)
    set_kind(config, "objective", "soft_distillation", teacher=source, weight=1.0, temperature=1.0)
    chain = f"decode|inception_crop({PIXELS})|flip_lr|{NORMALIZE}"
    config.dataset.update(batch_size=1024, split="train[:99%]", preprocess=chain)
    resize = f"resize_small({PIXELS // 7 * 8})|central_crop({PIXELS})"
    config.dataset.eval_preprocess = f"decode|{resize}|{NORMALIZE}"
    config.model.head_bias_init = 0.0
    config.mix.mixup_alpha = 1.0
    config.schedule.update(learning_rate=1e-4, warmup_steps=5_000)
    return config


def small() -> ConfigDict:
    config = quickstart.get_config("scratch")
    config.train_step.patch_sizes = (4, 12, 8, 6, 3)
    config.duration.steps, config.schedule.warmup_steps = 1_000, 100
    return config
