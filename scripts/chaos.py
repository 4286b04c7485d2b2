"""Disturbs a run of several processes at random and checks that its result does not change.

    python scripts/chaos.py --workdir=/tmp/chaos --minutes=30

Four processes of this machine train a small ViT; every 20 to 60 seconds one of them is killed,
killed while it saves, stopped or asked to end, and now and then the newest checkpoint is damaged.
The final parameters have to be bit-identical to those of the same run left in peace, which is made
first. Prints the disturbances survived; status 1 if the parameters differ.
"""

import argparse
import signal
import sys
from pathlib import Path

from vit_jax import launch

STEPS_PER_MINUTE = 90  # of this model on two cores, restarts included
SETTINGS = (
    "--config.dataset.batch_size=64",
    "--config.log.every_steps=5",
    "--config.log.tensorboard=False",
    "--config.model.num_layers=2",  # most of the time goes into collectives, per array
    "--config.model.dropout_rate=0.1",
    "--config.processes.heartbeat_timeout_seconds=10",
    "--config.processes.step_timeout_seconds=120",
)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", required=True, type=Path, help="a new folder")
    parser.add_argument("--minutes", type=float, default=30.0, help="about, of the disturbed run")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--pause", type=float, nargs=2, default=(20.0, 60.0), metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    arguments, overrides = parser.parse_known_args()
    launch.start_logging()
    with launch.one_line_errors():
        from vit_jax.measure.chaos import run_chaos

        # As at Ctrl-C, so that no training outlives this.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        steps = max(10, round(STEPS_PER_MINUTE * arguments.minutes))
        command = [
            sys.executable,
            f"{launch.ROOT}/scripts/train.py",
            f"--config={launch.ROOT}/configs/quickstart.py",
            f"--config.duration.steps={steps}",
            f"--config.checkpoint.every_steps={min(20, steps // 10)}",
            *SETTINGS,
            *overrides,
        ]
        events, differing = run_chaos(
            command,
            arguments.workdir.absolute(),
            num_processes=arguments.processes,
            seed=arguments.seed,
            pause_seconds=tuple(arguments.pause),
        )
        print("disturbances:", ", ".join(f"{n} x {name}" for name, n in events.most_common()))
        names = ", ".join(differing)
        print("final parameters:", f"DIFFER in {names}" if differing else "bit-identical")
        sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
