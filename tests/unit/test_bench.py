"""``agentcomm bench``: its arguments, what it misses, and the codecs' results file."""

import json
import subprocess
import sys

import pytest
import torch

import agentcomm
from agentcomm import _core, cli
from agentcomm.bench import _shared, codecs
from agentcomm.bench._report import compare

TINY = ["bench", "codecs", "--nelems", "4096", "--turns", "1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: BENCHMARK"),
        (["speed"], "invalid choice: 'speed'"),
        (["codecs", "--spec", "int9"], "'int9' in spec 'int9' is no codec; there are raw, fp16"),
        (["codecs", "--nelems", "0"], "'0' is no whole number above 0"),
        (["codecs", "--turns", "many"], "'many' is no whole number above 0"),
        (["codecs", "--dtype", "int32"], "invalid choice: 'int32'"),
        (["codecs", "--tier", "mmx"], "invalid choice: 'mmx'"),
        (["codecs", "--json", "nowhere/x.json"], "there is no folder nowhere"),
        (["accuracy", "--task", "chess"], "invalid choice: 'chess'"),
        (["accuracy", "--spec", "int8[block=100]"], "block=100 is out of range"),
        (["accuracy", "--seeds", "-1"], "'-1' is no whole number above 0"),
        (["accuracy", "--nranks", "1"], "1 is out of range; it must be in 2..16"),
    ],
    ids=str,
)
def test_wrong_arguments(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *words])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["codecs"], ["accuracy"]], ids=str)
def test_help(words, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *words, "--help"])
    assert caught.value.code == 0
    assert f"usage: {' '.join(['agentcomm bench', *words])}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "module", "package"),
    [
        (TINY[1:], "tqdm", "tqdm"),
        (["accuracy"], "tqdm", "tqdm"),
        (["accuracy"], "matplotlib", "matplotlib"),
        (["accuracy", "--task", "digits"], "sklearn", "scikit-learn"),
    ],
)
def test_missing_extra(words, module, package, capsys, monkeypatch, tmp_path):
    for name in ("tqdm", "matplotlib", "sklearn"):  # those that come first are there
        monkeypatch.setitem(sys.modules, name, None if name == module else sys)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *words]) == 1
    error = capsys.readouterr().err
    assert f"agentcomm bench: {package} cannot be imported" in error
    assert "-m pip install matplotlib scikit-learn tqdm" in error
    assert list(tmp_path.iterdir()) == []


