"""Big Transfer (BiT, 1912.11370): pre-training of its ResNets with SGD, also table 7 of 2010.11929.

    python scripts/train.py --config=configs/bit.py:R50x1,imagenet21k --workdir=/tmp/bit
    python scripts/train.py --config=configs/bit.py:R152x2,jft,7 \\
        --config.dataset.name=/data/photos --workdir=...
    python scripts/train.py --config=configs/bit.py:quickstart --workdir=/tmp/bit

The argument is VARIANT,DATASET[,EPOCHS] as in configs/pretrain.py, which trains the same models
with Adam (table 3); VARIANT is a key of `models.variants.BIT`. Or it is `quickstart`: a small
ResNet on the 300 scans of configs/quickstart.py, a minute on two cores. configs/hyperrule.py
fine-tunes the result.

SGD with momentum 0.9, rate 0.03 * batch / 256 with batches of 4096, 5,000 steps of linear warm-up,
then a tenth of the rate at each of some epochs, weight decay 1e-4 (section 3.3, "Upstream
Pre-Training"):

                     epochs  divided by 10 after
  BiT-S imagenet2012     90  30, 60, 80
  BiT-M imagenet21k      90  30, 60, 80
  BiT-L jft              40  10, 23, 30, 37

Other EPOCHS: at the same fractions of the training. BiT adds 1e-4 * w to the gradient, which
momentum multiplies by 1 / (1 - 0.9); ours is added after momentum and multiplied by the rate: 1e-3,
as in big_vision's configs/bit_i1k.py and bit_i21k.py. Those have cosine decay and clip at norm 1;
the paper mentions no clipping. Losses are theirs: softmax for ImageNet-1k, sigmoid with head bias
-10 for the others. Max-pooling pads zeros, as in BiT's code. Images, evaluation, bfloat16,
sharding and reader processes are those of configs/pretrain.py.

Table 7 (2010.11929, appendix D.1) compares both optimizers on JFT, 7 epochs, fine-tuned at 384
pixels by configs/finetune.py; "SGD" are this recipe's hyper-parameters, its epochs of decay
are not published. Run R50x1,jft,7 and R152x2,jft,7 here and in configs/pretrain.py:

               R50x1 Adam    SGD   R152x2 Adam    SGD
  ImageNet          77.54  78.24         84.97  84.37
  CIFAR-10          97.67  97.46         99.06  99.07
  CIFAR-100         86.07  85.17         92.05  91.06
  Pets              91.11  91.00         95.37  94.79
  Flowers           94.26  92.06         98.62  99.32

Hours: the paper trains on a TPUv3-512 and gives none; scripts/plan.py predicts them. Expected
accuracy: table 7; from ImageNet-21k, fine-tuned on ImageNet by configs/hyperrule.py: R50x1 80.68,
R152x2 85.15 (README of google-research/big_transfer).
"""

from ml_collections import ConfigDict

from configs import pretrain, quickstart
from vit_jax.config import section, set_kind
from vit_jax.kinds import check_known
from vit_jax.models.variants import BIT

DECAYS = {90: (30, 60, 80), 40: (10, 23, 30, 37)}  # epochs: those after which the rate falls
TABLE_7 = {"R50x1": 78.24, "R152x2": 84.37}  # ImageNet, SGD
README = {"R50x1": 80.68, "R152x2": 85.15}


def get_config(argument: str = "R50x1,imagenet2012") -> ConfigDict:
    if argument == "quickstart":
        return small()
    variant, dataset, epochs = pretrain.parse_argument("bit", argument)
    check_known("VARIANT", variant, BIT)
    config = pretrain.pretraining(variant, dataset)
    name = pretrain.without_version(dataset)
    planned = 40 if name.startswith("jft") else 90
    sgd(config, tuple(epoch / planned for epoch in DECAYS[planned]))
    config.duration.epochs = float(epochs or planned)
    config.schedule.learning_rate = 0.03 * config.dataset.batch_size / 256
    config.schedule.warmup_steps = 5_000
    if planned == 90 and name != "imagenet21k":
        config.objective.loss = "softmax"
        config.model.head_bias_init = 0.0
    if name == "jft" and epochs == 7 and variant in TABLE_7:
        config.sweep.published = (
            f"{TABLE_7[variant]} on ImageNet, fine-tuned at 384 pixels (2010.11929, table 7)"
        )
    if name == "imagenet21k" and not epochs and variant in README:
        config.sweep.published = (
            f"{README[variant]} on ImageNet, fine-tuned by configs/hyperrule.py (big_transfer)"
        )
    return config


def sgd(config: ConfigDict, decay_at: tuple[float, ...]) -> None:
    config.model.max_pool_padding = "zero"
    set_kind(config, "optimizer", "sgd", momentum=0.9, weight_decay=1e-3)
    set_kind(config, "schedule", "staircase", decay_at=decay_at)


def small() -> ConfigDict:
    config = quickstart.get_config("scratch")
    config.model = section("model", "bit", resnet_layers=(1, 1))
    sgd(config, (0.6, 0.9))
    config.schedule.learning_rate = 0.03
    return config
