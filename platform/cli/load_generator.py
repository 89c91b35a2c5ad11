"""Load on an OpenAI-compatible server over HTTP: some clients, each asking again as soon as it was answered, or
requests that come at a rate, whether the earlier ones were answered or not.

Every request is a streamed completion of a random prompt given as token ids, so that its length is exact and no two
requests share a prefix; `ignore_eos` makes every answer as long as asked for. Times are taken at the client:

    sent ── time to first token ──► first chunk ── inter-token time ──► chunk ... ──► last chunk
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from remora.platform.base.errors import RemoraError
from remora.platform.cli.client import key_headers
from remora.platform.cli.lengths import Lengths


class LoadFailed(RemoraError):
    """A request of the load was refused or broke off: its figures would mean nothing."""

    code = "load_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """One run."""

    url: str
    model: str
    num_clients: int
    num_requests: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    #: Arrivals a second, at random (Poisson); None: a client asks again when it was answered.
    requests_per_s: float | None = None
    #: Prompts are drawn from token ids in [first, last]; both must be ordinary tokens of the model.
    first_token_id: int = 1000
    last_token_id: int = 30000
    seed: int = 0
    temperature: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Of one request: its first token, and the mean interval of those behind it (0 for one token)."""

    ttft_s: float
    inter_token_s: float


@dataclass(slots=True)
class LoadResult:
    """What the clients saw. Times in seconds."""

    plan: LoadPlan
    wall_s: float = 0.0
    output_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    #: Between two chunks, however many tokens are in the second.
    chunk_gap_s: list[float] = field(default_factory=list)
    requests: list[RequestTimes] = field(default_factory=list)

    def goodput(self, max_ttft_s: float, max_inter_token_s: float) -> float:
        """Requests a second that kept both bounds."""
        good = [r for r in self.requests if r.ttft_s <= max_ttft_s and r.inter_token_s <= max_inter_token_s]
        return len(good) / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` (0 .. 1) of the values do not exceed; nan without any."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)]


async def run_load(plan: LoadPlan) -> LoadResult:
    """Runs the load. Raises LoadFailed with the first error."""
    result = LoadResult(plan)
    asks = asks_of(plan)
    connector = aiohttp.TCPConnector(limit=0 if plan.requests_per_s else plan.num_clients)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=key_headers()) as session:
        started_s = time.perf_counter()

        async def client() -> None:
            while asks:
                await _one_request(session, plan, asks.pop(), result)

        try:
            async with asyncio.TaskGroup() as group:
                if plan.requests_per_s:
                    gaps = random.Random(plan.seed)
                    while asks:
                        group.create_task(_one_request(session, plan, asks.pop(), result))
                        await asyncio.sleep(gaps.expovariate(plan.requests_per_s))
                else:
                    for _ in range(plan.num_clients):
                        group.create_task(client())
        except* (aiohttp.ClientError, LoadFailed) as errors:
            raise LoadFailed(f"{plan.url}: {errors.exceptions[0]}") from None
        result.wall_s = time.perf_counter() - started_s
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    prompt: list[int]
    output_tokens: int


def asks_of(plan: LoadPlan) -> list[Ask]:
    """The requests of a run, the last first."""
    numbers = random.Random(plan.seed)
    return [
        Ask(
            prompt=[
                numbers.randint(plan.first_token_id, plan.last_token_id)
                for _ in range(plan.prompt_tokens.draw(numbers))
            ],
            output_tokens=plan.output_tokens.draw(numbers),
        )
        for _ in range(plan.num_requests)
    ]


async def _post(session: aiohttp.ClientSession, plan: LoadPlan, body: dict[str, Any]) -> aiohttp.ClientResponse:
    """Tries again where a server has closed a kept connection while the request was on its way: with each of those that
    are kept that can happen once."""
    for _ in range(plan.num_clients):
        with contextlib.suppress(aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            return await session.post(f"{plan.url}/v1/completions", json=body)
    return await session.post(f"{plan.url}/v1/completions", json=body)


async def _one_request(session: aiohttp.ClientSession, plan: LoadPlan, ask: Ask, result: LoadResult) -> None:
    body = {
        "model": plan.model,
        "prompt": ask.prompt,
        "max_tokens": ask.output_tokens,
        "temperature": plan.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent_s = time.perf_counter()
    chunk_times_s: list[float] = []
    num_tokens: int | None = None
    async with await _post(session, plan, body) as response:
        if response.status != 200:
            raise LoadFailed(f"{response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise LoadFailed(str(event["error"]))
            if event.get("usage"):
                num_tokens = int(event["usage"]["completion_tokens"])
            if event.get("choices"):
                chunk_times_s.append(time.perf_counter())
    if not chunk_times_s:
        raise LoadFailed("an answer without any chunk")
    # A server that does not tell the usage is taken at its word that it ignores the end of the text.
    num_tokens = ask.output_tokens if num_tokens is None else num_tokens
    result.output_tokens += num_tokens
    ttft_s = chunk_times_s[0] - sent_s
    result.ttft_s.append(ttft_s)
    mean_s = (chunk_times_s[-1] - chunk_times_s[0]) / (num_tokens - 1) if num_tokens > 1 else 0.0
    result.requests.append(RequestTimes(ttft_s=ttft_s, inter_token_s=mean_s))
    if num_tokens > 1:
        # A chunk may hold several tokens: the time is shared out over all tokens after the first.
        gaps = [after - before for before, after in itertools.pairwise(chunk_times_s)]
        result.chunk_gap_s += gaps
        tokens_per_gap = (num_tokens - 1) / max(1, len(gaps))
        result.inter_token_s += [gap / tokens_per_gap for gap in gaps]
