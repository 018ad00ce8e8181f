# make demo        a dense and a routed model at equal FLOPs, in a few minutes, with pictures
# make test        what CI runs: lint, types, tests
# make test-long   the tests that take minutes each
# make docs        the documentation as a site, in site/; a warning is an error
# make mutants     break the core in named ways and see which law catches each
# make families    convert a tiny model of every family of transformers, and print what came of it
# make bench       training, prefill and generation beside transformers and the peers; hours, goes on where it was
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-long lint docs mutants families bench clean

demo: $(INSTALLED)
	$(BIN)/modepth demo

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile -m "not long"

test-long: $(INSTALLED)
	$(BIN)/pytest -m long

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # not --quiet, which would not count warnings

mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants

families: $(INSTALLED)
	$(BIN)/python -m tests.scan_families --write

bench: $(INSTALLED)
	$(BIN)/modepth bench results/bench --peers .peers

# torch first and alone: resolved together with others, it may come as a newer build.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "modepth needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist site
