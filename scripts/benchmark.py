"""Measures this code beside others, in turn.

    python scripts/benchmark.py step --variant=S/16 --against=timm,official,big_vision --clones=DIR
    python scripts/benchmark.py tpu --variant=B/16 --topology=v5e:2x2 --against=official,big_vision
    python scripts/benchmark.py sizes --variants=B/32,B/16,L/16 --resolutions=224,384
    python scripts/benchmark.py compile --variant=S/16 --against=official,big_vision --clones=DIR
    python scripts/benchmark.py loop
    python scripts/benchmark.py checkpoint --variant=S/16
    python scripts/benchmark.py load --variant=B/16
    python scripts/benchmark.py input --against=big_vision,dataloader,resized --clones=DIR
    python scripts/benchmark.py table benchmarks/*.json

step: images per second of the update (--inference: of the forward pass) on one batch, and the MFU
against a matrix product in the same run. Any --config.model.* and --config.dataset.batch_size, or
--largest_batch: the largest whose update fits by the compiler's count.
tpu: compiles the update for TPUs that are not here: Mcycles of 1.5 GHz (the compiler's estimate,
plus the attention kernel's products at the peak and its bytes at the bandwidth), GB to and from
HBM, GiB at the peak.
sizes: the same compiler: images that fit, and images per second, of --variants at --resolutions.
compile: seconds to trace and compile what makes the initial parameters, and the update.
loop: what the training loop costs over the bare update.
checkpoint: seconds that a checkpoint of the training state costs, beside flax's msgpack.
load: seconds to load a published file (written for this, with random numbers), beside timm.
input: images per second and processor time of the input pipeline on the same JPEGs (made for this),
beside big_vision's, torch's DataLoader with Pillow (as in timm) and ours from a --resize=256 copy;
`taskset -c 0` before the command measures on one core.
table: files of --json as the tables of docs/performance.md.

--against names timm and timm_eager (the extra [peers]), official and big_vision (clones of google-
research/vision_transformer and google-research/big_vision below --clones) or reference (ours, the
official attention). A ratio above 1 is in our favour. --json=FILE keeps the cases, with
machine, versions and command.
"""

import json
import logging
import os
import platform
import shlex
import statistics
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from absl import flags

from vit_jax import command_line, launch
from vit_jax.errors import UserError

FLAGS = flags.FLAGS


def step(config):
    from vit_jax.measure.fit import largest_batch
    from vit_jax.measure.step import benchmark_step

    with_variant(config)
    if FLAGS.largest_batch:
        config.dataset.batch_size = largest_batch(config)
        if not config.dataset.batch_size:
            raise UserError("--largest_batch: not even one image fits on each device.")
        print(f"largest batch that fits: {config.dataset.batch_size}")
    cases, figures = benchmark_step(
        config,
        against=FLAGS.against,
        clones=FLAGS.clones,
        train=not FLAGS.inference,
        steps=FLAGS.steps,
        rounds=FLAGS.rounds,
    )
    print(
        f"{figures['images_per_second']:.4g} images/s, MFU {figures['mfu']:.1%} of "
        f"{figures['ceiling'] / 1e9:.4g} GFLOP/s of a matrix product"
    )
    return cases


def tpu(config):
    from vit_jax.measure.tpu import benchmark_tpu
    from vit_jax.plan.topology import parse_topology

    with_variant(config)
    topology, against = parse_topology(FLAGS.topology), FLAGS.against or ["reference"]
    return benchmark_tpu(config, topology, against=against, clones=FLAGS.clones)


def sizes(config):
    from vit_jax.measure.tpu import benchmark_sizes
    from vit_jax.plan.topology import parse_topology

    resolutions = [int(each) for each in FLAGS.resolutions]
    topology = parse_topology(FLAGS.topology)
    return benchmark_sizes(config, topology, variants=FLAGS.variants, resolutions=resolutions)


