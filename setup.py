"""Build the C extensions: this is what ``pip install --no-build-isolation .`` runs.

Environment switches, all off unless set::

    AGENTCOMM_WERROR=1        compiler warnings are errors
    AGENTCOMM_DEBUG=1         -Og and asserts, instead of -O3 and NDEBUG
    AGENTCOMM_SANITIZE=LIST   "address,undefined" or "thread"; asserts on
    AGENTCOMM_COVERAGE=1      gcov counters; asserts on
    CC, CXX                   the compilers

Never -march, never -ffast-math: one binary serves every CPU (kernels carry target attributes and
are chosen at run time), and every kernel gives the same bits. ``agentcomm._c10d`` is compiled
against the torch that is installed now, which is why the build must not be isolated.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.modified import newer_group

ROOT = Path(__file__).resolve().parent
TORCH_MIN = (2, 11)
BUILD_COMMANDS = {"bdist_wheel", "build", "build_ext", "dist_info", "editable_wheel", "install"}
INSTALLERS = "apt-get install {}  (Debian, Ubuntu)    or    dnf install {}  (Fedora)"


def switch(name: str) -> bool:
    """Tell whether an environment switch is on."""
    return os.environ.get(f"AGENTCOMM_{name}", "") not in ("", "0")


def compiler(variable: str) -> list[str]:
    """Return the command that setuptools will use for CC or CXX."""
    command = os.environ.get(variable) or sysconfig.get_config_var(variable)
    return shlex.split(command or {"CC": "cc", "CXX": "c++"}[variable])


# These come after Python's own CFLAGS on the command line, so NDEBUG is set or cleared here and not
# inherited. Python's -fwrapv would hide signed overflow from UBSan.
SANITIZE = os.environ.get("AGENTCOMM_SANITIZE", "")
FLAGS = "-ffp-contract=off -fno-math-errno -fvisibility=hidden -pthread".split()
FLAGS += "-Wall -Wextra -Wconversion -Wshadow -Wvla -Wcast-align -Wundef".split()
LINK_FLAGS = ["-pthread"]
if SANITIZE or switch("DEBUG") or switch("COVERAGE"):
    FLAGS += ["-Og", "-g", "-UNDEBUG", "-U_FORTIFY_SOURCE"]
else:
    FLAGS += ["-O3", "-DNDEBUG"]
if SANITIZE:
    LINK_FLAGS += [f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all"]
    FLAGS += [*LINK_FLAGS[1:], "-fno-omit-frame-pointer", "-fno-wrapv"]
if switch("COVERAGE"):
    LINK_FLAGS += ["--coverage"]
    FLAGS += ["--coverage"]
if switch("WERROR"):
    FLAGS += ["-Werror"]
C_FLAGS = ["-std=c11", *FLAGS, "-Wstrict-prototypes", "-Wmissing-prototypes"]
CXX_FLAGS = ["-std=c++20", *FLAGS]


def output(command: list[str]) -> str:
    """Return what a command prints, "" where it fails."""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def stop(problem: str, remedy: str) -> None:
    """End the build with what is wrong and the command that cures it."""
    raise SystemExit(f"\nagentcomm cannot be built: {problem}\n\n    {remedy}\n")


def check_toolchain():
    """Return torch; stop with a clear message where it, a compiler or Python.h is missing."""
    for variable, packages in (("CC", ("gcc", "gcc")), ("CXX", ("g++", "gcc-c++"))):
        if shutil.which(command := compiler(variable)[0]) is None:
            problem = f"there is no compiler {command!r}. Install one, or name one in {variable}."
            stop(problem, INSTALLERS.format(*packages))
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        stop("Python.h is missing.", INSTALLERS.format("python3-dev", "python3-devel"))
    wanted = ".".join(map(str, TORCH_MIN))
    torch_first = f"pip install 'torch>={wanted}' setuptools && pip install --no-build-isolation ."
    try:
        import torch
    except (ImportError, OSError) as error:
        stop(
            f"torch cannot be imported in this build ({error}). agentcomm is compiled against the"
            " torch that it runs with: install that first, then build without isolation.",
            torch_first,
        )
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < TORCH_MIN:
        stop(f"torch {torch.__version__} is too old, {wanted} is the oldest.", torch_first)
    return torch


def extensions(torch) -> list[Extension]:
    """Describe ``_core`` (C, stable ABI) and ``_c10d`` (the one C++ file, linked with libtorch)."""
    csrc = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("csrc/**/*"))]
    folders = tuple(f"csrc/{name}/" for name in ("core", "codecs", "x86", "reduce", "sched"))
    common = {"depends": [path for path in csrc if path.endswith((".h", ".inc"))]}
    common |= {"extra_link_args": LINK_FLAGS, "include_dirs": ["csrc/include", "csrc"]}
    stable_abi = not sysconfig.get_config_var("Py_GIL_DISABLED")  # free-threaded Python has none
    core = Extension(
        "agentcomm._core",
        [path for path in csrc if path.startswith(folders) and path.endswith(".c")]
        + ["csrc/python/core_module.c", "csrc/python/engine_type.c"],
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if stable_abi else [],
        py_limited_api=stable_abi,
        **common,
    )
    base, cxx11_abi = (torch.__path__[0], torch.compiled_with_cxx11_abi()) if torch else ("", True)
    c10d = Extension(
        "agentcomm._c10d",
        ["csrc/c10d/transport.cpp", "csrc/python/c10d_module.c"],
        define_macros=[("_GLIBCXX_USE_CXX11_ABI", str(int(cxx11_abi)))],
        library_dirs=[f"{base}/lib"],
        libraries=["torch", "torch_cpu", "c10"],
        language="c++",
        **common,
    )
    api = f"{base}/include/torch/csrc/api/include"
    c10d.include_dirs = [*core.include_dirs, f"{base}/include", api]
    return [c10d, core]  # the slower one first


class BuildExt(build_ext):
    """Compile in parallel, each file with the flags of its language, and only what has changed."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = int(self.parallel or os.cpu_count() or 1)
        self.force = True  # build/ may hold a library made with other switches or another torch
        setting = [C_FLAGS, CXX_FLAGS, compiler("CC"), compiler("CXX"), TORCH and TORCH.__version__]
        key = hashlib.sha256(repr([setting, sys.implementation.cache_tag]).encode()).hexdigest()
        self.build_temp = str(Path("build", f"objects-{key[:12]}"))

    def run(self) -> None:
        super().run()
        parent = ROOT if self.inplace else Path(self.build_lib)
        (parent / "agentcomm" / "_build_info.py").write_text(self.build_info())

    def build_extensions(self) -> None:
        self.compiler.compile = self.compile_sources
        with ThreadPoolExecutor(self.parallel) as self.pool:
            super().build_extensions()

    def compile_sources(self, sources, output_dir, macros, include_dirs, debug, **options):
        """Stand in for the compiler's ``compile``, which has one set of flags and uses one core."""
        depends = options["depends"]
        _, objects, _, cpp, build = self.compiler._setup_compile(
            output_dir, macros, include_dirs, sources, depends, None
        )
        # Python's and torch's headers may warn as they like.
        cpp = [f"-isystem{arg[2:]}" if arg.startswith("-I/") else arg for arg in cpp]
        args = self.compiler._get_cc_args(cpp, debug, None)

        def compile_one(obj: str) -> None:
            source, suffix = build[obj]
            if newer_group([source, *depends], obj):
                flags = CXX_FLAGS if suffix == ".cpp" else C_FLAGS
                self.compiler._compile(obj, source, suffix, args, flags, cpp)

        list(self.pool.map(compile_one, objects))
        return objects

    def build_info(self) -> str:
        """Return the text of ``agentcomm/_build_info.py``: what this build was made of."""
        git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        in_checkout = (ROOT / ".git").exists() and shutil.which("git")
        facts = {
            "VERSION": self.distribution.get_version(),
            "TORCH_VERSION": TORCH.__version__,
            "COMPILER": output([*compiler("CC"), "--version"]).partition("\n")[0],
            "CFLAGS": " ".join(C_FLAGS),
            "SANITIZE": SANITIZE,
            "COMMIT": output(git) if in_checkout else "",
        }
        lines = "".join(f"{name} = {value!r}\n" for name, value in facts.items())
        return f'"""Written by setup.py, not by hand."""\n\n{lines}'


class BuildPy(build_py):
    """Start from an empty folder: build/lib keeps modules that the source no longer has."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "agentcomm"), ignore_errors=True)
        super().run()


TORCH = check_toolchain() if BUILD_COMMANDS.intersection(sys.argv) else None
setup(ext_modules=extensions(TORCH), cmdclass={"build_ext": BuildExt, "build_py": BuildPy})
