# Two commands do everything on a fresh clone: `make campaign` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PRESET ?= kda_prefill
DB ?= sqlite:///factory.db
STAMP := $(VENV)/.installed

.PHONY: campaign test postgresql lint typecheck unit soak docs docs-data ship clean

campaign: $(STAMP)  ## set up and run the main job: the KDA prefill campaign, or PRESET=...
	$(BIN)/factory launch $(PRESET)

test: postgresql lint typecheck unit  ## set up and pass all checks; the whole of CI

postgresql:  ## the server that tests run against, if there is none yet
	tests/install_postgresql.sh

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

soak: postgresql $(STAMP)  ## what is too long for CI
	$(BIN)/python -m pytest -m "soak and not gpu" --timeout 3600

docs: $(STAMP)  ## the documentation as a site, in build/site; a broken link fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-data: $(STAMP)  ## render tables, example report and picture on the pages from data
	$(BIN)/python -m docs.data

ship: $(STAMP)  ## CAMPAIGN=...: put it among the shipped results, and on the pages
	$(BIN)/python -m docs.data.ship $(CAMPAIGN) --db $(DB)
	$(BIN)/python -m docs.data

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS='ignore:Editable installation' \
		$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs,postgresql]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps flashinfer-bench
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
