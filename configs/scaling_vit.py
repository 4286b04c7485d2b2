"""g/14 and G/14 as in "Scaling Vision Transformers" (2106.04560).

    python scripts/train.py --config=configs/scaling_vit.py:g/14 \\
        --config.dataset.name=/data/photos --workdir=...
    python scripts/train.py --config=configs/scaling_vit.py:g/14,imagenet21k --workdir=...
    python scripts/plan.py --config=configs/scaling_vit.py:G/14 --topology=v5p:8x8x8

The argument is VARIANT[,DATASET]:
  VARIANT  g/14 (1.0 billion parameters) or G/14 (1.8 billion), or another Transformer of
           `models.create.VARIANTS`; not a ResNet, which has no tokens to pool, nor
           DeiT-distilled-*, whose two heads use tokens of their own.
  DATASET  jft_3b (default): the paper's JFT-3B was never published; set --config.dataset.name
           to your own data with the splits `train` and `test`. Or a dataset of configs/pretrain.py,
           another TFDS name, or the path of an image folder.

The recipe (big_vision's configs/proj/scaling_laws/train_vit_g.py): 1,000,000 steps of 16,384 images
of 224 pixels with the official code's crop and flip; attention pooling before the head, no
class token, no hidden layer. Sigmoid cross-entropy summed over classes, head bias -10.
Adafactor as modified in the paper: first moment 0.9 in bfloat16, factored second moment with
exponent 0.8, at most 0.999; clipping at norm 1. Rate 8e-4 with 10,000 steps of warm-up, reciprocal
square root with a time scale of 10,000 steps, and 50,000 steps of cool-down to 0, which
--config.duration.steps moves. Weight decay is decoupled, multiplied by the learning rate, and for
kernels only: 0.03 (big_vision's 2.4e-5), and 100 times that, 3.0, for the head's.

Ours, see configs/pretrain.py: bfloat16 computation, scanned blocks that save only their
inputs, the state split over 4 devices, 8 reader processes per host, each with up to 5 batches of
the host's share: 3 GB on each of 32 hosts, 25 GB on each of 4.

Expected accuracy of the unchanged recipe, fine-tuned on ImageNet (abstract): G/14 90.45 (84.86 with
10 images per class).
Our sources do not give hours; big_vision's recipe fits 32 images per TPUv3 core with g/14, and
scripts/plan.py predicts times.
"""

from ml_collections import ConfigDict

from configs import pretrain
from vit_jax.config import set_kind
from vit_jax.errors import UserError


def get_config(argument: str = "g/14") -> ConfigDict:
    variant, separator, dataset = argument.partition(",")
    if separator and not dataset:
        raise UserError(
            f"configs/scaling_vit.py:{argument} must be VARIANT[,DATASET], such as g/14 or "
            f"G/14,imagenet21k. Datasets: {', '.join(pretrain.DATASETS)}, another TFDS name or a "
            "folder."
        )
    config = pretrain.pretraining(variant, dataset or "jft_3b")
    if "patch_size" not in config.model:
        raise UserError(
            f"configs/scaling_vit.py:{argument}: {variant} has no tokens to pool; use a "
            "Transformer such as g/14 or G/14."
        )
    config.dataset.batch_size = 16_384
    config.duration.steps = 1_000_000
    config.model.classifier = "map"
    config.model.position_stddev = config.model.hidden_size**-0.5  # as in big_vision
    set_kind(config, "optimizer", "adafactor")
    config.schedule.learning_rate = 8e-4
    config.optimizer.momentum_dtype = "bfloat16"
    config.optimizer.weight_decay = 0.03
    config.optimizer.decay_multipliers = (("head/kernel", 100.0),)
    config.optimizer.clip_norm = 1.0
    set_kind(config, "schedule", "rsqrt")
    config.schedule.cooldown_steps = 50_000
    if variant == "G/14" and not dataset:
        config.sweep.published = "90.45 on ImageNet, fine-tuned (2106.04560)"
    return config
