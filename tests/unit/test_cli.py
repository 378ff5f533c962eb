"""The command line: ``agentcomm info``."""

import json
import subprocess
import sys
from importlib import metadata

import pytest
import torch

import agentcomm
from agentcomm import _core, cli


def test_info(capsys):
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    for fact in (agentcomm.__version__, torch.__version__, _core.cpu_info()["tier"], "gloo"):
        assert fact in shown
    lines = shown.splitlines()
    for row in agentcomm.codecs():
        shown = f"{row['name']}:FRAC" if row["sparse"] else row["name"]
        (line,) = [line for line in lines if line.split()[:1] == [shown]]
        assert f"{row['bits_per_element']:.3f}" in line


def test_info_as_json(capsys):
    assert cli.main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["agentcomm"] == agentcomm.__version__
    assert report["torch"] == torch.__version__
    assert report["cpu tier"] == _core.cpu_info()["tier"]
    assert report["wire version"] == _core.WIRE_VERSION
    assert report["transport"] == "ok"
    assert report["codecs"] == agentcomm.codecs()


def test_info_of_an_installation_for_another_torch(capsys, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert cli.main(["info"]) == 1
    assert "torch 9.9.9 is installed; rebuild it" in capsys.readouterr().out


def test_info_without_the_core(capsys, monkeypatch):
    monkeypatch.delattr(agentcomm, "_core")
    monkeypatch.setitem(sys.modules, "agentcomm._core", None)
    for name in ("agentcomm.frames", "agentcomm.specs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    cli.main(["info"])
    assert "_core does not load" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"agentcomm {agentcomm.__version__}\n"


@pytest.mark.parametrize("words", [[], ["inof"], ["info", "--yaml"]])
def test_what_it_does_not_know(words, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage: agentcomm" in capsys.readouterr().err


def test_console_script():
    (script,) = metadata.entry_points(group="console_scripts", name="agentcomm")
    assert script.load() is cli.main


@pytest.mark.parametrize("flags", [[], ["-OO"]], ids=str)
def test_python_m_agentcomm(flags):
    command = [sys.executable, *flags, "-m", "agentcomm", "info", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["transport"] == "ok"
    assert done.stderr == ""
