"""PyTorch implementations that tests compare with; never a dependency of the package."""

from __future__ import annotations

import warnings
from typing import Any

from vit_jax.measure import peers
from vit_jax.measure.torchvision import provide_torchvision


def import_timm() -> Any:
    return peers.import_timm()[0]


def import_transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        provide_torchvision()
        import transformers
        from transformers import DeiTForImageClassification, ViTForImageClassification  # noqa: F401
    return transformers
