"""The page about a run, read back as a browser and a screen reader would."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import tiny
from vit_jax.data.datasets import create_dataset
from vit_jax.errors import UserError
from vit_jax.inference.model import load_model
from vit_jax.report import predictions
from vit_jax.report.charts import Line, line_chart
from vit_jax.report.page import table, tag
from vit_jax.report.report import write_report
from vit_jax.train import train_and_evaluate
from vit_jax.workdir.metrics import read_metrics

VOID = ("img", "meta")
SECTIONS = ["results", "curves", "time", "predictions", "inside", "settings", "provenance"]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@dataclasses.dataclass
class Element:
    name: str
    attributes: dict[str, str]
    children: list[Any]

    @property
    def text(self) -> str:
        """Its texts, in one line."""
        parts = (each if isinstance(each, str) else each.text for each in self.children)
        return " ".join("".join(parts).split())

    def all(self, name: str = "", **attributes: str) -> list[Element]:
        """Elements below it of this name and these attributes, in the order of the page."""
        found = []
        for each in self.children:
            if isinstance(each, Element):
                same = all(each.attributes.get(key) == value for key, value in attributes.items())
                found += [each] if name in ("", each.name) and same else []
                found += each.all(name, **attributes)
        return found

    def one(self, name: str = "", **attributes: str) -> Element:
        (found,) = self.all(name, **attributes)
        return found

    @property
    def rows(self) -> list[list[str]]:
        """Texts of a table's cells."""
        return [[cell.text for cell in row.children] for row in self.all("tr")]


