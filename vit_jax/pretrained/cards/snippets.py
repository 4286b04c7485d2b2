"""How written weights are loaded: the Python of the model cards, which the tests run."""

from __future__ import annotations

from pathlib import Path

from vit_jax.pretrained.formats.description import Description

# Format -> the library that loads it, in Hugging Face's spelling.
LIBRARIES = {
    "npz": "vit_jax",
    "npz_published": "vit_jax",
    "big_vision": "vit_jax",
    "timm": "timm",
    "huggingface": "transformers",
    "orbax": "vit_jax",
    "stablehlo": "jax",
    "onnx": "onnx",
}

_STABLEHLO = """\
import jax
import jax.export
import numpy as np

with open("model.stablehlo", "rb") as file:
    model = jax.export.deserialize(bytearray(file.read()))
params = dict(np.load("params.npz"))
images = np.zeros({shape}, np.{dtype})
{output} = jax.jit(model.call)(params, images)
"""

_ONNX = """\
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
images = np.zeros({shape}, np.{dtype})
[{output}] = session.run(["{output}"], {{"images": images}})
"""

_VIT_JAX = """\
import jax
import numpy as np
from vit_jax.inference.load import load_model

model = load_model("{name}")
images = np.zeros({shape}, np.float32)
logits = model.module.apply({{"params": model.params}}, images, train=False)
"""

_TIMM = """\
import timm
import torch

model = timm.create_model("local-dir:{name}", pretrained=True).eval()
images = torch.zeros({torch_shape})
logits = model(images)
"""

_TRANSFORMERS = """\
import torch
from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("{name}").eval()
images = torch.zeros({torch_shape})
logits = model(images).logits
"""


def export_snippet(format: str, *, shape: tuple[int, ...], dtype: str, output: str) -> str:
    """For the folders of `scripts/export.py`; run in the folder.

    Args:
      format: `stablehlo` or `onnx`.
      shape, dtype: of an input.
      output: name of what the model gives.
    """
    template = {"stablehlo": _STABLEHLO, "onnx": _ONNX}[format]
    return template.format(shape=shape, dtype=dtype, output=output)


def snippet_for(format: str, target: Path, description: Description) -> str:
    """For weights in one of the formats of `scripts/convert_checkpoint.py`; run beside them."""
    height, width, channels = description.image_shape
    template = _VIT_JAX
    if description.model["num_classes"]:  # without a head they need other classes
        template = {"timm": _TIMM, "huggingface": _TRANSFORMERS}.get(format, _VIT_JAX)
    return template.format(
        name=target.name,
        shape=(1, height, width, channels),
        torch_shape=(1, channels, height, width),
    )
