"""Pre-trains a small ViT on bundled data, fine-tunes it on handwritten digits, and compares.

    ./scripts/quickstart.sh [WORKDIR]

which sets up the environment and calls this script. The same command again goes on where an
interrupted one was.
"""

from vit_jax import launch


def run(config, workdir):
    del config  # the three stages have their own
    from vit_jax.quickstart import run_quickstart

    run_quickstart(workdir)


if __name__ == "__main__":
    launch.main(run, doc=__doc__, default_config=str(launch.ROOT / "configs/quickstart.py"))
