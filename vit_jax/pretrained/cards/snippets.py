"""The formats of written weights, and the Python that loads each: the tests run it."""

from __future__ import annotations

from typing import NamedTuple

from vit_jax.workdir.description import Description

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


class Format(NamedTuple):
    library: str  # that loads it, in Hugging Face's spelling
    text: str
    snippet: str = _VIT_JAX


FORMATS = {
    "npz": Format("vit_jax", "an `.npz` file with the official code's parameter names"),
    "npz_published": Format("vit_jax", "an `.npz` file named like Google's published ones"),
    "big_vision": Format("vit_jax", "an `.npz` file of big_vision"),
    "timm": Format("timm", "a timm folder", _TIMM),
    "huggingface": Format("transformers", "a Hugging Face folder", _TRANSFORMERS),
    "orbax": Format("vit_jax", "an Orbax checkpoint of vit_jax"),
    "stablehlo": Format("jax", "a `jax.export` program (StableHLO), with parameters", _STABLEHLO),
    "onnx": Format("onnx", "an ONNX model", _ONNX),
}


def export_snippet(format: str, *, shape: tuple[int, ...], dtype: str, output: str) -> str:
    """For the folders of `scripts/export.py`: inputs of this shape and dtype, `output`'s name."""
    return FORMATS[format].snippet.format(shape=shape, dtype=dtype, output=output)


def loading_snippet(format: str, name: str, description: Description) -> str:
    """For the files and folders of `scripts/convert_checkpoint.py`; run beside them."""
    height, width, channels = description.image_shape
    # Without a head the other libraries need other classes.
    template = FORMATS[format].snippet if description.model["num_classes"] else _VIT_JAX
    shape, torch_shape = (1, height, width, channels), (1, channels, height, width)
    return template.format(name=name, shape=shape, torch_shape=torch_shape)