def test_tier_that_this_cpu_lacks(capsys, monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(_core, "cpu_info", lambda: {"tier": "avx2", "features": 5})
    assert cli.main([*TINY, "--tier", "avx512"]) == 1
    assert "--tier avx512: this CPU has avx2, c" in capsys.readouterr().err


def test_codecs(capsys, tmp_path):
    pytest.importorskip("tqdm")
    features, nthreads = _core.cpu_info()["features"], torch.get_num_threads()
    path = tmp_path / "codecs.json"
    assert cli.main([*TINY, "--json", str(path)]) == 0
    assert _core.cpu_info()["features"] == features
    assert torch.get_num_threads() == nthreads
    document = json.loads(path.read_text())
    assert sorted(document) == ["environment", "left_out", "results", "schema", "settings"]
    environment = document["environment"]
    assert environment["torch"] == torch.__version__
    assert environment["agentcomm"] == agentcomm.__version__
    assert {"cpu", "cores", "tier", "commit", "date"} <= set(environment)
    assert document["settings"]["nelems"] == [4096]
    tiers = [name for name, mask in codecs.TIERS.items() if mask & ~features == 0]
    specs = _shared.all_specs(lossless=True)
    operations = ["encode", "encode with residual", "decode", "decode, add"]
    found = [row for row in document["results"] if row["kind"] == "codec"]
    assert [(r["dtype"], r["spec"], r["tier"], r["operation"]) for r in found] == [
        (dtype, spec, tier, operation)
        for dtype in codecs.DTYPES
        for spec in specs
        for tier in tiers
        for operation in operations
    ]
    others = [row["name"] for row in document["results"] if row["kind"] == "other"]
    assert "torch.topk, 1% of |x|" in others
    assert "torch.quantile of |x|" in others
    shown = capsys.readouterr().out
    for row in document["results"]:
        assert row["name"].split(",")[0].split()[0] in shown
        for figure in ("seconds", "dense_gb_per_s", "memcpy_multiple"):
            assert sorted(row[figure]) == ["median", "min", "nsamples", "q1", "q3"]
            assert row[figure]["nsamples"] == len(row["sample_s"]) == len(row["memcpy_s"]) == 1
        if row["kind"] == "codec":
            x = torch.zeros(row["nelems"], dtype=codecs.DTYPES[row["dtype"]])
            assert row["dense_nbytes"] == x.nbytes
            assert row["frame_nbytes"] == agentcomm.encode(x, row["spec"]).numel()


def test_what_is_slow_takes_fewer_turns(monkeypatch, tmp_path):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(codecs, "SLOW_S", 0.0)
    path = tmp_path / "codecs.json"
    assert cli.main([*TINY[:-1], "5", "--spec", "int8", "int4", "--json", str(path)]) == 0
    for row in json.loads(path.read_text())["results"]:
        assert row["seconds"]["nsamples"] == codecs.NTURNS_SLOW == 3


def test_size_that_quantile_refuses(capsys, monkeypatch, tmp_path):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(codecs, "QUANTILE_NELEMS_MAX", 4095)
    path = tmp_path / "codecs.json"
    assert cli.main([*TINY, "--spec", "raw", "--json", str(path)]) == 0
    left_out = "torch.quantile, 4096 elements: it takes at most 4095"
    assert f"left out: {left_out}" in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert left_out in document["left_out"]
    assert not any("quantile" in row["name"] for row in document["results"])


def test_default_specs_follow_the_table(monkeypatch):
    names = [row["name"] for row in agentcomm.codecs()]
    sparse = {"topk", "randk"}
    assert {spec.split(":")[0] for spec in _shared.all_specs(lossless=True)} == set(names)
    assert "raw" not in _shared.all_specs(lossless=False)
    table = [{"name": name, "lossless": name == "raw"} for name in ("raw", "sign", *sorted(sparse))]
    monkeypatch.setattr(agentcomm, "codecs", lambda: table)
    later = ["sign", "randk:0.01", "randk:0.01+int8", "topk:0.01", "topk:0.01+int8"]
    assert _shared.all_specs(lossless=False) == later
    assert _shared.all_specs(lossless=True) == ["raw", *later]


def test_comparison_is_by_seed():
    """A seed without plain DDP, or that failed or diverged, must not pass for a good one."""

    def run(seed, mode, loss):
        run = {"task": "gpt", "seed": seed, "mode": mode, "error": "" if loss else "rank 0: ..."}
        if loss:
            run["final"] = {"validation loss (nats per byte)": loss}
        return run | {"sent_nbytes": 10 if mode == "int8" else 40, "dense_nbytes": 40}

    runs = [
        run(1, "plain", 2.0), run(1, "int8", 2.5), run(2, "plain", 4.0), run(2, "int8", 4.25),
        run(3, "plain", None), run(3, "int8", 9.0), run(1, "int4", float("inf")),
        run(2, "int4", 4.0), run(3, "int4", None),
    ]  # fmt: skip
    plain, int8, int4 = compare(runs, ["plain", "int8", "int4"])
    (difference,) = int8["minus_plain"].values()
    assert difference == {"mean": 0.375, "std": pytest.approx(0.25 / 2**0.5)}
    (final,) = int8["final"].values()
    assert final["mean"] == 5.25
    assert int8["ratio"] == 4
    assert (plain["nseeds"], plain["nfailed"], int8["nseeds"]) == (2, 1, 3)
    (difference,) = int4["minus_plain"].values()
    assert difference == {"mean": float("inf"), "std": None}
    assert int4["nfailed"] == 1


def test_results_file_has_no_nan(tmp_path):
    _shared.write_json(tmp_path / "x.json", {"a": [float("nan"), (float("inf"), 1.5)]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [None, [None, 1.5]]}


def test_library_does_not_load_it():
    code = """
import sys
from agentcomm import cli
cli.main(["info"])
print([name for name in sys.modules if name.startswith("agentcomm.bench")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
