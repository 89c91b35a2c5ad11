"""HTTP streaming, side by side: vLLM for CPUs and Remora in turns, one server at a time, the same load on each.

`make bench-peers` installs the peer and runs this. Nothing else should run on the machine: both use all cores.
The load is `remora bench`'s: random prompts, greedy, end of text ignored, streaming.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Figures = dict[str, float]
PORTS = {"vllm": 8911, "remora": 8912}


@contextmanager
def serving(name: str, command: list[str], environment: dict[str, str], timeout_s: float) -> Iterator[str]:
    """Runs a server until the block ends; yields its URL once it answers."""
    url = f"http://127.0.0.1:{PORTS[name]}"
    with tempfile.NamedTemporaryFile("w+", suffix=f"-{name}.log", delete=False) as log:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            deadline = time.monotonic() + timeout_s
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{name} did not start; its log: {log.name}")
                time.sleep(1)
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=2) as response:
            return bool(json.load(response)["data"])
    except (OSError, ValueError):
        return False


def _preloaded(vllm: Path) -> list[Path]:
    """What vLLM's documentation preloads on a CPU, as far as it is installed: tcmalloc and Intel's OpenMP."""
    allocators = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    return [*allocators[:1], *sorted(vllm.glob("lib/libiomp5.so"))]


def measure(url: str, model: str, clients: list[int], requests: int) -> dict[int, Figures]:
    """One run for each number of clients, after a warm-up. All prompts differ, so nothing is served from a cache."""
    command = [sys.executable, "-m", "remora.platform.cli.main", "bench", "--url", url, "-m", model, "--json"]
    command += ["--clients", ",".join(map(str, clients)), "--requests", str(requests)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures = [json.loads(line)["figures"] for line in output.splitlines() if line.startswith("{")]
    return dict(zip(clients, figures, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, required=True, help="environment with vLLM")
    parser.add_argument("--folder", type=Path, required=True, help="the model as a Hugging Face folder, bfloat16")
    parser.add_argument("--models", default="smollm2,smollm2-int8", help="Remora's models to measure")
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--requests", type=int, default=4, help="requests a client")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    clients = [int(number) for number in options.clients.split(",")]
    vllm_command = [
        str(options.vllm / "bin" / "vllm"), "serve", str(options.folder), "--served-model-name", "smollm2",
        "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(PORTS["vllm"]), "--max-model-len", "2048",
        "--max-num-seqs", "64",
    ]  # fmt: skip
    vllm_environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Left to itself it keeps one core free for its other processes, which on two cores is half the machine.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "LD_PRELOAD": ":".join(map(str, _preloaded(options.vllm))),
    }
    remora_command = [sys.executable, "-m", "remora.platform.cli.main", "up", "--port", str(PORTS["remora"])]
    runs: dict[str, list[dict[int, Figures]]] = {}
    for _ in range(options.rounds):
        with serving("vllm", vllm_command, vllm_environment, 900) as url:
            runs.setdefault("vLLM-CPU bf16", []).append(measure(url, "smollm2", clients, options.requests))
        with (
            tempfile.TemporaryDirectory() as state,
            serving("remora", remora_command, {"REMORA_STATE_DIR": state}, 300) as url,
        ):
            for model in options.models.split(","):
                runs.setdefault(f"Remora {model}", []).append(measure(url, model, clients, options.requests))
    print("| clients | server | tok/s (median of rounds) | ratio | TTFT p50 / p99 s | inter-token p50 / p99 ms |")
    print("|---|---|---|---|---|---|")
    for number in clients:
        reference = 0.0
        for name, rounds in runs.items():
            middle = {key: statistics.median(run[number][key] for run in rounds) for key in rounds[0][number]}
            reference = reference or middle["tokens_per_s"]
            print(
                f"| {number} | {name} | {middle['tokens_per_s']:.0f} | {middle['tokens_per_s'] / reference:.2f} "
                f"| {middle['ttft_p50_s']:.3f} / {middle['ttft_p99_s']:.3f} "
                f"| {middle['inter_token_p50_ms']:.1f} / {middle['inter_token_p99_ms']:.1f} |"
            )


if __name__ == "__main__":
    main()
