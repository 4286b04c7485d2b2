"""The command `vit`: its scripts, and what they say to those who type it."""

import logging

import pytest

from vit_jax import cli, wording
from vit_jax.console import start_logging
from vit_jax.workdir.description import collect_provenance


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wording, "called_vit", False)
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)


def vit(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/vit", *arguments])
    with pytest.raises(SystemExit):
        cli.main()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("predict", "--help"), ("usage: vit predict ", "vit predict MODEL", "from vit zoo list")),
        (("finetune", "--help"), ("work directory of vit train,", "`vit zoo list`")),
        (("zoo", "get", "vit_b"), ("`vit zoo list`",)),
        (("nothing",), ()),
    ],
)
def test_those_who_type_vit_read_vit(arguments, said, monkeypatch, capsys) -> None:
    vit(monkeypatch, *arguments)
    output = "".join(capsys.readouterr())
    assert "scripts/" not in output
    assert all(text in output for text in said), output


def test_so_do_the_log_and_the_page_of_a_run(monkeypatch, capsys) -> None:
    vit(monkeypatch, "train", "--config=pretrain:B/16,mine")
    start_logging()
    logging.info("python scripts/report.py runs/a, or scripts/predict.py, not /my/scripts/x.py")
    assert "vit report runs/a, or vit predict, not /my/scripts/x.py" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["/site/root/scripts/train.py", "--config=pretrain:B/16,mine"])
    assert collect_provenance()["command"] == "vit train --config=pretrain:B/16,mine"


def test_others_read_the_scripts(script) -> None:
    assert "`python scripts/zoo.py list`" in script("zoo.py", "get", "vit_b").stderr
