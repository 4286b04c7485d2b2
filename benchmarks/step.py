"""Images per second of the update beside those of other projects, in turn, on the same batch.

    python benchmarks/step.py --variant=S/16 --against=timm,official,big_vision --clones=peers
    python benchmarks/step.py --variant=S/16 model.dtype=bfloat16 --against=timm

Also the model's FLOP/s as a share of those of one large product, the peak of the memory on a GPU,
and how long each takes until its first update is done. A ratio above 1 is in our favour. timm
comes with `pip install -e '.[peers]'`; official, big_vision and scenic are clones of
google-research's vision_transformer, big_vision and scenic in the folder --clones;
`remat=full`, say, is our model with `model.remat` set to it, and the name of an attention (`xla`)
is short for `attention=xla`. `dataset.preprocess=decode|patchify(196)` is our model on images in
shapes of their own, in rows of as many patches (their sides are 1:2 to 2:1), a share of which is
padding: it is printed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import ROOT, launch
from vit_jax.arguments import names, split_overrides

sys.path.append(str(ROOT))

from benchmarks import common
from benchmarks.common import NUM_CLASSES
from benchmarks.peers import PEERS, check_peer, create_timm, jax_peer
from vit_jax.command_line import override
from vit_jax.data.ops import grid_within
from vit_jax.data.pipeline import batch_spec
from vit_jax.models.kernels.attention import ATTENTIONS
from vit_jax.parameters.sharding import batch_sharding
from vit_jax.run import Run

Batch = dict[str, jax.Array]
Steps = Callable[[int], Any]  # runs so many updates, and waits for them


def main(argv: Sequence[str]) -> None:
    parser = common.create_parser(__doc__, "step")
    parser.add_argument("--variant", default="Ti/16", help="sizes of the model (default: Ti/16)")
    known = ",".join((*PEERS, *ATTENTIONS, "KEY=VALUE"))
    parser.add_argument("--against", type=names, default=[], help=f"of {known}")
    parser.add_argument("--clones", default="peers", help="folder of the peers' clones")
    parser.add_argument("--steps", type=int, default=5, help="updates per turn (default: 5)")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each (default: 8)")
    overrides, rest = split_overrides(argv)
    arguments = parser.parse_args(rest)
    config = common.create_config(arguments.variant, batch_size=8, overrides=overrides)
    changes = [change for change in arguments.against if "=" in change]
    for peer in arguments.against:
        if peer not in (*ATTENTIONS, *changes):
            check_peer(peer, config.model, arguments.clones)

    run = common.noise_run(config)
    batch_size = run.batch_size
    with jax.set_mesh(run.mesh):
        batch = random_batch(run)
        subjects: dict[str, Steps] = {}

        def images_per_second(subject: Steps) -> float:
            subject(1)  # brings back the memory and the caches that others took
            start = time.perf_counter()
            subject(arguments.steps)
            return arguments.steps * batch_size / (time.perf_counter() - start)

        starts, updates = {}, {}  # seconds, compilation included
        peaks: dict[str, list[float]] = {}
        programs: dict[str, list[float]] = {}
        for name in ("vit_jax", *arguments.against):
            start = time.perf_counter()
            subjects[name] = create_subject(name, config, run, batch, arguments.clones)
            made = time.perf_counter()
            subjects[name](1)
            starts[name], updates[name] = [made - start], [time.perf_counter() - made]
            if (gib := peak_gib(name)) is not None:
                peaks[name] = [gib]
            if changes and name in ("vit_jax", *changes):
                programs[name] = [program_gib()]
            alone = images_per_second(subjects[name])  # in case that compiling a peer never ends
            print(f"{name}: {alone:.4g} images/s alone", file=sys.stderr)

        turns = {
            name: lambda subject=subject: images_per_second(subject)
            for name, subject in subjects.items()
        }
        speeds = common.take_turns(turns, arguments.rounds)
    most = run.mesh.size * common.product_flops(config.model.dtype)
    percent = 100 * run.train_flops_per_image() / most

    pixels = "x".join(map(str, run.dataset.image_shape[:2]))
    case = f"update, {config.model.dtype}, batch {batch_size}, {pixels} pixels"
    if config.model.dropout_rate:
        case += f", dropout {config.model.dropout_rate}"
    cases = common.compare(arguments.variant, case, "images/s", speeds)
    shares = {name: [percent * turn for turn in speed] for name, speed in speeds.items()}
    of_product = f"share of the {most / 1e12:.4g} TFLOP/s of a product"
    cases += common.compare(arguments.variant, of_product, "%", shares)
    if peaks:
        cases += common.compare(arguments.variant, "peak of the memory", "GiB", peaks)
    if programs:
        cases += common.compare(arguments.variant, "memory of the program", "GiB", programs)
    for what, seconds in (("initial state", starts), ("first update", updates)):
        cases += common.compare(arguments.variant, f"until there: {what}", "s", seconds)
    common.write_result(arguments.json, cases, argv)


def peak_gib(name: str) -> float | None:
    """The most memory that a subject had on a GPU; JAX tells it for the first one only."""
    if name.startswith("timm"):
        import torch

        return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    stats = jax.devices()[0].memory_stats() if name == "vit_jax" else None
    return stats["peak_bytes_in_use"] / 2**30 if stats else None


def program_gib() -> float:
    """What the program that was compiled last needs: arguments, results and temporaries."""
    stats = jax.devices()[0].client.live_executables()[0].get_compiled_memory_stats()
    sizes = [getattr(stats, f"{kind}_size_in_bytes") for kind in ("argument", "output", "temp")]
    return (sum(sizes) - stats.alias_size_in_bytes) / 2**30


def random_batch(run: Run) -> Batch:
    """Random pixels and labels on the devices of a run."""
    rng, shapes = np.random.default_rng(0), batch_spec(run.dataset, run.batch_size)
    grids = {}
    if op := run.dataset.preprocess.patchify:
        sides = np.round(1000 * 2 ** rng.uniform(-1, 1, run.batch_size)).astype(int)
        rows = [grid_within(op.lengths[0], op.patch_size, 1000, side) for side in sides.tolist()]
        grids = {"grid": np.array(rows, np.int32)}
        real = np.mean(np.prod(rows, axis=1)) / op.lengths[0]
        print(f"{op}: {100 * real:.1f} % of the tokens are real", file=sys.stderr)
    batch = {
        **grids,
        "image": rng.integers(0, 256, shapes["image"].shape, np.uint8),
        "label": rng.integers(0, run.dataset.num_classes, shapes["label"].shape, np.int32),
        "mask": np.ones(run.batch_size, np.float32),
    }
    return jax.device_put(batch, batch_sharding(run.mesh))


def create_subject(name: str, config: ConfigDict, run: Run, batch: Batch, clones: str) -> Steps:
    """Makes the state of ours (`vit_jax`, or a change of it) or a peer; returns what updates it."""
    if name.startswith("timm"):
        return create_timm(config, batch, NUM_CLASSES, compiled=name == "timm")
    arguments: tuple[Any, ...]
    if changed := name in ATTENTIONS or "=" in name:
        change = name if "=" in name else f"attention={name}"
        change = change if change.startswith("dataset.") else f"model.{change}"
        config = config.copy_and_resolve_references()
        config = override(config, [change])
        run = common.noise_run(config)
        batch = random_batch(run)
    if name == "vit_jax" or changed:
        step, state = run.jit_train_step(), run.initial_state(config.seed)
        arguments = (run.place_constants(), batch)
    else:
        init, update = jax_peer(name, config, NUM_CLASSES, clones)
        step = jax.jit(update, donate_argnums=0)
        state = jax.jit(init)(jax.random.key(0), batch["image"][:1])
        arguments = (batch["image"], batch["label"])
    jax.block_until_ready(state)

    def run_steps(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            state, metrics = step(state, *arguments)
        jax.block_until_ready((state, metrics))

    return run_steps


if __name__ == "__main__":
    with launch.one_line_errors():
        main(sys.argv[1:])
