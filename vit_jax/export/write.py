"""Finished models for programs that know nothing of this one: StableHLO and ONNX.

What is written is read again, and has to give the logits of the model that it was made from, or
nothing is left on disk.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError, check_known, import_extra
from vit_jax.export.card import write_card
from vit_jax.export.convert import compute_logits, unfinished
from vit_jax.export.onnx import OPSET, write_onnx
from vit_jax.export.onnx_graph import INPUT_NAME
from vit_jax.files.paths import write_arrays
from vit_jax.inference.images import input_range
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.parameters.names import count_parameters, flatten_names, unflatten_names
from vit_jax.workdir.description import MODEL_FILE, PARAMS_FILE

# Largest difference, in standard deviations of the logits. JAX compiles the same operations twice,
# so that only the order of float32 sums may change (measured: 0 for B/16). ONNX Runtime has kernels
# of its own: 6e-6 for B/16, 8e-6 for H/14 and R50+B/16; B/16 with the other form of GELU: 3e-4.
TOLERANCES = {"stablehlo": 1e-5, "onnx": 1e-4}
# One bfloat16 rounding is 4e-3 of a value.
BFLOAT16_TOLERANCE = 5e-2

INPUTS: dict[str, Any] = {"float": np.float32, "uint8": np.uint8}
OUTPUTS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "logits": lambda logits: logits,
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
}
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")  # of StableHLO, compiled into one file
STABLEHLO_FILE, ONNX_FILE = "model.stablehlo", "model.onnx"
_FRAMES = "jax_traceback_in_locations_limit"


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
      input: `float`, scaled as the model's preprocessing scales, or `uint8`, raw pixels.
      output: `logits`, or probabilities by `softmax` or `sigmoid` (the loss it was trained with).
      batch: number of images; None leaves it free.

    Returns:
      A report for JSON: `source`, `destination`, `format`, `files` ({name: bytes}),
      `num_parameters`, `max_difference`, `tolerance`, and `unit`, which these are in.

    Raises:
      UserError: an unknown setting; the destination is taken or cannot be written; a package is
        missing; the model has an operation without ONNX form; or what was written computes
        something else.
    """
    check_known("--format", format, TOLERANCES)
    check_known("--input", input, INPUTS)
    check_known("--output", output, OUTPUTS)
    if batch is not None and batch < 1:
        raise UserError(f"--batch={batch} must be at least 1, or free.")
    target = Path(destination)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target} exists; remove it, or choose another destination.")
    model = load_model(source, **model_options)
    if output != "logits" and not model.description.model["num_classes"]:
        raise UserError(f"--output={output}: {model.source} has no head, and no classes.")
    if format == "onnx" and model.module.dtype != jnp.float32:
        raise UserError("--dtype: ONNX files compute in float32; leave it out.")
    free: Any = batch or jax.export.symbolic_shape("b")[0]
    images = jax.ShapeDtypeStruct((free, *model.description.image_shape), INPUTS[input])
    with unfinished(target) as folder:
        folder.mkdir()
        write = {"stablehlo": _write_stablehlo, "onnx": _write_onnx}[format]
        check = compare(write(model, folder, images, output), model, format, images, output)
        model.description.write(folder / MODEL_FILE)
        _write_card(model, folder, format, images, output, check)
    return {
        "source": model.source,
        "destination": str(target),
        "format": format,
        "files": {path.name: path.stat().st_size for path in sorted(target.iterdir())},
        "num_parameters": count_parameters(model.params),
        **check,
    }


def report_text(report: Mapping[str, Any]) -> str:
    """The report of `export_model` for people."""
    lines = [
        f"{report['source']} -> {report['destination']} ({report['format']}, "
        f"{report['num_parameters']:,} parameters)",
        f"  read again: differs by {report['max_difference']:.1g} {report['unit']} "
        f"(at most {report['tolerance']:g})",
        *(f"  wrote {name}, {size:,} bytes" for name, size in report["files"].items()),
    ]
    return "\n".join(lines)


def create_forward(model: Model, output: str) -> Callable[[Any, Any], Any]:
    """(flat parameters, images [B, H, W, C]) -> logits or probabilities [B, K]."""
    module = model.module
    if hasattr(module, "attention"):  # kernels are for one platform
        module = module.clone(attention="reference")

    def forward(params: Mapping[str, Any], images: jax.Array) -> jax.Array:
        if images.dtype == jnp.uint8:
            images = scale_pixels(model, images)
        logits = module.apply({"params": unflatten_names(dict(params))}, images, train=False)
        return OUTPUTS[output](logits)

    return forward


def output_name(output: str) -> str:
    return "logits" if output == "logits" else "probabilities"


def scale_pixels(model: Model, images: Any) -> jax.Array:
    """uint8 [B, H, W, C] -> the floats that the model's preprocessing makes of them."""
    black, white = (end[None, None, None] for end in input_range(model.description))
    return jnp.asarray(images, jnp.float32) * ((white - black) / np.float32(255)) + black


