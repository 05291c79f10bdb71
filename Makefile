# `make train` and `make test` need no set-up: they make .venv, install the library and the workbench, and run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
# Docker images of Python set it; each process of the tests would then compile all modules again, in 3 seconds.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help train quick test compiled slow oldest-torch newest-torch xla attack mutants sanitize integrations gpu ledger evidence check options docs site dist cross cross-wheels format clean

help:
	@echo "make train   set up, train on handwritten digits with LAMB, print where the report is"
	@echo "make quick   set up, run the mathematics, the table of cases and the contract on the CPU: under a minute"
	@echo "make test    set up, run everything CI runs"
	@echo "make slow    run the tests that CI leaves out: all of the GPU's kernels in an interpreter, minutes"
	@echo "make oldest-torch   run the tests of the CPU with the oldest torch that is supported, in an environment of its own"
	@echo "make newest-torch   the same with the newest torch, or with that of TORCH=2.13.0"
	@echo "make xla     run the tests of torch_xla on its CPU runtime, in an environment of its own"
	@echo "make attack  random cases, uses, damage and command lines, minutes (MINUTES=30 SEED=7)"
	@echo "make mutants  plant faults in a copy of the package, and see that tests find each, half an hour (FAULTS='parts of names')"
	@echo "make sanitize   run the tests of the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer, minutes"
	@echo "make integrations   install trainers of others and run the tests in them, minutes"
	@echo "make gpu     on a machine with one: tests and benchmarks that need it, into build/gpu (STEPS=smoke, RESULTS=folder)"
	@echo "make ledger  count what steps do, into benchmarks/results/ledger.json; BECAUSE='the reason' if rows got worse"
	@echo "make evidence   repeat each cell of the published comparisons, ten minutes; MNIST=DIR TEXT=FILE for those that need data"
	@echo "make check   formatters, linter and type checker alone"
	@echo "make options   write what the C library knows of optimizers' options, csrc/options.h, from their classes"
	@echo "make docs    write what pages take from the code, and build the site in build/site; a warning is an error"
	@echo "make dist    build sdists and wheels of both distributions in dist, and try them in fresh environments"
	@echo "make cross   compile the C library for Windows, macOS, ARM and musl, and run its steps under qemu and Wine"
	@echo "make format  rewrite the code in the project's format"
	@echo "make clean   remove the environment and all caches"

# An editable install contains the C code only after a rebuild, so the stamp depends on it. pip would make a new build
# environment each time, and compile the whole library; with the tools of $(VENV), only changed sources are compiled.
# --no-compile: Python compiles the modules that are imported; pip would compile all, in 25 seconds of one processor.
STAMP := $(VENV)/installed
EDITABLE := --no-build-isolation --config-settings build-dir=build/editable --config-settings cmake.define.BIGHORN_WERROR=ON
WORKBENCH := --editable './workbench[study]'
$(STAMP): pyproject.toml workbench/pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/bighorn/_kernels/csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): downloads, and then the C library, which two cores compile in about 80 seconds at first"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet 'scikit-build-core>=0.11' 'hatchling>=1.26' editables
	$(BIN)/python -c 'from scikit_build_core.build import get_requires_for_build_editable as more; print(*more(), sep="\n")' \
	  | xargs -r $(BIN)/python -m pip install --disable-pip-version-check --quiet
	$(BIN)/python -m pip install --disable-pip-version-check --quiet \
	  --no-compile --constraint constraints.txt $(EDITABLE) --editable '.[dev]' $(WORKBENCH)
	touch $(STAMP)

# Other versions of Triton, unpacked beside the environment: the oldest supported one, then versions for the slow tests.
# Triton has wheels for Linux alone.
ifeq ($(shell uname),Linux)
TRITONS := 3.3.1
MORE_TRITONS := 3.4.0 3.5.1 3.6.0 3.8.0 3.9.0
endif
$(VENV)/tritons/%: | $(STAMP)
	rm -rf $@.part
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --no-deps --target $@.part triton==$*
	mv $@.part $@

train: $(STAMP)
	$(BIN)/bighorn train --report runs/digits.html

