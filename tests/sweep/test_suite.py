"""The suites of scripts/evaluate_paper.py: their tasks, and small ones from start to end."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from configs import finetune, suites
from scripts.evaluate_paper import Row, evaluate_suite, means
from tests import fixtures_data, tiny
from vit_jax.command_line import override
from vit_jax.errors import UserError
from vit_jax.evaluators.few_shot import confidence95
from vit_jax.inference.evaluate import evaluate
from vit_jax.inference.load import load_model
from vit_jax.inference.probe import probe
from vit_jax.models.create import VARIANTS
from vit_jax.train import train_and_evaluate

# Runs of two updates on 16 images each.
FAST = ("duration.steps=2", "schedule.warmup_steps=1", "dataset.batch_size=8")
FAST += ("loader.num_threads=1", "log.tensorboard=False")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run on digits of three channels."""
    folder = tmp_path_factory.mktemp("model") / "run"
    config = tiny.config(
        duration__steps=1,
        dataset__preprocess="decode(channels=3)|resize(16)",
        dataset__eval_preprocess="decode(channels=3)|resize(16)",
    )
    train_and_evaluate(config, str(folder))
    return str(folder)


def run(
    source: str, name: str, workdir: Path, datasets: list[str], *overrides: str, **options: Any
) -> list[Row]:
    model = load_model(source)
    tasks = suites.tasks(name, model.description.model, datasets, 16)
    for settings in (task["settings"] for task in tasks if overrides):
        settings["config"] = override(settings["config"], overrides)
    return evaluate_suite(model, tasks, str(workdir), **options)


def test_the_suites_are_the_papers() -> None:
    model = VARIANTS["L/16"]
    few_shot = suites.tasks("fewshot", model, (), None)
    assert [task["name"] for task in few_shot] == list(suites.FEW_SHOT)
    vtab = suites.tasks("vtab", model, (), None)
    assert [task["name"] for task in vtab] == list(finetune.VTAB)
    groups = [task["group"] for task in vtab]
    assert groups == ["natural"] * 7 + ["specialized"] * 4 + ["structured"] * 8
    for task in vtab:
        recipe = finetune.get_config(f"L/16,vtab/{task['name']}")
        assert task["settings"]["config"].to_dict() == recipe.to_dict()
        assert task["published"] == recipe.sweep.published
    transfer = suites.tasks("transfer", VARIANTS["B/16"], (), None)
    assert {task["name"] for task in transfer} == finetune.DATASETS.keys()
    assert "83.97" in transfer[0]["published"]
    no_variant = suites.tasks("transfer", {**VARIANTS["B/16"], "mlp_dim": 8}, ["cifar10"], 64)[0]
    assert no_variant["published"] == ""
    config = no_variant["settings"]["config"]
    assert (config.model.mlp_dim, config.dataset.eval_preprocess) == (8, "official_eval(64)")
    with pytest.raises(UserError, match="--image_size=60 is not divisible by tokens of 16"):
        suites.tasks("vtab", model, (), 60)
    with pytest.raises(UserError, match="VTAB task='dtt' is unknown. Did you mean 'dtd'"):
        suites.tasks("vtab", model, ["dtt"], None)


def test_few_shot_is_the_probes_and_is_measured_once(source, tmp_path, caplog):
    caplog.set_level("INFO")
    rows = run(source, "fewshot", tmp_path, ["digits", "dtd"], seeds=2)
    expected = probe(
        source, dataset="digits", train_split="train", split="test", kinds=["few_shot"], seeds=2
    )
    assert [(row.task, row.metric) for row in rows] == [
        *(("digits", f"{n}shot") for n in (1, 5, 10, 25)),
        ("dtd", ""),
        *(("mean", f"{n}shot") for n in (1, 5, 10, 25)),
    ]
    assert rows[1].ours == 100 * expected["few_shot/accuracy_5shot"]
    assert rows[1].ci95 == 100 * expected["few_shot/accuracy_5shot_ci95"]
    assert "python scripts/prepare_data.py tfds dtd" in rows[4].state
    assert rows[5].of == "mean of 1 of 2 tasks"

    assert "| digits | 5shot | " in (tmp_path / "suite.md").read_text()
    written = json.loads((tmp_path / "suite.json").read_text())
    assert [Row(**row) for row in written["rows"]] == rows

    # Two tasks share the work, and end with the same.
    share = {"seeds": 2, "num_tasks": 2}
    assert (
        run(source, "fewshot", tmp_path / "two", ["dtd", "digits"], task=0, **share)[1].ours is None
    )
    shared = run(source, "fewshot", tmp_path / "two", ["dtd", "digits"], task=1, **share)
    assert [row for row in shared if row.task == "digits"] == rows[:4]

    caplog.clear()
    assert run(source, "fewshot", tmp_path, ["digits", "dtd"], seeds=2) == rows
    assert "Task 1 of 2: digits" not in caplog.messages
    run(source, "fewshot", tmp_path, ["digits"], seeds=3)  # other seeds are another result
    assert "Task 1 of 1: digits" in caplog.messages


