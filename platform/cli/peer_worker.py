"""Remora's engine for `remora bench peers`, alone in its process.

`python -m remora.platform.cli.peer_worker SOURCE WEIGHTS`

Reads a case a line from standard input and answers each with a line of times in seconds; the first line says that the
model is loaded. tests/bench/peers/vllm_worker.py does the same for vLLM.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from remora.deployments.models.load import load_model
from remora.deployments.models.loaded_model import LoadedModel
from remora.platform.base.model_config import ModelConfig
from remora.platform.cli.batch_load import BatchCase, run_batch

_BLOCK_TOKENS = 32


def main(source: str, weights: str) -> None:
    config = ModelConfig.model_validate({"name": "bench", "source": source, "weights": weights})
    loaded = load_model(config, block_tokens=_BLOCK_TOKENS)
    run_batch(loaded, BatchCase(prompt_tokens=64, output_tokens=8, num_sequences=1))
    print(json.dumps({"weights_bytes": loaded.weights_bytes}), flush=True)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(_measure(loaded, json.loads(line), number, config.max_step_tokens)), flush=True)


def _measure(loaded: LoadedModel, case: dict[str, Any], seed: int, max_step_tokens: int) -> dict[str, float]:
    times = run_batch(
        loaded,
        BatchCase(
            prompt_tokens=case["prompt_tokens"],
            own_tokens=case["own_tokens"],
            output_tokens=case["output_tokens"],
            num_sequences=case["num_sequences"],
            shared_prompt=case["kind"] == "shared",
        ),
        max_step_tokens=max_step_tokens,
        seed=seed,
    )
    whole_s = times.prompt_s + times.output_s
    if case["kind"] == "shared" and case["output_tokens"] == 1:  # a next turn: the common part is cached already
        whole_s -= times.shared_s
    return {"prompt_s": times.prompt_s, "whole_s": whole_s}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
