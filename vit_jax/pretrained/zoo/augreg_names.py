"""File names of the AugReg collection (2106.10270): a name encodes the training recipe.

`B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0`; a fine-tuned file appends
`--imagenet2012-steps_20k-lr_0.03-res_384`.

Files use light0 but never light2, while the paper's table has light1 and light2: we assume that
file names count these two from 0.
"""

import re
from typing import NamedTuple

from vit_jax.errors import UserError

_VARIANTS = "Ti/16 S/32 S/16 B/32 B/16 B/8 L/16 R+Ti/16 R26+S/32 R50+L/32"
# name in files, such as R_Ti_16: key of create.VARIANTS, and `name` in the index
MODELS = {re.sub(r"\W", "_", variant): variant for variant in _VARIANTS.split()}
DATASETS = {"i1k": "imagenet2012", "i21k": "imagenet21k"}  # of pre-training
# name in file names: name in the paper's table of augmentations
AUGMENTATIONS = {"none": "none", "light0": "light1", "light1": "light2"}
AUGMENTATIONS |= {name: name for name in ("medium1", "medium2", "strong1", "strong2")}
# Of fine-tuning: number of classes.
ADAPTATION = {
    "imagenet2012": 1000,
    "cifar100": 100,
    "oxford_iiit_pet": 37,
    "resisc45": 45,
    "kitti": 4,  # VTAB's task: distance of the closest vehicle
}
STEPS = {"0k": 500, "2k": 2_500, "10k": 10_000, "20k": 20_000}  # of fine-tuning

_NAME = re.compile(
    rf"(?P<upstream>(?P<model>{'|'.join(MODELS)})-(?P<data>i1k(?=-300)|i21k)-(?P<epochs>30|300)ep"
    rf"-lr_(?P<rate>0\.001)-aug_(?P<augmentation>{'|'.join(AUGMENTATIONS)})-wd_(?P<decay>0\.1|0\.03)"
    r"-do_(?P<dropout>0\.[01])-sd_(?P=dropout))"
    rf"(?:--(?P<adapt>{'|'.join(ADAPTATION)})-steps_(?P<steps>{'|'.join(STEPS)})"
    r"-lr_(?P<adapt_rate>0\.001|0\.003|0\.01|0\.03)-res_(?P<res>224|384))?"
)


class FileName(NamedTuple):
    """The parts of a name, in the words of the paper and of `models.create.VARIANTS`."""

    upstream: str  # the pre-trained file's name
    variant: str
    data: str  # key of DATASETS
    epochs: int
    learning_rate: float
    augmentation: str
    weight_decay: float
    dropout_rate: float  # and that of stochastic depth
    adapt_dataset: str  # key of ADAPTATION; "" for a pre-trained file
    adapt_steps: str  # key of STEPS, or ""
    adapt_rate: float  # 0.0 for a pre-trained file
    resolution: int  # pixels


def is_file_name(name: str) -> bool:
    return _NAME.fullmatch(name.removesuffix(".npz")) is not None


def parse(name: str) -> FileName:
    """The parts of a file's name, with or without `.npz`; UserError: not of the collection."""
    match = _NAME.fullmatch(name.removesuffix(".npz"))
    if match is None:
        raise UserError(
            f"{name!r} is not an AugReg file; names look like Ti_16-i21k-300ep-lr_0.001-aug_none-"
            "wd_0.03-do_0.0-sd_0.0 (i1k: 300ep only; wd_0.1; do_0.1-sd_0.1), with a suffix such as "
            "--imagenet2012-steps_20k-lr_0.03-res_384 if fine-tuned; "
            f"models: {', '.join(MODELS)}; aug: {', '.join(AUGMENTATIONS)}; fine-tuned on: "
            f"{', '.join(ADAPTATION)}; steps: {', '.join(STEPS)}."
        )
    return FileName(
        upstream=match["upstream"],
        variant=MODELS[match["model"]],
        data=match["data"],
        epochs=int(match["epochs"]),
        learning_rate=float(match["rate"]),
        augmentation=AUGMENTATIONS[match["augmentation"]],
        weight_decay=float(match["decay"]),
        dropout_rate=float(match["dropout"]),
        adapt_dataset=match["adapt"] or "",
        adapt_steps=match["steps"] or "",
        adapt_rate=float(match["adapt_rate"] or 0),
        resolution=int(match["res"] or 224),
    )
