"""The pause of live moves: a session that streams behind a long prompt is moved to and fro between two replicas.

Needs a platform whose model has two replicas, in one pool or in two, for example:

    remora up examples/two_replicas.yaml --port 8000        # or examples/two_pools.yaml
    python tests/bench/bench_moves.py --url http://127.0.0.1:8000 --moves 100 --tokens 2048

or `--nodes`, which starts a platform on two nodes of this machine, a thread each, and ends it.

Prints the pauses (from the freeze to the first token from the target) beside what they are promised by (design §8): one
engine step, the copy of one block, and four round trips to an actor. All are taken in the same run: the step as the
interval of tokens of the unmoved stream, the copy in this process, with both checksums, and the round trip as
`GET /v1/replicas`, which asks every replica once, over HTTP (an upper bound). With `--sessions` larger than 1 the moves
are spread over so many sessions, one after the other: between two pools the first move of each copies the whole prompt.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import threading
import time
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

CALLS = 50


class Streaming(threading.Thread):
    """Reads one turn of a session; `arrivals_s` are the times of its chunks."""

    def __init__(self, url: str, session: str, model: str, prompt: list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.arrivals_s: list[float] = []
        self.error: str | None = None
        self._is_enough = False
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
                if self._is_enough:
                    return
                if line.startswith("data: {"):
                    document = json.loads(line[6:])
                    if "error" in document:
                        self.error = document["error"]["message"]
                    self.arrivals_s.append(time.perf_counter())

    def end(self) -> None:
        """Goes away, which cancels the turn."""
        self._is_enough = True
        self.join()


def replicas(http: httpx.Client, model: str) -> list[dict[str, Any]]:
    return [each for each in http.get("/v1/replicas").json()["data"] if each["model"] == model and each["connected"]]


def block_copies(block_bytes: int) -> list[float]:
    """Seconds that copying a block and two checksums took, again and again."""
    blocks_NB = np.random.default_rng(0).integers(0, 256, (8, block_bytes), np.uint8)
    into_B = np.zeros(block_bytes, np.uint8)
    times_s = []
    for number in range(CALLS):
        started_s = time.perf_counter()
        expected = zlib.crc32(blocks_NB[number % 8])
        into_B[:] = blocks_NB[number % 8]
        assert zlib.crc32(into_B) == expected
        times_s.append(time.perf_counter() - started_s)
    return times_s


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Moving:
    """One session that streams, and is moved to and fro."""

    def __init__(self, http: httpx.Client, options: argparse.Namespace, number: int) -> None:
        self.http, self.model = http, options.model
        self.session = http.post("/v1/sessions", json={"model": options.model}).json()["id"]
        prompt = [5 + (number * 104_729 + index * 7919) % 40_000 for index in range(options.tokens)]
        num_tokens = 16 * options.moves // options.sessions + 200
        self.stream = Streaming(options.url, self.session, options.model, prompt, num_tokens)
        while len(self.stream.arrivals_s) < 60 and self.stream.is_alive():
            time.sleep(0.05)
        arrivals_s = self.stream.arrivals_s
        self.unmoved_s = [later - one for one, later in itertools.pairwise(arrivals_s[20:])]
        (self.at,) = [each["id"] for each in replicas(http, self.model) if each["stats"]["num_running"]]

    def move(self, target: str) -> dict[str, Any] | None:
        response = self.http.post(f"/v1/sessions/{self.session}/migrate", json={"to": {"replica": target}})
        if response.status_code != 200:
            print(f"a move was refused: {response.text}")
            return None
        moved = dict(response.json())
        self.at = moved["to"]
        return moved

    def end(self) -> None:
        self.stream.end()
        self.http.delete(f"/v1/sessions/{self.session}")
        if self.stream.error is not None:
            print(f"the stream ended with: {self.stream.error}")


def measure(options: argparse.Namespace) -> None:
    first: list[dict[str, Any]] = []
    later: list[dict[str, Any]] = []
    unmoved_s: list[float] = []
    trips_s: list[float] = []
    with httpx.Client(base_url=options.url, timeout=120) as http:
        found = replicas(http, options.model)
        if len(found) != 2:
            raise SystemExit(f"{options.model} has {len(found)} connected replicas; this needs two")
        ids, cards = [each["id"] for each in found], [each["card"] for each in found]
        copies_s = block_copies(cards[0]["block_bytes"])
        for number in range(options.sessions):
            moving = Moving(http, options, number)
            unmoved_s += moving.unmoved_s
            for _ in range(CALLS // options.sessions + 1):
                started_s = time.perf_counter()
                http.get("/v1/replicas")
                trips_s.append(time.perf_counter() - started_s)
            for move_number in range(options.moves // options.sessions):
                moved = moving.move(ids[1 - ids.index(moving.at)])
                if moved is None:
                    break
                (later if move_number else first).append(moved)
                time.sleep(0.1)
            moving.end()
    moves = first + later
    pools = "one pool" if cards[0]["pool_id"] == cards[1]["pool_id"] else "two pools"
    if options.nodes:
        pools = "two nodes"
    print(
        f"{platform.processor() or platform.machine()}, {pools}, {len(moves)} moves, {options.tokens} tokens and more"
    )
    for name, group in (("first of a session", first), ("later", later)):
        if group:
            counts = {kind: statistics.mean(each["tokens"][kind] for each in group) for kind in group[0]["tokens"]}
            text = ", ".join(f"{count:.0f} {kind}" for kind, count in counts.items())
            print(f"{name}: {text}; whole time p50 {statistics.median(each['took_s'] for each in group) * 1e3:.0f} ms")
    rows = {
        "pause": [each["pause_s"] for each in moves],
        "token interval, unmoved": unmoved_s,
        "block copy": copies_s,
        "GET /v1/replicas": trips_s,
    }
    for name, values in rows.items():
        print(
            f"{name:24} p50 {statistics.median(values) * 1e3:7.1f} ms   p90 {percentile(values, 0.9) * 1e3:7.1f} ms"
            f"   max {max(values) * 1e3:7.1f} ms"
        )
    promise_s = statistics.median(unmoved_s) + statistics.median(copies_s) + 4 * statistics.median(trips_s)
    ratio = statistics.median(rows["pause"]) / promise_s
    print(f"one step, one block copy and four round trips: {promise_s * 1e3:.1f} ms; pause / that: {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--moves", type=int, default=100)
    parser.add_argument("--sessions", type=int, default=1, help="over which the moves are spread")
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    parser.add_argument("--nodes", action="store_true", help="on two nodes of its own")
    options = parser.parse_args()
    if options.nodes:
        from two_nodes import two_nodes

        own = two_nodes(max_model_len=8192)
    else:
        own = nullcontext()
    with own as nodes:
        if nodes is not None:
            options.url = str(nodes.http.base_url).rstrip("/")
        measure(options)


if __name__ == "__main__":
    main()
