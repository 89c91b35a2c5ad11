"""The pause of live moves: a session that streams behind a long prompt is moved to and fro between two replicas.

Needs a platform whose model has two replicas in one pool, for example:

    remora up examples/two_replicas.yaml --port 8000
    python tests/bench/bench_moves.py --url http://127.0.0.1:8000 --moves 100 --tokens 2048

Prints the pauses (from the freeze to the first token from the target) beside what they are promised by (design §8): one
engine step, and four round trips to an actor. Both are taken in the same run: the step as the interval of tokens of the
unmoved stream, the round trip as `GET /v1/replicas`, which asks every replica once, over HTTP (an upper bound).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import threading
import time
from typing import Any

import httpx

CALLS = 50


class Streaming(threading.Thread):
    """Reads one turn of a session; `arrivals_s` are the times of its chunks."""

    def __init__(self, url: str, session: str, model: str, prompt: list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.arrivals_s: list[float] = []
        self.error: str | None = None
        self._url = url
        self._body = {
            "model": model,
            "prompt": prompt,
            "session_id": session,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=600) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    document = json.loads(line[6:])
                    if "error" in document:
                        self.error = document["error"]["message"]
                    self.arrivals_s.append(time.perf_counter())


def replicas(http: httpx.Client, model: str) -> list[dict[str, Any]]:
    return [each for each in http.get("/v1/replicas").json()["data"] if each["model"] == model and each["connected"]]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--moves", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    options = parser.parse_args()
    with httpx.Client(base_url=options.url, timeout=120) as http:
        ids = [each["id"] for each in replicas(http, options.model)]
        if len(ids) != 2:
            raise SystemExit(f"{options.model} has {len(ids)} connected replicas; this needs two")
        session = http.post("/v1/sessions", json={"model": options.model}).json()["id"]
        prompt = [5 + number * 7919 % 40_000 for number in range(options.tokens)]
        stream = Streaming(options.url, session, options.model, prompt, 16 * options.moves + 200)
        while len(stream.arrivals_s) < 100 and stream.is_alive():
            time.sleep(0.05)
        unmoved_s = [later - one for one, later in zip(stream.arrivals_s[20:], stream.arrivals_s[21:], strict=False)]
        trips_s = []
        for _ in range(CALLS):
            started_s = time.perf_counter()
            http.get("/v1/replicas")
            trips_s.append(time.perf_counter() - started_s)
        pauses_s, shared = [], 0
        (at,) = [each["id"] for each in replicas(http, options.model) if each["stats"]["num_running"]]
        for _ in range(options.moves):
            target = ids[1 - ids.index(at)]
            response = http.post(f"/v1/sessions/{session}/migrate", json={"to": {"replica": target}})
            if response.status_code != 200:
                print(f"a move was refused: {response.text}")
                break
            moved = response.json()
            at = moved["to"]
            pauses_s.append(moved["pause_s"])
            shared += moved["tokens"]["shared"]
            time.sleep(0.1)
        http.delete(f"/v1/sessions/{session}")
        stream.join(5)
        if stream.error is not None:
            print(f"the stream ended with: {stream.error}")
    print(f"{platform.processor() or platform.machine()}, {len(pauses_s)} moves, {options.tokens} tokens and more")
    rows = {"pause": pauses_s, "token interval, unmoved": unmoved_s, "GET /v1/replicas": trips_s}
    for name, values in rows.items():
        print(
            f"{name:24} p50 {statistics.median(values) * 1e3:7.1f} ms   p90 {percentile(values, 0.9) * 1e3:7.1f} ms"
            f"   max {max(values) * 1e3:7.1f} ms"
        )
    step_s, trip_s = statistics.median(unmoved_s), statistics.median(trips_s)
    promise_s = step_s + 4 * trip_s
    ratio = statistics.median(pauses_s) / promise_s
    print(f"one step and four round trips: {promise_s * 1e3:.1f} ms; pause / that: {ratio:.2f}")


if __name__ == "__main__":
    main()
