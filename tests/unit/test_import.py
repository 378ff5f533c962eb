"""What ``import agentcomm`` costs, what it offers, and how it refuses another torch."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import agentcomm
from agentcomm import _build_info, _c10d, _extension


def in_a_fresh_interpreter(code, *flags):
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_leaves_torch_alone():
    code = """
import sys
import agentcomm
agentcomm.__version__, agentcomm.SpecError, agentcomm.Int8, dir(agentcomm)
from agentcomm import PeerError, Stats
print(agentcomm.parse if hasattr(agentcomm, "parse") else "", *{"torch", "numpy"} & {*sys.modules})
"""
    assert in_a_fresh_interpreter(code) == ""


def test_import_has_no_effect_on_torch_s_settings():
    """Threads stay as they were; subnormals too, which a library of -ffast-math would change."""
    code = """
import torch
threads, tiny = torch.get_num_threads(), torch.tensor([1e-40])
import agentcomm, agentcomm._core, agentcomm._c10d
agentcomm.encode(torch.ones(5), "int8")
print(torch.get_num_threads() == threads, bool(tiny + tiny > 0))
"""
    assert in_a_fresh_interpreter(code) == "True True"


def test_every_public_name_is_there():
    for name in agentcomm.__all__:
        value = getattr(agentcomm, name)
        if name in agentcomm._MODULES:
            assert value is importlib.import_module(f"agentcomm.{name}")
            assert value.__doc__
            continue
        assert value.__module__.startswith("agentcomm."), name
        assert value.__doc__, f"{name} has no docstring"
        assert getattr(importlib.import_module(value.__module__), name) is value


def test_lists_of_public_names_agree():
    assert len(agentcomm.__all__) == len(set(agentcomm.__all__))  # their order is ruff's business
    homes = agentcomm._HOMES
    in_homes = sorted(name for names in homes.values() for name in names)
    assert sorted([*in_homes, *agentcomm._MODULES]) == sorted(agentcomm.__all__)
    tree = ast.parse(Path(agentcomm.__file__).read_text())
    typed = {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "agentcomm"
        for alias in node.names
    }
    modules = {("agentcomm", name) for name in agentcomm._MODULES}
    assert typed == {(home, name) for home, names in homes.items() for name in names} | modules


def test_dir_lists_them_loaded_or_not():
    assert set(agentcomm.__all__) <= set(dir(agentcomm))
    assert dir(agentcomm) == sorted(dir(agentcomm))
    assert "__version__" in dir(agentcomm)


def test_star_import():
    namespace = {}
    exec("from agentcomm import *", namespace)
    assert set(agentcomm.__all__) <= set(namespace)


def test_unknown_attribute():
    with pytest.raises(
        AttributeError, match=re.escape("module 'agentcomm' has no attribute 'no_such_name'")
    ):
        agentcomm.no_such_name  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        from agentcomm import no_such_name  # noqa: F401


def test_version():
    assert agentcomm.__version__ == _build_info.VERSION


def test_exceptions():
    errors = importlib.import_module("agentcomm.errors")
    names = ["SpecError", "FrameError", "MismatchError", "PeerError", "StateError"]
    for name in names:
        cls = getattr(agentcomm, name)
        assert issubclass(cls, errors.AgentCommError)
        assert cls("text").status == ""
    assert issubclass(agentcomm.SpecError, ValueError)
    assert issubclass(agentcomm.FrameError, ValueError)
    assert issubclass(agentcomm.PeerError, RuntimeError)
    assert issubclass(agentcomm.StateError, RuntimeError)


# ---- the extension that is compiled against torch -----------------------------------------------


def test_extension_loads_beside_its_torch():
    assert _extension.c10d() is _c10d
    assert torch.__version__.startswith(_c10d.TORCH_VERSION)
    assert torch.__version__ == _build_info.TORCH_VERSION


def test_extension_refuses_another_torch(monkeypatch):
    built = _build_info.TORCH_VERSION
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    with pytest.raises(ImportError) as caught:
        _extension.c10d()
    assert str(caught.value) == (
        f"agentcomm was compiled against torch {built}, but torch 9.9.9 is installed; rebuild it in"
        " agentcomm's"
        " source folder: pip install --no-build-isolation --no-deps --force-reinstall ."
    )


def test_extension_that_does_not_load_names_the_cure(monkeypatch):
    monkeypatch.delattr(agentcomm, "_c10d")
    monkeypatch.setitem(sys.modules, "agentcomm._c10d", None)
    with pytest.raises(ImportError, match=re.escape(_extension.REBUILD)) as caught:
        _extension.c10d()
    assert isinstance(caught.value.__cause__, ImportError)


def test_extension_of_an_unknown_build_is_tried(monkeypatch):
    monkeypatch.delattr(agentcomm, "_build_info")
    monkeypatch.setitem(sys.modules, "agentcomm._build_info", None)
    assert _extension.c10d() is _c10d