def test_mistakes(source: str, tmp_path: Path, script: tiny.Script) -> None:
    for name, flag, message in (
        ("fewshot", "--datasets=digits,dtd", "no result of dtd; the table says why"),
        ("fewshot", "--config.seed=1", "--config.seed=1: this suite trains nothing"),
        ("fewshot", "--seeds=0", "argument --seeds: 0 must be at least 1"),
        ("transfer", "--config.sed=1", "--config.sed is not a key of the config"),
    ):
        command = [source, f"--suite={name}", f"--workdir={tmp_path}", "--datasets=digits", flag]
        result = script("evaluate_paper.py", *command)
        assert (result.returncode, message in result.stderr) == (2, True)
    written = json.loads((tmp_path / "fewshot" / "suite.json").read_text())["rows"]
    assert "prepare_data.py tfds dtd" in written[4]["state"]
    model = load_model(source)
    model.params["head"]["bias"][:] += 1
    with pytest.raises(UserError, match=r"has evaluations of other parameters .* --workdir"):
        evaluate_suite(model, [], str(tmp_path / "fewshot"))


def test_a_folder_as_a_classifiers_data_set(source: str, tmp_path: Path) -> None:
    counts = {"3": 3, "8": 3}
    photos = str(fixtures_data.write_folder(tmp_path / "photos", {"train": counts, "test": counts}))
    rows = run(source, "imagenet", tmp_path / "out", [photos])
    p = evaluate(source, dataset=photos, split="test", classes="present")["accuracy"]
    assert [row.metric for row in rows] == ["accuracy", "calibration_error"]
    assert (rows[0].ours, rows[0].of) == (100 * p, "6 images")
    assert rows[0].ci95 == pytest.approx(196 * np.sqrt(p * (1 - p) / 6))


def test_means_of_groups() -> None:
    rows = [
        Row("a", "x", "accuracy", 10.0),
        Row("a", "y", "accuracy", 20.0),
        Row("b", "z", "accuracy", 60.0),
        Row("b", "w", state="missing"),
    ]
    assert [(row.task, row.ours, row.of) for row in means(rows)] == [
        ("mean a", 15.0, "mean of 2 of 2 tasks"),
        ("mean b", 60.0, "mean of 1 of 2 tasks"),
        ("mean", 30.0, "mean of 3 of 4 tasks"),
    ]


def test_the_interval_is_students() -> None:
    values = [0.7, 0.75, 0.9]
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert confidence95(values) == pytest.approx((high - low) / 2)
    assert confidence95(values[:1]) is None


@pytest.mark.slow
def test_vtab_by_the_script_and_read_back(source: str, tmp_path: Path, script: tiny.Script) -> None:
    picture = fixtures_data.encoded(fixtures_data.picture(0), "PNG")

    def example(split: str, index: int) -> Any:
        return {"image": picture, "label": index % 2, "file_name": f"{split}{index}"}

    splits = {"train": 800, "validation": 200, "test": 9}
    fixtures_data.tiny_tfds("dtd", tmp_path / "data", splits, example=example)
    datasets = ["dtd", "svhn"]
    command = [source, "--suite=vtab", f"--workdir={tmp_path}", f"--data_dir={tmp_path}/data"]
    command += [f"--datasets={','.join(datasets)}", "--seeds=2", "--image_size=16"]
    command += [f"--config.{setting}" for setting in FAST]
    result = script("evaluate_paper.py", *command)
    assert (result.returncode, "no result of svhn;" in result.stderr) == (2, True)
    finished = tmp_path / "vtab" / "dtd" / "sweep.json"
    before = finished.stat().st_mtime_ns
    options = {"seeds": 2, "data_dir": str(tmp_path / "data")}
    rows = run(source, "vtab", tmp_path / "vtab", datasets, *FAST, **options)
    assert finished.stat().st_mtime_ns == before  # it is read back
    assert "prepare_data.py tfds svhn_cropped" in rows[1].state
    values = [seed["accuracy"] for seed in json.loads(finished.read_text())["final"]]
    assert (rows[0].ours, rows[0].of) == (pytest.approx(100 * np.mean(values)), "2 seeds")
