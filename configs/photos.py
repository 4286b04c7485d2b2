"""Fine-tuning on a folder of your own photos, on one GPU or a laptop.

    python scripts/finetune.py --config=configs/photos.py:S/16,/path/to/photos \\
        --config.pretrained.source=augreg:S/16 --workdir=runs/photos

The argument is VARIANT,FOLDER[,RESOLUTION]:
  VARIANT     a row of `vit_jax/models/variants.py`: that of the weights.
  FOLDER      with CLASS_NAME/*.jpg, of which a fifth is held out, or {train,test}/CLASS_NAME/*.jpg;
              any kind of image that OpenCV decodes.
  RESOLUTION  pixels, default 224 (a hybrid or a patch of 14 takes multiples of its tokens).

With scripts/train.py and no source it starts from random weights.

The paper's fine-tuning (section B.1.1: SGD with momentum 0.9, cosine decay, no weight decay,
clipping at norm 1) with a batch that one device holds: 500 updates of 32 images at learning rate
0.003, from the lower half of the paper's grid since the batch is smaller. scripts/sweep.py with
this recipe chooses the rate on a tenth of the training photos.

With a few hundred photos, training only the head and the upper blocks is faster:
--config.optimizer.freeze='embedding/.*|cls|.*/pos_embedding|.*/encoderblock_[0-7]/.*'.
500 updates are 16,000 images: with Ti/16 at 224 pixels about half an hour on two CPU cores (8 per
second), with S/16 about four times that. No accuracy is published for photos of yours.
"""

from ml_collections import ConfigDict

from configs.finetune import fine_tuning, parse_argument
from vit_jax.errors import UserError


def get_config(argument: str = "S/16,photos") -> ConfigDict:
    if not argument.rpartition(",")[2].isdigit():
        argument += ",224"
    variant, folder, resolution = parse_argument("photos", argument)
    if not folder:
        raise UserError(f"configs/photos.py:{argument} must be VARIANT,FOLDER[,RESOLUTION].")
    config = fine_tuning(variant)
    config.dataset.name = folder
    config.dataset.split = "train"
    config.dataset.batch_size = 32
    config.dataset.preprocess = f"official_train({resolution})"
    config.dataset.eval_preprocess = f"official_eval({resolution})"
    config.evaluators.test.every_steps = 100
    config.duration.steps = 500
    config.schedule.warmup_steps = 50
    config.optimizer.learning_rate = 0.003
    config.checkpoint.every_steps = 100
    config.sweep.learning_rates = (0.001, 0.003, 0.01)
    config.sweep.train_split = "train[:90%]"
    config.sweep.validation_split = "train[90%:]"
    return config
