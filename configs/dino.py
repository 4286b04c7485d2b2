"""Self-distillation on your own pictures, without labels: DINO (2104.14294), iBOT, DINOv2's form.

    python scripts/train.py --config=configs/dino.py:S/16,/path/to/pictures --workdir=runs/dino
    python scripts/train.py --config=configs/dino.py:quickstart --workdir=runs/dino

The argument is VARIANT,DATA[,RESOLUTION][,ibot|,dinov2][,knn]:
  VARIANT     a key of `models.create.VARIANTS`; or weights, which student and teacher start from:
              configs/dino.py:hf://facebook/dinov2-small,/path/to/pictures.
  DATA        a folder of pictures, with or without classes, or any other `dataset.name`.
  RESOLUTION  of the large crops in pixels, default 224; small ones have 3/7 of it (96).
  ibot        also learn masked patches (2111.07832); dinov2: these, Sinkhorn-Knopp centering and
              KoLeo (2304.07193).
  knn         with labels: the accuracy of the teacher's 20 nearest neighbours on the split `test`,
              ten times in a run.
Or it is `quickstart`: a small model on the drawn letters, on two cores.

For batches of 64 to 256 on one machine. From main_dino.py: the rate, 5e-4 * batch / 256 after a
tenth of warm-up (10 of its 100 epochs), AdamW with weight decay from 0.04 to 0.4, clipping at 3,
stochastic depth 0.1, prototypes frozen for a hundredth of the run, and the teacher's momentum, from
0.9995 on, which its help recommends for batches of 256. From DINOv2's ssl_default_config.yaml: the
teacher's temperature, from 0.04 to 0.07 in three tenths of the run, and with `dinov2` the crops'
areas.
From weights: a tenth of the rate, layer-wise decay 0.9 (DINOv2's) and no frozen prototypes, our
choice. No accuracy of these recipes was measured yet. `quickstart` has what was best for a smaller
model in a few minutes; from some thousand updates on it is ahead of masked autoencoders
(docs/pre_training.md). A difference: the rate ends at 0 (1e-6 there).

The result is the teacher, a backbone without a head: fine-tune it, or scripts/probe.py.
"""

from ml_collections import ConfigDict

from configs import quickstart
from configs.finetune import fine_tuning, parse_argument, pixels_per_token
from vit_jax.config import set_kind
from vit_jax.models.create import VARIANTS

FORMS = ("ibot", "dinov2")
BATCH_SIZE, STEPS = 128, 20_000


def get_config(argument: str = "S/16,pictures") -> ConfigDict:
    if argument == "quickstart":
        return small()
    parts = argument.split(",")
    has_labels = parts[-1] == "knn" and bool(parts.pop())
    form = parts.pop() if parts[-1] in FORMS else "dino"
    variant, data, size = parse_argument("dino", ",".join(parts), default=224)
    config, side = fine_tuning(variant), pixels_per_token(variant)
    config.dataset.update(name=data, batch_size=BATCH_SIZE)
    config.model.stochastic_depth_rate = 0.1
    config.duration.steps = STEPS
    distil(config, form)
    set_kind(config, "optimizer", "adamw")
    config.optimizer.update(weight_decay=0.04, final_weight_decay=0.4, clip_norm=3.0)
    config.optimizer.momentum_dtype = "float32"
    config.schedule.learning_rate = 5e-4 * BATCH_SIZE / 256
    if variant not in VARIANTS:
        config.schedule.learning_rate /= 10
        config.optimizer.layer_decay = 0.9
        config.objective.frozen_prototypes_steps = 0
    areas = ", area=(0.32, 1), local_area=(0.05, 0.32)" if form == "dinov2" else ""
    masks = f"|block_masks({size // side})" if form != "dino" else ""
    small_size = max(1, size * 3 // 7 // side) * side
    config.dataset.preprocess = f"decode|dino_crops({size}, {small_size}{areas}){masks}"
    config.dataset.eval_preprocess = f"decode|resize_small({size})|central_crop({size})"
    if has_labels:
        neighbors(config)
    else:
        with config.unlocked():
            del config.evaluators.test
    return config


def distil(config: ConfigDict, form: str) -> None:
    """The objective, and what is a share of the run's length."""
    steps = config.duration.steps
    set_kind(config, "objective", "dino" if form == "dino" else "ibot")
    config.objective.update(
        teacher_temperature=0.07,
        warmup_teacher_steps=3 * steps // 10,
        teacher_momentum=0.9995,
        frozen_prototypes_steps=steps // 100,
    )
    if form == "dinov2":
        config.objective.update(centering="sinkhorn_knopp", koleo_weight=0.1)
    config.schedule.warmup_steps = steps // 10


def neighbors(config: ConfigDict, train_split: str = "train") -> None:
    set_kind(config, "evaluators.test", "nearest_neighbors")
    config.evaluators.test.update(
        train_split=train_split, every_steps=config.duration.steps // 10, at_start=True
    )


def small() -> ConfigDict:
    config = quickstart.pretrain()
    distil(config, "dino")
    config.objective.update(num_prototypes=256, head_hidden_size=256, head_bottleneck_size=64)
    config.objective.update(teacher_momentum=0.99, teacher_temperature=0.02)
    config.objective.warmup_teacher_temperature = 0.02
    crops = "dino_crops(12, 8, 2, area=(0.4, 1), local_area=(0.2, 0.5), flip=False)"
    config.dataset.preprocess = f"decode(channels=1)|{crops}"
    neighbors(config, "train[:5000]")
    return config
