# Everything runs in this folder's own .venv; nothing global is touched.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: fit test test-slow lint

fit: .venv/installed  ## train ToyModel on MNIST with the seed's recipe, and test it
	$(BIN)/lit-mnist fit --config configs/mnist.yaml

test: .venv/installed  ## the tests that fit in ten minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2  # two cores: one thread for each of two tests

test-slow: .venv/installed  ## the ones that do not
	$(BIN)/pytest -m slow

lint: .venv/installed  ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@
