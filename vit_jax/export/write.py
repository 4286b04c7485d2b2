"""Exports finished models for other programs, StableHLO and ONNX, and reads the files back."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError, import_extra
from vit_jax.export import convert
from vit_jax.export.onnx import INPUT_NAME, OPSET, write_onnx
from vit_jax.files.paths import to_path, write_arrays, write_json
from vit_jax.inference.images import input_range
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.kinds import check_known
from vit_jax.models.create import clone_with
from vit_jax.trees import flatten_names, unflatten_names
from vit_jax.workdir.description import MODEL_FILE, PARAMS_FILE

# Largest difference, in standard deviations of the logits. StableHLO: only the order of float32
# sums may change (measured: 0 for B/16). ONNX Runtime has its own kernels: 6e-6 for B/16, 8e-6 for
# H/14 and R50+B/16; B/16 with the other form of GELU: 3e-4.
TOLERANCES = {"stablehlo": 1e-5, "onnx": 1e-4}
# One bfloat16 rounding is 4e-3 of a value.
BFLOAT16_TOLERANCE = 5e-2

INPUTS: dict[str, Any] = {"float": np.float32, "uint8": np.uint8}
# Name of the result, and how it is computed from logits.
OUTPUTS: dict[str, tuple[str, Callable[[jax.Array], jax.Array]]] = {
    "logits": ("logits", lambda logits: logits),
    "softmax": ("probabilities", jax.nn.softmax),
    "sigmoid": ("probabilities", jax.nn.sigmoid),
}
Reopened = Callable[[np.ndarray], Any]  # what was written and read back: images -> output
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")  # of StableHLO, compiled into one file
READERS = {
    "stablehlo": f"jax {jax.__version__} and releases up to six months later, as it promises; on "
    f"{', '.join(PLATFORMS)}",
    "onnx": f"ONNX Runtime and others, with operator set {OPSET}",
}


def export_model(
    source: str | Path,
    destination: str | Path,
    *,
    format: str,
    input: str = "float",
    output: str = "logits",
    batch: int | None = None,
    **model_options: Any,
) -> dict[str, Any]:
    """Writes a folder with the model, `model.json` and README.md (the model card).

    StableHLO: `model.stablehlo` (of `jax.export`) and `params.npz`. ONNX: `model.onnx`, and
    `model.onnx.data` for more than 2 GB.

    Args:
      source: of the model, see `load_model`, which takes `model_options`.
      destination: a folder that does not exist yet, or is empty.
      format: a key of `TOLERANCES`.
      input: `float`, scaled by the model's preprocessing, or `uint8`, raw pixels.
      output: `logits`, or probabilities by `softmax` or `sigmoid` (the loss it was trained with).
      batch: number of images; None leaves it free.

    Returns the result of `convert.finish`. UserError for an unknown setting, a destination that
    exists, a package that is missing, or files that compute something else.
    """
    check_known("--format", format, TOLERANCES)
    check_known("--input", input, INPUTS)
    check_known("--output", output, OUTPUTS)
    if batch is not None and batch < 1:
        raise UserError(f"--batch={batch} must be at least 1, or free.")
    convert.check_destination(target := to_path(destination), format)
    model = load_model(source, **model_options)
    if output != "logits" and not model.description.model["num_classes"]:
        raise UserError(f"--output={output}: {model.source} has no head, so no classes.")
    if parse(model.description.eval_preprocess or "decode").patchify:
        height, width, _ = model.description.image_shape
        text = f"--format={format} is for images of one size; the model takes any"
        raise UserError(f"{text}: --preprocess='decode|resize({height}, {width})'.")
    if format == "onnx" and model.module.dtype != jnp.float32:
        raise UserError("--dtype: ONNX files compute in float32; omit it.")
    free: Any = batch or jax.export.symbolic_shape("b")[0]
    dtype = np.int32 if model.is_text else INPUTS[input]
    images = jax.ShapeDtypeStruct((free, *model.description.image_shape), dtype)
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise UserError("the file is verified on the CPU; add ',cpu' to JAX_PLATFORMS.") from error
    with convert.unfinished(target) as folder:
        folder.mkdir()
        write = {"stablehlo": _write_stablehlo, "onnx": _write_onnx}[format]
        # Layers have forms for the accelerator of this machine, which may also round products
        # more coarsely than either file.
        with jax.default_device(cpu):
            check = compare(write(model, folder, images, output), model, format, images, output)
        write_json(folder / MODEL_FILE, model.description.to_json())
        result = OUTPUTS[output][0]
        facts = {
            "Result": f"`{result}`" if result == output else f"`{result}`, by {output}",
            "Computes in": np.dtype(model.module.dtype).name,
            "Read by": READERS[format],
        }
        card: Any = {"facts": facts, "images": images, "output": result}
        return convert.finish(folder, target, model, format, check, **card)


def create_forward(model: Model, output: str) -> Callable[[Any, Any], Any]:
    """(flat parameters, images [B, H, W, C]) -> logits or probabilities [B, K]."""
    module = clone_with(model.module, attention="reference")  # kernels are platform-specific

    def forward(params: Mapping[str, Any], images: jax.Array) -> jax.Array:
        if images.dtype == jnp.uint8:
            images = scale_pixels(model, images)
        logits = module.apply({"params": unflatten_names(dict(params))}, images, train=False)
        return OUTPUTS[output][1](logits)

    return forward


def scale_pixels(model: Model, images: Any) -> jax.Array:
    """uint8 [B, H, W, C] -> the floats that the model's preprocessing turns them into."""
    black, white = (end[None, None, None] for end in input_range(model.description))
    return jnp.asarray(images, jnp.float32) * ((white - black) / np.float32(255)) + black


