"""Numbers of an image: an age, a dose, coordinates; columns of a table.

    python scripts/finetune.py --config=configs/regression.py:S/16,people.csv \\
        --config.pretrained.source=augreg:S/16 --config.dataset.label_key=age --workdir=runs/age

The argument is VARIANT,TABLE[,RESOLUTION]: as in configs/photos.py, but TABLE is a .csv or .parquet
file with the columns `path`, numbers to predict (`target`, or those of `dataset.label_key`,
separated by commas) and, if there are splits, `split`. Several numbers weigh alike: each is
measured in standard deviations of the training images. Optimizer, crops and length are those of
configs/photos.py; with crops and flips the number must not depend on the place in the image, else
--config.dataset.preprocess='decode|resize(224)'.
"""

from ml_collections import ConfigDict

from configs import photos
from vit_jax.config import set_kind


def get_config(argument: str = "S/16,numbers.csv") -> ConfigDict:
    config = photos.get_config(argument)
    set_kind(config, "objective", "regression")
    set_kind(config, "evaluators.test", "regression")
    config.checkpoint.best_metric = "test/mae"
    return config
