"""``agentcomm run`` on scripts that need no torch: it must be as if python had run them."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

import agentcomm
from agentcomm.errors import SpecError
from agentcomm.run._settings import OPTIONS, PLAIN_SPECS, Settings
from agentcomm.specs import parse

NONE_BUILT = "agentcomm: no DistributedDataParallel was built: nothing was compressed\n"
PLAIN = (sys.executable,)
LAUNCHED = (sys.executable, "-m", "agentcomm", "run")


def run(command, *args, flags=(), env=None, **options):
    interpreter, *rest = command
    return subprocess.run(
        [interpreter, *flags, *rest, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | (env or {}),
        **options,
    )


def both(*args, **options):
    """Run under python and under the launcher; assert that they agree and return the latter."""
    plain, launched = run(PLAIN, *args, **options), run(LAUNCHED, *args, **options)
    assert launched.stdout == plain.stdout
    assert launched.stderr == plain.stderr + NONE_BUILT
    assert launched.returncode == plain.returncode
    return launched


@pytest.fixture
def script(tmp_path):
    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def test_a_script_sees_what_it_would_see_under_python(script):
    path = script(
        """
        import sys, __main__
        print(__name__, __file__, sys.argv, sys.path, sys.flags, __main__.__dict__.keys())
        print(sys.stdin.read(), sys.exc_info(), "torch" in sys.modules, sys.orig_argv)
        """
    )
    done = both(path, "a", "--codec", "-m", "--", "-x", "", input="from stdin")
    assert "'--codec', '-m', '--', '-x', ''" in done.stdout
    assert "from stdin" in done.stdout
    assert "torch" not in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("text", "returncode"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('no')", 1),
        ("def f(): raise ValueError('x')\nf()", 1),
        ("import os; os._exit(3)", 3),
        ("x = = 1", 1),
    ],
)
def test_the_end_of_a_script(script, text, returncode):
    path = script(text)
    plain, launched = run(PLAIN, path), run(LAUNCHED, path)
    assert launched.returncode == plain.returncode == returncode
    assert launched.stdout == plain.stdout
    assert launched.stderr.removesuffix(NONE_BUILT) == plain.stderr


def test_a_signal_ends_it_as_it_ends_python(script):
    path = script("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert run(LAUNCHED, path).returncode == -signal.SIGTERM
    both(script("import os, signal; os.kill(os.getpid(), signal.SIGINT)"))


def test_no_script_of_that_name(tmp_path):
    both(tmp_path / "missing.py")
    plain, launched = run(PLAIN, "-m", "no.such"), run(LAUNCHED, "-m", "no.such")
    assert launched.stderr.removesuffix(NONE_BUILT) == plain.stderr
    assert launched.returncode == plain.returncode == 1


def test_modules_and_folders(script, tmp_path):
    script("import sys; print(__name__, sys.argv, sys.path[0])", "module.py")
    (tmp_path / "folder").mkdir()
    script("import sys; print(__name__, sys.argv, sys.path[0])", "folder/__main__.py")
    both("-m", "module", "--codec", "x", cwd=tmp_path)
    both("folder", "-m", cwd=tmp_path)


CHILDREN = """
    import multiprocessing, os, subprocess, sys

    def say(where):
        finder = type(sys.meta_path[0]).__name__
        text = f"{where} {finder} {sys.flags.optimize} {sys.warnoptions} {sys._xoptions}\\n"
        os.write(1, text.encode())

    if __name__ == "__main__":
        say("main")
        for method in ("spawn", "fork", "forkserver"):
            context = multiprocessing.get_context(method)
            child = context.Process(target=say, args=(method,))
            child.start(); child.join()
        child = os.fork()
        if child == 0:
            say("os.fork"); os._exit(0)
        os.waitpid(child, 0)
        code = "import sys; print('subprocess', type(sys.meta_path[0]).__name__)"
        subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_flags_and_the_hook_reach_children(script):
    flags = ("-O", "-W", "error::UserWarning", "-X", "dev", "-u")
    done = run(LAUNCHED, script(CHILDREN), flags=flags)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "main", "spawn", "fork", "forkserver", "os.fork", "subprocess",
    ]  # fmt: skip
    assert {line.split()[1] for line in lines} == {"_Watch"}
    for line in lines[:-1]:
        assert " 1 ['default', 'error::UserWarning'] {'dev': True}" in line


def test_a_hidden_sitecustomize_runs(script, tmp_path):
    script("import sys; sys.hidden = __file__", "sitecustomize.py")
    path = script("import sys, sitecustomize; print(sys.hidden, sitecustomize.__file__, sys.path)")
    done = both(path, env={"PYTHONPATH": str(tmp_path)})
    assert str(tmp_path / "sitecustomize.py") in done.stdout


