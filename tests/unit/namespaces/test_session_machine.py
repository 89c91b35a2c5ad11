"""Sessions under several writers, silence, restarts and repeated calls, against a plain model of what must be there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from counted_machine import CountedMachine
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from remora.namespaces.edits import ContextOutcome
from remora.namespaces.pending_removals import removals_of
from remora.namespaces.session_book import LEASE_S, SessionBook, Stored
from remora.namespaces.session_commands import (
    AbortTurn,
    BeginTurn,
    CommitTurn,
    CreateSession,
    DeleteSession,
    ForkSession,
    PinSession,
    RemoveTokens,
    RenewTurns,
    SessionHead,
    SessionRefused,
    ShowSession,
    TruncateSession,
    TurnStarted,
)
from remora.namespaces.session_log import pack_tokens, unpack_tokens
from remora.platform.base.ids import Epoch, ModelId, NamespaceId, SessionId

NAMES = st.sampled_from(["a", "b", "c", "d"])
MAX_SESSIONS = 3
MODEL, NAMESPACE = ModelId("m"), NamespaceId("n")


@dataclass
class Known:
    tokens: list[int] = field(default_factory=list)
    writer: str | None = None


class SessionMachine(CountedMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.book = SessionBook()
        self.stored: list[Stored] = []
        self.model: dict[str, Known] = {}
        #: Every turn ever begun: (session, turn id, epoch).
        self.turns: list[tuple[str, str, int]] = []
        self.highest: dict[str, int] = {}
        self.committed: list[CommitTurn] = []
        self.count = 0

    def do(self, command: Any) -> Any:
        answer, records = self.book.decide(command, self.now_s)
        self.store(records)
        return answer

    def store(self, records: tuple[Stored, ...]) -> None:
        """What a store does, and what removals and lost leases mean to the model."""
        for record in records:
            if record.event is None:
                self.stored = [each for each in self.stored if each.session_id != record.session_id]
                self.model.pop(record.session_id, None)
            else:
                assert record.version == 1 + sum(each.session_id == record.session_id for each in self.stored)
                self.stored.append(record)
                if type(record.event).__name__ == "TurnAborted":
                    self.model[record.session_id].writer = None

    @rule(name=NAMES, ttl_s=st.sampled_from([None, 5.0, 50.0]))
    def create(self, name: str, ttl_s: float | None) -> None:
        self.count += 1
        command = CreateSession(
            session_id=SessionId(name), model_id=MODEL, namespace_id=NAMESPACE, ttl_s=ttl_s,
            call_id=str(self.count), max_sessions=MAX_SESSIONS,
        )  # fmt: skip
        known = name in self.model
        answer = self.do(command)
        if isinstance(answer, SessionHead):
            self.model[name] = Known()
        else:
            assert isinstance(answer, SessionRefused)
            assert known or answer.error == "OverQuota"

    @rule(name=NAMES, new=NAMES, share=st.floats(0, 1))
    def fork(self, name: str, new: str, share: float) -> None:
        self.count += 1
        tokens = list(self.model[name].tokens) if name in self.model else []
        cut = int(len(tokens) * share)
        command = ForkSession(
            session_id=SessionId(name), new_id=SessionId(new), call_id=str(self.count), num_tokens=cut,
            max_sessions=MAX_SESSIONS,
        )  # fmt: skip
        if isinstance(self.do(command), SessionHead):
            self.model[new] = Known(tokens[:cut])

    @rule(name=NAMES)
    def begin(self, name: str) -> None:
        self.count += 1
        answer = self.do(BeginTurn(session_id=SessionId(name), turn_id=f"t{self.count}", model_id=MODEL))
        if isinstance(answer, TurnStarted):
            assert self.model[name].writer is None
            assert answer.epoch > self.highest.get(name, -1)
            assert list(unpack_tokens(answer.state.token_bytes)) == self.model[name].tokens
            self.highest[name] = answer.epoch
            self.model[name].writer = f"t{self.count}"
            self.turns.append((name, f"t{self.count}", answer.epoch))
        else:
            assert name not in self.model or answer.busy

    @rule(name=NAMES, start=st.integers(0, 8), length=st.integers(0, 4))
    def remove_tokens(self, name: str, start: int, length: int) -> None:
        tokens = self.model[name].tokens if name in self.model else []
        self.count += 1
        call_id = str(self.count)
        command = RemoveTokens(session_id=SessionId(name), call_id=call_id, start=start, end=start + length)
        answer = self.do(command)
        assert self.do(command) == answer, "said again"
        assert isinstance(answer, SessionRefused) or start + length <= len(tokens)
        if isinstance(answer, SessionHead):
            del tokens[start : start + length]

    @rule(index=st.integers(0, 1000), tokens=st.lists(st.integers(0, 2**32 - 1), max_size=5), rolls=st.booleans())
    def commit(self, index: int, tokens: list[int], rolls: bool) -> None:
        """When the context rolls, its second and third token leave."""
        if not self.turns:
            return
        name, turn, epoch = self.turns[-1 - index % min(len(self.turns), 6)]
        mine = name in self.model and self.model[name].writer == turn
        before = list(self.model[name].tokens) if name in self.model else []
        after = [*before, *tokens, 7]
        pending = tuple((each.start, each.end) for each in self.book._sessions[SessionId(name)].pending) if mine else ()
        rolls = rolls and len(after) > 3
        removed = (*pending, (1, 3)) if rolls else pending
        if rolls:
            del after[1:3]
        command = CommitTurn(
            session_id=SessionId(name), turn_id=turn, epoch=Epoch(epoch), kind="text",
            prompt_bytes=pack_tokens(tokens), output_bytes=pack_tokens([7]),
            context=ContextOutcome(edits=(), removed=removed) if removed else None,
        )  # fmt: skip
        answer = self.do(command)
        if mine and name in self.model:
            assert isinstance(answer, SessionHead)
            self.model[name] = Known(after)
            self.committed.append(command)

    @rule(index=st.integers(0, 1000))
    def commit_again(self, index: int) -> None:
        if self.committed:
            self.do(self.committed[index % len(self.committed)])

    @rule(index=st.integers(0, 1000), renew=st.booleans())
    def abort_or_renew(self, index: int, renew: bool) -> None:
        if self.turns:
            name, turn, _ = self.turns[index % len(self.turns)]
            session_id = SessionId(name)
            self.do(
                RenewTurns(turns=((session_id, turn),)) if renew else AbortTurn(session_id=session_id, turn_id=turn)
            )

    @rule(name=NAMES, share=st.floats(0, 1))
    def truncate(self, name: str, share: float) -> None:
        self.count += 1
        cut = int(len(self.model[name].tokens) * share) if name in self.model else 0
        answer = self.do(TruncateSession(session_id=SessionId(name), call_id=str(self.count), num_tokens=cut))
        if isinstance(answer, SessionHead):
            del self.model[name].tokens[cut:]

    @rule(name=NAMES, pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        self.do(PinSession(session_id=SessionId(name), pinned=pinned))

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        self.do(DeleteSession(session_id=SessionId(name)))

    @rule(duration_s=st.sampled_from([0.1, 4.0, LEASE_S + 1]))
    def pass_time(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.store(self.book.expire(self.now_s))

    @rule(new_cluster=st.booleans())
    def restart(self, new_cluster: bool) -> None:
        floor = self.book.epoch_floor
        self.book = SessionBook()
        self.book.restore([(e.session_id, e.event) for e in self.stored if e.event is not None], floor, self.now_s)
        if new_cluster:
            self.store(self.book.abort_all(self.now_s))

    @invariant()
    def the_book_is_the_model(self) -> None:
        self.book.check_integrity()
        assert len(self.book) == len(self.model) <= MAX_SESSIONS
        for name, known in list(self.model.items()):
            head = self.do(ShowSession(session_id=SessionId(name), with_tokens=True))
            if name in self.model:
                assert list(unpack_tokens(head.state.token_bytes)) == known.tokens
                computed = list(unpack_tokens(head.state.computed_bytes))
                for removal in removals_of(head.state.pending, len(computed)):
                    assert removal.at == len(computed)
                    del computed[removal.start : removal.end]
                assert computed == known.tokens
                assert (head.state.open_turn and head.state.open_turn.turn_id) == known.writer


def test_sessions_are_what_they_were_told_whoever_writes_and_whatever_restarts() -> None:
    SessionMachine.run(max_examples=60, stateful_step_count=50)
