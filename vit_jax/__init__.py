"""Vision Transformers in JAX.

    import vit_jax

    model = vit_jax.load_model("augreg/B_16-imagenet2012")  # or a file, hf://owner/name, a run
    model.predict("photo.jpg")  # [("tabby, tabby cat", 0.93), ...]
    model.features(["a.jpg", "b.jpg"])  # [2, 768]
    model.attention("photo.jpg")  # [12, 1, 12, 197, 197]

    config = vit_jax.get_config("configs/finetune.py:S/16,mine,224", "duration.steps=500")
    vit_jax.train_and_evaluate(config, "runs/mine", dataset={"train": (images, labels), ...})

Everything is imported lazily.
"""

import importlib
import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

# OpenCV reads it on import: larger images are rejected before memory is allocated.
os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(2**28))

# Of configs/ and scripts/: the repository, or what `pip install` has put into the package.
_PACKAGE = Path(__file__).resolve().parent
ROOT = _PACKAGE.parent if (_PACKAGE.parent / "configs/pretrain.py").exists() else _PACKAGE / "root"

if TYPE_CHECKING:
    from vit_jax.command_line import get_config as get_config
    from vit_jax.errors import UserError as UserError
    from vit_jax.export.convert import convert_checkpoint as convert_checkpoint
    from vit_jax.inference.load import load_model as load_model
    from vit_jax.inference.model import Model as Model
    from vit_jax.inference.visualize import visualize as visualize
    from vit_jax.models.create import create_model as create_model
    from vit_jax.models.create import get_variant as get_variant
    from vit_jax.models.look import look as look
    from vit_jax.pretrained.load import load_pretrained as load_pretrained
    from vit_jax.pretrained.zoo.entries import list_models as list_models
    from vit_jax.train import train_and_evaluate as train_and_evaluate

_HOMES = {
    "Model": "vit_jax.inference.model",
    "UserError": "vit_jax.errors",
    "convert_checkpoint": "vit_jax.export.convert",
    "create_model": "vit_jax.models.create",
    "get_config": "vit_jax.command_line",
    "get_variant": "vit_jax.models.create",
    "list_models": "vit_jax.pretrained.zoo.entries",
    "load_model": "vit_jax.inference.load",
    "load_pretrained": "vit_jax.pretrained.load",
    "look": "vit_jax.models.look",
    "train_and_evaluate": "vit_jax.train",
    "visualize": "vit_jax.inference.visualize",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vit_jax' has no attribute {name!r}")
    from vit_jax.errors import with_short_errors

    value = getattr(importlib.import_module(_HOMES[name]), name)
    if inspect.isfunction(value):
        value = with_short_errors(value)
        value.__module__ = __name__  # pickle finds it here
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
