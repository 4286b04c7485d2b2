"""The page about a run, read back as a browser and a screen reader would."""

import base64
import json
import re
import shutil
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tests import fixtures_data, tiny
from vit_jax.data.datasets import create_dataset
from vit_jax.errors import UserError
from vit_jax.files.paths import to_path
from vit_jax.inference.load import load_model
from vit_jax.report import model as of_model
from vit_jax.report import summary
from vit_jax.report.page import table, tag
from vit_jax.report.report import provenance as provenance_of
from vit_jax.report.report import settings as settings_of
from vit_jax.report.report import time as time_of
from vit_jax.report.report import write_report
from vit_jax.report.runs import read_run
from vit_jax.train import train_and_evaluate
from vit_jax.trees import count_parameters
from vit_jax.workdir.metrics import read_metrics

SECTIONS = ["results", "curves", "time", "predictions", "inside", "settings", "provenance"]
CHARTS = 3  # of filters, positions and attention distances
CODE = re.compile(r"<style>(.*?)</style>", re.DOTALL)


def read(page: str) -> ET.Element:
    """The elements; raises if one is not closed, or a text is not escaped."""
    return ET.fromstring(CODE.sub("", page))


def text_of(element: ET.Element | None) -> str:
    assert element is not None
    return " ".join("".join(element.itertext()).split())


def section(page: ET.Element, name: str) -> Any:
    return page.find(f".//section[@id='{name}']")


def rows_of(element: ET.Element, path: str = ".//table") -> list[list[str]]:
    """Texts of the cells of the first table at this path."""
    first = element.find(path)
    assert first is not None
    return [[text_of(cell) for cell in row] for row in first.iter("tr")]


def image_of(element: ET.Element) -> tuple[str, bytes]:
    """Its kind and content."""
    [(kind, content)] = re.findall(r"^data:image/(.*);base64,(.*)$", element.attrib["src"])
    return kind, base64.b64decode(content)


def facts_of(page: ET.Element) -> dict[str, str]:
    [facts] = page.findall(".//dl")
    return {text_of(name): text_of(value) for name, value in facts}


