"""The rules that no compiler checks: layers, names, symbols, and what comes with a codec."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from oracles import PER_BYTE

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
UNTRACKED = {".git", ".venv", "build", "dist", "__pycache__"}
BINARY_FOLDERS = {"corpus", "golden"}
C_SUFFIXES = {".c", ".h", ".inc", ".cpp", ".cu", ".cuh"}
CXX_SUFFIXES = {".cpp", ".cc", ".cxx", ".hpp", ".hh", ".hxx"}
TEXT_SUFFIXES = C_SUFFIXES | {".py", ".pyi", ".md", ".toml", ".sh", ".yml", ".cfg", ".txt", ""}

# Which folders of csrc the files of a folder may include. Dependencies point one way.
MAY_INCLUDE = {
    "include": {"include"},
    "core": {"include", "core"},
    "codecs": {"include", "core", "codecs"},
    "x86": {"include", "core", "x86"},
    "cuda": {"include", "core", "cuda"},
    "sched": {"include", "core", "sched"},
    "reduce": {"include", "core", "codecs", "sched", "reduce"},
    "c10d": {"include", "core", "reduce", "c10d"},
    "python": {"include", "core", "codecs", "x86", "cuda", "sched", "reduce", "c10d", "python"},
}
LIBRARY_FOLDERS = ("core", "codecs", "x86", "sched", "reduce")  # own no process, file or terminal
FORBIDDEN_CALLS = re.compile(
    r"\b(getenv|secure_getenv|setenv|printf|fprintf|vprintf|vfprintf|dprintf|puts|fputs|putchar"
    r"|fputc|putc|perror|exit|_exit|_Exit|quick_exit|abort)\s*\("
)
PYTHON_HEADER = re.compile(r"Python\.h")
TORCH_HEADER = re.compile(r"(torch|c10|ATen|caffe2|gloo)/")
INTRINSICS_HEADER = re.compile(r"(\w*mmintrin|immintrin|x86intrin|cpuid)\.h")
HOME = re.compile(r"(?<![\w.])/(?:home|root|Users)/\w")
INVISIBLE = re.compile("[\u00a0\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')


def repo_files():
    """Return the files that git has or would take; all but builds where there is no git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if listed.returncode == 0:
            paths = (ROOT / name for name in listed.stdout.split("\0") if name)
            return sorted(path for path in paths if path.is_file())
    ignored = (".so", ".o", ".pyc", ".egg-info")
    return sorted(
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not UNTRACKED.intersection(path.relative_to(ROOT).parts)
        and not any(part.endswith(ignored) for part in path.relative_to(ROOT).parts)
        and not any(part.endswith("_cache") for part in path.relative_to(ROOT).parts)
        and path.name != "_build_info.py"
    )


FILES = repo_files()
C_FILES = [path for path in FILES if path.is_relative_to(CSRC) and path.suffix in C_SUFFIXES]
LAYER_OF = {path.name: path.relative_to(CSRC).parts[0] for path in C_FILES}
TEXT_FILES = [
    path
    for path in FILES
    if path.suffix in TEXT_SUFFIXES and not BINARY_FOLDERS.intersection(path.parts)
]


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def blank(match):
    """Replace by nothing but the newlines, so that line numbers stay."""
    return "\n" * match.group().count("\n")


def code_of(path):
    """Return a C file without its comments."""
    return COMMENT.sub(blank, path.read_text())


def includes_of(path):
    return re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', code_of(path), re.MULTILINE)


def codecs():
    lines = code_of(CSRC / "codecs" / "codec_list.inc")
    return re.findall(r'^AGC_CODEC\((\d+),\s*(\w+),\s*"([^"]+)"', lines, re.MULTILINE)


CODECS = [pytest.param(*codec, id=codec[2]) for codec in codecs()]


@pytest.mark.parametrize("path", C_FILES, ids=name_of)
def test_includes_point_one_way(path):
    layer = path.relative_to(CSRC).parts[0]
    assert layer in MAY_INCLUDE, f"{layer}: say in MAY_INCLUDE what this folder may include"
    for quote, header in includes_of(path):
        if PYTHON_HEADER.match(header):
            assert layer == "python", f"{header}: only csrc/python knows Python"
        elif TORCH_HEADER.match(header):
            assert name_of(path) == "csrc/c10d/transport.cpp", f"{header}: only there"
        elif INTRINSICS_HEADER.fullmatch(header):
            assert layer == "x86", f"{header}: intrinsics belong in csrc/x86"
        elif quote == '"':
            basename = Path(header).name
            assert ".." not in header, f"{header}: write it from csrc down"
            assert basename in LAYER_OF, f"{header}: csrc has no such file"
            # The list of codecs is data, not code.
            allowed = LAYER_OF[basename] in MAY_INCLUDE[layer] or basename == "codec_list.inc"
            assert allowed, f"csrc/{layer} must not include {header}"


def test_only_cxx_file_is_the_transport():
    found = [name_of(path) for path in FILES if path.suffix in CXX_SUFFIXES]
    assert found == ["csrc/c10d/transport.cpp"]


