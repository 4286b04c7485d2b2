"""The pages of the repository: what they link to and name exists, `<!-- run -->` blocks run.

Whether the site builds is for scripts/docs.sh, whose tools tests do not need.
"""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

import vit_jax
from tests import tiny
from vit_jax import config as schema
from vit_jax.command_line import load_recipe
from vit_jax.pretrained.zoo.entries import find_entry

DOCS = tiny.ROOT / "docs"
PAGES = [*sorted(tiny.ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
PAGES.append(tiny.ROOT / "benchmarks/diary.md")
SITE = runpy.run_path(str(DOCS / "site/source_pages.py"))
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
RUN = re.compile(r"^<!-- run -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What stands for something else: FOLDER, B/16[,EPOCHS], ...
PLACEHOLDER = re.compile(r"[A-Z]{3,}|[\[…]|\.\.\.")
# Of programs of others, and of setup.sh.
OTHER_FLAGS = {"gpus-per-task", "newest", "signal", "target", "tests", "upgrade"}
# The same blocks on fewer and smaller arrays.
SMALLER = ["duration.steps=1", "dataset.batch_size=8", "model.num_layers=1"]
SMALLER += ["model.hidden_size=16", "model.mlp_dim=16", "model.num_heads=2"]
SMALLER += ["log.tensorboard=False"]
FEWER = {'"duration.steps=300"': str(SMALLER)[1:-1], "1500": "1740"}


def prose(text: str) -> str:
    return FENCE.sub("", text)


def inline_code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", prose(text))


def commands(text: str) -> Iterator[tuple[str, set[str]]]:
    """Each command that starts a script of ours: its name, and the flags behind it."""
    blocks = [block for _, kind, block in FENCE.findall(text) if kind in ("bash", "shell")]
    for line in [*re.sub(r"\\\n", " ", "\n".join(blocks)).splitlines(), *inline_code(text)]:
        if match := re.search(r"scripts/(\w+\.py)\b(.*)", line.partition(" # ")[0]):
            yield match[1], set(re.findall(r"(?<!\S)--(\w+)", match[2])) - {"config", "help"}


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(params=PAGES, ids=lambda path: path.name)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8")))
    for link in links:
        name, _, anchor = link.partition("#")
        if "://" in name:
            continue
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text(encoding="utf-8")), link
        elif anchor and not re.fullmatch(r"L\d+", anchor):  # those are tested below
            assert SITE["line_of"](str(target.relative_to(tiny.ROOT)), anchor), link


def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    pattern = r"(?<![\w/])(?:scripts|configs|benchmarks|vit_jax|docs|tests)/[\w/.]+\.(?:py|sh|md)\b"
    named = {name for name in re.findall(pattern, text) if not name.endswith(("/x.py", "/x.md"))}
    of_others = {"vit_jax/main.py", "configs/vit.py", "tests/models/test_x.py"}
    of_others.add("configs/vit_s16_i1k.py")
    assert not [name for name in sorted(named - of_others) if not (tiny.ROOT / name).exists()]


def test_config_keys_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    sections = "|".join(re.escape(key.removesuffix(".*")) for key in {*schema.KEYS, *schema.KINDS})
    keys = set(re.findall(r"--config\.([a-z_][\w.]*\w)", text)) - {"x", "x=y"}
    for span in inline_code(text):
        if match := re.fullmatch(rf"((?:{sections})\.[\w.]+)(?: ?=.*)?", span, re.DOTALL):
            keys.add(match[1])
    for key in sorted(keys - {"dataset.json", "model.json", "model.safetensors"}):
        section, _, leaf = key.rpartition(".")
        section = re.sub(r"^evaluators\.\w+$", "evaluators.*", section)
        if section in schema.KINDS:
            names = schema.KINDS[section][0]
            known = {"name"}.union(*(schema.kind_keys(section, name) for name in names))
        else:
            known = set(schema.KEYS.get(section, {"seed"} if not section else ()))
        assert leaf in known, key


def test_flags_exist(script: tiny.Script) -> None:
    """A command's flags are in --help of its script, those that stand alone in that of any."""
    asked: dict[str, set[str]] = {}
    alone: set[str] = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name, flags in commands(text):
            asked.setdefault(name, set()).update(flags)
        for span in inline_code(text):
            alone.update(re.findall(r"^--([a-z][\w-]*)", span))
    helps = {}
    for path in sorted((tiny.ROOT / "scripts").glob("*.py")):
        calls: list[tuple[str, ...]] = [()] if path.name != "zoo.py" else [("list",), ("get",)]
        texts = [script(path.name, *call, "--help").stdout for call in calls]
        helps[path.name] = set(re.findall(r"--(\w+)", " ".join(texts)))
    assert len(asked) > 12
    wrong = {name: flags - helps[name] for name, flags in asked.items() if flags - helps[name]}
    assert not wrong
    unknown = alone - set().union(*helps.values()) - OTHER_FLAGS
    assert not unknown


def test_recipes_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    specs = set(re.findall(r"(?<!/)\bconfigs/\w+\.py:[^\s`'\"]+", text))
    for spec in sorted(specs):
        is_on_the_web = find_entry(spec.partition(":")[2].partition(",")[0]) is not None
        if is_on_the_web or PLACEHOLDER.search(spec) or spec == "configs/vit.py:b16,cifar10":
            continue
        assert load_recipe(spec).dataset.name, spec


def test_lines_that_readers_are_sent_to_are_those() -> None:
    """Of README's map of the paper and of the picture of the model."""
    readme = (tiny.ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\[`(\w+)`\]\(([\w/]+\.py)#L(\d+)\)", readme)
    picture = (tiny.ROOT / "docs/model.svg").read_text(encoding="utf-8")
    drawn = re.findall(
        r"(\w+) ·[^\d]*?(\w+\.py):(\d+)", re.sub(r"</text>\n<text[^>]*>", " ", picture)
    )
    links += [(name, f"vit_jax/models/{file}", line) for name, file, line in drawn]
    assert len(links) > 25
    for name, file, line in links:
        text = (tiny.ROOT / file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        assert re.search(rf"\b{name}\b", text), (name, file, line, text)


def test_the_site_has_every_page_and_name() -> None:
    tree = ast.parse((DOCS / "site/conf.py").read_text())
    [contents] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "source_pages_contents"
    ]
    listed = [re.sub(r".*<(\w+)>", r"\1", entry) for part in contents.values() for entry in part]
    assert sorted([*listed, "index"]) == sorted(path.stem for path in DOCS.glob("*.md"))
    documented = re.findall(r"auto\w+:: vit_jax\.(\w+)", (DOCS / "api.md").read_text())
    assert sorted(documented) == sorted(vit_jax.__all__)


def test_marked_blocks_run(tmp_path, monkeypatch, script):
    """In the order of a user's day, in one folder: what photos.md trains others look into."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for i in range(12):
        path = tmp_path / f"photos/{'cat' if i % 2 else 'dog'}/{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), rng.integers(0, 256, (40, 40, 3), np.uint8))
    cv2.imwrite("new.jpg", np.full((30, 40, 3), 128, np.uint8))
    order = sorted(DOCS.glob("*.md"), key=lambda path: path.name != "photos.md")
    smaller = ["--distributed=off", *(f"--config.{override}" for override in SMALLER)]
    count = 0
    for page in order:
        names: dict[str, object] = {}
        for kind, block in RUN.findall(page.read_text(encoding="utf-8")):
            count += 1
            if kind == "python":
                for many, few in FEWER.items():
                    block = block.replace(many, few)
                exec(compile(block, page.name, "exec"), names)
                continue
            for line in re.sub(r"\\\n", " ", block).splitlines():
                python, path, *arguments = shlex.split(line, comments=True)
                assert python == "python"
                trains = path in ("scripts/train.py", "scripts/finetune.py")
                done = script(Path(path).name, *arguments, *(smaller if trains else []))
                assert done.returncode == 0, (page.name, line, done.stderr)
    assert count >= 10
