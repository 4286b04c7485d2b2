"""Finished models for programs that know nothing of this one: StableHLO and ONNX.

What is written is read again, and has to give the logits of the model that it was made from, or
nothing is left on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.export.check import largest_difference, pixel_scaling
from vit_jax.export.settings import OUTPUTS, ExportSettings
from vit_jax.inference.load import PretrainedModel, load_model
from vit_jax.onnx.trace import build_graph
from vit_jax.onnx.write import write_onnx
from vit_jax.parameters.names import count_parameters, flatten_names, unflatten_names
from vit_jax.pretrained.cards.card import write_card
from vit_jax.pretrained.cards.snippets import export_snippet
from vit_jax.pretrained.files.npz import write_arrays
from vit_jax.workdir.files import MODEL_FILE, PARAMS_FILE

# Largest difference, in standard deviations of the logits. JAX compiles the same operations twice,
# so that only the order of float32 sums may change (measured: 0 for B/16). ONNX Runtime has kernels
# of its own: 6e-6 for B/16, 8e-6 for H/14 and R50+B/16; B/16 with the other form of GELU: 3e-4.
TOLERANCES = {"stablehlo": 1e-5, "onnx": 1e-4}
# One bfloat16 rounding is 4e-3 of a value.
BFLOAT16_TOLERANCE = 5e-2

STABLEHLO_FILE, ONNX_FILE = "model.stablehlo", "model.onnx"
INPUT_NAME = "images"
_FRAMES = "jax_traceback_in_locations_limit"


def export(
    source: str,
    destination: str,
    settings: ExportSettings,
    **load_options: Any,
) -> dict[str, Any]:
    """Loads `source` (see `load_model`, also for `load_options`) and exports it."""
    if settings.format == "onnx" and load_options.get("dtype", "float32") != "float32":
        raise UserError("--dtype: ONNX files compute in float32; leave it out.")
    return export_model(load_model(source, **load_options), destination, settings)


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
    scratch = target.parent / f".{target.name}.{os.getpid()}.tmp"
    try:
        # In a folder of the final name, which the card shows.
        folder = scratch / target.name
        folder.mkdir(parents=True)
        run = {"stablehlo": _write_stablehlo, "onnx": _write_onnx}[settings.format]
        reopened = run(model, folder, settings)
        difference, tolerance = _check(model, settings, reopened)
        model.description.write(folder / MODEL_FILE)
        _write_card(model, folder, settings, tolerance)
        os.replace(folder, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
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
    scale, offset = pixel_scaling(model.description)

    def forward(params: Mapping[str, Any], images: jax.Array) -> jax.Array:
        if settings.input == "uint8":
            images = jnp.asarray(images, jnp.float32) * scale + offset
        logits = model.module.apply({"params": unflatten_names(dict(params))}, images, train=False)
        return OUTPUTS[settings.output](logits)

    return forward


def _write_stablehlo(
    model: PretrainedModel, folder: Path, settings: ExportSettings
) -> Callable[[np.ndarray], Any]:
    """Writes, reads again, and returns what was read as a function.

    Parameters stand beside the program: inside it, B/16 takes four times as long to compile and
    more than twice the memory to load, and 2 GB would be the end.
    """
    try:
        import flatbuffers  # noqa: F401  # what jax.export writes with
    except ImportError as error:
        raise UserError(
            'StableHLO files need the package flatbuffers: pip install "vit_jax[export]".'
        ) from error
    params = flatten_names(model.params)
    specs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in params.items()}
    forward = jax.jit(create_forward(model, settings))
    with _without_locations():
        program = jax.export.export(forward, platforms=settings.platforms)(
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
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(
            'ONNX files are checked with the package onnxruntime: pip install "vit_jax[export]".'
        ) from error
    images = settings.images(model.description.image_shape)
    params = flatten_names(model.params)
    graph, result, output = build_graph(
        create_forward(model, settings), params, images, input_name=INPUT_NAME
    )
    write_onnx(
        folder / ONNX_FILE,
        graph,
        result,
        images=images,
        output=output,
        output_name=settings.output_name,
        opset=settings.opset,
        metadata={"vit_jax.description": json.dumps(model.description.to_json())},
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; it comments on every shape that it cannot infer
    session = onnxruntime.InferenceSession(
        str(folder / ONNX_FILE), options, providers=["CPUExecutionProvider"]
    )
    return lambda images: session.run([settings.output_name], {INPUT_NAME: images})[0]


def _check(
    model: PretrainedModel, settings: ExportSettings, reopened: Callable[[np.ndarray], Any]
) -> tuple[float, float]:
    """The largest difference from the model and the largest that is allowed, or a UserError."""
    tolerance = TOLERANCES[settings.format]
    if model.module.dtype == jnp.bfloat16:
        tolerance = BFLOAT16_TOLERANCE
    difference = largest_difference(
        reopened, model.module, model.params, model.description, settings
    )
    if not difference <= tolerance:
        raise UserError(
            f"the {settings.format} file was written and read again, and differs by "
            f"{difference:.2g} {settings.unit} from the model (allowed: {tolerance:g}); it was "
            "removed. Please report this."
        )
    return difference, tolerance


def _write_card(
    model: PretrainedModel, folder: Path, settings: ExportSettings, tolerance: float
) -> None:
    shape = model.description.image_shape
    batch = settings.batch or "batch"
    facts = {
        "Batch size": str(settings.batch or "free"),
        "Computes in": np.dtype(model.module.dtype).name,
        "Result": f"`{settings.output_name}`"
        + (f", by {settings.output}" if settings.output != "logits" else ""),
        "Checked": f"read again after writing, it differed from vit_jax by at most {tolerance:g} "
        f"{settings.unit}",
    }
    if settings.format == "onnx":
        facts["Operator set"] = str(settings.opset)
    else:
        facts["Platforms"] = ", ".join(settings.platforms)
        facts["Written by jax"] = f"{jax.__version__}; `jax.export` promises that releases of the "
        facts["Written by jax"] += "following six months read it"
    sizes = ", ".join(map(str, (batch, *shape)))
    inputs = f"`{INPUT_NAME}`: float32 [{sizes}], scaled as below."
    if settings.input == "uint8":
        inputs = f"`{INPUT_NAME}`: uint8 [{sizes}], pixels from 0 to 255. The last step below, "
        inputs += "the scaling, is part of the model."
    write_card(
        folder,
        description=model.description,
        format=settings.format,
        source=model.source,
        report=model.report,
        facts=facts,
        inputs=inputs,
        snippet=export_snippet(
            settings.format,
            shape=(settings.batch or 2, *shape),
            dtype=np.dtype(settings.dtype).name,
            output=settings.output_name,
        ),
    )
