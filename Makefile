PYTHON ?= python

.PHONY: test lint type bench docs

test:
	$(PYTHON) -m pytest -n auto --dist loadfile

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

type:
	$(PYTHON) -m mypy

bench:
	$(PYTHON) -m tests.benchmarks

docs:
	$(PYTHON) -m sphinx -W --keep-going $(SPHINXOPTS) -b html docs docs/_build/html
