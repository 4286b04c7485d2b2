"""Feature distillation: a small model learns the features of a large one, without labels.

    python scripts/train.py --config=configs/feature_distillation.py:Ti/16,FOLDER \\
        --config.objective.teacher=WEIGHTS --workdir=runs/student
    python scripts/finetune.py --config=configs/photos.py:Ti/16,photos \\
        --config.pretrained.source=runs/student --workdir=runs/photos

The argument is VARIANT,DATA[,RESOLUTION]: the student, a key of `models.create.VARIANTS` or weights
to start from; pictures with or without classes; pixels, default 224. WEIGHTS are of any size and
family with tokens. Further students share the passes of the teacher and the augmentation:
--config.objective.students="('Ti/16', 'S/32')"; load_model('runs/student#student_2') is the second.

A dense layer maps the student's patches after the last norm to the teacher's, which are whitened;
the distance is the smooth L1 (2205.14141, section 3: there with the same architecture and 300
epochs of ImageNet). --config.objective.features=pooled or both; distance=cosine. Patches of another
size are interpolated to the teacher's grid. Crops, flips, AdamW at 5e-4 for a batch of 256 and
weight decay 0.05, our choice; no accuracy was measured.
"""

from ml_collections import ConfigDict

from configs.finetune import fine_tuning, parse_argument
from vit_jax.config import set_kind
from vit_jax.models.create import VARIANTS

STEPS = 10_000


def get_config(argument: str = "Ti/16,pictures") -> ConfigDict:
    variant, data, size = parse_argument("feature_distillation", argument, default=224)
    config = fine_tuning(variant)
    set_kind(config, "objective", "feature_distillation")
    set_kind(config, "optimizer", "adamw")
    config.optimizer.update(weight_decay=0.05, clip_norm=1.0)
    config.schedule.update(learning_rate=5e-4 if variant in VARIANTS else 5e-5, warmup_steps=500)
    config.dataset.update(name=data, batch_size=256)
    config.dataset.preprocess = f"decode|random_resized_crop({size}, (0.3, 1))|flip_lr"
    config.dataset.eval_preprocess = f"decode|resize_small({size})|central_crop({size})"
    config.duration.steps = STEPS
    with config.unlocked():
        del config.evaluators.test
    return config