def test_file_names_are_unique():
    common = {"__init__.py", "__main__.py", "py.typed"}
    folders = (CSRC, ROOT / "agentcomm")
    inside = [path for path in FILES if any(path.is_relative_to(folder) for folder in folders)]
    counts = Counter(path.name for path in inside if path.name not in common)
    assert [name for name, n in counts.items() if n > 1] == []


@pytest.mark.parametrize("folder", LIBRARY_FOLDERS)
def test_c_library_leaves_the_process_alone(folder):
    found = []
    for path in C_FILES:
        if path.is_relative_to(CSRC / folder):
            code = STRING.sub('""', code_of(path))
            for number, line in enumerate(code.splitlines(), 1):
                found += [f"{name_of(path)}:{number}: {m}" for m in FORBIDDEN_CALLS.findall(line)]
    assert found == []


@pytest.mark.parametrize("name", ["core_module.c", "c10d_module.c"])
def test_python_module_is_thin(name):
    path = CSRC / "python" / name
    code = STRING.sub('""', code_of(path))
    assert len(path.read_text().splitlines()) <= 700
    without_gil = re.findall(r"Py_BEGIN_ALLOW_THREADS(.*?)Py_END_ALLOW_THREADS", code, re.DOTALL)
    assert code.count("Py_BEGIN_ALLOW_THREADS") == len(without_gil)
    assert code.count("Py_END_ALLOW_THREADS") == len(without_gil)
    for block in without_gil:
        assert re.findall(r"\b_?Py\w+\s*\(", block) == [], "a call into Python without the GIL"


def test_codec_list_is_consistent():
    for column in zip(*codecs(), strict=True):
        assert len(set(column)) == len(column), f"twice in codec_list.inc: {column}"
    assert CODECS


@pytest.mark.parametrize(("number", "symbol", "name"), CODECS)
def test_codec_is_defined_in_its_own_file(number, symbol, name):
    definition = re.compile(rf"^const struct agc_codec agc_codec_{symbol}\b", re.MULTILINE)
    files = [path.name for path in C_FILES if definition.search(code_of(path))]
    assert files == [f"{symbol}.c"]


@pytest.mark.parametrize(("number", "symbol", "name"), CODECS)
def test_codec_has_an_oracle(number, symbol, name):
    tree = ast.parse((ROOT / "tests" / "oracles.py").read_text())
    functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert symbol in PER_BYTE or any(symbol in function.split("_") for function in functions), (
        f"tests/oracles.py needs a function with {symbol} between underscores, as encode_{symbol},"
        " or an entry in PER_BYTE for encode_blocks"
    )


@pytest.mark.parametrize(("number", "symbol", "name"), CODECS)
def test_codec_has_a_section_in_the_docs(number, symbol, name):
    text = (ROOT / "docs" / "codecs.md").read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    assert any(re.search(rf"\b{re.escape(name)}\b", heading) for heading in headings)


def test_oracles_do_not_know_the_implementation():
    tree = ast.parse((ROOT / "tests" / "oracles.py").read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert not imported & {"agentcomm", "torch"}


def exported_symbols(module):
    from agentcomm import _build_info

    if _build_info.SANITIZE or "--coverage" in _build_info.CFLAGS:
        pytest.skip("an instrumented build exports its run time's symbols too")
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"{module} is not built"
    command = ["nm", "-D", "--defined-only", "--format=posix", spec.origin]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listing.splitlines()}


def test_core_exports_its_init_function_only():
    assert exported_symbols("agentcomm._core") == {"PyInit__core"}


def test_c10d_exports_no_c_function_but_init():
    linker = {"__bss_start", "_edata", "_end", "_init", "_fini"}
    names = exported_symbols("agentcomm._c10d") - linker
    # Mangled names are inline functions and type tables of torch's headers.
    assert {name for name in names if not name.startswith("_Z")} == {"PyInit__c10d"}


def test_build_is_for_every_cpu_and_bit_exact():
    from agentcomm import _build_info

    assert "-ffp-contract=off" in _build_info.CFLAGS
    assert not re.search(r"-march|-mtune|-ffast-math|-Ofast|-mavx", _build_info.CFLAGS)


def test_version_is_one():
    from agentcomm import _build_info

    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    header = (CSRC / "include" / "agentcomm.h").read_text()
    parts = re.findall(r"#define AGC_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header)
    assert ".".join(parts) == version
    assert version == _build_info.VERSION
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_setup_script_is_short():
    assert len((ROOT / "setup.py").read_text().splitlines()) < 200


def test_ci_script_is_executable():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("path", TEXT_FILES, ids=name_of)
def test_text_is_clean(path):
    text = path.read_bytes().decode()
    may_have_tabs = path.name in {"Makefile", ".editorconfig"} or path.suffix == ".mk"
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{name_of(path)}:{number}"
        assert line == line.rstrip(), f"{where}: space at the end of the line"
        assert may_have_tabs or "\t" not in line, f"{where}: tab"
        assert not INVISIBLE.search(line), f"{where}: invisible character"
        assert not HOME.search(line), f"{where}: somebody's home folder"
    assert text == "" or (text.endswith("\n") and not text.endswith("\n\n")), "one final newline"
