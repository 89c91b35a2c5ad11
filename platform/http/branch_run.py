"""One way in which a forked session goes on: its session, its prompt, its generation.

A branch that is kept is a session of its own from its fork on, and its turn is kept as any other; one that fails or is
left leaves no session. A branch that is not kept only reads its parent's log, and takes no other session's place.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping

from fastapi import Request

from remora.cache_actors.session_client import ask
from remora.deployments.engine.messages import SamplingParams, TokenDelta
from remora.deployments.models.tokenizer import ChatTokenizer
from remora.namespaces.session_commands import DeleteSession, Done, ForkSession, SessionHead
from remora.namespaces.session_log import SessionState
from remora.platform.base.errors import RemoraError
from remora.platform.base.ids import SessionId
from remora.platform.http.api_types import Branch, PromptTokensDetails, Usage
from remora.platform.http.branch_logs import BranchLog, BranchLogs
from remora.platform.http.branch_request import BranchRequest
from remora.platform.http.chat_request import ChatRequest
from remora.platform.http.generation import Generation
from remora.platform.http.services import Services
from remora.platform.http.session_models import transfer_document
from remora.platform.http.session_prompt import SessionLog, TurnPrompt, chat_prompt, text_prompt
from remora.platform.http.session_requests import new_session_id


class BranchRun:
    """One branch: `prepare`, `start`, `next_deltas` until it has ended, and always `finish`."""

    def __init__(self, services: Services, parent: SessionState, logs: BranchLogs, wanted: BranchRequest) -> None:
        """`parent` with its tokens, up to where the branch leaves it; `logs` has it for the branch's model."""
        self._services = services
        self._parent_model, self._num_parent_tokens = parent.model_id, parent.num_tokens
        self._logs = logs
        self._wanted = wanted
        #: What it goes on behind, as its model has it.
        self.log = BranchLog(parent)
        self._fork: asyncio.Task[SessionHead] | None = None
        self._generation: Generation | None = None
        self._tokenizer: ChatTokenizer | None = None
        self._added: TurnPrompt | None = None
        self.index = wanted.index
        self.session_id = SessionId(wanted.session_id or new_session_id()) if wanted.keep else None
        self.prompt: tuple[int, ...] = ()
        #: What ended it early.
        self.error: RemoraError | None = None
        self._ended = False

    async def prepare(self, request: Request, operation: str, response_id: str, parent_span: Mapping[str, str]) -> None:
        """Forks the session and renders the prompt; nothing is computed yet. Raises a RemoraError."""
        wanted, fields = self._wanted, self._wanted.fields
        named = fields.model_copy(update={"session_id": self.session_id})
        self._generation = generation = Generation(
            self._services, request, named, operation, response_id=response_id, parent=parent_span
        )
        self._tokenizer = tokenizer = await self._services.tokenizers.get(generation.model_id)
        self.log = await self._logs.of(wanted, parent_span)
        log: SessionLog | None
        if wanted.keep:
            await self._make_session()
            log = await generation.begin_turn()
        else:
            log = generation.go_on_from(self.log.state)
        assert log is not None
        if isinstance(fields, ChatRequest):
            generation.content.asked(fields.messages)
            self._added = await chat_prompt(tokenizer, fields, log)
        else:
            generation.content.asked({"role": "user", "content": prompt} for prompt in fields.prompt)
            self._added = await text_prompt(tokenizer, fields, log)
        self.prompt = log.token_ids + self._added.added

    async def _make_session(self) -> None:
        assert self.session_id is not None
        catalog, parent = self._services.core.catalog, self.log.state
        namespace_id = catalog.find_namespace(catalog.find_model(parent.model_id), parent.namespace_id)
        command = ForkSession(
            session_id=parent.session_id,
            new_id=self.session_id,
            call_id=uuid.uuid4().hex,
            num_tokens=self._num_parent_tokens,
            max_sessions=catalog.namespaces[namespace_id].max_sessions,
            log=self.log.log,
            owner=parent.owner,
        )
        # It runs to its end even if the client leaves, so that `finish` knows what there is to delete.
        self._fork = self._services.turns.spawn(ask(self._services.turns.port, command, SessionHead))
        await asyncio.shield(self._fork)

    async def start(self) -> None:
        """Hands the prompt to the router. Raises a RemoraError."""
        assert self._generation is not None
        assert self._tokenizer is not None
        fields = self._wanted.fields
        is_chat = isinstance(fields, ChatRequest)
        await self._generation.start(
            [self.prompt],
            self._tokenizer,
            max_tokens=fields.output_limit if isinstance(fields, ChatRequest) else fields.max_tokens,
            default_max_tokens=None if is_chat else SamplingParams().max_tokens,
            logprobs=fields.num_logprobs if isinstance(fields, ChatRequest) else fields.logprobs,
            field="messages" if is_chat else "prompt",
            added=self._added,
        )

    async def next_deltas(self) -> list[TokenDelta]:
        """As Generation.next_deltas."""
        assert self._generation is not None
        return [delta for _, delta in await self._generation.next_deltas()]

    def finish(self, error: BaseException | None = None) -> None:
        """Stops what still runs; a session whose turn is not kept goes. May be called twice."""
        if self._ended:
            return
        self._ended = True
        self.error = error if isinstance(error, RemoraError) else None
        if self._generation is not None:
            self._generation.finish(error)
        fork = self._fork
        if fork is not None and not (self._generation is not None and self._generation.is_kept):
            self._services.turns.spawn(self._drop(fork))

    async def _drop(self, fork: asyncio.Task[SessionHead]) -> None:
        with contextlib.suppress(RemoraError):
            made = await fork  # a name that was taken is another's session
            command = DeleteSession(session_id=made.state.session_id)
            await ask(self._services.turns.port, command, Done)

    # ---- what the answer says of it

    @property
    def place(self) -> str:
        """Equal for branches of one model and namespace."""
        return f"{self._wanted.fields.model} {self._wanted.fields.namespace or ''}"

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Of a branch that was prepared."""
        assert self._tokenizer is not None
        return self._tokenizer

    @property
    def system_fingerprint(self) -> str:
        return "" if self._generation is None else self._generation.system_fingerprint

    def usage(self) -> Usage:
        if self._generation is None:
            return Usage(0, 0, 0, PromptTokensDetails(0))
        return self._generation.usage()

    def described(self, *, ended: bool, error: dict[str, str | None] | None = None) -> Branch:
        session_id = None if self.error is not None else self.session_id
        moved = self.log.moved
        return Branch(
            index=self.index,
            session_id=session_id,
            model=None if self._wanted.fields.model == self._parent_model else self._wanted.fields.model,
            transfer=transfer_document(moved) if ended and moved is not None else None,
            usage=self.usage() if ended else None,
            error=error,
        )
