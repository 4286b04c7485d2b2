"""The page about a run, read back as a browser and a screen reader would."""

import base64
import json
import re
import shutil
import subprocess
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
from vit_jax.report.page import table, tag
from vit_jax.report.report import write_report
from vit_jax.train import train_and_evaluate
from vit_jax.workdir.description import write_provenance
from vit_jax.workdir.metrics import read_metrics

SECTIONS = ["results", "curves", "time", "predictions", "inside", "settings", "provenance"]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
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
    found = element.find(path)
    assert found is not None
    return [[text_of(cell) for cell in row] for row in found.iter("tr")]


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
    return write_report(str(workdir), output=str(tmp_path_factory.mktemp("page") / "page.html"))


@pytest.fixture(scope="module")
def page(page_file: Path) -> ET.Element:
    return read(page_file.read_text(encoding="utf-8"))


@pytest.fixture
def changed(tmp_path: Path, workdir: Path) -> Path:
    """A copy to change."""
    folder = tmp_path / "copy"
    shutil.copytree(workdir, folder, ignore=shutil.ignore_patterns("checkpoints"))
    return folder


def edit(folder: Path, name: str, change: Any) -> None:
    """Applies `change` to a JSON file."""
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def test_the_page_is_well_formed_and_asks_no_host(page: ET.Element, page_file: Path) -> None:
    assert [each.attrib["id"] for each in page.iter("section")] == SECTIONS
    links = [each.attrib["href"] for each in page.iter("a")]
    assert links == [f"#{name}" for name in ("main", *SECTIONS)]
    for each in page.iter():
        assert each.tag not in ("link", "iframe", "object")
        assert each.attrib.get("src", "data:image/").startswith("data:image/")
    [style] = CODE.findall(page_file.read_text())
    assert not re.search(r"url\(|@import|https?:", style)


def test_nothing_takes_eyes(page: ET.Element) -> None:
    images = list(page.iter("img"))
    assert len(section(page, "curves").findall(".//img")) >= 4
    assert len(section(page, "inside").findall(".//img")) == 4
    for each in images:
        assert len(each.attrib["alt"]) > 20
        content = base64.b64decode(each.attrib["src"].partition(";base64,")[2])
        pixels = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
        assert min(pixels.shape[:2]) >= 16
        assert np.std(pixels) > 0  # something is on it
    for each in page.iter("table"):
        assert {cell.get("scope") for cell in each.iterfind("thead/tr/th")} == {"col"}
        assert all(row[0].get("scope") == "row" for row in each.iterfind("tbody/tr"))
    for each in page.iterfind(".//*[@tabindex='0']"):
        assert each.tag == "pre" or each.attrib["aria-label"]


def test_names_are_texts(page: ET.Element, photos: Path) -> None:
    assert text_of(page.find(".//h1")) == "<run> & 1"
    assert str(photos) in text_of(page.find(".//p[@class='summary']"))
    header, *rows = rows_of(page, ".//table[@class='confusion']")
    assert header[1:] == [row[0] for row in rows]
    assert set(header[1:]) <= {"<b>cat", "dog & 'co'", 'the "owl"'}
    assert rows_of(section(page, "results"))[1][-1] == "98.7 <by others>"
    bad = "<script>'\"&\udcff"
    for built in (tag("p", bad), tag("p", title=bad), table([bad], [(bad,)], label=bad)):
        assert built.count("&lt;script&gt;&#x27;&quot;&amp;\ufffd") == built.count("script") > 0


def test_the_results_are_those_of_the_run(page: ET.Element, workdir: Path) -> None:
    results = json.loads((workdir / "results.json").read_text())
    header, row = rows_of(section(page, "results"))
    cells = dict(zip(header, row, strict=True))
    assert [cells[key] for key in ("evaluator", "step", "num_examples")] == ["test", "8", "24"]
    assert cells["accuracy"] == f"{100 * results['test/accuracy']:.2f} %"
    assert cells["loss"] == f"{results['test/loss']:.4g}"
    times = {row[0]: row[1] for row in rows_of(section(page, "time"))}
    for kind in ("start", "compile", "evaluation", "checkpoint", "data_wait", "lost"):
        assert times[kind.replace("_", " ")] == f"{results[f'{kind}_seconds']:,.1f}"
    assert times["training"] == f"{results['goodput'] * results['seconds']:,.1f}"


