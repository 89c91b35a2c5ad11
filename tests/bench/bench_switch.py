"""What it takes to switch a conversation to another resident model, with and without its KV.

    python tests/bench/bench_switch.py                      # starts examples/compatible_models.yaml, and stops it
    python tests/bench/bench_switch.py --url http://127.0.0.1:8000 --pair smollm2:smollm2-int8

A session of the first model has `--tokens` tokens. It is moved to the second (`POST /v1/sessions/{id}/migrate`), and
a turn of four tokens is asked for there. Without reuse the first model's namespace is trimmed before, so that the same
call computes the log. Both are taken in turn, with new tokens each time, in one run: medians, and how the tokens came.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "compatible_models.yaml"
PAIRS = ("smollm2:smollm2-int8", "smollm2-int8:smollm2", "smollm2:smollm2-kv8", "smollm2-kv8:smollm2")
START_TIMEOUT_S = 300.0


@contextmanager
def started(port: int) -> Iterator[str]:
    """The URL of a platform with the example, in a state directory of its own."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="remora-switch-") as folder:
        config = Path(folder) / "remora.yaml"
        config.write_text(f"{EXAMPLE.read_text()}\ncluster: {{name: bench-switch, state_dir: {folder}/state}}\n")
        command = [sys.executable, "-m", "remora.platform.cli.main", "up", str(config), "--port", str(port)]
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not is_ready(url):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"the platform does not start:\n{(Path(folder) / 'log').read_text()[-3000:]}")
                time.sleep(0.5)
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


class Switch:
    """One move of a new session, and its first token at the other model."""

    def __init__(self, http: httpx.Client, source: str, target: str, num_tokens: int, number: int, reuse: bool) -> None:
        self._http = http
        prompt = [5 + (number * 104_729 + index * 7919) % 40_000 for index in range(num_tokens - 7)]
        session = self._post("/v1/sessions", {"model": source})["id"]
        turn = {"session_id": session, "temperature": 0, "ignore_eos": True}
        self._post("/v1/completions", {**turn, "model": source, "prompt": prompt, "max_tokens": 7})
        if not reuse:
            self._post(f"/v1/namespaces/{source}/trim", {"to": 0})
        started_s = time.perf_counter()
        moved = self._post(f"/v1/sessions/{session}/migrate", {"to": {"model": target}})
        self.switch_s = time.perf_counter() - started_s
        self.tokens: dict[str, int] = moved["tokens"]
        body = {**turn, "model": target, "prompt": [7, 8, 9, 10], "max_tokens": 4, "stream": True}
        started_s = time.perf_counter()
        with http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {") and "error" in json.loads(line[6:]):
                    raise SystemExit(line)
                if line.startswith("data: {"):
                    self.first_token_s = time.perf_counter() - started_s
                    break
        http.delete(f"/v1/sessions/{session}")

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._http.post(path, json=body)
        if response.status_code != 200:
            raise SystemExit(f"{path}: {response.text}")
        return dict(response.json())


def measure(url: str, pairs: list[str], num_tokens: int, repeats: int) -> None:
    print(f"{platform.processor() or platform.machine()}, {num_tokens} tokens, medians of {repeats}")
    print(f"{'from':14} {'to':14} {'reuse':6} {'switch':>9} {'first token':>12} {'together':>9}  tokens")
    number = 0
    with httpx.Client(base_url=url, timeout=300) as http:
        for pair in pairs:
            source, target = pair.split(":")
            runs: dict[bool, list[Switch]] = {True: [], False: []}
            for _ in range(repeats + 1):
                for reuse, found in runs.items():
                    number += 1
                    found.append(Switch(http, source, target, num_tokens, number, reuse))
            together: dict[bool, float] = {}
            for reuse, found in runs.items():
                # The first one of each also waits for what is made once: memory, buffers, the tokenizer.
                rest = found[1:]
                switch_s = statistics.median(each.switch_s for each in rest)
                first_s = statistics.median(each.first_token_s for each in rest)
                together[reuse] = statistics.median(each.switch_s + each.first_token_s for each in rest)
                counts = ", ".join(f"{count} {how}" for how, count in rest[-1].tokens.items() if count)
                print(
                    f"{source:14} {target:14} {'yes' if reuse else 'no':6} {switch_s * 1e3:6.0f} ms "
                    f"{first_s * 1e3:9.0f} ms {together[reuse] * 1e3:6.0f} ms  {counts}"
                )
            print(f"{'':36} without / with: {together[False] / together[True]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a running platform; by default one is started")
    parser.add_argument("--port", type=int, default=8911, help="of the platform that is started")
    parser.add_argument("--pair", action="append", help="FROM:TO, names of models; may be repeated")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    pairs = options.pair or list(PAIRS)
    if options.url:
        measure(options.url, pairs, options.tokens, options.repeats)
        return
    with started(options.port) as url:
        measure(url, pairs, options.tokens, options.repeats)


if __name__ == "__main__":
    main()