C_SOURCES = $(wildcard src/bighorn/_kernels/csrc/*.[ch] tests/csrc/*.[ch] tests/device/*.cpp benchmarks/*.c)

check: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(C_SOURCES)
	$(BIN)/ruff check
	$(BIN)/mypy

# Does not install the library, whose sources may depend on the new header.
options:
	test -x $(BIN)/python || $(MAKE) $(STAMP)
	$(BIN)/python -m tests.csrc.options_header

format: $(STAMP)
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(C_SOURCES)
	$(BIN)/ruff check --fix

docs: $(STAMP)
	$(BIN)/python docs/_ext/generated.py
	$(MAKE) site

# The tests take the pages as they are, and compare the generated parts with the code.
site: $(STAMP)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/site

# Tests that start processes wait for them: with three workers two cores take 456 s, with two 504, and with four no less.
WORKERS = $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) * 3 // 2)')
test: $(STAMP)
	$(MAKE) --jobs=2 --output-sync check site compiled $(TRITONS:%=$(VENV)/tritons/%)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow"

# One process compiles the modules that tests import, beside the type checker; else each worker would compile all. The tests
# report what cannot be collected.
compiled: $(STAMP)
	$(BIN)/bighorn doctor --require cpu
	$(BIN)/pytest --collect-only -qq -m "not slow" > /dev/null || true

# The inner loop: no process is started, nothing is compiled, and no tensor has millions of elements. QUICK=... selects other folders or files.
QUICK ?= tests/math tests/contract tests/errors tests/scaling tests/backends/test_backends.py
quick: $(STAMP)
	$(BIN)/pytest -n 2 --dist load -q -m "not slow and not process and not long" $(QUICK)

# auditwheel names the wheel after the oldest sufficient glibc; libraries that it adds would appear in a folder of the wheel.
# The README in the wheel has absolute links, which work on a package index.
REPOSITORY := $(shell sed -n 's/^Repository = "\(.*\)"/\1/p' pyproject.toml)
dist: $(STAMP)
	rm -rf build/dist build/tree dist
	mkdir -p build/tree
	git ls-files -z | xargs -0 cp --parents --target-directory build/tree
	$(BIN)/python docs/_ext/readme_links.py build/tree/README.md $(REPOSITORY)
	$(BIN)/python docs/_ext/readme_links.py build/tree/workbench/README.md $(REPOSITORY) workbench
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt $(EDITABLE) --editable '.[release]'
	$(BIN)/python -m build --outdir build/dist build/tree
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/dist/*.whl
	mv build/dist/*.tar.gz dist
	$(BIN)/python -m build --outdir dist build/tree/workbench
	$(BIN)/python tests/package/fresh_install.py dist

# The C library of other platforms, compiled by Zig, a wheel of 100 MB. An emulator runs its kernels if one is installed:
# Debian's packages are qemu-user-static and wine64. PLATFORMS="aarch64-macos x86_64-windows-gnu" selects some.
PLATFORMS ?=
cross: build/zig/installed
	build/zig/bin/python -m tests.csrc.cross $(PLATFORMS)
cross-wheels: build/zig/installed
	build/zig/bin/python -m tests.csrc.cross --wheels $(PLATFORMS)
build/zig/installed: Makefile # its recipe has the packages
	$(PYTHON) -m venv build/zig
	build/zig/bin/pip install --disable-pip-version-check --quiet cmake wheel 'ziglang>=0.14'
	build/zig/bin/pip install --disable-pip-version-check --quiet --upgrade --target build/zig/windows \
	  --platform win_amd64 --only-binary=:all: --no-deps intel-openmp
	touch $@

# Other versions of torch, each in a separate environment: the oldest one in pyproject.toml, and the newest one or the
# version in TORCH. PyPI's build for Linux installs 3 GB of CUDA; PIP_INDEX_URL may name an index with builds without it.
# With the oldest the tests omit FSDP2: on the CPU, torch 2.7 and 2.8 return the sum of float32 and bfloat16 gradients over
# ranks in place of their mean. Both omit Triton's interpreter, which fails in 3.3 with NumPy 2.4, and in 3.9 at a mask that
# the compilers accept; the tests of the pinned torch compile with each Triton.
OLDEST_TORCH := $(shell sed -n 's/.*"torch>=\(.*\)".*/\1/p' pyproject.toml)
TORCH ?=
OLDEST := build/torch-$(OLDEST_TORCH)
NEWEST := build/torch-$(or $(TORCH),newest)
build/torch-%/installed: pyproject.toml workbench/pyproject.toml CMakeLists.txt $(wildcard src/bighorn/_kernels/csrc/*)
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --quiet --upgrade --editable . $(WORKBENCH) \
	  '$(if $(filter newest,$*),torch,torch==$*.*)' hypothesis pytest pytest-timeout pytest-xdist
	touch $@

# Warnings of other versions are not failures.
WITH_TORCH = $(1)/bin/bighorn doctor --require cpu && \
	$(1)/bin/pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slow" -W default \
	  --ignore tests/integrations --ignore tests/gpu --ignore workbench/tests/gpu --ignore tests/package/test_architecture.py \
	  --ignore tests/backends/test_triton_compile.py --ignore tests/backends/test_interpreter.py \
	  --ignore tests/docs/test_adding_an_optimizer.py

oldest-torch: $(OLDEST)/installed
	$(call WITH_TORCH,$(OLDEST)) -k "not fsdp and not hybrid and not sharded_processes and not step_on_a_gpu"

newest-torch: $(NEWEST)/installed
	$(call WITH_TORCH,$(NEWEST))

# torch_xla needs the torch of its version. The tests use no GPU, even if that torch is a CUDA build.
XLA_VERSION := 2.9
XLA := build/xla-$(XLA_VERSION)
$(XLA)/installed: pyproject.toml workbench/pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --quiet --upgrade --editable . --editable ./workbench \
	  'torch==$(XLA_VERSION).*' 'torch_xla==$(XLA_VERSION).*' expecttest hypothesis pytest pytest-timeout pytest-xdist
	touch $@

xla: $(XLA)/installed
	PJRT_DEVICE=CPU $(XLA)/bin/pytest -n auto --dist load -W default tests/device -k xla

slow: $(STAMP) $(TRITONS:%=$(VENV)/tritons/%) $(MORE_TRITONS:%=$(VENV)/tritons/%)
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder -m slow

# A second install of the package, whose C library ends the process at a wrong address or at undefined behaviour.
build/sanitized: $(STAMP) $(wildcard src/bighorn/*.py src/bighorn/*/*.py src/bighorn/*/*/*.py src/bighorn/_kernels/csrc/*)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --upgrade --target $@ \
	  --config-settings cmake.define.BIGHORN_SANITIZE=ON --config-settings build-dir=build/sanitized-objects .
	test -f $@/bighorn/_kernels/libbighorn.so
	touch $@

# All kernels of the CPU under both; `make test` runs a covering set. SANITIZE=... gives pytest other arguments.
SANITIZE ?= tests/backends/test_backends.py tests/backends/test_came_cpu.py tests/precision/test_precision.py -k 'cpu and not temporaries'
sanitize: $(STAMP) build/sanitized
	$(BIN)/python -m tests.support.sanitized -q $(SANITIZE)

FAULTS ?=
mutants: $(STAMP)
	$(BIN)/python -m tests.mutation.run $(FAULTS)

MINUTES ?= 10
SEED ?= 1
attack: $(STAMP) build/sanitized
	$(BIN)/python -m tests.attack.run --minutes $(MINUTES) --seed $(SEED)

# Trainers that depend on CUDA or another torch are installed without dependencies: the tests import only the modules that
# build optimizers. fastprogress needs fasthtml from 1.1 on. UPGRADE=--upgrade installs the newest versions, like a nightly run.
WITHOUT_DEPENDENCIES := timm torchtitan torchtune nemo-automodel verl axolotl 'megatron-core==0.16.*' \
	addict art colorama einops spmd_types torch_checkpointing torchdata \
	trl diffusers sentence-transformers \
	fastai beartype fastcore fastdownload 'fastprogress<1.1' fasttransform plum-dispatch \
	bitsandbytes galore-torch lion-pytorch torchao
UPGRADE ?=
integrations: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet $(UPGRADE) \
		--constraint constraints.txt $(EDITABLE) --editable '.[dev,test-integrations]' --editable './workbench[study,postgresql]'
	$(BIN)/python -m pip install --disable-pip-version-check --quiet $(UPGRADE) --no-deps $(WITHOUT_DEPENDENCIES)
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(BIN)/python -m pip install --disable-pip-version-check --quiet $(UPGRADE) \
		--constraint constraints.txt --no-build-isolation 'deepspeed==0.19.*'
	$(BIN)/pytest -m "not slow" tests/integrations workbench/tests/test_peer_state.py workbench/tests/test_examples.py workbench/tests/test_logs.py workbench/tests/test_study_server.py tests/docs/test_docs.py tests/package/test_types.py
	$(BIN)/python -m tests.integrations.page

# A Python whose torch finds a GPU runs the tests without any download, since containers have their own torch. Other machines
# use $(VENV).
RESULTS ?= build/gpu
STEPS ?= smoke cases rest bench tuning
gpu:
	if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	  $(PYTHON) -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable . && \
	  PYTHONPATH=workbench/src $(PYTHON) workbench/benchmarks/gpu_session.py --results $(RESULTS) $(STEPS); \
	else \
	  $(MAKE) $(STAMP) && $(BIN)/python workbench/benchmarks/gpu_session.py --results $(RESULTS) $(STEPS); \
	fi

# Counts are the same on every run, so a test compares them. Counts of the C library need valgrind.
BECAUSE ?=
ledger: $(STAMP)
	$(BIN)/python benchmarks/ledger.py --because "$(BECAUSE)"

# Digits come with scikit-learn. MNIST is a folder with its four idx files, TEXT the text of tinyshakespeare.
MNIST ?=
TEXT ?=
evidence: $(STAMP)
	$(BIN)/python workbench/benchmarks/evidence.py $(if $(MNIST),--mnist '$(MNIST)') $(if $(TEXT),--text '$(TEXT)')

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
