"""What is shown of a run, in a pipe and on a terminal."""

import io
import logging
import os
import pty
import subprocess
import sys

import pytest

from vit_jax import console
from vit_jax.console import (
    WIDTH,
    Progress,
    ensure_logging,
    format_seconds,
    number_text,
    start_logging,
    wilson_interval,
)


@pytest.fixture(autouse=True)
def own_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)


def test_lines_of_a_pipe_are_wrapped_between_words(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging()
    path = "/a" * 60
    logging.info("%s is %s", path, "long " * 40)
    logging.warning("odd\x1b[2J")
    first, second, *rest, last = capsys.readouterr().out.splitlines()
    assert path in first + second
    assert all(len(line) <= WIDTH and line.startswith(9 * " ") for line in rest)
    assert last.endswith(r" warning: odd\x1b[2J")


def test_the_log_is_started_unless_somebody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's
    logging.basicConfig()  # as absl.logging.log does, which Orbax calls
    ensure_logging()
    (handler,) = logging.root.handlers
    ensure_logging()
    assert logging.root.handlers == [handler]


@pytest.mark.parametrize(
    ("is_terminal", "modules", "is_shown"),
    [(True, {}, True), (False, {"ipykernel": None}, True), (False, {}, False)],
)
def test_work_is_watched_where_somebody_looks(is_terminal, modules, is_shown, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(console, "tqdm", lambda items, **options: (items, options["disable"]))
    assert console.watched("abc", "image", 3) == ("abc", not is_shown)


def test_what_takes_long_is_said_and_again(monkeypatch, capsys):
    monkeypatch.setattr(console, "REMINDER_SECONDS", 0.02)
    monkeypatch.setattr(console, "TICK_SECONDS", 0.01)
    start_logging()
    progress = Progress(lambda: ("compiling the update", 3))
    text = ""
    while text.count("Still compiling the update (0 s).") < 2:
        text += capsys.readouterr().out
    progress.close()


def test_a_bar_on_a_terminal_only() -> None:
    """The same program with a terminal as stderr, and with a pipe."""
    program = (
        "import logging, time\n"
        "from vit_jax.console import Progress, start_logging\n"
        "start_logging(to_stderr=True)\n"
        "progress = Progress(lambda: ('updating', 0))\n"
        "progress.begin(0, 4)\n"
        "progress.advance(2)\n"
        "progress.show(2, ['loss 1.5', 'lr 0.1'], ['ETA 3s', '8 images/s'])\n"
        "logging.info('evaluated')\n"
        "progress._bar and progress._bar.refresh()\n"
        "progress.close()\n"
    )
    command = [sys.executable, "-c", program]
    pipe = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    assert [line.split(maxsplit=1)[1] for line in pipe.splitlines()] == [
        "step 2/4  loss 1.5  lr 0.1  8 images/s  ETA 3s",
        "evaluated",
    ]
    reader, terminal = pty.openpty()
    subprocess.run(command, stderr=terminal, check=True)
    os.close(terminal)
    shown = os.read(reader, 10_000).decode()
    os.close(reader)
    assert all(part in shown for part in (" 50% |", "2/4  ETA 3s  8 images/s  loss", "evaluated"))


@pytest.mark.parametrize(
    ("columns", "numbers", "doing"),
    [
        (60, "", ""),
        (80, "  loss 1.5  lr 0.0001", "  evaluating a_long_na"),
        (100, "  loss 1.5  a_share_of_long_name 52.00 %", "  evaluating a_long_name (3 s)"),
        (
            120,
            "  loss 1.5  a_share_of_long_name 52.00 %  lr 0.0001",
            "  evaluating a_long_name (3 s)",
        ),
    ],
)
def test_the_time_left_and_the_speed_stay_beside_a_bar(
    columns: int, numbers: str, doing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = Progress(lambda: ("updating", 0))
    progress.begin(0, 400_000)
    rest = ["loss 1.5", "a_share_of_long_name 52.00 %", "lr 0.0001"]
    progress.show(0, rest, ["ETA 2h07m", "1,234 images/s"])
    shown, speed = str(progress._bar), "| 0/400000  ETA 2h07m  1,234 images/s"
    assert shown.partition("|")[2][10:] == speed + numbers
    assert progress._beside_bar("evaluating a_long_name (3 s)")[27:].startswith(doing)
    progress.close()


def test_numbers_for_people() -> None:
    texts = {0.2: "0s", 42: "42s", 185: "3m05s", 7620: "2h07m", 356400: "4d03h"}
    assert {seconds: format_seconds(seconds) for seconds in texts} == texts
    assert number_text("test/accuracy_top5", 0.93456) == "93.46 %"
    assert number_text("loss", 0.3142857) == "0.3143"
    assert number_text("num_examples", 50000) == "50,000"
    # Wilson's interval of 10 of 20, and of none of 20.
    assert wilson_interval(0.5, 20) == pytest.approx((0.2993, 0.7007), abs=1e-4)
    assert wilson_interval(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