class Reader(HTMLParser):
    """Every tag must be closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {}, [])
        self.open = [self.root]

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        assert len(dict(attributes)) == len(attributes), name
        element = Element(name, {key: value or "" for key, value in attributes}, [])
        self.open[-1].children.append(element)
        self.open += [] if name in VOID else [element]

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop().name == name

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read(text: str) -> Element:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == [reader.root]
    return reader.root


def report(workdir: Path, output: Path, **kwargs: Any) -> Element:
    path = write_report(str(workdir), output=str(output / "page.html"), **kwargs)
    return read(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Classes whose names are markup."""
    root, rng = tmp_path_factory.mktemp("data") / "a & b", np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 8)):
        for name in ("<b>cat", "dog & 'co'", 'the "owl"'):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (20, 30, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


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
def page(tmp_path_factory: pytest.TempPathFactory, workdir: Path) -> Element:
    return report(workdir, tmp_path_factory.mktemp("page"))


@pytest.fixture
def changed(tmp_path: Path, workdir: Path) -> Path:
    """A copy to change."""
    folder = tmp_path / "copy"
    shutil.copytree(workdir, folder, ignore=shutil.ignore_patterns("checkpoints"))
    return folder


def edit(folder: Path, change: Any) -> None:
    """Applies `change` to the config."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def test_the_page_is_well_formed_and_asks_no_host(page: Element) -> None:
    assert page.one("html").attributes["lang"] == "en"
    assert [each.attributes["id"] for each in page.all("section")] == SECTIONS
    levels = [int(each.name[1]) for each in page.all() if re.fullmatch(r"h\d", each.name)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [each.attributes["id"] for each in page.all() if "id" in each.attributes]
    assert len(set(ids)) == len(ids)
    links = [each.attributes["href"] for each in page.all("a")]
    assert {link[1:] for link in links} == {"main", *SECTIONS} <= set(ids)
    for each in page.all():
        assert each.name not in ("link", "iframe", "object")
        assert "src" not in each.attributes or each.attributes["src"].startswith("data:image/")
    assert not re.search(r"url\(|@import|https?:", page.one("style").text + page.one("script").text)


def test_nothing_takes_eyes(page: Element) -> None:
    images = page.all("img")
    assert len(images) > 4
    assert all(len(each.attributes["alt"]) > 20 for each in images)
    for each in page.all("svg"):
        assert each.attributes["role"] == "img"
        assert [part.name for part in each.children[:2]] == ["title", "desc"]
        assert all(part.text for part in each.children[:2])
    for each in page.all("table"):
        assert {cell.attributes["scope"] for cell in each.one("thead").all("th")} == {"col"}
        assert all(
            row.children[0].attributes["scope"] == "row" for row in each.one("tbody").all("tr")
        )
    for each in page.all("", tabindex="0"):
        assert each.name == "pre" or each.attributes["aria-label"]


def test_names_are_texts(page: Element, photos: Path) -> None:
    assert page.one("h1").text == "<run> & 1"
    assert str(photos) in page.one("p", **{"class": "summary"}).text
    header, *rows = page.one("table", **{"class": "confusion"}).rows
    names = ["<b>cat", "dog & 'co'", 'the "owl"']
    assert header[1:] == [row[0] for row in rows]
    assert set(header[1:]) <= set(names)
    assert page.one("section", id="results").one("table").rows[1][-1] == "98.7 <by others>"


def test_the_results_are_those_of_the_run(page: Element, workdir: Path) -> None:
    results = json.loads((workdir / "results.json").read_text())
    header, row = page.one("section", id="results").one("table").rows
    cells = dict(zip(header, row, strict=True))
    assert cells["evaluator"] == "test"
    assert cells["step"] == "8"
    assert cells["accuracy"] == f"{100 * results['test/accuracy']:.2f} %"
    assert cells["loss"] == f"{results['test/loss']:.4g}"
    assert cells["num_examples"] == "24"
    times = {row[0]: row[1] for row in page.one("section", id="time").all("table")[0].rows}
    for kind in ("start", "compile", "evaluation", "checkpoint", "data_wait", "lost"):
        assert times[kind.replace("_", " ")] == f"{results[f'{kind}_seconds']:,.1f}"
    assert times["training"] == f"{results['goodput'] * results['seconds']:,.1f}"


def test_the_curves_have_every_row(page: Element, workdir: Path) -> None:
    rows = read_metrics(workdir)
    charts = {each.one("h3").text: each for each in page.all("figure", **{"class": "chart"})}
    assert {"loss", "accuracy", "learning_rate", "images_per_second"} <= set(charts)
    of_training = [row for row in rows if "loss" in row]
    of_test = [row for row in rows if "test/loss" in row]
    assert [len(of_training), len(of_test)] == [8, 2]
    lines = charts["loss"].all("polyline")
    points = [
        [[float(x) for x in point.split(",")] for point in line.attributes["points"].split()]
        for line in lines
    ]
    assert [len(each) for each in points] == [len(of_training), len(of_test)]
    # The places on the paper are an affine map of the numbers; one decimal is printed.
    values = [row["loss"] for row in of_training] + [row["test/loss"] for row in of_test]
    drawn = [y for line in points for _, y in line]
    slope, offset = np.polyfit(values, drawn, 1)
    np.testing.assert_allclose(drawn, slope * np.array(values) + offset, atol=0.11)
    assert slope < 0  # up is more
    header, *numbers = charts["loss"].one("table").rows
    assert header == ["step", "training", "test"]
    assert [row[1] for row in numbers] == [f"{row['loss']:.4g}" for row in of_training]
    assert [row[2] for row in numbers if row[2]] == [f"{row['test/loss']:.4g}" for row in of_test]


def test_the_confusion_matrix_is_that_of_the_model(
    page: Element, workdir: Path, photos: Path
) -> None:
    model = load_model(str(workdir))
    data = create_dataset(name=str(photos), split="test", preprocess="decode|resize(16)")
    counts = np.zeros((3, 3), int)
    for i in range(data.num_examples):
        logits = model.logits(data.source[i]["image"])
        counts[data.source[i]["label"], logits[0].argmax()] += 1
    _, *rows = page.one("table", **{"class": "confusion"}).rows
    found = [[int(cell) for cell in row[1:]] for row in rows]
    seen = [i for i in range(3) if counts[i].any() or counts[:, i].any()]
    assert found == counts[np.ix_(seen, seen)].tolist()
    wrong = int(counts.sum() - counts.trace())
    text = page.one("section", id="predictions").text
    assert f"On 24 examples of {photos} test, the model is wrong {wrong} times" in text
    mistakes = page.all("figure", **{"class": "mistake"})
    assert len(mistakes) == min(wrong, 12) > 0
    shares = [float(re.search(r"([\d.]+)%", each.text)[1]) for each in mistakes]  # type: ignore[index]
    assert shares == sorted(shares, reverse=True)


def test_what_differs_from_the_defaults(page: Element) -> None:
    rows = {row[0]: row[1:] for row in page.one("section", id="settings").one("table").rows}
    assert rows["dataset.batch_size"] == ["16", "512"]
    assert rows["model.patch_size"] == ["8", "absent"]  # sizes have no default
    assert "dataset.on_bad_image" not in rows


def test_what_differs_from_the_recipe(changed: Path, tmp_path: Path) -> None:
    path = changed / "provenance.jsonl"
    start = json.loads(path.read_text())
    start["command"] = "python scripts/train.py --config=/elsewhere/configs/quickstart.py:scratch"
    path.write_text(json.dumps(start) + '\n{"torn')
    page = report(changed, tmp_path, max_examples=0)
    section = page.one("section", id="settings")
    assert "What differs from configs/quickstart.py:scratch:" in section.text
    rows = {row[0]: row[1:] for row in section.one("table").rows}
    assert rows["dataset.batch_size"] == ["16", "48"]
    assert rows["evaluators.validation.split"] == ["absent", '"train[300:600]"']
    assert "checkpoint.keep" not in rows
    section = page.one("section", id="provenance")
    (row,) = section.all("table")[0].rows[1:]
    assert row[:3] == [start["time"], "0", start["commit"] or "unknown"]
    assert section.all("pre")[0].text == start["command"]


def test_a_run_without_data_and_one_without_evaluators(changed: Path, tmp_path: Path) -> None:
    edit(changed, lambda config: config["dataset"].update(name=str(tmp_path / "gone")))
    page = report(changed, tmp_path)
    assert re.search(r"Not shown\. .*gone", page.one("section", id="predictions").text)
    assert re.search(r"Not drawn: .*gone", page.one("section", id="inside").text)
    assert len(page.one("section", id="inside").all("img")) == 2  # of the parameters alone
    assert page.one("section", id="results").all("table")
    edit(changed, lambda config: config.update(evaluators={}))
    page = report(changed, tmp_path)
    assert page.one("section", id="results").text == "ResultsThe config has no evaluators."
    assert "Not drawn: The config has no evaluator" in page.one("section", id="inside").text


def test_a_run_that_is_going_on(changed: Path, tmp_path: Path) -> None:
    for name in ("results.json", "params.npz"):
        (changed / name).unlink()
    lines = (changed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (changed / "metrics.jsonl").write_text("".join(lines[:6]) + '{"step": 7, "lo')
    page = report(changed, tmp_path)
    assert "step 5 of 8, not ended" in page.one("p", **{"class": "summary"}).text
    assert "last evaluations so far" in page.one("section", id="results").text
    assert page.one("section", id="results").one("table").rows[1][-3] == "4"
    assert "has not written params.npz yet" in page.one("section", id="predictions").text
    (changed / "metrics.jsonl").write_text("")
    edit(changed, lambda config: config["duration"].update(steps=None, epochs=90.0))
    page = report(changed, tmp_path)
    assert "step 0 of 90 epochs, not ended" in page.one("p", **{"class": "summary"}).text
    assert "No numbers have been logged yet." in page.one("section", id="curves").text
    assert "No times have been logged yet." in page.one("section", id="time").text
    assert page.one("section", id="results").one("table").rows[1][-3] == "not yet"


@pytest.mark.parametrize("objective", ["masked_patch", "multi_label"])
def test_a_run_without_one_label_per_image(changed: Path, tmp_path: Path, objective: str) -> None:
    edit(changed, lambda config: config.update(objective={"name": objective}))
    page = report(changed, tmp_path, max_examples=8)
    text = page.one("section", id="predictions").text
    assert f"There is no confusion matrix: objective.name='{objective}' has no one label." in text
    assert "over 8 images" in page.one("section", id="inside").text
    assert len(page.one("section", id="inside").all("img")) == 4


def test_some_examples_and_many_classes(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictions, "MOST_CLASSES", 1)
    monkeypatch.setattr("vit_jax.report.report.inside", lambda _: [])
    section = report(workdir, tmp_path, max_examples=9).one("section", id="predictions")
    assert "On 9 examples, evenly spread over the 24, of" in section.text
    header, *rows = section.one("table").rows
    assert header == ["label", "taken for", "times", "images of the label"]
    times = [int(row[2]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert f"the model is wrong {sum(times)} times" in section.text
    assert sum({row[0]: int(row[3]) for row in rows}.values()) <= 9


def test_long_curves_are_thinned_and_averaged() -> None:
    steps = np.arange(1.0, 100_001.0)
    chart = read(line_chart("loss", [Line("training", steps, np.sin(steps))]))
    raw, mean = (each.attributes["points"].split() for each in chart.all("polyline"))
    assert len(raw) == len(mean) <= 300
    assert raw[-1].partition(",")[0] == "340.0"  # the last one is there
    heights = [np.ptp([float(point.partition(",")[2]) for point in each]) for each in (raw, mean)]
    assert heights[1] < 0.1 * heights[0]
    assert chart.one("table").rows[-1][0] == "100000"


@pytest.mark.parametrize("values", [[0.5], [0.0], [-3.0, -3.0], [1e-9, 2e-9], [0.0, 1e12]])
def test_any_range_has_an_axis(values: list[float]) -> None:
    line = Line("training", np.arange(float(len(values))), np.array(values))
    chart = read(line_chart("loss", [line]))
    points = np.array(
        [point.split(",") for point in chart.one("polyline").attributes["points"].split()]
    )
    assert np.isfinite(points.astype(float)).all()
    assert 3 <= len(chart.all("line", **{"class": "grid"})) <= 7


@pytest.mark.parametrize(
    ("name", "values", "ends"),
    [
        ("mAP", [0.7096], ["0 %", "80 %"]),  # and not 120 %
        ("images_per_second", [112.0, 118.0], ["0", "150"]),  # steady, and looks so
        ("loss", [1.1, 1.4], ["1.1", "1.4"]),
    ],
)
def test_where_an_axis_begins_and_ends(name: str, values: list[float], ends: list[str]) -> None:
    line = Line("training", np.arange(float(len(values))), np.array(values))
    ticks = [
        each.text for each in read(line_chart(name, [line])).all("text", **{"text-anchor": "end"})
    ]
    assert [ticks[0], ticks[-1]] == ends


def test_texts_are_escaped_wherever_they_stand() -> None:
    bad = "<script>'\"&\udcff"
    for built in (tag("p", bad), tag("p", title=bad), table([bad], [(bad,)], label=bad)):
        assert "<script" not in built
        assert built.count("&lt;script&gt;&#x27;&quot;&amp;\ufffd") == built.count("script")


def test_mistakes_are_told_in_one_line(changed: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no metrics.jsonl"):
        write_report(str(tmp_path))
    edit(changed, lambda config: config.pop("sweep"))
    with pytest.raises(UserError, match="has no 'sweep': another version of the code"):
        write_report(str(changed))
    assert not (changed / "report.html").exists()


def test_without_matplotlib_the_page_says_so(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    page = report(workdir, tmp_path)
    assert "needs the package matplotlib" in page.one("section", id="inside").text
    assert page.one("section", id="predictions").all("table")


def test_a_run_in_a_bucket(workdir: Path, bucket: str) -> None:
    from vit_jax.files.paths import to_path

    folder = to_path(f"{bucket}/run")
    for name in ("config.json", "metrics.jsonl", "provenance.jsonl", "results.json"):
        (folder / name).write_bytes((workdir / name).read_bytes())
    path = write_report(f"{bucket}/run")
    assert str(path) == f"{bucket}/run/report.html"
    page = read(path.read_text())
    assert "Not shown. The run has not written params.npz" in page.one("main").text


def test_the_script(changed: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert tiny.run_here(monkeypatch, "report.py", str(changed), "--max_examples=0") == 0
    assert f"Wrote {changed}/report.html." in capsys.readouterr().out
    assert "--max_examples=0" in (changed / "report.html").read_text()
    assert tiny.run_here(monkeypatch, "report.py", "nowhere") == 2


@pytest.mark.skipif(BROWSER is None, reason="needs a browser: Debian's package chromium")
def test_a_browser_shows_it_on_a_phone(workdir: Path, tmp_path: Path) -> None:
    path = write_report(str(workdir), output=str(tmp_path / "page.html"))
    script = """
      const frame = document.querySelector("iframe");
      frame.onload = () => {
        const page = frame.contentDocument, root = page.documentElement;
        const plot = page.querySelector(".plot");
        plot.focus();
        plot.dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
        document.body.dataset.found = JSON.stringify({
          inside: root.clientWidth, wide: root.scrollWidth,
          sections: [...page.querySelectorAll("section")].map((each) => each.id),
          at: page.querySelector(".chart .at").textContent,
        });
      };"""
    frame = f'<iframe src="{path.name}" style="width:390px;height:844px;border:0"></iframe>'
    (tmp_path / "phone.html").write_text(f"<body>{frame}<script>{script}</script></body>")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=5000", "--dump-dom", (tmp_path / "phone.html").as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(read(result.stdout).one("body").attributes["data-found"])
    assert found["sections"] == SECTIONS
    assert found["inside"] in range(370, 391)  # less a scroll bar
    assert found["wide"] <= found["inside"]
    assert found["at"] == "step 1"
