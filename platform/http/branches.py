"""A session forked several ways at once: every branch generates, and all are read as one sequence of deltas.

parent's log ─┬─ fork ─ turn ─┐                           ┌─► branch 0 ─┐
              ├─ fork ─ turn ─┼─ what all prompts share ──┼─► branch 1 ─┼─► one answer
              └─ read only ───┘  is computed once         └─► branch 2 ─┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence

from fastapi import Request
from opentelemetry.trace import SpanKind

from remora.deployments.engine.messages import TokenDelta
from remora.deployments.moves import precopy_job
from remora.namespaces.hashing import chain_hashes
from remora.namespaces.session_log import SessionState
from remora.platform.base import telemetry_names as names
from remora.platform.base.errors import RemoraError
from remora.platform.base.ids import ModelId, RequestId
from remora.platform.base.telemetry import fail, inject, start_span
from remora.platform.http.api_types import PromptTokensDetails, Usage
from remora.platform.http.branch_logs import BranchLogs
from remora.platform.http.branch_request import BranchRequest, cut_parent
from remora.platform.http.branch_run import BranchRun
from remora.platform.http.caller import caller_of
from remora.platform.http.chat_request import ChatRequest
from remora.platform.http.disconnect import ClientGone
from remora.platform.http.generation import new_response_id, response_headers
from remora.platform.http.services import Services

logger = logging.getLogger(__name__)

#: Full blocks of the common prompt that no pool has: from so many on, computing them once is worth another request.
MIN_MISSING_BLOCKS = 2

#: What a branch said; None: it has ended, or failed with its `error`.
BranchEvent = tuple[BranchRun, list[TokenDelta] | None]


class Branches:
    """Started by `open`, read by `next_events`, and always ended by `finish`."""

    def __init__(
        self,
        services: Services,
        request: Request,
        parent: SessionState,
        wanted: Sequence[BranchRequest],
        num_tokens: int | None = None,
    ) -> None:
        """`parent` with its tokens; `num_tokens`: how many of them the branches have. Raises InvalidRequest, and
        NotFound for the model of a branch.

        Begins the request's span, whose parent the client may name.
        """
        parent = cut_parent(parent, num_tokens)
        self._services = services
        self._request = request
        self._parent = parent
        first = wanted[0].fields
        self._operation = names.OPERATION_CHAT if isinstance(first, ChatRequest) else names.OPERATION_TEXT_COMPLETION
        self.id = new_response_id(self._operation)
        self._logs = BranchLogs(services, caller_of(request), parent)
        for each in wanted:
            self._logs.check(each)
        self.runs = [BranchRun(services, parent, self._logs, each) for each in wanted]
        self._events: asyncio.Queue[BranchEvent] = asyncio.Queue()
        self._first: list[BranchEvent] = []
        self._num_running = len(self.runs)
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = False
        self._span = start_span(
            names.request_span(names.FORK, parent.model_id),
            {
                names.GEN_AI_OPERATION_NAME: self._operation,
                names.GEN_AI_PROVIDER_NAME: names.PROVIDER,
                names.GEN_AI_REQUEST_MODEL: parent.model_id,
                names.GEN_AI_REQUEST_STREAM: bool(first.stream),
                names.GEN_AI_REQUEST_CHOICE_COUNT: len(self.runs),
                names.GEN_AI_RESPONSE_ID: self.id,
                names.REMORA_NAMESPACE: parent.namespace_id,
                names.REMORA_SESSION_ID: parent.session_id,
            },
            parent=request.headers,
            kind=SpanKind.SERVER,
        )

    async def open(self) -> None:
        """Returns when a branch has said something. Raises the first branch's error when none of them runs."""
        span_headers = inject(self._span)
        models: dict[str, list[BranchRun]] = {}
        for run in self.runs:
            models.setdefault(run.place, []).append(run)
        self._tasks = [asyncio.create_task(self._run_together(runs, span_headers)) for runs in models.values()]
        while self._num_running and not any(deltas for _, deltas in self._first):
            self._first += await self._take()
        if not self._num_running and all(run.error is not None for run in self.runs):
            assert self.runs[0].error is not None
            raise self.runs[0].error

    async def next_events(self) -> list[BranchEvent]:
        """Everything that came since the last call, in order; empty when all branches have ended."""
        if self._first:
            events, self._first = self._first, []
            return events
        return await self._take() if self._num_running else []

    async def _take(self) -> list[BranchEvent]:
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        self._num_running -= sum(deltas is None for _, deltas in events)
        return events

    @contextlib.contextmanager
    def _ending_only(self, run: BranchRun) -> Iterator[None]:
        """What ends one branch ends no other."""
        try:
            yield
        except RemoraError as error:
            run.finish(error)
        except Exception as error:
            logger.exception("branch %d of %s failed", run.index, self.id)
            run.finish(RemoraError(str(error)))

    async def _run_together(self, runs: Sequence[BranchRun], span_headers: dict[str, str]) -> None:
        """Branches of one model and namespace. Those of others do not wait for them."""
        await asyncio.gather(*(self._prepare(run, span_headers) for run in runs))
        try:
            await self._compute_common([run for run in runs if run.error is None])
        except Exception:  # each can compute it
            logger.exception("what branches of %s share cannot be computed before", self.id)
        await asyncio.gather(*(self._run(run) for run in runs))

    async def _prepare(self, run: BranchRun, span_headers: dict[str, str]) -> None:
        with self._ending_only(run):
            await run.prepare(self._request, self._operation, f"{self.id}-{run.index}", span_headers)

    async def _run(self, run: BranchRun) -> None:
        """Moves one branch's deltas into the common sequence."""
        with self._ending_only(run):
            if run.error is None:
                await run.start()
                while deltas := await run.next_deltas():
                    self._events.put_nowait((run, deltas))
                run.finish()
        self._events.put_nowait((run, None))

    async def _compute_common(self, runs: Sequence[BranchRun]) -> None:
        """Lets the parent's pool have the blocks that all prompts begin with, unless it has most of them: else each
        branch would compute them. What cannot be had now is computed by the branches."""
        if len(runs) < 2:
            return
        parent, core = runs[0].log.state, self._services.core
        card = core.fleet.known_card(parent.model_id)
        if card is None or parent.edits or parent.pending or parent.context.overflow == "roll":
            return
        common = _common_prefix([run.prompt for run in runs])[: card.max_model_len - 1]
        fingerprint = card.of(parent.namespace_id).fingerprint
        root = core.catalog.chain_root(parent.namespace_id, fingerprint)
        hashes = chain_hashes(root, common, card.block_tokens)
        if len(hashes) < MIN_MISSING_BLOCKS:
            return
        found = await self._services.pools.find_blocks(parent.namespace_id, fingerprint, hashes)
        if len(hashes) - max(found.values(), default=0) < MIN_MISSING_BLOCKS:
            return
        job = precopy_job(
            RequestId(f"{self.id}-common"),
            parent.model_id,
            parent.namespace_id,
            common[: len(hashes) * card.block_tokens],
            num_kept_tokens=min(parent.num_tokens, len(common)),
            priority=-parent.priority,
            owner=parent.owner,
            trace_context=inject(self._span),
        )
        try:
            await core.moves.precopy(job)
        except RemoraError as error:
            logger.info("branches of %s compute what they share each: %s", self.id, error)

    # ---- the answer as a whole

    @property
    def is_chat(self) -> bool:
        return self._operation == names.OPERATION_CHAT

    @property
    def model_id(self) -> ModelId:
        return self._parent.model_id

    def usage(self) -> Usage:
        """Of all branches together."""
        each = [run.usage() for run in self.runs]
        return Usage(
            sum(usage.prompt_tokens for usage in each),
            sum(usage.completion_tokens for usage in each),
            sum(usage.total_tokens for usage in each),
            PromptTokensDetails(
                sum(usage.prompt_tokens_details.cached_tokens for usage in each),
                sum(usage.prompt_tokens_details.converted_tokens for usage in each),
            ),
        )

    def headers(self) -> dict[str, str]:
        """Of the response."""
        return response_headers(self.id, self._span)

    def finish(self, error: BaseException | None = None) -> None:
        """Stops whatever still runs. May be called twice."""
        if self._ended:
            return
        self._ended = True
        self._logs.stop()
        for task in self._tasks:
            task.cancel()
        for run in self.runs:
            # Those that have ended by themselves are finished already.
            run.finish(error or ClientGone())
        usage = self.usage()
        self._span.set_attribute(names.GEN_AI_USAGE_INPUT_TOKENS, usage.prompt_tokens)
        self._span.set_attribute(names.GEN_AI_USAGE_OUTPUT_TOKENS, usage.completion_tokens)
        self._span.set_attribute(names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, usage.prompt_tokens_details.cached_tokens)
        if error is not None:
            fail(self._span, error)
        self._span.end()


def _common_prefix(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Of all: in order, the first and the last differ the earliest."""
    first, last = min(prompts), max(prompts)
    length = next((i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return first[:length]
