"""Makes the tables of docs/performance.md, diary.md and results/README.md from results/*.json.

    python benchmarks/tables.py    # after a file has changed; writes all three

results/README.md has all files; in the others a table follows each `<!-- table: NAME -->`. MFU is
the FLOPs of a model per second (of an update: three forward passes, without what is recomputed)
over the peak of the data sheet.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import vit_jax
from vit_jax import ROOT

sys.path.append(str(ROOT))

from benchmarks import calibrate, common
from vit_jax.plan.topology import parse_topology

RESULTS = Path(__file__).resolve().parent / "results"
PAGES = (ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "diary.md")
OPENING = """# Kept results

Each file of this folder as a table, written by `python benchmarks/tables.py`. A ratio above 1 means
that we are faster or need less. [What they say](../../docs/performance.md).
"""
VARIANTS = ("S/16", "B/16", "L/16", "H/14", "R50+B/16")
Row = dict[str, Any]


def main() -> None:
    (RESULTS / "README.md").write_text(index())
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))


def index() -> str:
    """results/README.md: every file, in a section of its own."""
    sections = [OPENING]
    for path in sorted(RESULTS.glob("*.json")):
        if path.name.startswith("calibration"):  # of a form of its own
            table = calibrate.markdown(json.loads(path.read_text()))
        elif "_" in path.stem:  # the others are results of this machine
            table = common.markdown(json.loads(path.read_text()))
        else:
            continue
        sections.append(f"## {path.stem}\n\n{table}\n")
    return "\n".join(sections)


def with_tables(page: str) -> str:
    """A page with the tables that follow its marks made anew."""

    def replace(mark: re.Match[str]) -> str:
        return f"{mark[1]}\n\n{calibrate.markdown(TABLES[mark[2]]())}\n\n"

    return re.sub(r"(<!-- table: (\w+) -->)\n\n(?:\|.*\n)*\n*", replace, page)


def results(pattern: str) -> list[dict[str, Any]]:
    """Kept results, small models first."""
    kept = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{pattern}.json"))]
    return sorted(kept, key=lambda result: VARIANTS.index(result["cases"][0]["model"]))


def cases_of(result: dict[str, Any], case: str, unit: str) -> dict[str, Row]:
    """The rows of a case whose name begins so, by peer."""
    return {
        row.get("peer", ""): row
        for row in result["cases"]
        if row["case"].startswith(case) and row["unit"] == unit
    }


def ratio_of(row: Row) -> str:
    """The ratio of a row, and those of its turns if there were several."""
    low, high = row["ratio_of_turns"]
    spread = f" ({low:.2f} to {high:.2f})" if high > low else ""
    return f"{row['ratio']:.2f}{spread}"


def gpu_rows() -> list[Row]:
    """Updates on a GPU beside timm; MFU of both."""
    chip = parse_topology("H100:1").chip
    assert chip
    rows = []
    for result in results("step_h100_*"):
        speed = cases_of(result, "update", "images/s").get("timm")
        if speed is None:
            continue
        share = cases_of(result, "share of the", "%")["timm"]
        memory = cases_of(result, "peak of the memory", "GiB")["timm"]
        product = float(re.findall(r"the ([\d.]+) TFLOP/s", share["case"])[0])
        rows.append(
            {
                "model": speed["model"],
                "images": re.findall(r"batch (\d+)", speed["case"])[0],
                "images/s": f"{speed['ours']:,.0f}",
                "timm": f"{speed['theirs']:,.0f}",
                "ratio (of turns)": ratio_of(speed),
                "MFU": f"{share['ours'] * product / chip.tflops:.1f} %",
                "timm's MFU": f"{share['theirs'] * product / chip.tflops:.1f} %",
                "share of a product": f"{share['ours']:.1f} %",
                "GiB": f"{memory['ours']:.1f}",
                "timm's GiB": f"{memory['theirs']:.1f}",
            }
        )
    return rows


def tpu_rows() -> list[Row]:
    """Updates by the clock of benchmarks/tpu.py beside big_vision and the official code."""
    rows = []
    for result in results("tpu_*"):
        topology = (re.findall(r"--topology=(\S+)", result["command"]) or ["v5e:2x2"])[0]
        pixels = int((re.findall(r"official_train\((\d+)\)", result["command"]) or [224])[0])
        chip = parse_topology(topology).chip
        assert chip
        seconds = cases_of(result, "update", "ms")
        memory = cases_of(result, "update", "GiB")["big_vision"]
        ours = seconds["big_vision"]
        images = int(re.findall(r"(\d+) images a device", ours["case"])[0])
        rate = images * update_flops(ours["model"], pixels) / (ours["ours"] / 1e3)
        model = ours["model"] if pixels == 224 else f"{ours['model']}, {pixels} pixels"
        model += ", dropout" if "dropout" in ours["case"] else ""
        official = seconds.get("official")
        rows.append(
            {
                "model": model,
                "chip": chip.name,
                "images": images,
                "ms": f"{ours['ours']:.1f}",
                "MFU if so": f"{100 * rate / chip.tflops / 1e12:.0f} %",
                "big_vision ms": f"{ours['theirs']:.1f}",
                "ratio": f"{ours['ratio']:.2f}",
                "official ms": f"{official['theirs']:.1f}" if official else "",
                "its ratio": f"{official['ratio']:.2f}" if official else "",
                "GiB": f"{memory['ours']:.2f}",
                "big_vision's GiB": f"{memory['theirs']:.2f}",
            }
        )
    return rows


def update_flops(variant: str, pixels: int) -> float:
    """Of one image in an update of a plain ViT with 1,000 classes: `models.flops`, closed."""
    sizes = vit_jax.get_variant(variant)
    hidden, mlp, patch = (sizes[key] for key in ("hidden_size", "mlp_dim", "patch_size"))
    patches = (pixels // patch) ** 2
    tokens = patches + 1
    block = tokens * (4 * hidden**2 + 2 * hidden * mlp) + 2 * tokens**2 * hidden
    stem = 3 * patch**2 * patches * hidden
    return 3 * 2 * (stem + sizes["num_layers"] * block + hidden * common.NUM_CLASSES)


def cpu_rows() -> list[Row]:
    """Updates on two cores beside three peers."""
    rows = []
    for result in results("step_cpu_*"):
        speeds = cases_of(result, "update", "images/s")
        shares = list(cases_of(result, "share of the", "%").values())
        [ours, *_] = speeds.values()
        row = {
            "update": ours["case"].removeprefix("update, ").replace(", 224x224 pixels", ""),
            "machine": result["machine"].replace("2 cores of ", ""),
            "images/s": f"{ours['ours']:.2f}",
            "share of a product": f"{shares[0]['ours']:.0f} %" if shares else "",
        }
        for peer in ("timm", "official", "big_vision"):
            row[f"ratio to {peer}"] = ratio_of(speeds[peer]) if peer in speeds else ""
        rows.append(row)
    return sorted(rows, key=lambda row: row["update"])


def input_rows() -> list[Row]:
    """Training images per second of a core, here and elsewhere."""
    rows = []
    for name, photographs in (("input_cpu", "500 x 375"), ("input_cpu_scale4", "2000 x 1500")):
        result = json.loads((RESULTS / f"{name}.json").read_text())
        speeds = cases_of(result, "input pipeline, per CPU second", "images/s")
        row = {"photographs": photographs, "here": f"{speeds['whole']['ours']:,.0f}"}
        for title, peer in (
            ("DataLoader, Pillow", "dataloader"),
            ("tf.data", "tf_data"),
            ("decoding all of it", "whole"),
            ("`reduced=True`", "reduced"),
            ("a copy of 256 pixels", "resized"),
        ):
            row[title] = f"{speeds[peer]['theirs']:,.0f}" if peer in speeds else ""
        rows.append(row)
    return rows


def kept_rows(name: str) -> list[Row]:
    """The rows of a calibration."""
    rows: list[Row] = json.loads((RESULTS / f"{name}.json").read_text())
    return rows


TABLES = {
    "gpu": gpu_rows,
    "tpu": tpu_rows,
    "cpu": cpu_rows,
    "input": input_rows,
    "operations": lambda: kept_rows("calibration"),
    "published": lambda: kept_rows("calibration_published"),
    "maxtext": lambda: kept_rows("calibration_maxtext"),
}


if __name__ == "__main__":
    main()
