"""The experiments in miniature: every run builds, and one experiment runs, resumes and reports."""

import re
from pathlib import Path
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from configs import miniature
from scripts.miniature import difference95, interval, verdict
from tests.saved_models import save_model
from vit_jax.errors import UserError
from vit_jax.files.paths import write_json
from vit_jax.parameters.sharding import create_mesh
from vit_jax.run import complete_config, create_run, to_plain


def test_every_run_builds() -> None:
    experiments = miniature.EXPERIMENTS.values()
    variants = {name for experiment in experiments for name in experiment.variants.split()}
    assert set(miniature.VARIANTS) <= variants  # none is in no experiment
    built = set()
    names = dict.fromkeys(run for variant in variants for run in miniature.runs(variant, 1))
    for name in sorted(names):
        config = miniature.get_config(name)
        sections = (config[key] for key in ("model", "objective", "gradient", "mesh"))
        settings = str((name.startswith("pretrain/"), *sections))
        if settings in built:  # the same but for data and numbers
            continue
        built.add(settings)
        if "scan" in config.model:
            config.model.scan = True  # traced sooner
        mesh = create_mesh(**config.mesh)
        with jax.set_mesh(mesh):
            run = create_run(config, mesh)
        assert set(run.evaluations) == (
            {"test", "digits", "letters"} if name.startswith("pretrain/") else {"test"}
        )
    with pytest.raises(UserError, match="must be STAGE/VARIANT_seedN"):
        miniature.get_config("pretrain/vit")
    with pytest.raises(UserError, match="VARIANT='vti' is unknown"):
        miniature.get_config("pretrain/vti_seed0")


def test_claims_are_of_variants() -> None:
    for experiment in miniature.EXPERIMENTS.values():
        variants = set(experiment.variants.split())
        for claim in map(str.strip, experiment.claims.splitlines()):
            match = re.fullmatch(r"(\S+) [>=] (\S+): \S.*", claim)
            assert match, claim
            assert {name.partition("/")[0] for name in match.groups()} <= variants


def test_verdicts() -> None:
    # R: t.test(c(1, 2, 3), c(4, 6, 8))$conf.int
    difference, half = difference95([1, 2, 3], [4, 6, 8])
    assert (difference, round(half, 4)) == (-4.0, 4.1554)
    assert difference95([1, 1], [2, 2]) == (-1.0, 0.0)
    assert verdict([5, 6, 7], ">", [1, 2, 3], 2).startswith("shows (+4.0 ± ")
    assert verdict([1, 2, 3], ">", [5, 6, 7], 2).startswith("not at this scale (-4.0")
    assert verdict([1, 2, 3], ">", [1, 2, 4], 2).startswith("undecided")
    assert verdict([1, 1.1], "=", [1, 1.2], 2).startswith("shows")
    assert verdict([1, 1.1], "=", [9, 9.2], 2).startswith("not at this scale")
    assert verdict([1, 5], "=", [3, 5], 2).startswith("undecided")
    assert (verdict([1], ">", [2], 2), interval([]), interval([1])) == ("-", "-", "1.0")


def stand_in(config: ConfigDict, workdir: str, **_: Any) -> dict[str, float]:
    """Leaves what a training leaves, as far as the experiments look at it."""
    source = config.pretrained.source
    assert not source or Path(source, "params.npz").exists()
    save_model(Path(workdir), class_names=tuple("0123456789"))
    write_json(Path(workdir, "config.json"), to_plain(complete_config(config, workdir)))
    scores = ("test/accuracy", "digits/accuracy_5shot", "letters/accuracy_5shot")
    results = {"step": 2, "seconds": 1.0, **dict.fromkeys(scores, 0.5)}
    write_json(Path(workdir, "results.json"), results)
    return results


def test_an_experiment_runs_and_resumes(tmp_path, script, monkeypatch):
    monkeypatch.setattr("vit_jax.train.train_and_evaluate", stand_in)
    command = [f"--workdir={tmp_path}", "--experiments=distance", "--seeds=1"]
    command.append("--config.evaluators.test.split=test[:50]")
    first, second = ([*command, "--num_tasks=2", f"--task={i}"] for i in range(2))
    assert "3 of 3 runs" in script("miniature.py", *first, "--dry_run").stdout
    assert script("miniature.py", *first).returncode == 0
    done = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/results.json")}
    assert {path.parent.name for path in done} == {"vit_seed0", "vit_px24_seed0"}
    assert "0 of 3 runs" in script("miniature.py", *first, "--dry_run").stdout
    assert "3 of 3 runs" in script("miniature.py", *second, "--dry_run").stdout
    (tmp_path / "miniature.md").unlink()
    assert script("miniature.py", *first).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert "| vit_px24/1 | " in (tmp_path / "miniature.md").read_text()
    assert (tmp_path / "distance.png").read_bytes().startswith(b"\x89PNG")
    assert script("miniature.py", *command[:1], "--experiments=x").returncode == 2
