PYTHON ?= python

.PHONY: test slow exhaustive lint type bench docs build

test:
	$(PYTHON) -m pytest -n auto --dist worksteal

slow:
	$(PYTHON) -m pytest -n auto --dist worksteal -m slow

exhaustive:
	$(PYTHON) -m pytest -n auto --dist worksteal -m exhaustive

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

type:
	$(PYTHON) -m mypy

bench:
	$(PYTHON) -m tests.benchmarks

docs:
	$(PYTHON) -m sphinx -W --keep-going $(SPHINXOPTS) -b html docs docs/_build/html

build:
	$(PYTHON) -m build
