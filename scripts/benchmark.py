"""Measures this code beside a reference, in turn.

    python scripts/benchmark.py step [--config=RECIPE] [--steps=5] [--rounds=8]
    python scripts/benchmark.py load [--variant=B/16] [--rounds=5]
    python scripts/benchmark.py input [--peer=CLONE_OF_BIG_VISION] [--num_images=4096]

step: what the training loop costs over a plain jitted update, on examples held in memory; images
per second of each turn and the ratios are printed, the median ratio gives the overhead.
load: seconds to load a published file (written for this, with random numbers), beside timm.
input: images per second and processor time of the input pipeline, beside big_vision's on the same
JPEGs (made for this); `taskset -c 0` before the command measures on one core.
"""

import logging
import statistics
import sys
import tempfile
from pathlib import Path

from absl import flags

from vit_jax import command_line, launch
from vit_jax.errors import UserError

BENCHMARKS = ("step", "load", "input")


def step(config, workdir):
    logging.getLogger().setLevel(logging.WARNING)  # the loop's own progress is not wanted here
    from vit_jax.measure.step import benchmark_step

    del workdir
    result = benchmark_step(config, steps=flags.FLAGS.steps, rounds=flags.FLAGS.rounds)
    for name in ("loop", "reference"):
        print_turns(name, "images/s", result[name])
    ratios = "  ".join(f"{ratio:.3f}" for ratio in result["ratios"])
    print(f"loop / reference: {ratios}")
    print(f"overhead of the loop: {100 * result['overhead']:.1f} % (median of turns)")


def load(config, workdir):
    logging.getLogger().setLevel(logging.WARNING)
    from vit_jax.measure.weights import benchmark_load

    del config, workdir
    given = flags.FLAGS
    with tempfile.TemporaryDirectory() as folder:
        result = benchmark_load(Path(folder), variant=given.variant, rounds=given.rounds)
    for name in ("vit_jax", "timm"):
        print_turns(name, "s", result[name])
    print(f"vit_jax / timm: {result['ratio']:.2f} (median of turns)")


def input_pipeline(config, workdir):
    from vit_jax.measure.input import Settings, benchmark_input, compare

    del workdir
    given = flags.FLAGS
    settings = Settings(
        batch_size=config.dataset.batch_size,
        num_images=given.num_images,
        num_threads=config.loader.num_threads,
        num_workers=config.loader.num_workers,
    )
    if not given.peer:
        print("without --peer=CLONE_OF_BIG_VISION there is nothing to compare with")
    with tempfile.TemporaryDirectory() as folder:
        speeds = benchmark_input(
            Path(folder),
            settings,
            preprocess=config.dataset.preprocess,
            peer=given.peer,
            rounds=given.rounds,
        )
    ours = speeds["vit_jax"]
    for name, turns in speeds.items():
        print_turns(name, "images/s", [turn.images_per_second for turn in turns])
        print_turns(name, "CPU ms/image", [turn.cpu_ms_per_image for turn in turns])
        if turns is not ours:
            rate, cpu = compare(ours, turns)
            print(f"vit_jax / {name}: {rate:.2f} in images/s, {cpu:.2f} per CPU second (medians)")


def print_turns(name, unit, values):
    turns = "  ".join(f"{value:.3g}" for value in values)
    print(f"{name:>16}: median {statistics.median(values):.3g} {unit} of turns {turns}")


if __name__ == "__main__":
    flags.DEFINE_integer("steps", 5, "Updates per turn.", lower_bound=1)
    flags.DEFINE_integer("rounds", 8, "How often both take turns.", lower_bound=1)
    flags.DEFINE_string("variant", "B/16", "Model whose file is loaded.")
    flags.DEFINE_string("peer", "", "Clone of github.com/google-research/big_vision.")
    flags.DEFINE_integer("num_images", 4096, "Images per turn of the input.", lower_bound=1)
    with launch.one_line_errors():
        if not command_line.asks_for_help():
            if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
                raise UserError(f"name a benchmark: {', '.join(BENCHMARKS)}; see --help.")
            chosen = sys.argv.pop(1)
        else:
            chosen = "step"
    launch.main(
        {"step": step, "load": load, "input": input_pipeline}[chosen],
        doc=__doc__,
        default_config=f"{launch.ROOT}/configs/benchmark.py{':input' * (chosen == 'input')}",
        workdir=False,
    )
