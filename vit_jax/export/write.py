"""Finished models for programs that know nothing of this one: StableHLO and ONNX.

What is written is read again, and has to give the logits of the model that it was made from, or
nothing is left on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError, import_extra
from vit_jax.export.card import write_card
from vit_jax.export.onnx import OPSET, write_onnx
from vit_jax.export.settings import INPUT_NAME, OUTPUTS, ExportSettings
from vit_jax.files.atomic import write_arrays
from vit_jax.inference.inputs import input_range
from vit_jax.inference.load import PretrainedModel
from vit_jax.parameters.names import count_parameters, flatten_names, unflatten_names
from vit_jax.workdir.description import MODEL_FILE, PARAMS_FILE

# Largest difference, in standard deviations of the logits. JAX compiles the same operations twice,
# so that only the order of float32 sums may change (measured: 0 for B/16). ONNX Runtime has kernels
# of its own: 6e-6 for B/16, 8e-6 for H/14 and R50+B/16; B/16 with the other form of GELU: 3e-4.
TOLERANCES = {"stablehlo": 1e-5, "onnx": 1e-4}
# One bfloat16 rounding is 4e-3 of a value.
BFLOAT16_TOLERANCE = 5e-2

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")  # of StableHLO, compiled into one file
STABLEHLO_FILE, ONNX_FILE = "model.stablehlo", "model.onnx"
_FRAMES = "jax_traceback_in_locations_limit"


def export_model(
    model: PretrainedModel, destination: str | os.PathLike[str], settings: ExportSettings
) -> dict[str, Any]:
    """Writes a folder with the model, `model.json` and README.md (the model card).

    StableHLO: `model.stablehlo` (of `jax.export`) and `params.npz`. ONNX: `model.onnx`, and
    `model.onnx.data` for more than 2 GB.

    Args:
      model: what to write.
      destination: a folder that does not exist yet, or is empty.
      settings: how.

    Returns:
      A report for JSON: `source`, `destination`, `format`, `files` ({name: bytes}),
      `num_parameters`, `max_difference`, `tolerance`, and `unit`, which these are in.

    Raises:
      UserError: the destination is taken or cannot be written; a package is missing; the model
        has an operation without ONNX form; or what was written computes something else.
    """
    target = Path(destination)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target} exists; remove it, or choose another destination.")
    if settings.output != "logits" and not model.description.model["num_classes"]:
        raise UserError(f"--output={settings.output}: {model.source} has no head, and no classes.")
    if settings.format == "onnx" and model.module.dtype != jnp.float32:
        raise UserError("--dtype: ONNX files compute in float32; leave it out.")
    tolerance = TOLERANCES[settings.format]
    if model.module.dtype == jnp.bfloat16:
        tolerance = BFLOAT16_TOLERANCE
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        folder = Path(scratch) / target.name  # of the final name, which the card shows
        folder.mkdir()
        write = {"stablehlo": _write_stablehlo, "onnx": _write_onnx}[settings.format]
        difference = largest_difference(write(model, folder, settings), model, settings)
        if not difference <= tolerance:
            raise UserError(
                f"the {settings.format} file was written and read again, and differs by "
                f"{difference:.2g} {settings.unit} from the model (allowed: {tolerance:g}); it "
                "was removed. Please report this."
            )
        model.description.write(folder / MODEL_FILE)
        _write_card(model, folder, settings, tolerance)
        os.replace(folder, target)
    return {
        "source": model.source,
        "destination": str(target),
        "format": settings.format,
        "files": {path.name: path.stat().st_size for path in sorted(target.iterdir())},
        "num_parameters": count_parameters(model.params),
        "max_difference": difference,
        "tolerance": tolerance,
        "unit": settings.unit,
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


def create_forward(model: PretrainedModel, settings: ExportSettings) -> Callable[[Any, Any], Any]:
    """(flat parameters, images [B, H, W, C]) -> logits or probabilities [B, K]."""

    module = model.module
    if hasattr(module, "attention"):  # kernels are for one platform
        module = module.clone(attention="reference")

    def forward(params: Mapping[str, Any], images: jax.Array) -> jax.Array:
        if settings.input == "uint8":
            images = scale_pixels(model, images)
        logits = module.apply({"params": unflatten_names(dict(params))}, images, train=False)
        return OUTPUTS[settings.output](logits)

    return forward


def scale_pixels(model: PretrainedModel, images: Any) -> jax.Array:
    """uint8 [B, H, W, C] -> the floats that the model's preprocessing makes of them."""
    black, white = (end[None, None, None] for end in input_range(model.description))
    return jnp.asarray(images, jnp.float32) * ((white - black) / np.float32(255)) + black


