# Everything from a fresh clone, with only Python >= 3.11 and make:
#   make demo    the main job          make lab     JupyterLab on the lessons
#   make test    the tests             make slides  the deck, in slides/_build
#   make site    docs, lessons, live explorers, drawings, decks and sheets as one static site, in docs/_site (needs npm)
#   make runtime Python for the browser, which saved pages of explorers take along (needs npm)
#   make handout two sheets for learners; make pictures: those of the README
#   make test-long, test-lessons, test-browser, test-compilers, test-processes: the tests of one kind that .ci/run has
#   make nightly what is rare or long: pages of the site, decks, all compiled programs, 200 random plans of the day
#   make bench   what a change may make slower, in minutes, beside plain JAX and the last record (tests/bench.py)
#   make device-test  one accelerator, in minutes: right or wrong, how fast, how much memory (tests/device.md)
#   make engines SLURM, MPI, Ray and torchrun, installed in .engines, train the same; times go to tests/engines.md (root)
# Another Python beside the first one: make test PYTHON=python3.12 VENV=.venv312

PYTHON ?= python3
VENV ?= .venv
STAMP := $(VENV)/.llmpar-installed
BIN := $(VENV)/bin
# Tests start llmpar a hundred times: a machine that keeps no bytecode compiles the package each time.
unexport PYTHONDONTWRITEBYTECODE
TESTS ?= tests

.DEFAULT_GOAL := help
.PHONY: help setup runtime compilers demo test test-long test-lessons test-browser test-compilers test-processes test-fast nightly test-full lab bench device-test slides handout site notebooks pictures lint engines clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

setup: $(STAMP)

# uv where it works (a shim without a uv behind it does not), plain venv and pip otherwise.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "llmpar needs Python 3.11 or newer, and '$(PYTHON)' was not found; install it or name another: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(0 if sys.version_info >= (3, 11) else "llmpar needs Python 3.11 or newer, and $(PYTHON) is " + v + "; name a newer one: make PYTHON=python3.11")'
	@if command -v uv >/dev/null 2>&1 && uv --version >/dev/null 2>&1; then \
	  set -ex; uv venv --quiet --allow-existing --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" $(VENV); \
	  uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]'; \
	else \
	  set -ex; $(PYTHON) -m venv $(VENV); \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'; \
	fi
	@touch $@

# Two things from npm, where it is: the accessibility checker of the browser tests, which say that they were skipped without it;
# and Python for the browser (Pyodide), packed into one file that git ignores and a wheel carries.
node_modules: package.json
	@if command -v npm >/dev/null 2>&1; then npm install --silent --no-package-lock --no-audit --no-fund && touch $@ || echo "llmpar: npm install failed"; fi

RUNTIME := llmpar/explore/static/python.json
runtime: $(RUNTIME)

$(RUNTIME): package.json .ci/runtime.py | node_modules
	@test -f node_modules/pyodide/pyodide.asm.wasm || { echo "llmpar: Python for the browser comes through npm, which is not here or failed; install Node.js with npm, then run make runtime. Pages without it: save(…, small=True)" >&2; exit 1; }
	@$(PYTHON) .ci/runtime.py node_modules/pyodide $@

# What `llmpar compile` asks: the compilers for GPUs and TPUs, without a device. They lie beside the environment, since JAX looks
# for a GPU wherever its plugin is installed: PYTHONPATH=$(VENV)/aot llmpar compile. Tests that need them find them there.
COMPILERS := jax-cuda12-plugin jax-cuda12-pjrt libtpu
compilers: $(VENV)/aot/.installed

$(VENV)/aot/.installed: $(STAMP)
	@if command -v uv >/dev/null 2>&1 && uv --version >/dev/null 2>&1; then \
	  set -ex; uv pip install --quiet --python $(BIN)/python --no-deps -c constraints.txt --target $(VENV)/aot $(COMPILERS); \
	else \
	  set -ex; $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt --upgrade --target $(VENV)/aot $(COMPILERS); \
	fi
	@touch $@

demo: $(STAMP)
	$(BIN)/llmpar demo --out demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python notebooks/build.py --check
	$(BIN)/python tests/house.py

# What a change to the package can break. MARKS chooses other tests by their markers; WHY records what they cost (tests/costs.py).
# The jobs below each take a kind of test, so that only they install what it needs: a browser's npm's checker, the compilers' half
# a gigabyte. Two workers; what takes long comes first (tests/conftest.py).
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder
WITH = $(PYTEST) $$(grep -l "mark\.$(1)" tests/test_*.py) -m "$(1) and not nightly"
test: $(STAMP)
	$(PYTEST) $(TESTS) $(if $(MARKS),-m "$(MARKS)") $(if $(WHY),--record-costs="$(WHY)")

# What takes seconds to compile and has a quicker test beside it.
test-long: $(STAMP)
	$(call WITH,long)

test-lessons: $(STAMP)
	$(call WITH,lessons)

# Without Python for the browser, its tests say that they were skipped.
test-browser: $(STAMP) node_modules
	-@$(MAKE) --no-print-directory runtime
	$(call WITH,browser)

test-compilers: compilers
	$(call WITH,compilers)

test-processes: $(STAMP)
	$(call WITH,processes)

# The default tests without a lesson.
test-fast: $(STAMP)
	$(PYTEST) $(TESTS) -m "not (lessons or browser or compilers or processes or long or nightly or full or engines)"

# Two hundred random plans are those of the day; the log has each with its seed.
nightly: compilers node_modules
	-@$(MAKE) --no-print-directory runtime
	@mkdir -p runs
	$(PYTEST) $(TESTS) -m "nightly and not (full or engines)" --plans-log runs/plans-$$(date +%Y%m%d).jsonl

# All that the default tests sample: plans by lot, seeds, pages, lessons, in parts: make test-full PART=1/8, … PART=8/8.
# tests/full_runs.md tells when each part ran last.
PART ?= 1/1
test-full: $(STAMP)
	LLMPAR_TEST_TYPES=all $(PYTEST) $(TESTS) -m full --part $(PART)

engines: $(STAMP)
	PYTHON=$(BIN)/python bash tests/install_engines.sh .engines
	LLMPAR_ENGINES=.engines $(BIN)/python -m pytest tests/test_real_engines.py -n0 -m engines --record-engines
	$(BIN)/python tests/engines_table.py

# Where npm is, explorers that learners save answer by themselves.
lab: $(STAMP)
	-@command -v npm >/dev/null 2>&1 && $(MAKE) --no-print-directory runtime
	$(BIN)/llmpar lab

bench: $(STAMP)
	$(BIN)/python tests/bench.py

device-test: $(STAMP)
	$(BIN)/python tests/device.py

slides: $(STAMP)
	$(BIN)/python slides/build.py

handout: $(STAMP)
	$(BIN)/python slides/handout.py

# LLMPAR_REPOSITORY=owner/name tells lessons where Colab and Binder open them, LLMPAR_SITE shared links where the site is.
site: $(RUNTIME) slides handout
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --jobs 2 -c docs -d docs/_doctrees . docs/_site
	@echo "the site is in docs/_site; to see it: $(BIN)/python -m http.server --directory docs/_site"

pictures: $(STAMP)
	$(BIN)/python docs/pictures.py

notebooks: $(STAMP)
	$(BIN)/python notebooks/build.py

clean:
	rm -rf demo runs dist build slides/_build slides/_handout docs/_site docs/_doctrees docs/.jupyter_cache docs/jupyter_execute .jax_cache .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
