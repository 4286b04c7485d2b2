"""Fine-tuning on a folder of your own photos, on a GPU or a laptop.

    python scripts/finetune.py --config=configs/photos.py:S/16,/path/to/photos \\
        --config.pretrained.source=augreg:S/16 --workdir=runs/photos

    python scripts/train.py --config=configs/photos.py:Ti/16,/path/to/photos,128,scratch \\
        --workdir=runs/photos

The argument is VARIANT,FOLDER[,RESOLUTION][,multi_label][,scratch][,native]:
  VARIANT      a key of `models.create.VARIANTS`: the variant of the weights; or the weights, a
               file, folder, address or name of the zoo, which training starts from.
  FOLDER       with CLASS_NAME/*.jpg, of which a fifth is held out, or
               {train,test}/CLASS_NAME/*.jpg; any image that OpenCV can decode. Or a .csv or
               .parquet file with the columns `path`, `label` (or `labels`) and, if there are
               splits, `split`: `data/table.py`.
  RESOLUTION   pixels, default 224 (for a hybrid or a patch of 14, a multiple of its tokens).
  multi_label  any number of labels per image, the table's `labels`: a sigmoid per class, and
               mean average precision (mAP) as the metric.
  scratch      random weights, for scripts/train.py.
  native       photos keep their shapes, in as many patches as a square of RESOLUTION has
               (NaFlex of SigLIP 2, 2502.14786, section 2.4): any Vision Transformer.

From weights: the paper's fine-tuning (section B.1.1: SGD with momentum 0.9, cosine decay, no weight
decay, clipping at norm 1) with a batch that fits one device: 500 updates of 32 images at learning
rate 0.003, from the lower half of the paper's grid as the batch is smaller. scripts/sweep.py
with this recipe chooses the rate on a tenth of the training photos. With a few hundred photos,
training only the head and the upper blocks is faster:
--config.optimizer.freeze='embedding/.*|cls|.*/pos_embedding|.*/encoderblock_[0-7]/.*'.
Crops and resizing are antialiased, which the paper's are not: they would see one pixel in 200 of a
photo of 12 megapixels.
500 updates are 16,000 images: with Ti/16 at 224 pixels about half an hour on two CPU cores (8 per
second), with S/16 about four times that. No accuracy is published for your own photos.

From scratch: AdamW, 100 epochs, crops and flips. It was tried only on synthetic pictures (800 of 10
classes): 40 % after 500 updates, and 36 % with mixup, RandAugment and half the rate.
"""

from ml_collections import ConfigDict

from configs.finetune import fine_tuning, parse_argument
from vit_jax.config import get_config as default_config
from vit_jax.config import section, set_kind
from vit_jax.errors import UserError
from vit_jax.models.create import get_variant
from vit_jax.models.tokens import token_grid

OPTIONS = ("multi_label", "scratch", "native")


def get_config(argument: str = "S/16,photos") -> ConfigDict:
    parts = argument.split(",")
    options = {parts.pop() for _ in OPTIONS if parts and parts[-1] in OPTIONS}
    if parts and not parts[-1].isdigit():
        parts.append("224")
    if len(parts) < 3:
        raise UserError(
            f"configs/photos.py:{argument} must be VARIANT,FOLDER[,RESOLUTION][,multi_label]"
            "[,scratch][,native]."
        )
    variant, folder, resolution = parse_argument("photos", ",".join(parts))
    config = from_scratch(variant) if "scratch" in options else fine_tuning(variant)
    config.dataset.name = folder
    config.dataset.split = "train"
    patch = config.model.patch_size if "native" in options else 1
    area = (0.3, 1.0) if "scratch" in options else (0.05, 1.0)
    crop = f"random_resized_crop({resolution}, {area})"
    config.dataset.preprocess = f"decode(reduced=True)|{crop}|flip_lr"
    config.dataset.eval_preprocess = f"huggingface_eval({resolution})"
    if "native" in options:
        rows = f"patchify({token_grid((resolution,) * 2, patch)[0] ** 2}, {patch})"
        config.dataset.preprocess = f"decode|random_area({area})|flip_lr|{rows}"
        config.dataset.eval_preprocess = f"decode|{rows}"
    if "scratch" not in options:
        config.dataset.batch_size = 32
        config.evaluators.test.every_steps = 100
        config.duration.steps = 500
        config.schedule.warmup_steps = 50
        config.schedule.learning_rate = 0.003
        config.checkpoint.every_steps = 100
        config.sweep.learning_rates = (0.001, 0.003, 0.01)
    config.sweep.train_split = "train[:90%]"
    config.sweep.validation_split = "train[90%:]"
    if "multi_label" in options:
        set_kind(config, "objective", "multi_label")
        set_kind(config, "evaluators.test", "average_precision")
    return config


def from_scratch(variant: str) -> ConfigDict:
    config = default_config()
    config.model = section("model", **get_variant(variant))
    config.dataset.batch_size = 64
    config.duration.epochs = 100.0
    config.schedule.warmup_steps = 200
    config.schedule.learning_rate = 1e-3
    config.optimizer.weight_decay = 0.05
    config.evaluators.test.every_steps = 500
    config.checkpoint.every_steps = 500
    return config
