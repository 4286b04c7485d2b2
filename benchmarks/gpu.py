"""What an accelerator does with products, with each attention, and with a run that is interrupted.

    python benchmarks/gpu.py products     FLOP/s of one large product
    python benchmarks/gpu.py attention    seconds, and errors beside float32 at full precision
    python benchmarks/gpu.py training     a run of the quickstart, whole and ended by SIGTERM

gpu.sh calls them. Status 1: an attention is less exact than the reference in the same dtype, or
the resumed run has other parameters.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax import launch

sys.path.append(str(launch.ROOT))

from benchmarks import common
from vit_jax.errors import UserError
from vit_jax.models.attention.choose import ATTENTIONS, AttentionFn, check_attention

Cases = list[dict[str, Any]]
# Variant and pixels: tokens, heads, their width.
SIZES = {"B/16 at 224": (197, 12, 64), "B/16 at 384": (577, 12, 64), "H/14 at 224": (257, 16, 80)}
# In a sum of another order: half a rounding in bfloat16, five in float32.
ROUNDINGS = {"bfloat16": 0.5 * 2**-9, "float32": 5 * 2**-24}


def main(argv: Sequence[str]) -> None:
    parser = common.arguments_parser(__doc__, "gpu")
    parser.add_argument("what", choices=("products", "attention", "training"))
    parser.add_argument("--batch_size", type=int, default=64, help="of attention (default: 64)")
    parser.add_argument("--steps", type=int, default=300, help="of training (default: 300)")
    arguments = parser.parse_args(argv)
    measure = {"products": products, "attention": attention, "training": training}
    cases, failed = measure[arguments.what](arguments)
    common.write_result(arguments.json, cases, argv)
    if failed:
        print(f"FAILED: {failed}", file=sys.stderr)
        sys.exit(1)


def row(model: str, case: str, unit: str, figure: float) -> Cases:
    print(f"{model}, {case}: {figure:.4g} {unit}", file=sys.stderr)
    return common.compare(model, case, unit, {"vit_jax": [figure]})


def products(_: argparse.Namespace) -> tuple[Cases, str]:
    """By dtype; float32 as JAX multiplies it by default (TF32 on NVIDIA's GPUs), and in full."""
    cases = []
    for dtype, precision in (("bfloat16", None), ("float32", None), ("float32", "highest")):
        with jax.default_matmul_precision(precision):
            rate = common.product_flops(dtype)
        name = f"product, {dtype}, {precision or 'default'} precision"
        cases += row("-", name, "TFLOP/s", rate / 1e12)
    return cases, ""


def attention(arguments: argparse.Namespace) -> tuple[Cases, str]:
    """Forward and backward of one layer, by size, dtype and implementation."""
    cases, failed = [], []
    platform = jax.devices()[0].platform
    for model, sizes in SIZES.items():
        shape = (arguments.batch_size, *sizes)
        arrays = [jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 4)]
        with jax.default_matmul_precision("highest"):
            exact = gradients(AttentionFn("reference", train=True))(*arrays)
        for dtype in ("bfloat16", "float32"):
            case = f"{dtype}, {shape[0]} x {shape[1]} tokens"
            low = [array.astype(dtype) for array in arrays]
            allowed = math.inf
            for name in ATTENTIONS:  # the reference first
                try:
                    check_attention(name, platform, dtype)
                except UserError:
                    continue
                run = gradients(AttentionFn(name, train=True))
                found = max(map(error_of, run(*low), exact))
                cases += row(model, f"{name}, {case}", "ms", 1e3 * seconds(run, low))
                cases += row(model, f"{name}, {case}: error", "ppm of the largest", 1e6 * found)
                if name == "reference":
                    allowed = 1.25 * found + ROUNDINGS[dtype]
                if not found <= allowed:
                    failed.append(f"{name}, {model}, {case}: error {found:.2g} > {allowed:.2g}")
            dropped = functools.partial(
                AttentionFn("auto", train=True),
                dropout_rng=jax.random.key(0),
                dropout_rate=0.1,
                deterministic=False,
            )
            run = gradients(dropped)
            cases += row(model, f"weights dropped, {case}", "ms", 1e3 * seconds(run, low))
    return cases, "; ".join(failed)


def gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """(queries, keys, values, cotangent) -> (output, three gradients), jitted."""

    @jax.jit
    def run(query: jax.Array, key: jax.Array, value: jax.Array, d_out: jax.Array) -> Any:
        out, backward = jax.vjp(function, query, key, value)
        return out, *backward(d_out.astype(out.dtype))

    return run


def error_of(found: jax.Array, exact: jax.Array) -> float:
    """The root of the mean squared error over the largest entry."""
    exact = jnp.asarray(exact, jnp.float32)
    error = jnp.sqrt(jnp.mean(jnp.square(jnp.asarray(found, jnp.float32) - exact)))
    return float(error / jnp.max(jnp.abs(exact)))


def seconds(run: Callable[..., Any], arrays: Sequence[jax.Array]) -> float:
    repeat = 1 if jax.devices()[0].platform == "cpu" else 50
    return common.seconds_of(run, *arrays, repeat=repeat)


def training(arguments: argparse.Namespace) -> tuple[Cases, str]:
    """Of scripts/train.py; seconds include start and compilation."""
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder, "whole"), Path(folder, "parts")
        command = [
            sys.executable,
            f"{launch.ROOT}/scripts/train.py",
            f"--config={launch.ROOT}/configs/quickstart.py",
            "--config.model.dtype=bfloat16",
            "--config.model.dropout_rate=0.1",
            f"--config.duration.steps={arguments.steps}",
            f"--config.checkpoint.every_steps={arguments.steps // 3}",
        ]
        start = time.perf_counter()
        subprocess.run([*command, f"--workdir={whole}"], check=True)
        cases = row("quickstart", f"{arguments.steps} updates", "s", time.perf_counter() - start)
        results = json.loads((whole / "results.json").read_text())
        cases += row("quickstart", "the loop", "images/s", results["images_per_second"])
        process = subprocess.Popen([*command, f"--workdir={parts}"])
        try:
            while process.poll() is None and not any(
                path.name.isdigit() for path in parts.glob("checkpoints/*")
            ):
                time.sleep(0.01)
            process.terminate()
            start = time.perf_counter()
            process.wait()
            cases += row("quickstart", "SIGTERM to exit", "s", time.perf_counter() - start)
        finally:
            process.kill()
        subprocess.run([*command, f"--workdir={parts}"], check=True)
        same = (whole / "params.npz").read_bytes() == (parts / "params.npz").read_bytes()
    cases += row("quickstart", "bit-identical after the resume", "1: yes", float(same))
    return cases, "" if same else "the resumed run has other parameters"


if __name__ == "__main__":
    launch.use_huge_pages()
    with launch.one_line_errors():
        main(sys.argv[1:])
