"""Pre-trains a small ViT on bundled data, fine-tunes it on handwritten digits, and compares.

    ./scripts/quickstart.sh [WORKDIR]

which sets up the environment and calls this script with --workdir=WORKDIR. The same command again
resumes an interrupted one.
"""

import argparse

from vit_jax import launch

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", required=True, help="folder of the three runs")
    workdir = parser.parse_args().workdir
    launch.start_logging()
    with launch.one_line_errors(resumes=True):
        from vit_jax.quickstart import run_quickstart

        run_quickstart(workdir)
