"""Depth, or another value of every pixel, from a linear head on the patches.

    python scripts/finetune.py --config=configs/depth.py:DINOv2-S/14,FOLDER,frozen \\
        --config.pretrained.source=hf://facebook/dinov2-small --workdir=runs/depth

The argument is VARIANT,FOLDER[,RESOLUTION][,frozen], as in configs/segmentation.py. FOLDER has
images/ and depth/ of the same names (16-bit or float pictures, or .npy), or is a table with the
columns path and depth. --config.objective.unit turns what they store into the unit of the results:
0.001 for millimetres and metres (NYU), 1 / 256 for KITTI; --config.objective.max_value=10 leaves
out what is further away, in that unit. Pixels at 0 have no depth and do not count.

The head predicts the logarithm; the loss is its absolute difference. For values that may be
negative: --config.objective.log=False --config.objective.min_value=-1e9. DINOv2 (2304.07193,
section 7.4) trains on 256 bins of depth instead, and on the class token beside the patches.
"""

from ml_collections import ConfigDict

from configs.segmentation import dense


def get_config(argument: str = "S/16,depths") -> ConfigDict:
    config = dense("depth", argument, "pixel_regression")
    config.checkpoint.best_metric = "test/rmse"
    return config