def _write_stablehlo(
    model: Model, folder: Path, images: jax.ShapeDtypeStruct, output: str
) -> Callable[[np.ndarray], Any]:
    """Writes, reads again, and returns what was read as a function.

    Parameters stand beside the program: inside it, B/16 takes four times as long to compile and
    more than twice the memory to load, and 2 GB would be the end.
    """
    import_extra("--format=stablehlo", "flatbuffers", "export")  # what jax.export writes with
    params = flatten_names(model.params)
    specs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in params.items()}
    forward = jax.jit(create_forward(model, output))
    with _without_locations():
        program = jax.export.export(forward, platforms=PLATFORMS)(specs, images)
    (folder / STABLEHLO_FILE).write_bytes(program.serialize())
    write_arrays(folder / PARAMS_FILE, params)
    call = jax.jit(jax.export.deserialize(bytearray((folder / STABLEHLO_FILE).read_bytes())).call)
    with np.load(folder / PARAMS_FILE) as arrays:
        return functools.partial(call, dict(arrays))


@contextlib.contextmanager
def _without_locations() -> Iterator[None]:
    """Programs name the lines they come from: folders of this machine, and of whoever calls."""
    before = getattr(jax.config, _FRAMES)
    jax.config.update(_FRAMES, 0)
    try:
        yield
    finally:
        jax.config.update(_FRAMES, before)


def _write_onnx(
    model: Model, folder: Path, images: jax.ShapeDtypeStruct, output: str
) -> Callable[[np.ndarray], Any]:
    """As `_write_stablehlo`."""
    onnxruntime = import_extra("--format=onnx", "onnxruntime", "export")
    write_onnx(
        folder / ONNX_FILE,
        create_forward(model, output),
        flatten_names(model.params),
        images,
        output_name=output_name(output),
        metadata={"vit_jax.description": json.dumps(model.description.to_json())},
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; it comments on every shape that it cannot infer
    session = onnxruntime.InferenceSession(
        str(folder / ONNX_FILE), options, providers=["CPUExecutionProvider"]
    )
    return lambda images: session.run([output_name(output)], {INPUT_NAME: images})[0]


def compare(
    reopened: Callable[[np.ndarray], Any],
    model: Model,
    format: str,
    images: jax.ShapeDtypeStruct,
    output: str,
) -> dict[str, Any]:
    """Compares what was read again with the model itself on seeded images, on CPU.

    Returns:
      `max_difference`, the `tolerance` of it, and the `unit` of both.

    Raises:
      UserError: they differ by more, or in shape or type.
    """
    try:
        # An accelerator would round products to fewer bits than either file.
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise UserError(
            "the file is checked on the CPU, which JAX_PLATFORMS excludes; add ',cpu' to it."
        ) from error
    unit = "standard deviations of the logits" if output == "logits" else "(absolute)"
    half = model.module.dtype == jnp.bfloat16
    tolerance = BFLOAT16_TOLERANCE if half else TOLERANCES[format]
    rng, worst = np.random.default_rng(0), 0.0
    with jax.default_device(cpu):
        # A free batch has to work for several sizes.
        for batch in images.shape[:1] if isinstance(images.shape[0], int) else (1, 3):
            pixels = rng.integers(0, 256, (batch, *images.shape[1:])).astype(np.uint8)
            floats = np.asarray(scale_pixels(model, pixels))
            logits = compute_logits(model.module, model.params, floats)
            expected = np.asarray(OUTPUTS[output](logits))
            found = np.asarray(reopened(pixels if images.dtype == np.uint8 else floats))
            scale = float(np.std(logits)) if output == "logits" else 1.0
            scale = scale or float(np.max(np.abs(logits))) or 1.0  # logits may be all the same
            same = (found.shape, found.dtype) == (expected.shape, expected.dtype)
            difference = np.max(np.abs(found - expected)) / scale if same else np.inf
            worst = float(np.maximum(worst, difference))  # unlike max, it keeps NaN
    if not worst <= tolerance:
        raise UserError(
            f"the {format} file was written and read again, and differs by {worst:.2g} {unit} "
            f"from the model (allowed: {tolerance:g}); it was removed. Please report this."
        )
    return {"max_difference": worst, "tolerance": tolerance, "unit": unit}


def _write_card(
    model: Model,
    folder: Path,
    format: str,
    images: jax.ShapeDtypeStruct,
    output: str,
    check: Mapping[str, Any],
) -> None:
    batch = images.shape[0] if isinstance(images.shape[0], int) else None
    what, dtype = output_name(output), np.dtype(images.dtype).name
    facts = {
        "Batch size": str(batch or "free"),
        "Computes in": np.dtype(model.module.dtype).name,
        "Result": f"`{what}`" if what == output else f"`{what}`, by {output}",
        "Checked": "read again after writing, it differed from vit_jax by at most "
        f"{check['tolerance']:g} {check['unit']}",
    }
    if format == "onnx":
        facts["Operator set"] = str(OPSET)
    else:
        facts["Platforms"] = ", ".join(PLATFORMS)
        promise = "`jax.export` promises that releases of the following six months read it"
        facts["Written by jax"] = f"{jax.__version__}; {promise}"
    sizes = ", ".join(map(str, (batch or "batch", *images.shape[1:])))
    pixels = "pixels from 0 to 255. The last step below, the scaling, is part of the model."
    scaling = pixels if dtype == "uint8" else "scaled as below."
    write_card(
        folder,
        model,
        format,
        facts=facts,
        inputs=f"`{INPUT_NAME}`: {dtype} [{sizes}], {scaling}",
        shape=(batch or 2, *images.shape[1:]),
        dtype=dtype,
        output=what,
    )
