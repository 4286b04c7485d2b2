"""Measures what the training loop costs over a plain jitted update.

    python scripts/benchmark.py step [--config=RECIPE] [--steps=5] [--rounds=8]

Loop and reference take turns in one process, on examples held in memory; images per second of
each turn and the ratios are printed, the median ratio gives the overhead.
"""

import logging
import statistics
import sys

from absl import flags

from vit_jax import launch
from vit_jax.errors import UserError

BENCHMARKS = ("step",)


def run(config, workdir):
    logging.getLogger().setLevel(logging.WARNING)  # the loop's own progress is not wanted here
    from vit_jax.benchmark import benchmark_step

    del workdir
    result = benchmark_step(config, steps=flags.FLAGS.steps, rounds=flags.FLAGS.rounds)
    for name in ("loop", "reference"):
        speeds = "  ".join(f"{speed:.1f}" for speed in result[name])
        median = statistics.median(result[name])
        print(f"{name:>9}: median {median:.1f} images/s of turns {speeds}")
    ratios = "  ".join(f"{ratio:.3f}" for ratio in result["ratios"])
    print(f"loop / reference: {ratios}")
    print(f"overhead of the loop: {100 * result['overhead']:.1f} % (median of turns)")


if __name__ == "__main__":
    flags.DEFINE_integer("steps", 5, "Updates per turn.", lower_bound=1)
    flags.DEFINE_integer("rounds", 8, "How often loop and reference take turns.", lower_bound=1)
    with launch.one_line_errors():
        if not launch.asks_for_help():
            if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
                raise UserError(f"name a benchmark: {', '.join(BENCHMARKS)}; see --help.")
            del sys.argv[1]
    launch.main(
        run, doc=__doc__, default_config=str(launch.ROOT / "configs/benchmark.py"), workdir=False
    )
