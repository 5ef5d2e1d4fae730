# Everything runs in this folder's own .venv; nothing global is touched.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: fit test test-slow lint bench

fit: .venv/installed  ## train ToyModel on MNIST with the seed's recipe, and test it
	$(BIN)/lit-mnist fit --config configs/mnist.yaml

test: .venv/installed  ## all but the long repetitions
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 4  # for two cores: a thread each, and many tests wait

test-slow: .venv/installed  ## the long repetitions
	$(BIN)/pytest -m slow

lint: .venv/installed  ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: .venv/installed  ## how fast each way of training is, side by side; half an hour
	$(BIN)/python -m benchmarks.speed

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@
