# Two commands matter: `make reproduce` and `make test`. Both set up what they need.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup test test-unpinned reproduce lab notebooks site

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
LOGS := build/test
NEEDS := import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; name another one with: make PYTHON=python3.12")

# What `make reproduce` runs; see README.md
SCALE ?= laptop
PAPER ?= all
SEEDS ?= 1
ABLATIONS ?= 0
FRESH ?= 0

# One thread for each process: threads that spin at barriers on few cores are far slower.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PYDEVD_DISABLE_FILE_VALIDATION ?= 1

NBVAL := --nbval-lax --nbval-current-env --nbval-cell-timeout 120 -p no:cacheprovider

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP) ## make .venv with the pinned dependencies

$(STAMP): pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c '$(NEEDS)'
	@echo "Installing the pinned dependencies into $(VENV); this takes a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints/cpu.txt -e '.[dev]'
	@touch $@

reproduce: $(STAMP) ## run the experiments, then open runs/latest/index.html (SCALE= PAPER= SEEDS= ABLATIONS=1 FRESH=1)
	@$(PY) -m lib.reproduce $(PAPER) --scale $(SCALE) --seeds $(SEEDS) \
	  $(if $(filter 1,$(ABLATIONS)),--ablations) $(if $(filter 1,$(FRESH)),--fresh)

test: $(STAMP) ## ruff, pytest, every notebook, one papermill run per paper
	@rm -rf $(LOGS) && mkdir -p $(LOGS)
	$(PY) -m ruff check .
	$(PY) -m pytest tests -n 2 | tee $(LOGS)/pytest.log
	$(PY) -m pytest $(NBVAL) notebooks | tee $(LOGS)/notebooks.log
	$(PY) -m lib.reproduce rao --scale smoke --runs $(LOGS)/runs
	@tail -q -n 1 $(LOGS)/pytest.log $(LOGS)/notebooks.log

test-unpinned: ## the tests with the newest dependencies that the ranges allow
	rm -rf build/unpinned
	$(PYTHON) -m venv build/unpinned
	build/unpinned/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	build/unpinned/bin/python -m pytest tests -n 2
	build/unpinned/bin/python -m pytest $(NBVAL) notebooks

lab: $(STAMP) ## open JupyterLab
	$(PY) -m jupyterlab notebooks/00_start_here.ipynb

notebooks: $(STAMP) ## execute every notebook at its defaults and store the outputs
	$(PY) -m lib.notebooks

site: $(STAMP) ## HTML of every notebook in site/, links checked
	$(PY) -m lib.site
