"""Measures this code beside a reference, in one process and in turn.

    python scripts/benchmark.py step [--config=RECIPE] [--steps=5] [--rounds=8]
    python scripts/benchmark.py load [--variant=B/16] [--rounds=5]

step: what the training loop costs over a plain jitted update, on examples held in memory; images
per second of each turn and the ratios are printed, the median ratio gives the overhead.
load: seconds to load a published file (written for this, with random numbers), beside timm.
"""

import logging
import statistics
import sys
import tempfile
from pathlib import Path

from absl import flags

from vit_jax import launch
from vit_jax.errors import UserError

BENCHMARKS = ("step", "load")


def step(config, workdir):
    logging.getLogger().setLevel(logging.WARNING)  # the loop's own progress is not wanted here
    from vit_jax.benchmark import benchmark_step

    del workdir
    result = benchmark_step(config, steps=flags.FLAGS.steps, rounds=flags.FLAGS.rounds)
    for name in ("loop", "reference"):
        print_turns(name, "images/s", result[name])
    ratios = "  ".join(f"{ratio:.3f}" for ratio in result["ratios"])
    print(f"loop / reference: {ratios}")
    print(f"overhead of the loop: {100 * result['overhead']:.1f} % (median of turns)")


def load(config, workdir):
    logging.getLogger().setLevel(logging.WARNING)
    from vit_jax.benchmark_load import benchmark_load, write_file

    del config, workdir
    variant = flags.FLAGS.variant
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "published.npz"
        write_file(path, variant)
        print(f"{variant}, {path.stat().st_size / 2**20:.0f} MiB")
        result = benchmark_load(path, variant=variant, rounds=flags.FLAGS.rounds)
    for name in ("vit_jax", "timm"):
        print_turns(name, "s", result[name])
    print(f"vit_jax / timm: {result['ratio']:.2f} (median of turns)")


def print_turns(name, unit, values):
    turns = "  ".join(f"{value:.3g}" for value in values)
    print(f"{name:>9}: median {statistics.median(values):.3g} {unit} of turns {turns}")


if __name__ == "__main__":
    flags.DEFINE_integer("steps", 5, "Updates per turn.", lower_bound=1)
    flags.DEFINE_integer("rounds", 8, "How often both take turns.", lower_bound=1)
    flags.DEFINE_string("variant", "B/16", "Model whose file is loaded.")
    with launch.one_line_errors():
        if not launch.asks_for_help():
            if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
                raise UserError(f"name a benchmark: {', '.join(BENCHMARKS)}; see --help.")
            chosen = sys.argv.pop(1)
        else:
            chosen = "step"
    launch.main(
        {"step": step, "load": load}[chosen],
        doc=__doc__,
        default_config=str(launch.ROOT / "configs" / "benchmark.py"),
        workdir=False,
    )