def compilation(config):
    from vit_jax.measure.compilation import benchmark_compile

    with_variant(config)
    against = FLAGS.against or ["official"]
    return benchmark_compile(config, against=against, clones=FLAGS.clones, rounds=FLAGS.rounds)


def checkpoint(config):
    from vit_jax.measure.checkpoints import benchmark_checkpoint

    with_variant(config)
    with tempfile.TemporaryDirectory() as folder:
        return benchmark_checkpoint(config, Path(folder), rounds=FLAGS.rounds)


def loop(config):
    from vit_jax.measure.loop import benchmark_loop
    from vit_jax.measure.turns import Case

    with_variant(config)
    found = benchmark_loop(config, steps=FLAGS.steps, rounds=FLAGS.rounds)
    print(f"overhead of the loop: {100 * found['overhead']:.1f} % (median of turns)")
    name = f"training loop, batch {config.dataset.batch_size}"
    return [Case(name, "bare update", found["loop"], found["reference"], "images/s")]


def load(config):
    from vit_jax.measure.turns import Case
    from vit_jax.measure.weights import benchmark_load

    del config
    variant = FLAGS.variant or "B/16"
    with tempfile.TemporaryDirectory() as folder:
        found = benchmark_load(Path(folder), variant=variant, rounds=FLAGS.rounds)
    return [Case("loading a file", "timm", found["vit_jax"], found["timm"], "s")]


def input_pipeline(config):
    from vit_jax.measure.input import Settings, benchmark_input
    from vit_jax.measure.turns import Case

    settings = Settings(
        batch_size=config.dataset.batch_size,
        num_images=FLAGS.num_images,
        num_threads=config.loader.num_threads,
        num_workers=config.loader.num_workers,
    )
    with tempfile.TemporaryDirectory() as folder:
        speeds = benchmark_input(
            Path(folder),
            settings,
            preprocess=config.dataset.preprocess,
            against=FLAGS.against,
            clones=FLAGS.clones,
            rounds=FLAGS.rounds,
        )
    ours = speeds.pop("vit_jax")
    rate = statistics.median(turn.images_per_second for turn in ours)
    cpu = statistics.median(turn.cpu_ms_per_image for turn in ours)
    print(f"{rate:.4g} images/s, {cpu:.3g} CPU ms per image")
    cases = []
    for name, turns in speeds.items():
        a, b = ([turn.images_per_second for turn in each] for each in (ours, turns))
        cases.append(Case("input pipeline", name, a, b, "images/s"))
        a, b = ([1000 / turn.cpu_ms_per_image for turn in each] for each in (ours, turns))
        cases.append(Case("input pipeline, per CPU second", name, a, b, "images/s"))
    return cases


def with_variant(config):
    """--variant replaces the sizes of the recipe's model."""
    if FLAGS.variant:
        from vit_jax.models.variants import get_variant

        with config.unlocked():
            config.model.update(get_variant(FLAGS.variant))


def benchmark(recipe, run):
    def main(config, _):
        if recipe != "tpu":
            logging.getLogger().setLevel(logging.WARNING)  # the loop's own progress
        cases = run(config)
        model = f"{FLAGS.variant}: " if FLAGS.variant else ""
        rows = []
        for case in cases:
            if isinstance(case, dict):  # of `sizes`
                rows.append(case)
                continue
            print(model + case.text())
            rows.append({"model": FLAGS.variant or config.model.name, **case.json()})
        if FLAGS.json:
            from vit_jax.files.paths import write_json

            write_json(FLAGS.json, {"cases": rows, **circumstances()})

    return main


def circumstances():
    """Command, machine and versions."""
    import jax

    packages = ["jax", "jaxlib", "flax", "libtpu", "torch", "timm"]
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    about = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    sets = [each for each in ("avx512_bf16", "avx512f", "avx2") if each in about.get("flags", "")]
    cpu = ", ".join([about.get("model name", platform.machine()), *sets[:1]])
    device = jax.devices()[0]
    accelerator = "" if device.platform == "cpu" else f", {device.device_kind}"
    command = [Path(sys.argv[0]).name, *ARGUMENTS]
    return {
        "command": shlex.join(c for c in command if not c.startswith(("--clones", "--json"))),
        "machine": f"{os.cpu_count()} cores of {cpu}{accelerator}",
        "python": platform.python_version(),
        "versions": versions,
    }


