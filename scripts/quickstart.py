"""Pre-trains a small ViT on bundled data, fine-tunes it on handwritten digits, and compares.

    ./scripts/quickstart.sh [WORKDIR]

which sets up the environment and calls this script with --workdir=WORKDIR. The same command
resumes an interrupted one.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax import ROOT, launch
from vit_jax.arguments import create_parser
from vit_jax.data.datasets import create_dataset
from vit_jax.inference.load import load_model
from vit_jax.report.report import write_report
from vit_jax.train import train_and_evaluate
from vit_jax.workdir.metrics import read_metrics

sys.path.insert(0, str(ROOT))  # for the recipes

from configs import quickstart

STAGES = ("pretrain", "finetune", "scratch")


def run_quickstart(workdir: str) -> dict[str, Any]:
    """Runs the three stages of `configs/quickstart.py`, each in a folder of `workdir`.

    If interrupted, the next call resumes. Writes `summary.json`, `predictions.png` and
    `finetune/report.html`, and prints the table.

    Returns:
      The contents of `summary.json`: per stage `accuracy` (on its test set), `images_per_second`,
      `seconds`; for `finetune` also `initial_accuracy`, before the first update.
    """
    root = Path(workdir)
    summary: dict[str, Any] = {}
    for number, stage in enumerate(STAGES, start=1):
        logging.info("Stage %d of %d: %s", number, len(STAGES), stage)
        config = quickstart.get_config(stage)
        if stage == "finetune":
            config.pretrained.source = str(root.absolute() / "pretrain")
        results = train_and_evaluate(config, str(root / stage))
        summary[stage] = {
            "accuracy": results["test/accuracy"],
            "images_per_second": results["images_per_second"],
            "seconds": results["seconds"],
        }
        start = [row for row in read_metrics(root / stage) if row["step"] == 0]
        if start:
            summary[stage]["initial_accuracy"] = start[0]["test/accuracy"]
    summary["svm"] = {"accuracy": svm_accuracy()}
    (root / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw_predictions(root)
    print(table(summary))
    print(f"\nFigures: {root / 'summary.json'}")
    print(f"Predictions: {root / 'predictions.png'}")
    print(f"Parameters for anything else: {root / 'finetune' / 'params.npz'}")
    against = {
        "The same model from random weights": summary["scratch"]["accuracy"],
        "RBF SVM on the pixels of the same 300 scans": summary["svm"]["accuracy"],
    }
    recipe = "configs/quickstart.py:finetune"
    page = write_report(str(root / "finetune"), recipe=recipe, against=against)
    print(f"A page about the fine-tuning: {page}")
    return summary


def read_scans(split: str, preprocess: str) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, H, W, C] and labels [N] of the handwritten digits."""
    dataset = create_dataset(name="digits", split=split, preprocess=preprocess)
    rng = np.random.default_rng(0)
    examples = [dataset.example(i, rng) for i in range(dataset.num_examples)]
    images = np.stack([example["image"] for example in examples])
    return images, np.array([example["label"] for example in examples])


def svm_accuracy() -> float:
    """A classical baseline on the same 300 scans; C=10 is best on the validation scans."""
    from sklearn.svm import SVC

    (x, y), (x_test, y_test) = (
        read_scans(split, "decode(channels=1)") for split in ("train[:300]", "test")
    )
    return float(
        SVC(C=10).fit(x.reshape(len(x), -1), y).score(x_test.reshape(len(x_test), -1), y_test)
    )


def table(summary: dict[str, Any]) -> str:
    """The comparison as text."""
    rows = [
        ("pretrain", "glyphs in an unseen typeface (50 classes)"),
        ("finetune", "handwritten digits, from the glyphs"),
        ("scratch", "handwritten digits, from random weights"),
    ]
    lines = [f"\n{'':54}accuracy  images/s    time"]
    for stage, text in rows:
        row = summary[stage]
        lines.append(
            f"{stage:10}{text:44}{100 * row['accuracy']:7.1f} %"
            f"{row['images_per_second']:10.0f}{row['seconds']:7.0f}s"
        )
    lines.append(
        f"{'svm':10}{'RBF SVM from the same 300 scans':44}{100 * summary['svm']['accuracy']:7.1f} %"
    )
    initial = summary["finetune"]["initial_accuracy"]
    lines.append(f"Before its first update the fine-tuned model scores {100 * initial:.1f} %.")
    return "\n".join(lines)


def draw_predictions(root: Path, rows: int = 5, columns: int = 12) -> None:
    """`predictions.png`: test scans with fine-tuned predictions; mistakes come first, in red."""
    from matplotlib.figure import Figure

    model = load_model(str(root / "finetune"))
    images, labels = read_scans("test", model.description.eval_preprocess)
    answers = model.logits(images).argmax(axis=-1)
    shown = np.argsort(answers == labels, kind="stable")[: rows * columns]

    figure = Figure(figsize=(columns, 1.35 * rows))
    for axis, i in zip(figure.subplots(rows, columns).flat, shown, strict=True):
        axis.imshow(images[i, :, :, 0], cmap="gray_r", interpolation="nearest")
        right = answers[i] == labels[i]
        text = f"{answers[i]}" if right else f"{labels[i]} read as {answers[i]}"
        axis.set_title(text, color="black" if right else "crimson", fontsize=10)
        axis.axis("off")
    wrong = int((answers != labels).sum())
    figure.suptitle(f"Fine-tuned on 300 scans: {wrong} of {len(labels)} test scans wrong (first)")
    figure.tight_layout()
    figure.savefig(root / "predictions.png", dpi=110)


if __name__ == "__main__":
    parser = create_parser(__doc__)
    parser.add_argument("--workdir", required=True, help="folder of the three runs")
    workdir = parser.parse_args().workdir
    launch.start_logging()
    with launch.one_line_errors(resumes=True):
        run_quickstart(workdir)