def report(workdir: Path, output: Path, **kwargs: Any) -> ET.Element:
    path = write_report(str(workdir), output=str(output / "page.html"), **kwargs)
    return read(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Classes whose names are markup."""
    counts = dict.fromkeys(("<b>cat", "dog & 'co'", 'the "owl"'), 8)
    folder = tmp_path_factory.mktemp("data") / "a & b"
    return fixtures_data.write_folder(folder, {"train": counts, "test": counts})


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "<run> & 1"
    config = tiny.config(
        dataset__name=str(photos),
        dataset__split="train",
        evaluators__test__split="test",
        evaluators__test__every_steps=4,
        sweep__published="98.7 <by others>",
        model__num_layers=2,
    )
    train_and_evaluate(config, str(folder))
    return folder


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory, workdir: Path) -> Path:
    output = tmp_path_factory.mktemp("page") / "page.html"
    return write_report(str(workdir), output=str(output), max_examples=2000)


@pytest.fixture(scope="module")
def page(page_file: Path) -> ET.Element:
    return read(page_file.read_text(encoding="utf-8"))


@pytest.fixture
def changed(tmp_path: Path, workdir: Path) -> Path:
    """A copy to change, without most curves: it takes long to draw them."""
    folder = tmp_path / "copy"
    shutil.copytree(workdir, folder, ignore=shutil.ignore_patterns("checkpoints"))
    rows = read_metrics(folder)
    for row in rows:
        for name in ("accuracy", "learning_rate", "images_per_second"):
            row.pop(name, None)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def edit(folder: Path, name: str, change: Any) -> None:
    """Applies `change` to a JSON file."""
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def test_the_page_is_well_formed_and_asks_no_host(page: ET.Element, page_file: Path) -> None:
    assert [part.attrib["id"] for part in page.iter("section")] == SECTIONS
    links = [link.attrib["href"] for link in page.iter("a")]
    assert links == [f"#{name}" for name in ("main", *SECTIONS)]
    for element in page.iter():
        assert element.tag not in ("link", "iframe", "object")
        assert element.attrib.get("src", "data:image/").startswith("data:image/")
    [style] = CODE.findall(page_file.read_text())
    assert not re.search(r"url\(|@import|https?:", style)


def test_nothing_takes_eyes(page: ET.Element) -> None:
    images = list(page.iter("img"))
    assert len(section(page, "curves").findall(".//img")) >= 4
    assert len(section(page, "inside").findall(".//img")) == CHARTS + 8
    for image in images:
        assert len(image.attrib["alt"]) > 20
        kind, content = image_of(image)
        if kind == "svg+xml":  # of a chart, whose ink is the page's in light and in dark mode
            chart = content.decode()
            assert "prefers-color-scheme:dark" in chart
            assert "#000000" not in chart
            assert ET.fromstring(chart).findall(".//{*}text")
            continue
        pixels = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
        assert min(pixels.shape[:2]) >= 16
        assert np.std(pixels) > 0  # something is on it
    for element in page.iter("table"):
        assert {cell.get("scope") for cell in element.iterfind("thead/tr/*")} == {"col"}
        assert all(row[0].get("scope") == "row" for row in element.iterfind("tbody/tr"))
    for element in page.iterfind(".//*[@tabindex='0']"):
        assert element.tag == "pre" or element.attrib["aria-label"]


def test_names_are_texts(page: ET.Element, photos: Path) -> None:
    assert text_of(page.find(".//h1")) == f"ViT/8 on {photos.name}"
    assert facts_of(page)["Run"].endswith("/<run> & 1")
    header, *rows = rows_of(page, ".//table[@class='confusion']")
    assert header[1:] == [row[0] for row in rows]
    assert set(header[1:]) <= {"<b>cat", "dog & 'co'", 'the "owl"'}
    assert facts_of(page)["Published"] == "98.7 <by others>"
    bad = "<script>'\"&\udcff"
    for built in (tag("p", bad), tag("p", title=bad), table([bad], [(bad,)], label=bad)):
        assert built.count("&lt;script&gt;&#x27;&quot;&amp;\ufffd") == built.count("script") > 0


def test_the_results_are_those_of_the_run(page: ET.Element, workdir: Path) -> None:
    results = json.loads((workdir / "results.json").read_text())
    header, row = rows_of(section(page, "results"))
    cells = dict(zip(header, row, strict=True))
    assert [cells[key] for key in ("Evaluator", "Step", "Examples")] == ["test", "8", "24"]
    assert cells["Accuracy"] == f"{100 * results['test/accuracy']:.2f} %"
    assert cells["Loss"] == f"{results['test/loss']:.4g}"
    times = {row[0]: row[1] for row in rows_of(section(page, "time"))[1:]}
    assert times.keys() >= {"start", "compilation", "training"}
    keys = {"compilation": "compile", "waiting for data": "data_wait"}
    for name, text in times.items():
        training = results["goodput"] * results["seconds"]
        seconds = training if name == "training" else results[f"{keys.get(name, name)}_seconds"]
        assert text == f"{seconds:,.1f} s" != "0.0 s"


def test_the_top_says_what_the_run_is(page: ET.Element, workdir: Path, photos: Path) -> None:
    accuracy = json.loads((workdir / "results.json").read_text())["test/accuracy"]
    low, high = (100 * end for end in summary.wilson_interval(accuracy, 24))
    assert text_of(page.find(".//title")) == f"ViT/8 on {photos.name}: {100 * accuracy:.1f} %"
    top = text_of(page.find(".//p[@class='headline']"))
    assert top.startswith(f"{100 * accuracy:.1f} %accuracy on 24 examples of {photos.name} test, ")
    assert top.endswith(f"95 % interval {low:.1f} to {high:.1f} %")
    facts, count = facts_of(page), count_parameters(load_model(str(workdir)).params)
    assert facts["Model"] == f"ViT/8, {count / 1000:.0f} k parameters, 2 layers, hidden size 16"
    assert facts["Weights"] == "random, seed 0"
    assert facts["Training"].startswith("8 steps of 16 examples, ")


def test_others_on_the_same_examples(changed: Path, workdir: Path) -> None:
    edit(changed, "config.json", lambda c: c["pretrained"].update(source=str(workdir)))
    main = read(tag("main", *summary.results(read_run(changed), {"an <SVM>": 0.5})))
    rows = rows_of(main, ".//table[@class='bars compared']")
    assert rows[0] == ["Model", "Accuracy", "95 % interval", "0 to 100 %"]
    assert re.fullmatch("This run: fine-tuned from .*/<run> & 1, trained on a & b", rows[1][0])
    edit(changed, "config.json", lambda c: c["pretrained"].update(source="gs://b/run.npz"))
    assert "<dd>fine-tuned from gs://b/run.npz</dd>" in summary.header(read_run(changed))[-1]
    assert rows[2][:3] == ["an <SVM>", "50.0 %", "31.4 to 68.6 %"]
    bars = [bar.attrib["style"] for bar in main.iter("i")]
    assert bars[1] == "--value:50.00%;--low:31.43%;--high:68.57%"
    edit(changed, "config.json", lambda c: c["checkpoint"].update(best_metric="test/loss"))
    run = read_run(changed)
    assert "compared" not in "".join(summary.results(run, {"an <SVM>": 0.5}))
    assert re.fullmatch(r"loss \d\.\d+", summary.result(run))


def test_the_curves_have_every_row(page: ET.Element, workdir: Path) -> None:
    rows, curves = read_metrics(workdir), section(page, "curves")
    alts = [image.attrib["alt"] for image in curves.iter("img")]
    ends: Any = dict(alt.split(" by step; last: ") for alt in alts)
    assert {"Loss", "Accuracy", "Learning rate", "Images per second"} <= set(ends)
    of_training = [f"{row['loss']:.4g}" for row in rows if "loss" in row]
    of_test = [f"{row['test/loss']:.4g}" for row in rows if "test/loss" in row]
    assert [len(of_training), len(of_test)] == [8, 2]
    assert ends["Loss"] == f"training {of_training[-1]}, test {of_test[-1]}"
    header, *numbers = rows_of(curves)
    for name, values in (("Loss", of_training), ("Loss, test", of_test)):
        column = header.index(name)
        assert [row[column] for row in numbers if row[column]] == values


def test_the_confusion_matrix_is_that_of_the_model(page, workdir, photos):
    model = load_model(str(workdir))
    data = create_dataset(name=str(photos), split="test", preprocess="decode|resize(16)")
    counts = np.zeros((3, 3), int)
    for i in range(data.num_examples):
        logits = model.logits(data.source[i]["image"])
        counts[data.source[i]["label"], logits[0].argmax()] += 1
    _, *rows = rows_of(page, ".//table[@class='confusion']")
    assert not any(cell == "0" for row in rows for cell in row)
    shown = [[int(cell or 0) for cell in row[1:]] for row in rows]
    seen = [i for i in range(3) if counts[i].any() or counts[:, i].any()]
    assert shown == counts[np.ix_(seen, seen)].tolist()
    wrong = int(counts.sum() - counts.trace())
    text = text_of(section(page, "predictions"))
    assert f"gets {wrong} of 24 examples wrong: {100 * wrong / 24:.1f} % of a & b test." in text
    mistakes = page.findall(".//figure[@class='mistake']")
    assert len(mistakes) == min(wrong, 12) > 0
    shares = [float(re.findall(r"([\d.]+) %", text_of(mistake))[0]) for mistake in mistakes]
    assert shares == sorted(shares, reverse=True)


def test_names_above_a_confusion_matrix_take_no_width(page_file: Path) -> None:
    """Nine classes with long names are 460 pixels wide, 30 are 1,230; looked at in Chromium."""
    style = page_file.read_text(encoding="utf-8")
    assert ".confusion thead th + th { writing-mode: vertical-rl;" in style


def test_time_of_updates_that_were_made_twice_is_no_crash(changed: Path) -> None:
    edit(changed, "results.json", lambda results: results.update(lost_seconds=3.0))
    times = dict(row[:2] for row in rows_of(read(tag("main", *time_of(read_run(changed))))))
    assert times["repeated updates"] == "3.0 s"


def test_what_differs_from_the_defaults_or_the_recipe(page: ET.Element, changed: Path) -> None:
    rows = {row[0]: row[1:] for row in rows_of(section(page, "settings"))}
    assert rows["dataset.batch_size"] == ["16", "512"]
    assert "dataset.on_bad_image" not in rows
    path, recipe = changed / "provenance.jsonl", "configs/quickstart.py:scratch"
    command = f"python scripts/train.py --config=/elsewhere/{recipe}"
    start = {**json.loads(path.read_text()), "command": command}
    start |= {"commit": "0123456789abcdef", "uncommitted_changes": True}
    path.write_text(json.dumps(start) + '\n{"torn')
    run = read_run(changed)
    settings = read(tag("main", *settings_of(run, "")))
    provenance = read(tag("main", *provenance_of(run)))
    assert f"Differences from {recipe}:" in text_of(settings)
    short = {**start, "command": "vit train --config quickstart:scratch --workdir=a"}
    run.starts[-1] = short
    assert read(tag("main", *settings_of(run, ""))).find("p").text == text_of(settings.find("p"))
    run.starts[-1] = start
    rows = {row[0]: row[1:] for row in rows_of(settings)}
    assert rows["dataset.batch_size"] == ["16", "48"]
    assert rows["evaluators.validation.split"] == ["absent", '"train[300:600]"']
    assert "checkpoint.keep" not in rows
    (row,) = rows_of(provenance)[1:]
    assert row[1:3] == ["0", f"{start['commit'][:12]} (changed)"]
    assert text_of(provenance.find("pre")) == start["command"].replace(" --", " \\ --")
    other = read(tag("main", *settings_of(run, "configs/quickstart.py:pretrain")))
    assert "Differences from configs/quickstart.py:pretrain:" in text_of(other)


def test_a_run_without_data_and_one_without_evaluators(changed: Path, tmp_path: Path) -> None:
    edit(changed, "config.json", lambda config: config["dataset"].update(name="./gone"))
    page = report(changed, tmp_path)
    assert re.search(r"Not shown\. .*gone", text_of(section(page, "predictions")))
    assert re.search(r"Not drawn: .*gone", text_of(section(page, "inside")))
    assert len(section(page, "inside").findall(".//img")) == 2  # of the parameters alone
    assert rows_of(section(page, "results"))
    edit(changed, "config.json", lambda config: config.update(evaluators={}))
    page = report(changed, tmp_path)
    assert text_of(section(page, "results")) == "ResultsThe config has no evaluators."
    assert "Not drawn: No evaluator of the config" in text_of(section(page, "inside"))


def test_a_run_that_is_going_on(changed: Path, tmp_path: Path) -> None:
    for name in ("results.json", "params.npz"):
        (changed / name).unlink()
    lines = (changed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (changed / "metrics.jsonl").write_text("".join(lines[:6]) + '{"step": 7, "lo')
    page = report(changed, tmp_path)
    assert "step 5 of 8, not finished" in text_of(page.find(".//p[@class='status']"))
    assert "latest evaluations" in text_of(section(page, "results"))
    assert rows_of(section(page, "results"))[1][-1] == "4"
    assert "params.npz is written at its end" in text_of(section(page, "predictions"))
    (changed / "metrics.jsonl").write_text("")
    edit(changed, "config.json", lambda config: config["duration"].update(steps=None, epochs=90.0))
    page = report(changed, tmp_path)
    assert "step 0 of 90 epochs, not finished" in text_of(page.find(".//p[@class='status']"))
    assert text_of(page.find(".//title")) == "ViT/8 on a & b"
    assert "No numbers have been logged yet." in text_of(section(page, "curves"))
    assert "No times have been logged yet." in text_of(section(page, "time"))
    assert rows_of(section(page, "results"))[1][-1] == "not yet"


def test_a_run_without_one_label_per_image(changed: Path, tmp_path: Path) -> None:
    edit(changed, "config.json", lambda config: config.update(objective={"name": "masked_patch"}))
    edit(changed, "model.json", lambda model: model.update(class_names=[]))
    page = report(changed, tmp_path, max_examples=8)
    text = "A confusion matrix needs one label per image, which objective.name='masked_patch'"
    assert text in text_of(section(page, "predictions"))
    assert "over 8 images" in text_of(section(page, "inside"))
    assert len(section(page, "inside").findall(".//img")) == CHARTS + 8


@pytest.mark.parametrize(
    ("name", "data_dir", "opens"),
    [
        (None, "", False),
        ("vit_jax", "", False),  # a folder here
        ("photos/{0..3}.tar", "", False),
        ("gs://bucket/photos.csv", "", False),
        ("cifar10", "/data", False),
        ("cifar10_corrupted/fog_1:1.0.0", "", True),
        ("glyphs(image_size=16, classes='0123456789')", "", True),
    ],
)
def test_data_at_a_path_that_only_the_run_names_are_not_opened(
    changed: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, data_dir: str, opens: bool
) -> None:
    def update(config: dict[str, Any]) -> None:
        config["dataset"].update(name=name or config["dataset"]["name"], data_dir=data_dir)

    edit(changed, "config.json", update)
    asked: list[str] = []

    def open_dataset(_: Any, **options: Any) -> Any:
        asked.append(options["name"])
        raise UserError("opened")

    monkeypatch.setattr(of_model.Model, "open_dataset", open_dataset)
    run = read_run(changed)
    _, error = of_model.load_subject(run, None)
    assert bool(asked) == opens == (str(error) == "opened")
    assert opens or "path that only its config names: --max_examples=2000 opens" in str(error)
    _, error = of_model.load_subject(run, 2000)
    assert str(error) == "opened"


def test_some_examples_many_classes_and_no_matplotlib(workdir, tmp_path, monkeypatch):
    monkeypatch.setattr(of_model, "MOST_CLASSES", 1)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = report(workdir, tmp_path, max_examples=9)
    for name in ("inside", "curves"):
        assert "needs the package matplotlib" in text_of(section(page, name))
    assert len(rows_of(section(page, "curves"))) == 1 + 8 + 2
    text = text_of(section(page, "predictions"))
    assert "of 9 examples wrong" in text
    assert "evenly spaced examples of 24" in text
    header, *rows = rows_of(section(page, "predictions"))
    assert header == ["Label", "Predicted", "Times", "Images of this label"]
    times = [int(row[2]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert f"gets {sum(times)} of" in text
    assert sum({row[0]: int(row[3]) for row in rows}.values()) <= 9


def test_a_run_in_a_bucket(workdir: Path, bucket: str) -> None:
    folder = to_path(f"{bucket}/run")
    for name in ("config.json", "metrics.jsonl", "provenance.jsonl", "results.json"):
        (folder / name).write_bytes((workdir / name).read_bytes())
    path = write_report(f"{bucket}/run")
    assert str(path) == f"{bucket}/run/report.html"
    assert "Not shown. The run has not finished; params.npz" in text_of(read(path.read_text()))


def test_the_script(changed: Path, script: tiny.Script) -> None:
    result = script("report.py", str(changed), "--max_examples=0", "--against=a probe=0.625")
    assert (result.returncode, f"Wrote {changed}/report.html." in result.stdout) == (0, True)
    text = text_of(read((changed / "report.html").read_text()))
    assert "--max_examples=0" in text
    assert "a probe62.5 %" in text
    edit(changed, "config.json", lambda config: config.pop("sweep"))
    for folder, message in (
        ("nowhere", "holds no metrics.jsonl"),
        (str(changed), "is damaged or from another version of the code (KeyError('sweep'))."),
    ):
        result = script("report.py", folder)
        assert (result.returncode, message in result.stderr) == (2, True)


def test_damaged_files_are_named(changed: Path) -> None:
    for name, content, message in (
        ("results.json", b"{}", "results.json is damaged, 'step' is missing or has the wrong type"),
        ("config.json", b"[]", "config.json is damaged, it is not a JSON object"),
        ("config.json", b"{\xff", "config.json is damaged, not a JSON file"),
    ):
        (changed / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            write_report(str(changed))