def _write_stablehlo(
    model: PretrainedModel, folder: Path, settings: ExportSettings
) -> Callable[[np.ndarray], Any]:
    """Writes, reads again, and returns what was read as a function.

    Parameters stand beside the program: inside it, B/16 takes four times as long to compile and
    more than twice the memory to load, and 2 GB would be the end.
    """
    import_extra("--format=stablehlo", "flatbuffers", "export")  # what jax.export writes with
    params = flatten_names(model.params)
    specs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in params.items()}
    forward = jax.jit(create_forward(model, settings))
    with _without_locations():
        program = jax.export.export(forward, platforms=PLATFORMS)(
            specs, settings.images(model.description.image_shape)
        )
    (folder / STABLEHLO_FILE).write_bytes(program.serialize())
    write_arrays(folder / PARAMS_FILE, params)
    read = jax.export.deserialize(bytearray((folder / STABLEHLO_FILE).read_bytes()))
    with np.load(folder / PARAMS_FILE) as arrays:
        read_params = dict(arrays)
    call = jax.jit(read.call)
    return lambda images: call(read_params, images)


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
    model: PretrainedModel, folder: Path, settings: ExportSettings
) -> Callable[[np.ndarray], Any]:
    """As `_write_stablehlo`."""
    onnxruntime = import_extra("--format=onnx", "onnxruntime", "export")
    write_onnx(
        folder / ONNX_FILE,
        create_forward(model, settings),
        flatten_names(model.params),
        settings.images(model.description.image_shape),
        output_name=settings.output_name,
        metadata={"vit_jax.description": json.dumps(model.description.to_json())},
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; it comments on every shape that it cannot infer
    session = onnxruntime.InferenceSession(
        str(folder / ONNX_FILE), options, providers=["CPUExecutionProvider"]
    )
    return lambda images: session.run([settings.output_name], {INPUT_NAME: images})[0]


def largest_difference(
    reopened: Callable[[np.ndarray], Any], model: PretrainedModel, settings: ExportSettings
) -> float:
    """Compares what was read again with the model itself on seeded images, on CPU.

    Returns:
      The largest difference in `settings.unit`; infinite where shapes or types differ.
    """
    try:
        # An accelerator would round products to fewer bits than either file.
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise UserError(
            "the file is checked on the CPU, which JAX_PLATFORMS excludes; add ',cpu' to it."
        ) from error
    apply = jax.jit(lambda p, x: model.module.apply({"params": p}, x, train=False))
    rng, worst = np.random.default_rng(0), 0.0
    with jax.default_device(cpu):
        # A free batch has to work for several sizes.
        for batch in (1, 3) if settings.batch is None else (settings.batch,):
            shape = (batch, *model.description.image_shape)
            pixels = rng.integers(0, 256, shape).astype(np.uint8)
            floats = np.asarray(scale_pixels(model, pixels))
            logits = apply(model.params, floats)
            expected = np.asarray(OUTPUTS[settings.output](logits))
            found = np.asarray(reopened(pixels if settings.input == "uint8" else floats))
            if (found.shape, found.dtype) != (expected.shape, expected.dtype):
                return np.inf
            unit = float(np.std(logits)) if settings.output == "logits" else 1.0
            unit = unit or float(np.max(np.abs(logits))) or 1.0  # logits may be all the same
            # Unlike max, it keeps NaN.
            worst = float(np.maximum(worst, np.max(np.abs(found - expected)) / unit))
    return worst


def _write_card(
    model: PretrainedModel, folder: Path, settings: ExportSettings, tolerance: float
) -> None:
    images, what = settings.images(model.description.image_shape), settings.output_name
    facts = {
        "Batch size": str(settings.batch or "free"),
        "Computes in": np.dtype(model.module.dtype).name,
        "Result": f"`{what}`" if what == settings.output else f"`{what}`, by {settings.output}",
        "Checked": f"read again after writing, it differed from vit_jax by at most {tolerance:g} "
        f"{settings.unit}",
    }
    if settings.format == "onnx":
        facts["Operator set"] = str(OPSET)
    else:
        facts["Platforms"] = ", ".join(PLATFORMS)
        promise = "`jax.export` promises that releases of the following six months read it"
        facts["Written by jax"] = f"{jax.__version__}; {promise}"
    sizes = ", ".join(map(str, (settings.batch or "batch", *images.shape[1:])))
    inputs = f"`{INPUT_NAME}`: float32 [{sizes}], scaled as below."
    if settings.input == "uint8":
        inputs = f"`{INPUT_NAME}`: uint8 [{sizes}], pixels from 0 to 255. The last step below, "
        inputs += "the scaling, is part of the model."
    write_card(
        folder,
        model,
        settings.format,
        facts=facts,
        inputs=inputs,
        shape=(settings.batch or 2, *images.shape[1:]),
        dtype=np.dtype(images.dtype).name,
        output=what,
    )
