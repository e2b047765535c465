# Everything runs in $(VENV), made on demand from pyproject.toml and constraints.txt; after that no network is needed.
# Give more arguments to a command with ARGS, as in: make test ARGS="-k flow -x"

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
LOWEST := $(VENV)-lowest
PEERS := $(VENV)-peers
LOGGERS := $(VENV)-loggers
MLFLOW := $(VENV)-mlflow
NOTEBOOK := $(VENV)-notebook
LOWEST_TESTS := tests/record/test_step_hooks.py tests/store tests/engine tests/explain tests/rules tests/attention

.DEFAULT_GOAL := help
.PHONY: help demo test slow typed check format docs gallery wheel package lowest peers loggers truth reproduce clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1	\2/p' Makefile

demo: $(READY) ## record a small network on real digits, then ask it what its predictions are made of
	@$(BIN)/dualform demo $(ARGS)

test: $(READY) ## run the tests in JOBS=2 processes, without the long ones
	@$(BIN)/python -m pytest -m "not slow" -n $(JOBS) $(ARGS)

slow: $(READY) ## run the long tests alone
	@$(BIN)/python -m pytest -m "slow and not package" $(ARGS)

typed: $(READY) ## run the tests of make test with the shapes and types of all arguments checked; takes twice as long
	@$(BIN)/python -m pytest -m "not slow" -n $(JOBS) --jaxtyping-packages=dualform,beartype.beartype $(ARGS)

check: $(READY) ## check the format, the style and the types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(READY) ## format the code and mend what can be mended by itself
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

docs: $(DOCS_READY) ## build the documentation as a site in docs/_build; a warning or a broken link is an error
	@$(BIN)/python -m sphinx -q -W -b html $(ARGS) docs docs/_build
	@echo "The site is docs/_build/index.html."

gallery: $(NOTEBOOK)/.ready ## run the notebooks of docs/gallery again and keep what they show, then test them; needs a network once
	@$(NOTEBOOK)/bin/python docs/gallery/execute.py
	@$(NOTEBOOK)/bin/python -m pytest -m slow tests/show/notebook $(ARGS)

wheel: $(READY) ## build the source distribution and the wheel in dist/
	@rm -rf dist
	@$(BIN)/python -m hatchling build
	@ls -sh dist

package: $(READY) ## build, install in a clean environment, and run the quickstart, demo, report and serve there; needs a network
	@$(BIN)/python -m pytest -m package $(ARGS)

lowest: $(LOWEST)/.ready ## run the tests of the core with the lowest versions that pyproject.toml claims; needs a network
	@$(LOWEST)/bin/python -m pytest -m "not slow" -n $(JOBS) $(LOWEST_TESTS) $(ARGS)

peers: $(READY) $(PEERS)/.ready ## compare the scores of a survey with captum and kronfluence, in an environment of theirs; needs a network once
	@$(BIN)/python benchmarks/survey.py --peers $(PEERS)/bin/python $(ARGS)

loggers: $(LOGGERS)/.ready $(MLFLOW)/.ready ## log a memory to TensorBoard, W&B, Trackio and MLflow, in environments of theirs; needs a network once
	@$(LOGGERS)/bin/python -m pytest -rs tests/log --deselect tests/log/test_mlflow.py $(ARGS)
	@$(MLFLOW)/bin/python -m pytest -rs tests/log/test_mlflow.py $(ARGS)

truth: $(READY) ## judge influence, direct contributions and the scores of other packages by training again; takes hours, needs a network once
	@sh experiments/truth/peers/environments.sh $(VENV)-truth
	@$(BIN)/dualform reproduce truth $(ARGS)
	@$(BIN)/python -m experiments.truth.page

reproduce: $(READY) ## run all experiments of the papers again, and make their results pages; takes hours
	@$(BIN)/dualform reproduce dual-form $(ARGS)
	@$(BIN)/python -m experiments.dual_form.page
	@$(BIN)/dualform reproduce primal-dual $(ARGS)
	@$(BIN)/python -m experiments.primal_dual.page
	@$(BIN)/dualform reproduce attention-svm $(ARGS)
	@$(BIN)/python -m experiments.attention_svm.page
	@$(BIN)/dualform reproduce rcmha $(ARGS)
	@$(BIN)/python -m experiments.rcmha.page
	@$(BIN)/dualform reproduce vqt $(ARGS)
	@$(BIN)/python -m experiments.vqt.page
	@$(BIN)/dualform reproduce key-driven-gqa $(ARGS)
	@$(BIN)/python -m experiments.key_driven_gqa.page

clean: ## remove caches and build files; .venv and runs stay
	@rm -rf build dist docs/_build .pytest_cache .ruff_cache .hypothesis
	@find src tests experiments benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(LOWEST)/.ready: pyproject.toml constraints-lowest.txt
	@$(PYTHON) -m venv --clear $(LOWEST)
	@echo "Installing the lowest versions in $(LOWEST): several gigabytes where torch comes with CUDA."
	@$(LOWEST)/bin/python -m pip install -qq --disable-pip-version-check -c constraints-lowest.txt \
	  -e '.[demo,hf,lora,lightning,svm,web]' pytest pytest-xdist hypothesis beartype
	@touch $@

$(PEERS)/.ready: benchmarks/survey_peers.txt
	@$(PYTHON) -m venv --clear $(PEERS)
	@echo "Installing captum and kronfluence in $(PEERS)."
	@$(PEERS)/bin/python -m pip install -qq --disable-pip-version-check torch==2.13.0
	@$(PEERS)/bin/python -m pip install -qq --disable-pip-version-check --no-deps captum==0.9.0 kronfluence==1.0.1
	@$(PEERS)/bin/python -m pip install -qq --disable-pip-version-check -r benchmarks/survey_peers.txt
	@touch $@

$(LOGGERS)/.ready: pyproject.toml
	@$(PYTHON) -m venv --clear $(LOGGERS)
	@echo "Installing TensorBoard, W&B and Trackio in $(LOGGERS)."
	@$(LOGGERS)/bin/python -m pip install -qq --disable-pip-version-check -e '.[pandas]' pytest hypothesis \
	  'tensorboard>=2.18' 'wandb>=0.18' 'trackio>=0.4'
	@touch $@

$(MLFLOW)/.ready: pyproject.toml # alone: MLflow asks for versions of its own of what the others need
	@$(PYTHON) -m venv --clear $(MLFLOW)
	@echo "Installing MLflow in $(MLFLOW)."
	@$(MLFLOW)/bin/python -m pip install -qq --disable-pip-version-check -e '.[pandas]' pytest hypothesis 'mlflow>=2.20'
	@touch $@

$(NOTEBOOK)/.ready: pyproject.toml docs/gallery/requirements.txt
	@$(PYTHON) -m venv --clear $(NOTEBOOK)
	@echo "Installing Jupyter and marimo in $(NOTEBOOK)."
	@$(NOTEBOOK)/bin/python -m pip install -qq --disable-pip-version-check -e '.[notebook,demo]' -r docs/gallery/requirements.txt
	@touch $@

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "dualform needs Python 3.11 or newer, and $(PYTHON) is: $$($(PYTHON) --version 2>&1)." \
	    "Name a newer one with: make PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "$(PYTHON) cannot make a virtual environment in $(VENV);" \
	    "where Python comes in parts, the part to install is called python3-venv." >&2; exit 1; }
	@echo "Installing dualform and its tools in $(VENV); the first time this takes a few minutes."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(DOCS_READY): $(READY)
	@echo "Installing what builds the documentation in $(VENV)."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@
