"""How long a stream stands still when the replica that computes it is killed.

Needs a platform whose model has two replicas, on this machine, for example:

    remora up examples/two_replicas.yaml --port 8000
    python tests/bench/bench_failover.py --url http://127.0.0.1:8000 --kills 10 --tokens 2048

One stream at a time; its replica gets SIGKILL in the middle. Prints the longest interval between two chunks around the
kill, beside the intervals before it, and counts streams that did not come to their end. The next kill waits until both
replicas are there again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import signal
import statistics
import time

import httpx
from bench_moves import Streaming, percentile, replicas

OUTPUT_TOKENS = 300
#: Chunks before the kill.
BEFORE = 60
RESTART_TIMEOUT_S = 120.0


def kill_one(http: httpx.Client, options: argparse.Namespace, number: int) -> tuple[list[float], float, bool]:
    """Seconds between chunks before the kill, the longest one behind it, and whether every token came."""
    session = http.post("/v1/sessions", json={"model": options.model}).json()["id"]
    prompt = [5 + (number * 104_729 + index * 7919) % 40_000 for index in range(options.tokens)]
    stream = Streaming(options.url, session, options.model, prompt, OUTPUT_TOKENS)
    while len(stream.arrivals_s) < BEFORE and stream.is_alive():
        time.sleep(0.01)
    (busy,) = [each for each in replicas(http, options.model) if each["stats"]["num_running"]]
    num_before = len(stream.arrivals_s)
    os.kill(busy["card"]["pid"], signal.SIGKILL)
    stream.join()
    gaps_s = [later - one for one, later in itertools.pairwise(stream.arrivals_s)]
    turn = http.get(f"/v1/sessions/{session}").json()
    is_whole = stream.error is None and turn["num_tokens"] == options.tokens + OUTPUT_TOKENS
    http.delete(f"/v1/sessions/{session}")
    return gaps_s[20 : num_before - 1], max(gaps_s[num_before - 2 :]), is_whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    options = parser.parse_args()
    unmoved_s: list[float] = []
    gaps_s: list[float] = []
    num_broken = 0
    with httpx.Client(base_url=options.url, timeout=120) as http:
        for number in range(options.kills):
            deadline_s = time.monotonic() + RESTART_TIMEOUT_S
            while len(replicas(http, options.model)) != 2:
                if time.monotonic() > deadline_s:
                    raise SystemExit(f"{options.model} has not got two connected replicas")
                time.sleep(0.2)
            before_s, gap_s, is_whole = kill_one(http, options, number)
            unmoved_s += before_s
            gaps_s.append(gap_s)
            num_broken += not is_whole
    print(f"{platform.processor() or platform.machine()}, {len(gaps_s)} kills, {options.tokens} tokens and more")
    for name, values in (("stands still", gaps_s), ("token interval before", unmoved_s)):
        print(
            f"{name:24} p50 {statistics.median(values) * 1e3:7.1f} ms   p90 {percentile(values, 0.9) * 1e3:7.1f} ms"
            f"   max {max(values) * 1e3:7.1f} ms"
        )
    print(f"streams that did not come to their end: {num_broken}")


if __name__ == "__main__":
    main()
