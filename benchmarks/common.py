"""What the benchmarks share: the recipe, a run on random pixels, turns, ratios, the JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

import vit_jax
from vit_jax import arguments
from vit_jax.command_line import override
from vit_jax.config import get_config, section
from vit_jax.data.datasets import Dataset
from vit_jax.data.preprocess import parse
from vit_jax.parameters.sharding import create_mesh
from vit_jax.plan.subject import Noise
from vit_jax.run import Run, create_run

NUM_EXAMPLES, NUM_CLASSES = 1_281_167, 1000
PACKAGES = ["jax", "jaxlib", "flax", "libtpu", "torch", "timm", "tensorflow-cpu"]
PACKAGES += ["jax-cuda12-pjrt", "jax-cuda13-pjrt", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"]


def create_parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """A parser with --json; `name` is that of the script."""
    epilog = "--config.KEY=VALUE overrides a key of vit_jax/config.py."
    parser = arguments.create_parser(doc, epilog=epilog)
    path = Path(__file__).parent / "results" / f"{name}.json"
    parser.add_argument("--json", type=Path, default=path, help=f"default: results/{name}.json")
    return parser


def create_config(variant: str, batch_size: int, overrides: Sequence[str] = ()) -> ConfigDict:
    """A variant on ImageNet at 224 pixels: clipping and AdamW as in the paper.

    Args:
      variant: of `models.create.VARIANTS`, such as "S/16".
      batch_size: images per update.
      overrides: `KEY=VALUE`.

    Raises:
      UserError: a mistake in one of them.
    """
    config = get_config()
    with config.unlocked():
        config.model = section("model", **vit_jax.get_variant(variant))
        config.evaluators = ConfigDict()
    config.dataset.name = "imagenet2012"
    config.dataset.preprocess = "official_train(224)"
    config.dataset.eval_preprocess = "official_eval(224)"
    config.dataset.batch_size = batch_size
    config.duration.steps = 10_000
    config.optimizer.clip_norm = 1.0
    config.optimizer.weight_decay = 0.1
    return override(config, overrides)


def noise_run(config: ConfigDict) -> Run:
    """The run of a config on the devices of this machine; its images are random pixels."""

    def open_noise(*, name: str, split: str, preprocess: str, **_: Any) -> Dataset:
        class_names = tuple(map(str, range(NUM_CLASSES)))
        return Dataset(name, split, Noise(NUM_EXAMPLES, 0), parse(preprocess), class_names)

    mesh = create_mesh(**config.mesh)
    with jax.set_mesh(mesh):
        return create_run(config, mesh, open_noise)


def seconds_of(function: Callable[..., Any], *arguments: Any, repeat: int) -> float:
    """Of one call of a jitted function, after a first one that compiles it."""
    jax.block_until_ready(function(*arguments))
    start = time.perf_counter()
    for _ in range(repeat):
        out = function(*arguments)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeat


def product_flops(dtype: str) -> float:
    """FLOP/s of one large product of random matrices, in which a device computes all the time."""
    size = 1024 if jax.devices()[0].platform == "cpu" else 8192
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (size, size), dtype) for key in keys)
    return 2 * size**3 / seconds_of(jax.jit(jnp.matmul), a, b, repeat=20)


def take_turns(subjects: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """What each subject returns in each round.

    In turn, so that a machine whose speed drifts drifts for all.
    """
    results: dict[str, list[Any]] = {name: [] for name in subjects}
    for turn in range(rounds):
        print(f"turn {turn + 1} of {rounds}", file=sys.stderr)
        for name, subject in subjects.items():
            results[name].append(subject())
    return results


def compare(
    model: str, case: str, unit: str, figures: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """Rows of the JSON, one for each peer: medians, and the ratio of each turn.

    Args:
      model: variant.
      case: what is measured.
      unit: a rate (`images/s`, `%`), or a cost (`s`, `Mcycles`, ...), of which less is better.
      figures: of each turn, by subject; `vit_jax` are ours. A ratio above 1 is in our favour.
    """
    ours = figures["vit_jax"]
    row = {"model": model, "case": case, "unit": unit, "ours": round(statistics.median(ours), 4)}
    rows = []
    for peer in [name for name in figures if name != "vit_jax"]:
        pairs = list(zip(ours, figures[peer], strict=True))
        ratios = [a / b if unit.endswith(("/s", "%")) else b / a for a, b in pairs]
        about_peer = {
            "peer": peer,
            "theirs": round(statistics.median(figures[peer]), 4),
            "ratio": round(statistics.median(ratios), 4),
            "ratio_of_turns": [round(min(ratios), 4), round(max(ratios), 4)],
        }
        rows.append({**row, **about_peer})
    return rows or [row]


def write_result(path: Path, cases: list[dict[str, Any]], arguments: Sequence[str]) -> None:
    """Prints the cases and writes them with the command, the machine and the versions."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    cpuinfo = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    about = {key.strip(): value.strip() for key, value in re.findall("(.*):(.*)", cpuinfo)}
    sets = [
        feature
        for feature in ("avx512_bf16", "avx512f", "avx2")
        if feature in about.get("flags", "")
    ]
    cpu = ", ".join([about.get("model name", platform.machine()), *sets[:1]])
    device = jax.devices()[0]
    accelerator = "" if device.platform == "cpu" else f", {device.device_kind}"
    kept = [argument for argument in arguments if not argument.startswith(("--clones", "--json"))]
    result = {
        "cases": cases,
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *kept]),
        "machine": f"{os.cpu_count()} cores of {cpu}{accelerator}",
        "python": platform.python_version(),
        "versions": versions,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{markdown(result)}\n\n{path}")


def markdown(result: Mapping[str, Any]) -> str:
    """A result as a line that says how it was made, and a table."""
    # Older results hold the command of before: `benchmark.py step --variant=S/16`.
    command = re.sub(r"^benchmark.py (\w+)", r"python benchmarks/\1.py", result["command"])
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"`{command}` on {result['machine']} ({versions}):",
        "",
        "| model | case | unit | ours | peer | theirs | ratio | of turns |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["cases"]:
        cells = [row["model"], row["case"], row["unit"], f"{row['ours']:.4g}"]
        if "peer" in row:
            low, high = row["ratio_of_turns"]
            spread = f"{low:.2f} to {high:.2f}" if high > low else ""
            cells += [row["peer"], f"{row['theirs']:.4g}", f"**{row['ratio']:.2f}**", spread]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
