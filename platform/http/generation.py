"""One HTTP request's generation: its prompts, started together and read as one sequence of deltas."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from fastapi import Request
from opentelemetry.trace import Span, SpanKind

from remora.deployments.engine.messages import EventFrame, TokenDelta
from remora.deployments.generation_job import GenerationJob
from remora.deployments.models.tokenizer import ChatTokenizer
from remora.deployments.request_stream import RequestStream
from remora.deployments.session_context import SessionContext
from remora.deployments.session_turns import SessionTurn
from remora.namespaces.session_log import SessionState
from remora.platform.base import telemetry_names as names
from remora.platform.base.errors import InvalidRequest, RemoraError
from remora.platform.base.ids import Epoch, ModelId, NamespaceId, ReplicaId, RequestId, SessionId
from remora.platform.base.telemetry import fail, inject, start_span
from remora.platform.http.access import require_session
from remora.platform.http.api_types import PromptTokensDetails, Usage
from remora.platform.http.caller import caller_of
from remora.platform.http.disconnect import ClientGone
from remora.platform.http.generation_fields import GenerationFields
from remora.platform.http.request_attributes import request_attributes
from remora.platform.http.services import Services
from remora.platform.http.session_prompt import ReadLog, SessionLog, TurnPrompt
from remora.platform.http.span_content import SpanContent

NAMESPACE_HEADER = "x-remora-namespace"
TRACE_HEADER = "x-remora-trace-id"

#: The events of a choice of a generation that has started, by its index within the whole HTTP request.
MakeFrame = Callable[["Generation", int], EventFrame]
#: Choice index within the whole HTTP request, and what it said.
ChoiceDelta = tuple[int, TokenDelta]


class Generation:
    """Started by `start`, read by `next_deltas`, and always ended by `finish`."""

    def __init__(
        self,
        services: Services,
        request: Request,
        fields: GenerationFields,
        operation: str,
        *,
        response_id: str | None = None,
        parent: Mapping[str, str] | None = None,
    ) -> None:
        """Finds model and namespace; raises NotFound, or RateLimited for a tenant with too many at once.

        Begins the generation's span below the W3C headers `parent`; without them it is the request's outermost, whose
        parent the client may name. `response_id` is made up if left out.
        """
        self._services = services
        self._fields = fields
        catalog = services.core.catalog
        self._caller = caller_of(request)
        self.model_id: ModelId = self._caller.find_model(catalog, fields.model)
        self._named_namespace = request.headers.get(NAMESPACE_HEADER) or fields.namespace
        self.namespace_id: NamespaceId = self._caller.find_namespace(catalog, self.model_id, self._named_namespace)
        self._caller.check_priority(fields.priority)
        if self._caller.limits is not None:
            self._caller.limits.begin()
        self.id = response_id or new_response_id(operation)
        self.created = int(time.time())
        self.system_fingerprint = ""
        self.num_choices = fields.n or 1
        self.num_prompt_tokens = 0
        self._started_s = time.monotonic()
        self._streams: list[RequestStream] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._merged: asyncio.Queue[list[ChoiceDelta] | RemoraError] = asyncio.Queue()
        self._num_pumping = 0
        #: When tokens last came; None before the first.
        self._delivered_s: float | None = None
        self._finish_reasons: dict[int, str] = {}
        self._ended = False
        self._turn: SessionTurn | None = None
        #: What the prompt goes on behind: the turn's, or one that is only read.
        self._log: SessionLog | None = None
        self._added: TurnPrompt | None = None
        #: The replica last seen at work.
        self._owner: ReplicaId | None = None
        self._span = start_span(
            names.request_span(operation, self.model_id),
            {
                **request_attributes(operation, fields),
                names.GEN_AI_REQUEST_MODEL: self.model_id,
                names.GEN_AI_RESPONSE_MODEL: self.model_id,
                names.REMORA_NAMESPACE: self.namespace_id,
                names.GEN_AI_RESPONSE_ID: self.id,
            },
            parent=request.headers if parent is None else parent,
            kind=SpanKind.SERVER,
        )
        self.content = SpanContent(self._span, enabled=services.config.telemetry.capture_content)
        self._labels = (self.model_id, self.namespace_id)
        services.stats.in_flight.labels(*self._labels).inc()

    async def begin_turn(self) -> SessionTurn | None:
        """Becomes the writer of the session that the request names; None if it names none.

        Raises NotFound, Conflict, and InvalidRequest for a session of another model or namespace.
        """
        session_id = self._fields.session_id
        if session_id is None:
            return None
        await require_session(self._services.turns.port, self._caller, SessionId(session_id))
        self._turn = await self._services.turns.begin(
            SessionId(session_id),
            self.model_id,
            self.namespace_id if self._named_namespace else None,
            wait_s=self._services.config.http.queue_timeout_s if self._fields.on_conflict == "wait" else 0.0,
        )
        self._log = self._turn
        self._span.set_attribute(names.REMORA_EPOCH, self._turn.epoch)
        self._belongs_to(self._turn.state)
        return self._turn

    def go_on_from(self, state: SessionState) -> ReadLog:
        """Goes on behind a session's log, with its tokens in `state`, and leaves the session as it is."""
        self._log = log = ReadLog(state)
        self._belongs_to(state)
        return log

    def _belongs_to(self, state: SessionState) -> None:
        self._span.set_attribute(names.REMORA_SESSION_ID, state.session_id)
        self._span.set_attribute(names.GEN_AI_CONVERSATION_ID, state.session_id)
        # A session pays where it was made.
        self.namespace_id = self._services.core.catalog.find_namespace(self.model_id, state.namespace_id)
        self._span.set_attribute(names.REMORA_NAMESPACE, self.namespace_id)
        in_flight = self._services.stats.in_flight
        in_flight.labels(*self._labels).dec()
        self._labels = (self.model_id, self.namespace_id)
        in_flight.labels(*self._labels).inc()

    @property
    def is_kept(self) -> bool:
        """Whether the commit of the session's turn was begun."""
        return self._turn is not None and self._turn.is_committed

    async def start(
        self,
        prompts: Sequence[tuple[int, ...]],
        tokenizer: ChatTokenizer,
        *,
        max_tokens: int | None,
        default_max_tokens: int | None,
        logprobs: int | None,
        field: str,
        added: TurnPrompt | None = None,
        make_frame: MakeFrame | None = None,
    ) -> None:
        """Checks the prompts against the model and hands them to the router. `field` is what the client calls them.

        Without `max_tokens` the output may fill the context, up to `default_max_tokens`. `added`: what the one prompt
        of a session's turn has behind the session's log. `make_frame`: how a text is told to the client, if it is
        streamed as it comes.
        """
        fields, turn, log = self._fields, self._turn, self._log
        self._added = added
        if max_tokens is not None:
            self._span.set_attribute(names.GEN_AI_REQUEST_MAX_TOKENS, max_tokens)
        card = await self._services.core.fleet.card(self.model_id, inject(self._span))
        self.system_fingerprint = f"fp_{card.fingerprint.hex()[:12]}"
        tokenizer.check_ids(fields.stop_token_ids or (), field="stop_token_ids")
        tokenizer.check_ids([token_id for token_id, _ in fields.biases()], field="logit_bias")
        context = SessionContext(card, log.state if log else None)
        for prompt in prompts:
            if not prompt:
                raise InvalidRequest(f"{field}: has no tokens; send at least one.", field=field)
            context.check(len(prompt), max_tokens or 1, field=field)
        if self._caller.limits is not None:
            self._caller.limits.take_prompt(sum(len(prompt) for prompt in prompts))
        if logprobs is not None or self.content.is_enabled:
            make_frame = None  # what it says is needed here
        is_kept = turn is not None or self._services.core.catalog.models[self.model_id].failover
        for index, prompt in enumerate(prompts):
            choices = range(index * self.num_choices, (index + 1) * self.num_choices)
            limit = context.output_limit(len(prompt), max_tokens, default_max_tokens)
            if (fields.min_tokens or 0) > limit:
                raise InvalidRequest(
                    f"min_tokens: {fields.min_tokens} is more than the {limit} tokens allowed.", field="min_tokens"
                )
            job = GenerationJob(
                request_id=RequestId(self.id if len(prompts) == 1 else f"{self.id}-{index}"),
                model_id=self.model_id,
                namespace_id=self.namespace_id,
                prompt_token_ids=context.engine_tokens(prompt),
                context=context.plan,
                num_kept_tokens=context.num_kept_tokens,
                sampling=fields.sampling(max_tokens=limit, logprobs=logprobs),
                num_choices=self.num_choices,
                grammar=fields.response_format.grammar() if fields.response_format is not None else None,
                # vLLM's clients count down, the engine counts up.
                priority=-(fields.priority if fields.priority is not None else log.state.priority if log else 0),
                session_id=turn.session_id if turn else None,
                epoch=turn.epoch if turn else Epoch(0),
                owner=log.state.owner if log else None,
                frames=tuple(make_frame(self, choice) for choice in choices) if make_frame else (),
                wants_token_ids=make_frame is None or is_kept,
                trace_context=inject(self._span),
            )
            self._streams.append(await self._services.core.open(job))
            self.num_prompt_tokens += len(prompt)
        self._span.set_attribute(names.GEN_AI_USAGE_INPUT_TOKENS, self.num_prompt_tokens)
        if len(self._streams) > 1:
            self._num_pumping = len(self._streams)
            self._pumps = [asyncio.create_task(self._pump(index)) for index in range(len(self._streams))]

    async def _pump(self, prompt_index: int) -> None:
        """Moves one prompt's deltas into the merged sequence."""
        try:
            while deltas := await self._streams[prompt_index].next_deltas():
                self._merged.put_nowait(self._numbered(prompt_index, deltas))
            self._merged.put_nowait([])
        except RemoraError as error:
            self._merged.put_nowait(error)

    def _numbered(self, prompt_index: int, deltas: list[TokenDelta]) -> list[ChoiceDelta]:
        return [(prompt_index * self.num_choices + delta.choice_index, delta) for delta in deltas]

    async def next_deltas(self) -> list[ChoiceDelta]:
        """What came since the last call; empty when every choice has ended. Raises what ended a prompt early.

        The end of a session's turn is only passed on when the turn is in the session's log.
        """
        deltas = await self._next_merged() if self._pumps else self._numbered(0, await self._streams[0].next_deltas())
        if deltas:
            self._delivered()
        self._finish_reasons |= {index: delta.finish_reason for index, delta in deltas if delta.finish_reason}
        self.content.said(deltas)
        if self._turn is not None:
            await self._keep(self._turn, deltas)
        return deltas

    def _delivered(self) -> None:
        """Notes how long the client has waited for these tokens."""
        now_s, before_s = time.monotonic(), self._delivered_s
        self._delivered_s = now_s
        if before_s is not None:
            self._services.stats.inter_token_s.labels(*self._labels).observe(now_s - before_s)
            return
        waited_s = now_s - self._started_s
        self._services.stats.first_token_s.labels(*self._labels).observe(waited_s)
        self._span.set_attribute(names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, waited_s)

    async def _keep(self, turn: SessionTurn, deltas: list[ChoiceDelta]) -> None:
        """Commits the turn when its last delta is among these."""
        stream = self._streams[0]
        self._owner = stream.replica_id or self._owner
        if self._added is None or not stream.log.finished or turn.is_committed:
            return
        (output,) = stream.log.token_ids()
        await turn.commit(
            self._added.kind,
            self._added.added,
            output,
            messages_json=self._added.messages_json,
            finish_reason=next((delta.finish_reason for _, delta in deltas if delta.finish_reason), ""),
            owner=self._owner,
            context=stream.context,
        )

    async def _next_merged(self) -> list[ChoiceDelta]:
        while self._num_pumping:
            item = await self._merged.get()
            if isinstance(item, RemoraError):
                raise item
            if item:
                return item
            self._num_pumping -= 1
        return []

    def usage(self) -> Usage:
        output = sum(stream.log.num_tokens for stream in self._streams)
        # What was found may have held tokens that a session's edit took out before the prompt was computed.
        found = sum(stream.num_cached_tokens or 0 for stream in self._streams)
        cached = min(found, self.num_prompt_tokens)
        converted = min(sum(stream.num_converted_tokens for stream in self._streams), cached)
        details = PromptTokensDetails(cached, converted)
        return Usage(self.num_prompt_tokens, output, self.num_prompt_tokens + output, details)

    def headers(self) -> dict[str, str]:
        """Of the response."""
        return response_headers(self.id, self._span)

    def finish(self, error: BaseException | None = None) -> None:
        """Stops whatever still runs and records the outcome. May be called twice."""
        if self._ended:
            return
        self._ended = True
        for pump in self._pumps:
            pump.cancel()
        for stream in self._streams:
            stream.close()
        if self._turn is not None:
            self._turn.end(_outcome(error))
        usage, stats = self.usage(), self._services.stats
        if self._caller.limits is not None:
            self._caller.limits.used_output(usage.completion_tokens)
            self._caller.limits.end()
        stats.in_flight.labels(*self._labels).dec()
        stats.finished.labels(*self._labels, _outcome(error)).inc()
        stats.duration_s.labels(*self._labels).observe(time.monotonic() - self._started_s)
        stats.prompt_tokens.labels(*self._labels).inc(usage.prompt_tokens)
        stats.cached_tokens.labels(*self._labels).inc(usage.prompt_tokens_details.cached_tokens)
        stats.output_tokens.labels(*self._labels).inc(usage.completion_tokens)
        self._span.set_attribute(names.GEN_AI_USAGE_OUTPUT_TOKENS, usage.completion_tokens)
        self._span.set_attribute(names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, usage.prompt_tokens_details.cached_tokens)
        if reasons := [self._finish_reasons[index] for index in sorted(self._finish_reasons)]:
            self._span.set_attribute(names.GEN_AI_RESPONSE_FINISH_REASONS, reasons)
        self.content.end()
        if error is not None:
            fail(self._span, error)
        self._span.end()


def new_response_id(operation: str) -> str:
    """As OpenAI's: it says which endpoint has answered."""
    return f"{'chatcmpl' if operation == names.OPERATION_CHAT else 'cmpl'}-{uuid.uuid4().hex}"


def response_headers(response_id: str, span: Span) -> dict[str, str]:
    """How to find a request in logs and traces."""
    trace_id = span.get_span_context().trace_id
    return {"x-remora-request-id": response_id, **({TRACE_HEADER: f"{trace_id:032x}"} if trace_id else {})}


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "ok"
    if isinstance(error, RemoraError):
        return error.code
    return "disconnected" if isinstance(error, (ClientGone, asyncio.CancelledError)) else RemoraError.code
