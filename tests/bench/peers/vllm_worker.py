"""vLLM's engine without HTTP, for `remora bench peers`: vllm_worker.py FOLDER, run by vLLM's own Python.

Reads a case a line from standard input, `{"kind", "prompt_tokens", "own_tokens", "output_tokens", "num_sequences"}`,
and answers each with a line of times in seconds on standard output, as platform/cli/peer_worker.py does.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

# vLLM and what it starts print to standard output: answers go to a copy of it that only this file knows.
_ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from vllm import LLM, SamplingParams  # noqa: E402


def main(folder: str) -> None:
    model = LLM(
        model=folder,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=64,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(1000, 30000) for _ in range(count)]

    def generate(prompts: list[list[int]], output_tokens: int) -> float:
        sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        started_s = time.perf_counter()
        model.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - started_s

    def measure(case: dict[str, Any]) -> dict[str, float]:
        common = tokens(case["prompt_tokens"]) if case["kind"] == "shared" else []

        def prompt() -> list[int]:
            return common + tokens(case["own_tokens"]) if common else tokens(case["prompt_tokens"])

        if case["kind"] == "shared" and case["output_tokens"] == 1:  # a next turn: the common part is cached already
            generate([common], 1)
        prompts = [prompt() for _ in range(case["num_sequences"])]
        if case["kind"] == "decode":
            first_s = generate(prompts, 1)
            return {"prompt_s": first_s, "whole_s": generate([prompt() for _ in prompts], case["output_tokens"])}
        return {"whole_s": generate(prompts, case["output_tokens"])}

    generate([tokens(64)], 8)
    print("{}", file=_ANSWERS, flush=True)  # ready
    for line in sys.stdin:
        print(json.dumps(measure(json.loads(line))), file=_ANSWERS, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