def table(paths):
    """Markdown of files that --json wrote."""
    for path in paths:
        found = json.loads(Path(path).read_text())
        versions = ", ".join(f"{name} {each}" for name, each in found["versions"].items())
        print(f"`{found['command']}` on {found['machine']} ({versions}):\n")
        if "fit" in found["cases"][0]:
            print("| model | pixels | images a device that fit | images/s a device |")
            print("|---|---|---|---|")
            for row in found["cases"]:
                speed = f"{row['images_per_second']:.4g}"
                print(f"| {row['model']} | {row['pixels']} | {row['fit']} | {speed} |")
            print()
            continue
        print("| model | case | unit | ours | peer | theirs | ratio | of turns |")
        print("|---|---|---|---|---|---|---|---|")
        for row in found["cases"]:
            low, high = row["ratio_of_turns"]
            spread = f"{low:.2f} to {high:.2f}" if high > low else ""
            cells = [row["model"], row["case"], row["unit"], f"{row['ours']:.4g}", row["peer"]]
            cells += [f"{row['theirs']:.4g}", f"**{row['ratio']:.2f}**", spread]
            print(f"| {' | '.join(cells)} |")
        print()


# What measures, and the recipe.
BENCHMARKS = {
    "step": (step, "step"),
    "tpu": (tpu, "tpu"),
    "sizes": (sizes, "tpu"),
    "compile": (compilation, "step"),
    "loop": (loop, "step"),
    "checkpoint": (checkpoint, "step"),
    "load": (load, "step"),
    "input": (input_pipeline, "input"),
}


if __name__ == "__main__":
    flags.DEFINE_string("variant", "", "Sizes of the model, such as S/16.")
    flags.DEFINE_list("against", [], "Peers: timm, timm_eager, official, big_vision, reference.")
    flags.DEFINE_string("clones", "", "Folder with clones of the peers' repositories.")
    flags.DEFINE_bool("inference", False, "Measure the forward pass.")
    flags.DEFINE_bool("largest_batch", False, "Measure with the largest batch that fits.")
    flags.DEFINE_string("topology", "v5e:2x2", "TPUs to compile for.")
    flags.DEFINE_list("variants", ["B/32", "B/16", "L/16"], "Models of `sizes`.")
    flags.DEFINE_list("resolutions", ["224", "384"], "Pixels of `sizes`.")
    flags.DEFINE_integer("steps", 5, "Updates per turn.", lower_bound=1)
    flags.DEFINE_integer("rounds", 8, "How often all take turns.", lower_bound=1)
    flags.DEFINE_integer("num_images", 4096, "Images per turn of the input.", lower_bound=1)
    flags.DEFINE_string("json", "", "File for the cases.")
    ARGUMENTS = sys.argv[1:]
    chosen = "step"
    with launch.one_line_errors():
        if not command_line.asks_for_help():
            if len(sys.argv) < 2 or sys.argv[1] not in (*BENCHMARKS, "table"):
                names = ", ".join((*BENCHMARKS, "table"))
                raise UserError(f"name a benchmark: {names}; see --help.")
            chosen = sys.argv.pop(1)
    if chosen == "table":
        table(sys.argv[1:])
        sys.exit()
    if chosen in ("tpu", "sizes"):  # the compiler is there without TPUs
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    measure, recipe = BENCHMARKS[chosen]
    launch.main(
        benchmark(recipe, measure),
        doc=__doc__,
        default_config=f"{launch.ROOT}/configs/benchmark.py:{recipe}",
        workdir=False,
    )
