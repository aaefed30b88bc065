# `make demo` and `make test` work on a fresh clone; the first one sets .venv up (a few minutes, about 3 GB).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: setup demo rl test test-fast test-long test-trl faults matrix bench lint format types lock clean

setup: $(READY)

# torch goes first and with its dependencies: elsewhere than where pip finds a CPU build, its libraries come that way.
$(READY): requirements/cpu.txt pyproject.toml
	@echo 'Setting $(VENV) up: about 3 GB, a few minutes.'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install "$$(grep '^torch==' requirements/cpu.txt)"
	$(PIP) install --no-deps -r requirements/cpu.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $(READY)

demo: setup
	$(BIN)/python examples/demo.py

# An RL run that learns, in a minute or two: docs/rl-run.md. ARGS="--no-push", ARGS="--kill-server-at 8 --plot run.png"
rl: setup
	$(BIN)/python examples/grpo_ray.py $(ARGS)

# Two processes, a file of tests to each in turn: much of the time goes into waiting for servers to start.
# One after another, for a debugger: make test TEST_PROCESSES=0
TEST_PROCESSES := 2
test: setup
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: setup
	$(BIN)/python -m pytest -m "not slow" tests/unit

# The full numbers of the tests that repeat themselves: 100 pushes, 200 begins, ten kills at each of 13 points.
test-long: setup
	WP_TEST_LONG=1 $(BIN)/python -m pytest tests/integration/test_flat_resources.py tests/integration/test_fault_campaign.py

# The recipe for TRL, and TRL's own clients, on TRL itself. It brings pyarrow and pandas, so that nothing else installs it.
test-trl: setup
	$(PIP) install --no-deps trl==1.16.0 datasets==5.2.0 pandas==3.1.1 pyarrow==26.0.1 multiprocess==0.70.19 xxhash==4.1.0
	$(BIN)/python -m pytest tests/integration/test_trl.py tests/integration/test_trl_client.py

# Pushes under traffic, each with a fault at a random point; prints faults and outcomes, exit code 1 on any violation.
# Options: make faults ARGS="--pushes 500 --seed 7 --mode direct --transport http,gloo --only kill_trainer"
faults: setup
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m faults.run $(ARGS)

# Every model that the tests know, compared with cold starts and with vLLM's own reload; writes docs/matrix.md.
# Options: make matrix ARGS="--models qwen3,gpt_oss --tp 2"
matrix: setup
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m matrix.run $(ARGS)

# What a push costs beside every other way: about ten minutes, writes docs/benchmarks. Leave the machine alone meanwhile.
# Options: make bench ARGS="--quick", ARGS="--models moe --transports shm --growth none --out /tmp/bench"
bench: setup
	PYTHONPATH=.:examples OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.run $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock:
	$(PYTHON) scripts/lock.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