def test_the_curves_have_every_row(page: ET.Element, workdir: Path) -> None:
    rows, curves = read_metrics(workdir), section(page, "curves")
    alts = [each.attrib["alt"] for each in curves.iter("img")]
    ends: Any = dict(alt.split(" over the steps; at the end ") for alt in alts)
    assert {"loss", "accuracy", "learning_rate", "images_per_second"} <= set(ends)
    of_training = [f"{row['loss']:.4g}" for row in rows if "loss" in row]
    of_test = [f"{row['test/loss']:.4g}" for row in rows if "test/loss" in row]
    assert [len(of_training), len(of_test)] == [8, 2]
    assert ends["loss"] == f"loss {of_training[-1]}, test/loss {of_test[-1]}"
    header, *numbers = rows_of(curves)
    for name, values in (("loss", of_training), ("test/loss", of_test)):
        column = header.index(name)
        assert [row[column] for row in numbers if row[column]] == values


def test_the_confusion_matrix_is_that_of_the_model(
    page: ET.Element, workdir: Path, photos: Path
) -> None:
    model = load_model(str(workdir))
    data = create_dataset(name=str(photos), split="test", preprocess="decode|resize(16)")
    counts = np.zeros((3, 3), int)
    for i in range(data.num_examples):
        logits = model.logits(data.source[i]["image"])
        counts[data.source[i]["label"], logits[0].argmax()] += 1
    _, *rows = rows_of(page, ".//table[@class='confusion']")
    found = [[int(cell) for cell in row[1:]] for row in rows]
    seen = [i for i in range(3) if counts[i].any() or counts[:, i].any()]
    assert found == counts[np.ix_(seen, seen)].tolist()
    wrong = int(counts.sum() - counts.trace())
    text = text_of(section(page, "predictions"))
    assert (
        f"On 24 of 24 examples of {photos} test, evenly spread, the model is wrong {wrong}" in text
    )
    mistakes = page.findall(".//figure[@class='mistake']")
    assert len(mistakes) == min(wrong, 12) > 0
    shares = [float(re.search(r"([\d.]+)%", text_of(each))[1]) for each in mistakes]  # type: ignore[index]
    assert shares == sorted(shares, reverse=True)


def test_what_differs_from_the_defaults_or_the_recipe(
    page: ET.Element, changed: Path, tmp_path: Path
) -> None:
    rows = {row[0]: row[1:] for row in rows_of(section(page, "settings"))}
    assert rows["dataset.batch_size"] == ["16", "512"]
    assert "dataset.on_bad_image" not in rows
    path, recipe = changed / "provenance.jsonl", "configs/quickstart.py:scratch"
    command = f"python scripts/train.py --config=/elsewhere/{recipe}"
    start = {**json.loads(path.read_text()), "command": command}
    path.write_text(json.dumps(start) + '\n{"torn')
    page = report(changed, tmp_path, max_examples=0)
    settings, provenance = section(page, "settings"), section(page, "provenance")
    assert f"What differs from {recipe}:" in text_of(settings)
    rows = {row[0]: row[1:] for row in rows_of(settings)}
    assert rows["dataset.batch_size"] == ["16", "48"]
    assert rows["evaluators.validation.split"] == ["absent", '"train[300:600]"']
    assert "checkpoint.keep" not in rows
    (row,) = rows_of(provenance)[1:]
    assert row[:3] == [start["time"], "0", start["commit"] or "unknown"]
    assert text_of(provenance.find("pre")) == start["command"]


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
    assert "Not drawn: The config has no evaluator" in text_of(section(page, "inside"))


