"""PyTorch implementations that tests compare with; never a dependency of the package."""

import warnings
from typing import Any

from benchmarks.peers import import_timm, make_torchvision_importable

__all__ = ["import_timm", "import_transformers"]


def import_transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        make_torchvision_importable(torch)
        import transformers
        from transformers import DeiTForImageClassification, ViTForImageClassification  # noqa: F401
    return transformers
