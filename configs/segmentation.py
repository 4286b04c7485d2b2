"""Semantic segmentation: a class for every pixel, from a linear head on the patches.

    python scripts/finetune.py --config=configs/segmentation.py:DINOv2-S/14,FOLDER,frozen \\
        --config.pretrained.source=hf://facebook/dinov2-small --workdir=runs/segmentation
    python scripts/train.py --config=configs/segmentation.py:S/16,FOLDER --workdir=runs/scratch

The result is used as docs/dense.md shows, with scripts/predict.py and scripts/evaluate.py.
The argument is VARIANT,FOLDER[,RESOLUTION][,frozen]:
  VARIANT     a key of `models.create.VARIANTS`; or weights, which training starts from:
              configs/segmentation.py:hf://facebook/dinov2-small,FOLDER,frozen.
  FOLDER      with images/ and masks/ of the same names, ADE20k's, Pascal VOC's, or a table with the
              columns path and mask; how classes are listed is in docs/dense.md.
  RESOLUTION  pixels of the crops, default 224 (a multiple of the patches).
  frozen      train the head alone.

The head is a batch norm and a dense layer on every patch, interpolated to the pixels, as in
DINOv2's linear evaluation (2304.07193, section 7.4), which trains it with AdamW at 1e-3 and weight
decay 1e-4 on 40,000 batches of 16 crops of 512 pixels. Here: 1,000 batches of 16. All layers train
at a tenth of that rate, layer-wise decay 0.75 and weight decay 0.05, our choice.
Crops and flips move image and mask alike. In training the test images are resized to the crop's
size; scripts/predict.py lays windows over images of any size.
"""

from ml_collections import ConfigDict

from configs.finetune import fine_tuning, parse_argument
from vit_jax.config import set_kind
from vit_jax.errors import UserError

STEPS = 1_000


def get_config(argument: str = "S/16,masks") -> ConfigDict:
    config = dense("segmentation", argument, "segmentation")
    config.checkpoint.best_metric = "test/mIoU"
    return config


def dense(recipe: str, argument: str, objective: str) -> ConfigDict:
    """What recipes of predicted pixels share; the evaluator is called like the objective."""
    rest, _, last = argument.rpartition(",")
    is_frozen = last == "frozen"
    variant, folder, size = parse_argument(recipe, rest if is_frozen else argument, default=224)
    config = fine_tuning(variant)
    if config.model.name not in ("vit", "modern_vit"):
        raise UserError(f"configs/{recipe}.py:{argument} must name a Vision Transformer.")
    has_token = config.model.name == "vit" and config.model.classifier.startswith("token")
    config.model.update(classifier="token_dense" if has_token else "dense", head_norm=True)
    set_kind(config, "objective", objective)
    set_kind(config, "evaluators.test", objective)
    set_kind(config, "optimizer", "adamw")
    config.optimizer.update(weight_decay=0.05, clip_norm=1.0, layer_decay=0.75)
    config.schedule.update(learning_rate=1e-4, warmup_steps=STEPS // 20)
    if is_frozen:
        config.optimizer.update(weight_decay=1e-4, layer_decay=1.0, freeze="(?!head).*")
        config.schedule.learning_rate = 1e-3
    config.duration.steps = STEPS
    config.dataset.update(name=folder, batch_size=16)
    config.dataset.preprocess = f"decode|random_resized_crop({size}, (0.25, 1))|flip_lr"
    config.dataset.eval_preprocess = f"decode|resize({size}, method='pillow_bilinear')"
    config.evaluators.test.every_steps = STEPS // 5
    config.checkpoint.every_steps = STEPS // 5
    return config