def test_a_run_that_is_going_on(changed: Path, tmp_path: Path) -> None:
    for name in ("results.json", "params.npz"):
        (changed / name).unlink()
    lines = (changed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (changed / "metrics.jsonl").write_text("".join(lines[:6]) + '{"step": 7, "lo')
    page = report(changed, tmp_path)
    assert "step 5 of 8, not ended" in text_of(page.find(".//p[@class='summary']"))
    assert "last evaluations so far" in text_of(section(page, "results"))
    assert rows_of(section(page, "results"))[1][-3] == "4"
    assert "has not written params.npz yet" in text_of(section(page, "predictions"))
    (changed / "metrics.jsonl").write_text("")
    edit(changed, "config.json", lambda config: config["duration"].update(steps=None, epochs=90.0))
    page = report(changed, tmp_path)
    assert "step 0 of 90 epochs, not ended" in text_of(page.find(".//p[@class='summary']"))
    assert "No numbers have been logged yet." in text_of(section(page, "curves"))
    assert "No times have been logged yet." in text_of(section(page, "time"))
    assert rows_of(section(page, "results"))[1][-3] == "not yet"


@pytest.mark.parametrize("objective", ["masked_patch", "multi_label"])
def test_a_run_without_one_label_per_image(changed: Path, tmp_path: Path, objective: str) -> None:
    edit(changed, "config.json", lambda config: config.update(objective={"name": objective}))
    if objective == "masked_patch":  # its outputs are no classes
        edit(changed, "model.json", lambda model: model.update(class_names=[]))
    page = report(changed, tmp_path, max_examples=8)
    text = f"There is no confusion matrix: objective.name='{objective}' has no one label."
    assert text in text_of(section(page, "predictions"))
    assert "over 8 images" in text_of(section(page, "inside"))
    assert len(section(page, "inside").findall(".//img")) == 4


def test_some_examples_many_classes_and_no_matplotlib(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_model, "MOST_CLASSES", 1)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = report(workdir, tmp_path, max_examples=9)
    for name in ("inside", "curves"):
        assert "needs the package matplotlib" in text_of(section(page, name))
    assert len(rows_of(section(page, "curves"))) == 1 + 8 + 2
    text = text_of(section(page, "predictions"))
    assert "On 9 of 24 examples of" in text
    header, *rows = rows_of(section(page, "predictions"))
    assert header == ["label", "taken for", "times", "images of the label"]
    times = [int(row[2]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert f"the model is wrong {sum(times)} times" in text
    assert sum({row[0]: int(row[3]) for row in rows}.values()) <= 9


def test_a_run_in_a_bucket(workdir: Path, bucket: str) -> None:
    folder = to_path(f"{bucket}/run")
    for name in ("config.json", "metrics.jsonl", "provenance.jsonl", "results.json"):
        (folder / name).write_bytes((workdir / name).read_bytes())
    path = write_report(f"{bucket}/run")
    assert str(path) == f"{bucket}/run/report.html"
    assert "Not shown. The run has not written params.npz" in text_of(read(path.read_text()))


def test_the_script(changed: Path, script: tiny.Script) -> None:
    result = script("report.py", str(changed), "--max_examples=0")
    assert (result.returncode, f"Wrote {changed}/report.html." in result.stdout) == (0, True)
    assert "--max_examples=0" in (changed / "report.html").read_text()
    edit(changed, "config.json", lambda config: config.pop("sweep"))
    for folder, message in (
        ("nowhere", "holds no metrics.jsonl"),
        (str(changed), "has no 'sweep': another version of the code has written it."),
    ):
        result = script("report.py", folder)
        assert (result.returncode, message in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"[]", "config.json is damaged, it holds no JSON object"),
        ("config.json", b"{\xff", "config.json is damaged, not a JSON file"),
        ("results.json", b"{}", "results.json is damaged, 'step' is missing or of a wrong kind"),
        ("results.json", b'{"step": 1, "seconds": 1, "goodput": 1, "a": []}', "'a' is no number"),
    ],
)
def test_damaged_files_are_named(changed: Path, name: str, content: bytes, message: str) -> None:
    (changed / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        write_report(str(changed))


@pytest.mark.parametrize("key", ["model", "dataset.name", "checkpoint.best_metric", "seed"])
def test_a_setting_of_another_kind_is_named(changed: Path, key: str) -> None:
    def change(config: Any) -> None:
        *sections, last = key.split(".")
        node = config[sections[0]] if sections else config
        node[last] = True if key != "seed" else "x"

    edit(changed, "config.json", change)
    with pytest.raises(UserError, match=f"config.json is damaged, '{key}.*of a wrong kind"):
        write_report(str(changed))


def test_a_damaged_line_of_provenance_is_left_out(changed: Path, tmp_path: Path) -> None:
    with open(changed / "provenance.jsonl", "ab") as file:
        file.write(b'\xff\n{"time": 3}\n[]\n')
    write_provenance(str(changed), start_step=0)
    root = report(changed, tmp_path, max_examples=0)
    assert "started 2 times" in text_of(section(root, "provenance"))


@pytest.mark.skipif(BROWSER is None, reason="needs a browser: Debian's package chromium")
def test_a_browser_shows_it_on_a_phone(page_file: Path, tmp_path: Path) -> None:
    shutil.copy(page_file, tmp_path)
    script = """
      const frame = document.querySelector("iframe");
      frame.onload = () => {
        const root = frame.contentDocument.documentElement;
        document.body.dataset.found = `${root.clientWidth} ${root.scrollWidth}`;
      };"""
    frame = '<iframe src="page.html" style="width:390px;height:844px;border:0"></iframe>'
    (tmp_path / "phone.html").write_text(f"<body>{frame}<script>{script}</script></body>")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=5000", "--dump-dom", (tmp_path / "phone.html").as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    [(inside, wide)] = re.findall(r'data-found="(\d+) (\d+)"', result.stdout)
    assert int(inside) in range(370, 391)  # less a scroll bar
    assert int(wide) <= int(inside)
