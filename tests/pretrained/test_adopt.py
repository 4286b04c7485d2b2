"""Fine-tuning computes what the weights were trained to compute."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.file_server import Served, serve_files
from tests.saved_models import save_model
from vit_jax.command_line import get_config
from vit_jax.errors import UserError
from vit_jax.export.convert import convert_checkpoint
from vit_jax.files.paths import read_json
from vit_jax.inference.load import load_model
from vit_jax.parameters.sharding import create_mesh
from vit_jax.pretrained.adopt import adopt
from vit_jax.run import create_run, to_plain
from vit_jax.sweep.run import SweepRun, read_outcome
from vit_jax.train import train_and_evaluate
from vit_jax.wording import escaped

IMAGENET = "decode|resize(16)|normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"
OVERRIDES: dict[str, Any] = {
    "duration__steps": 2,
    "model__mlp_dim": 64,
    "dataset__preprocess": "decode|resize(16)",
    "dataset__eval_preprocess": "decode|resize(16)",
}


def config_for(source: str, **overrides: Any) -> Any:
    model = load_model(source).description.model
    sizes = ("patch_size", "hidden_size", "num_layers", "mlp_dim", "num_heads")
    sizes_of = {f"model__{key}": model[key] for key in sizes}
    return tiny.config(**{**OVERRIDES, **sizes_of, "pretrained__source": source, **overrides})


@pytest.mark.parametrize("format", ["npz", "huggingface"])
def test_what_the_source_states_becomes_the_runs(format, tmp_path, caplog):
    source = str(
        save_model(
            tmp_path / "npz",
            class_names=("ant", "bee"),
            eval_preprocess=IMAGENET.replace("16)|", "16, method='pillow_bilinear')|"),
            gelu="exact",
            layer_norm_epsilon=1e-5,
        )
    )
    if format == "huggingface":
        convert_checkpoint(source, str(tmp_path / format), format=format)
        source = str(tmp_path / format)
    config = config_for(source)
    with caplog.at_level(logging.INFO):
        adopted = adopt(config, str(tmp_path / "run"))
    model = load_model(source)
    for key in ("gelu", "layer_norm_epsilon"):
        assert adopted.model[key] == model.description.model[key]
    assert "model.gelu=exact" in caplog.text
    assert config.model.gelu == "tanh"  # it is a copy
    run = create_run(adopted, create_mesh(**adopted.mesh))
    assert run.descriptions[""].model["gelu"] == "exact"
    rng = np.random.default_rng(0)
    for dataset in (run.dataset, run.datasets["test"]):
        pixels = dataset.source[0]["image"]
        np.testing.assert_allclose(
            dataset.example(0, rng)["image"], model.preprocess(pixels)[0], atol=0.1
        )


def test_what_was_asked_for_stays_and_is_said(tmp_path, caplog):
    ranged = "decode|resize(16)|value_range(0, 1)"
    source = save_model(
        tmp_path / "a", class_names=("a", "b"), eval_preprocess=IMAGENET, gelu="exact"
    )
    config = config_for(str(source), pretrained__keep=("model.gelu",), dataset__preprocess=ranged)
    adopted = adopt(config, str(tmp_path / "run"))
    assert adopted.model.gelu == "tanh"
    assert adopted.dataset.preprocess == ranged
    assert "dataset.preprocess has ValueRange(low=0.0" in caplog.text
    assert "normalize(" in adopted.dataset.eval_preprocess
    assert get_config("", "model.gelu=exact").pretrained.keep == ("model.gelu",)
    # What learns from pixels keeps its own.
    adopted = adopt(config_for(str(source)), str(tmp_path / "run"), rescales=False)
    assert adopted.dataset.preprocess == OVERRIDES["dataset__preprocess"]


def test_a_run_is_resumed_with_what_it_took(tmp_path: Path) -> None:
    source = save_model(
        tmp_path / "a", class_names=("a", "b"), eval_preprocess=IMAGENET, gelu="exact"
    )
    config = config_for(str(source))
    workdir = tmp_path / "run"
    train_and_evaluate(config, str(workdir))
    assert read_json(workdir / "config.json")["model"]["gelu"] == "exact"
    assert load_model(workdir).description.eval_preprocess.endswith("(0.229, 0.224, 0.225))")
    for file in source.iterdir():
        file.unlink()
    assert train_and_evaluate(config, str(workdir))["step"] == 2
    # Nor is it another run to a sweep.
    outcome = read_outcome(SweepRun("run", config, "test/accuracy"), tmp_path, "auto")
    assert outcome["state"] == "finished"


def test_a_damaged_config_is_said_by_the_workdir(tmp_path: Path) -> None:
    ranged = "decode|resize(16)|value_range(0, 1)"
    source = save_model(tmp_path / "a", class_names=("a", "b"), eval_preprocess=ranged)
    (tmp_path / "run/checkpoints/1").mkdir(parents=True)
    (tmp_path / "run/checkpoints/1/x").touch()
    (tmp_path / "run/config.json").write_text('{"model": 3}')
    adopted = adopt(config_for(str(source)), str(tmp_path / "run"))
    assert adopted.dataset.preprocess.endswith("|value_range(0.0)")


def test_what_signs_an_address_is_neither_saved_nor_shown(tmp_path, monkeypatch, caplog):
    source = str(save_model(tmp_path / "source"))
    file = tmp_path / "source" / "params.npz"
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    with serve_files() as server:
        server.files["/a.npz?id=3&X-Amz-Signature=secret"] = Served(file.read_bytes())
        signed = f"{server.address}/a.npz?id=3&X-Amz-Signature=secret"
        config = adopt(config_for(source, pretrained__source=signed), str(tmp_path))
        assert to_plain(config)["pretrained"]["source"] == f"{server.address}/a.npz?id=3"
        assert config.pretrained.source == signed  # which is read once more
        with pytest.raises(UserError) as error:
            adopt(config_for(source, pretrained__source=signed.replace("a.npz", "b")), "")
    assert "secret" not in str(error.value) + escaped(caplog.text, "\n")