def _write_stablehlo(model: Model, folder: Path, images: Any, output: str) -> Reopened:
    """Parameters are stored separately: inside the program they would slow down its loading."""
    import_extra("--format=stablehlo", "flatbuffers", "export")  # used by jax.export
    params = flatten_names(model.params)
    specs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in params.items()}
    forward = jax.jit(create_forward(model, output))
    frames = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, frames)
    try:  # programs contain source locations: folders of this machine and the caller's
        jax.config.update(frames, 0)
        program = jax.export.export(forward, platforms=PLATFORMS)(specs, images)
    finally:
        jax.config.update(frames, before)
    path = folder / "model.stablehlo"
    path.write_bytes(program.serialize())
    write_arrays(folder / PARAMS_FILE, params)
    call = jax.jit(jax.export.deserialize(bytearray(path.read_bytes())).call)
    with np.load(folder / PARAMS_FILE) as arrays:
        return functools.partial(call, dict(arrays))


def _write_onnx(model: Model, folder: Path, images: Any, output: str) -> Reopened:
    onnxruntime = import_extra("--format=onnx", "onnxruntime", "export")
    name, path, params = OUTPUTS[output][0], folder / "model.onnx", flatten_names(model.params)
    write_onnx(path, create_forward(model, output), params, images, output_name=name)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only; it warns of every shape it cannot infer
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: session.run([name], {INPUT_NAME: images})[0]


def compare(
    reopened: Reopened, model: Model, format: str, images: jax.ShapeDtypeStruct, output: str
) -> dict[str, Any]:
    """Compares what was read back with the model itself on seeded images."""
    unit = "standard deviations of the logits" if output == "logits" else "in probabilities"
    tolerance = TOLERANCES[format] if model.module.dtype == jnp.float32 else BFLOAT16_TOLERANCE
    rng, pairs = np.random.default_rng(0), []
    # A free batch must work for several sizes.
    for batch in images.shape[:1] if isinstance(images.shape[0], int) else (1, 3):
        pixels = inputs = model.sample(batch)
        if not model.is_text:
            pixels = rng.integers(0, 256, (batch, *images.shape[1:])).astype(np.uint8)
            inputs = np.asarray(scale_pixels(model, pixels))
        logits = convert.compute_logits(model.module, model.params, inputs)
        expected = np.asarray(OUTPUTS[output][1](logits))
        actual = np.asarray(reopened(pixels if images.dtype == np.uint8 else inputs))
        is_flat = output != "logits" or np.std(expected) == 0.0  # a head may be zero
        scale = 1.0 if is_flat else float(np.std(expected))
        pairs.append((expected / scale, actual / scale))
    return convert.check_same(pairs, f"the {format} file", tolerance, unit)
