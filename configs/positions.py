"""Position embeddings compared: the rows of table 8 (2010.11929, appendix D.4).

    python scripts/train.py --config=configs/positions.py:2d,imagenet2012 --workdir=/tmp/2d
    python scripts/train.py --config=configs/positions.py:none,quickstart --workdir=/tmp/none

The argument is ROW[,DATASET]: a key of `TABLE_8`, and a data set of configs/pretrain.py, whose
B/16 it is with other positions (`jft` by default); or `quickstart`: the small model on the 300
scans of configs/quickstart.py, two minutes on two cores. `1d` is the paper's model.

                1d: a vector for each of the 197 tokens; 2d: D/2 numbers each for column and row
  (at the stem) added to the patch embeddings, once
  _layers       added at the beginning of each layer, other vectors in each
  _shared       added at the beginning of each layer, the same vectors

`relative` has no vectors of places but of offsets, in the attention of every layer. What the paper
leaves open is in models/positions.py. Measured is 5-shot accuracy on ImageNet (least squares on
frozen features, as big_vision's configs/common_fewshot.py); `config.sweep.published` has the
table's, which does not name the data of the pre-training: JFT, as in the other appendices. It
reports single runs, and says that the rows with positions differ little.

Hours: as configs/pretrain.py:B/16. `relative` computes a third product in each attention, with an
embedding for each pair of tokens; on TPUs it does without the kernel that keeps scores on the chip.
"""

from ml_collections import ConfigDict

from configs import pretrain, quickstart
from vit_jax.config import evaluator
from vit_jax.errors import UserError

# model.position_embedding, and the accuracy in percent.
TABLE_8: dict[str, tuple[str, float]] = {
    "none": ("none", 61.382),
    "1d": ("learned", 64.206),
    "1d_layers": ("learned_layers", 63.964),
    "1d_shared": ("learned_shared", 64.292),
    "2d": ("learned2d", 64.001),
    "2d_layers": ("learned2d_layers", 64.046),
    "2d_shared": ("learned2d_shared", 64.022),
    "relative": ("relative", 64.032),
}


def get_config(argument: str = "1d") -> ConfigDict:
    row, _, dataset = argument.partition(",")
    if row not in TABLE_8:
        raise UserError(
            f"configs/positions.py:{argument} must be ROW[,DATASET]; rows: {', '.join(TABLE_8)}."
        )
    if dataset == "quickstart":
        config = quickstart.get_config("scratch")
    else:
        config = pretrain.get_config(f"B/16,{dataset or 'jft'}")
        with config.unlocked():
            config.evaluators.imagenet = evaluator(
                "validation",
                "few_shot",
                dataset="imagenet2012",
                preprocess="decode|resize(256)|central_crop(224)",
                train_split="train[:65000]",
                shots=(5,),
            )
        config.sweep.published = ""
        if pretrain.without_version(dataset or "jft") == "jft":
            accuracy = f"{TABLE_8[row][1]} on ImageNet, 5 images per class"
            config.sweep.published = f"{accuracy} (2010.11929, table 8)"
    config.model.position_embedding = TABLE_8[row][0]
    return config
