"""What the clock of `benchmarks/tpu.py` says of MaxText's updates, whose speed is published.

    python benchmarks/maxtext.py v5e/16b --clone=peers/maxtext    # minutes

In an environment with MaxText's packages, for one recipe of its clone: libtpu reads its flags once.
Its update is compiled as its script says, for the TPUs of the first row of its table. Operations
are counted by MaxText, without those of remat.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vit_jax import ROOT, launch
from vit_jax.arguments import create_parser

sys.path.append(str(ROOT))

from benchmarks.final_code import read_final_code, write_final_code
from vit_jax.hardware.chips import find_chip
from vit_jax.plan.program import parse_program

# name: (TPUs, TFLOP/s of a chip), src/maxtext/configs/tpu/CHIP/README.md, August 2026
PUBLISHED = {
    "v4/22b": ("v4-128", 156),
    "v5e/16b": ("v5e-256", 120),
    "v5e/32b": ("v5e-256", 132),
    "v5e/64b": ("v5e-256", 118),
    "v5p/32b": ("v5p-128", 328),
}


def main(argv: Sequence[str]) -> None:
    parser = create_parser(__doc__)
    parser.add_argument("recipe", choices=PUBLISHED)
    parser.add_argument("--clone", type=Path, default=Path("peers/maxtext"))
    given = parser.parse_args(argv)
    source = given.clone / "src"
    topology, published = PUBLISHED[given.recipe]
    script = (source / f"maxtext/configs/tpu/{given.recipe}.sh").read_text(encoding="utf-8")
    [libtpu] = re.findall(r'LIBTPU_INIT_ARGS="([^"]*)"', script) or [""]
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(re.findall(r"--\S+", libtpu))
    settings = re.findall(r"\b([a-z]\w*=[^\s\\]+)", script.rpartition("base.yml")[2])
    settings = [
        setting.replace("'", "").replace('"', "") for setting in settings if "$" not in setting
    ]
    write_final_code()

    sys.path.insert(0, str(source))
    trainer: Any = importlib.import_module("maxtext.trainers.pre_train.train_compile")
    tools: Any = importlib.import_module("maxtext.utils.maxtext_utils")
    calls: list[tuple[Any, ...]] = []
    compile_step = trainer.jit_and_compile

    def noted(*arguments: Any) -> Any:
        calls.append((compile_step(*arguments), *arguments))
        return calls[-1][0]

    trainer.jit_and_compile = noted
    trainer.main(
        [
            "train_compile",
            str(source / "maxtext/configs/base.yml"),
            *settings,
            f"compile_topology={topology}",
            "compile_topology_num_slices=1",
            "run_name=clock",
            "gcs_metrics=false",
        ]
    )
    [(compiled, _, _, _, mesh, *_, config, _)] = calls
    chip = find_chip(mesh.devices.flat[0].device_kind)
    code = read_final_code(parse_program(compiled.as_text()), chip, [0] * mesh.size)
    rate = tools.calculate_tflops_training_per_device(config)[0] / code.seconds
    alone = [cost for cost in code.costs if not cost.overlapped]
    links = sum(cost.links for cost in alone if cost.links == cost.seconds)
    row = {
        "recipe": given.recipe,
        "TPUs": topology,
        "published TFLOP/s": published,
        "by the clock": round(rate, 1),
        "ratio": round(rate / published, 2),
        "seconds": round(code.seconds, 3),
        "of which links": round(links, 3),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    with launch.one_line_errors():
        main(sys.argv[1:])