def test_launched_twice(script):
    path = script("print('once')")
    done = run(LAUNCHED, "-m", "agentcomm", "run", path)
    assert done.stdout == "once\n"
    assert done.stderr == NONE_BUILT
    assert done.returncode == 0


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_flags_that_keep_the_settings_out(script, flag):
    done = run((sys.executable, "-c", "import sys; sys.path[:0] = sys.argv.pop(1).split(':');"
                "from agentcomm.cli import main; main()", os.pathsep.join(sys.path), "run"),
               script(""), flags=(flag,))  # fmt: skip
    assert done.returncode == 2
    assert (
        f"python's {flag} keeps the run's settings from its processes; leave it out" in done.stderr
    )


@pytest.mark.parametrize("level", ["warning", "error", "quiet"])
def test_levels_that_say_nothing(script, level):
    assert run(LAUNCHED, "--log", level, script("")).stderr == ""


WRONG = {
    "--codec": ("inf8", "--codec: 'inf8' in spec 'inf8' is no codec"),
    "--rules": ('{"a"', "--rules: '{\"a\"' is no JSON"),
    "--chunk-nbytes": ("7", "chunk_nbytes=7 is out of range"),
    "--feedback": ("maybe", "feedback='maybe' is unknown"),
    "--warmup-nrounds": ("-1", "warmup_nrounds=-1 is out of range"),
    "--min-compress-nelems": ("few", "--min-compress-nelems: 'few' is no whole number"),
    "--device": ("tpu", "--device: 'tpu' is unknown; it must be one of auto, cpu, cuda"),
    "--report": ("/no/such/folder/x", "cannot be written; name a file in a folder that exists"),
    "--log": ("loud", "--log: 'loud' is unknown"),
}


def test_every_option_is_tried():
    assert set(WRONG) == {option.flag for option in OPTIONS}


@pytest.mark.parametrize("option", WRONG)
@pytest.mark.parametrize("by", ["command line", "variable"])
def test_a_wrong_option_is_found_before_the_script_runs(script, option, by):
    value, text = WRONG[option]
    path = script("print('ran')")
    variable = "AGENTCOMM_" + option.removeprefix("--").replace("-", "_").upper()
    if by == "variable":
        done, text = run(LAUNCHED, path, env={variable: value}), text.replace(option, variable)
    else:
        done = run(LAUNCHED, option, value, path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert text in done.stderr


def test_the_command_line_wins(script):
    path = script("import os; print(os.environ['AGENTCOMM_CODEC'], os.environ['AGENTCOMM_SEED'])")
    env = {"AGENTCOMM_CODEC": "nonsense", "AGENTCOMM_SEED": "kept"}
    assert run(LAUNCHED, "--codec", "int4", path, env=env).stdout == "int4 kept\n"


@pytest.mark.parametrize("words", [[], ["--codec", "int8"], ["-m"], ["--cod", "int8", "x.py"]])
def test_a_wrong_command_line(words):
    done = run(LAUNCHED, *words)
    assert done.returncode == 2
    assert "usage: agentcomm run" in done.stderr


def test_settings_survive_the_environment(tmp_path):
    texts = {
        "codec": "topk:0.1+int8", "rules": '{"*.bias": "raw"}', "chunk_nbytes": "65536",
        "feedback": "false", "warmup_nrounds": "3", "min_compress_nelems": "0", "device": "cpu",
        "report": str(tmp_path / "r.json"), "log": "debug",
    }  # fmt: skip
    settings = Settings.read(texts, {})
    assert Settings.read({}, settings.to_environ()) == settings
    assert json.loads(json.dumps(settings.to_dict())) == settings.to_dict()
    assert settings.attach_options(0) == {
        "rules": {"*.bias": "raw"}, "chunk_nbytes": 65536, "feedback": False,
        "warmup_nrounds": 3, "min_compress_nelems": 0,
    }  # fmt: skip


def test_small_models_are_compressed_by_default():
    settings = Settings.read({}, {})
    assert settings.attach_options(1023)["min_compress_nelems"] == 0
    assert settings.attach_options(1024)["min_compress_nelems"] == 1024


def test_rules_that_are_no_rules():
    with pytest.raises(SpecError, match="maps no patterns to specs"):
        Settings.read({"rules": "[1]"}, {})


def test_specs_that_are_not_parsed_are_good_ones():
    assert list(PLAIN_SPECS) == [row["name"] for row in agentcomm.codecs() if not row["sparse"]]
    for spec in PLAIN_SPECS:
        parse(spec)


def test_an_empty_entry_of_pythonpath_stays(tmp_path):
    code = tmp_path / "sub" / "script.py"
    code.parent.mkdir()
    code.write_text("import beside; print(beside.__file__)")
    (tmp_path / "beside.py").touch()
    both(code, cwd=tmp_path, env={"PYTHONPATH": f":{tmp_path / 'sub'}"})
