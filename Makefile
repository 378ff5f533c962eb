# Every target sets up for itself what it needs, in .venv: a fresh machine needs python3, gcc and g++.
#
#   make setup      the project and its extras, installed in .venv (editable)
#   make demo       examples/demo.py
#   make test       the C tests, then pytest          PYTEST_ARGS="-m 'not slow' -x"
#   make bench      kernels in C, then the step time over loopback    BENCH_ARGS=...
#   make lint       formats, types, spelling, and a plain compile with -Werror
#   make sanitize   the C tests and tests/unit under ASan, UBSan and TSan
#   make fuzz       libFuzzer, FUZZ_SECONDS a target (needs clang)
#   make cuda       compiles csrc/cuda (needs nvcc)
#   make clean      removes what was built; .venv stays, `rm -r .venv` removes that too

PYTHON ?= python3
TORCH ?= torch==2.13.0
FUZZ_SECONDS ?= 60

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
BUILT := .venv/.built
LINTERS := .venv/.linters
ASAN := $(CURDIR)/build/asan

C_SOURCES = $(wildcard $(patsubst %,csrc/%/*.c,core codecs x86 reduce sched))
C_FORMATTED = $(shell find csrc tests/c -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu')
C_CHECK = -std=c11 -O2 -ffp-contract=off -fno-math-errno -pthread -Wall -Wextra -Wconversion \
	-Wshadow -Wvla -Wstrict-prototypes -Wmissing-prototypes -Wcast-align -Wundef -Werror \
	-Icsrc/include -Icsrc -S -o /dev/null
C_COMPILERS = $(foreach cc,gcc clang,$(if $(shell command -v $(cc)),$(cc)))
NEW_ENOUGH = import sys, torch; sys.exit([int(x) for x in torch.__version__.split('.')[:2]] < [2, 11])

.PHONY: setup demo test bench lint sanitize fuzz cuda clean

setup: $(BUILT)

demo: $(BUILT)
	$(PY) examples/demo.py $(DEMO_ARGS)

test: $(BUILT)
	$(MAKE) -C tests/c test
	$(PY) -m pytest $(PYTEST_ARGS)

bench: $(BUILT)
	$(MAKE) -C tests/c bench
	$(PY) benchmarks/ddp_step.py $(if $(BENCH_ARGS),$(BENCH_ARGS),--link loopback)

lint: $(BUILT) $(LINTERS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy.stubtest agentcomm._core
	.venv/bin/clang-format --dry-run -Werror $(C_FORMATTED)
	.venv/bin/codespell
	set -e; for cc in $(C_COMPILERS); do for file in $(C_SOURCES); do $$cc $(C_CHECK) $$file; done; done
	$(PY) -m pytest -q tests/unit/test_repo.py

# The sanitized build lies beside .venv's. libstdc++ is named because libasan looks for it at start.
# Of the thousands of short tensors those in float32: longer ones of the other types are tried too.
NOT_SANITIZED := test_short_tensors and (float16 or float64)
sanitize: $(BUILT)
	$(MAKE) -C tests/c sanitize
	$(MAKE) -C tests/c tsan
	AGENTCOMM_SANITIZE=address,undefined $(PIP) install --quiet --no-build-isolation --no-deps \
		--upgrade --target $(ASAN) .
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(ASAN) $(PY) -P -m pytest tests/unit \
		-k "not ($(NOT_SANITIZED))" $(PYTEST_ARGS)

fuzz:
	@if command -v clang >/dev/null; then $(MAKE) -C tests/c fuzz FUZZ_SECONDS=$(FUZZ_SECONDS); \
	else echo "make fuzz needs clang with libFuzzer: apt-get install clang libclang-rt-14-dev"; fi

cuda:
	@if [ ! -d csrc/cuda ]; then echo "csrc/cuda is not there yet: the CUDA codecs come later"; \
	else set -ex; mkdir -p build/cuda; for file in csrc/cuda/*.cu; do nvcc --fmad=false -std=c++17 \
	-Icsrc/include -Icsrc -c -o build/cuda/$$(basename $$file).o $$file; done; fi

clean:
	rm -rf build dist *.egg-info agentcomm/*.so agentcomm/_build_info.py $(BUILT)
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache .coverage
	find agentcomm benchmarks examples tests -name __pycache__ -prune -exec rm -rf {} +
	$(MAKE) -C tests/c clean

# A new torch (its version.py is newer than the stamp) needs a new build.
$(BUILT): $(shell find csrc -type f) setup.py pyproject.toml \
		$(wildcard .venv/lib/python3*/site-packages/torch/version.py) | $(PY)
	$(PY) -c "$(NEW_ENOUGH)" 2>/dev/null || $(PIP) install "$(TORCH)" numpy
	$(PIP) install --no-build-isolation --editable '.[bench,demo,test]'
	touch $@

$(LINTERS): pyproject.toml | $(PY)
	$(PIP) install --group dev
	touch $@

$(PY):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "agentcomm needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
	$(PIP) install --upgrade 'pip>=25.1' 'setuptools>=77'
