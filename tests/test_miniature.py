"""The experiments in miniature: every run builds, and one experiment runs, resumes and reports."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from configs import miniature, miniature_fashion
from scripts.miniature import difference95, interval, verdict
from tests.saved_models import save_model
from vit_jax.data import idx
from vit_jax.errors import UserError
from vit_jax.files.paths import write_json
from vit_jax.parameters.sharding import create_mesh
from vit_jax.run import complete_config, create_run, to_plain

RECIPES = pytest.mark.parametrize("recipe", [miniature, miniature_fashion])


def variants(recipe):
    experiments = recipe.EXPERIMENTS.values()
    return {name for experiment in experiments for name in experiment.variants.split()}


@RECIPES
def test_every_run_builds(recipe, fashion) -> None:
    built = set()
    names = dict.fromkeys(run for variant in variants(recipe) for run in recipe.runs(variant, 1))
    for name in sorted(names):
        on_fashion = recipe is miniature_fashion
        config = recipe.get_config(f"{name},{fashion}" if on_fashion else name)
        sections = (config[key] for key in ("model", "objective", "gradient", "mesh"))
        is_upstream = name.startswith(("pretrain/", "upstream/"))
        settings = str((is_upstream, *sections))
        if settings in built:  # the same but for data and numbers
            continue
        built.add(settings)
        if "scan" in config.model:
            config.model.scan = True  # traced sooner
        if on_fashion:  # of 40 images
            config.dataset.split = config.dataset.split.partition("[")[0]
            for test in config.evaluators.values():
                if "train_split" in test:
                    test.train_split = "train"
        mesh = create_mesh(**config.mesh)
        with jax.set_mesh(mesh):
            run = create_run(config, mesh)
        others = {"fashion"} if on_fashion else {"digits", "letters"}
        assert set(run.evaluations) == {"test", *(others if is_upstream else ())}


def test_runs_that_are_none() -> None:
    for recipe, run, message in (
        (miniature, "pretrain/vit", "must be STAGE/VARIANT_seedN, such as pretrain/vit_seed0"),
        (miniature, "pretrain/vti_seed0", "VARIANT='vti' is unknown"),
        (miniature, "pretrain/vit_px24_seed0", "VARIANT='vit_px24' is unknown"),
        (miniature_fashion, "pretrain/vit_seed0", "stages: fashion, upstream"),
        (miniature_fashion, "upstream/vit_seed0", "Known: vit_glyphs, bit_glyphs, vit_mae"),
        (miniature_fashion, "upstream/vit_mae_n1000_seed0", "Did you mean 'vit_mae'"),
        (miniature_fashion, "fashion/vit_px24_seed0", "VARIANT='vit_px24' is unknown"),
    ):
        with pytest.raises(UserError, match=message):
            recipe.get_config(run)


def test_more_images_are_seen_more_often_but_not_as_much_more() -> None:
    few, all_images = (
        miniature_fashion.get_config(f"fashion/vit{n}_seed0") for n in ("_n1000", "")
    )
    assert (few.dataset.split, all_images.dataset.split) == ("train[:1000]", "train[:55000]")
    assert all_images.duration.steps * 128 == pytest.approx(5 * 55_000, rel=1e-3)
    assert all_images.duration.steps / few.duration.steps == pytest.approx(55 ** (1 / 3), rel=1e-2)


@RECIPES
def test_claims_are_of_variants(recipe) -> None:
    assert {re.sub(r"_(n|px)\d+$", "", name) for name in variants(recipe)} == set(recipe.VARIANTS)
    for experiment in recipe.EXPERIMENTS.values():
        known = set(experiment.variants.split())
        for claim in map(str.strip, experiment.claims.splitlines()):
            match = re.fullmatch(r"(\S+)(?: - (\S+))? [>=] (\S+)(?: - (\S+))?: \S.*", claim)
            assert match, claim
            assert {name.partition("/")[0] for name in match.groups() if name} <= known


def test_verdicts() -> None:
    # R: t.test(c(1, 2, 3), c(4, 6, 8))$conf.int
    difference, half = difference95([[1, 2, 3]], [[4, 6, 8]])
    assert (difference, round(half, 4)) == (-4.0, 4.1554)
    assert difference95([[1, 1]], [[2, 2]]) == (-1.0, 0.0)
    # Four variances of 1/3: their sum has 8 degrees of freedom, 2.306 * sqrt(4/3).
    groups = [[9, 10, 11], [1, 2, 3]], [[5, 6, 7], [2, 3, 4]]
    difference, half = difference95(*groups)
    assert (difference, round(half, 3)) == (5.0, 2.663)  # (10 - 2) - (6 - 3)
    assert verdict(groups[0], ">", groups[1], 2) == "shows (+5.0 ± 2.7)"
    for first, relation, second, expected in (
        ([5, 6, 7], ">", [1, 2, 3], "shows (+4.0 ± "),
        ([1, 2, 3], ">", [5, 6, 7], "not at this scale (-4.0"),
        ([1, 2, 3], ">", [1, 2, 4], "undecided"),
        ([1, 1.1], "=", [1, 1.2], "shows"),
        ([1, 1.1], "=", [9, 9.2], "not at this scale"),
        ([1, 5], "=", [3, 5], "undecided"),
    ):
        assert verdict([first], relation, [second], 2).startswith(expected)
    assert (verdict([[1]], ">", [[2]], 2), interval([]), interval([1])) == ("-", "-", "1.0")
    assert verdict([[1, 2], []], ">", [[2, 3], [1, 2]], 2) == "-"


def stand_in(config: ConfigDict, workdir: str, **_: Any) -> dict[str, float]:
    """Leaves what a training leaves, as far as the experiments look at it."""
    source = config.pretrained.source
    assert not source or Path(source, "params.npz").exists()
    save_model(Path(workdir), class_names=tuple("0123456789"))
    write_json(Path(workdir, "config.json"), to_plain(complete_config(config, workdir)))
    scores = ["test/accuracy", "digits/accuracy_5shot", "letters/accuracy_5shot"]
    scores += ["fashion/accuracy_5shot", "fashion/accuracy_10shot"]
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


def test_an_experiment_on_fashion_mnist(tmp_path, script, monkeypatch, fashion):
    monkeypatch.setattr("vit_jax.train.train_and_evaluate", stand_in)
    command = ["miniature.py", f"--workdir={tmp_path / 'runs'}", "--experiments=fashion_start"]
    command += ["--seeds=1", "--config.duration.steps=2"]
    refused = script(*command, f"--fashion_mnist={tmp_path}")
    assert "dataset-fashion-mnist" in refused.stderr
    assert not (tmp_path / "runs").exists()
    assert script(*command, f"--fashion_mnist={fashion}").returncode == 0
    runs = {path.parent.name: path.parent for path in tmp_path.glob("runs/fashion/*/results.json")}
    assert len(runs) == 19
    for name, folder in runs.items():
        config = json.loads((folder / "config.json").read_text())
        upstream = str(tmp_path / "runs/upstream" / re.sub("_n[0-9]+", "", name))
        starts = "glyphs" in name or "mae" in name
        assert config["dataset"]["name"] == str(fashion)
        assert config["pretrained"]["source"] == (upstream if starts else "")
    page = (tmp_path / "runs/miniature.md").read_text()
    assert "| variant | accuracy | 5-shot | 10-shot |" in page
    assert "| vit_mae_n1000, 1,000 images | 50.0 | - | - |" in page
    assert "| vit_mae, 55,000 images | 50.0 | 50.0 | 50.0 |" in page


def test_data_that_are_not_fashion_mnist(tmp_path, script, monkeypatch, fashion):
    monkeypatch.setattr(idx, "_FASHION_LABELS", set())  # of MNIST
    command = ["miniature.py", f"--workdir={tmp_path / 'runs'}", "--experiments=fashion_shape"]
    assert "has no Fashion-MNIST" in script(*command, f"--fashion_mnist={fashion}").stderr
    (fashion / "t10k-images-idx3-ubyte.gz").write_bytes(b"cut")
    idx.read_idx.cache_clear()
    damaged = script(*command, "--dry_run", f"--fashion_mnist={fashion}").stderr
    assert re.fullmatch(".*t10k-images-idx3-ubyte.gz cannot be read.*\n", damaged)
