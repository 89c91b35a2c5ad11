"""Sessions as pure state: turns, forks, cuts, room, and who may write."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from remora.namespaces.edits import ContextOutcome, EditRecord, Removal, truncated
from remora.namespaces.pending_removals import removals_of
from remora.namespaces.session_book import LEASE_S, SessionBook, Stored
from remora.namespaces.session_commands import (
    AbortTurn,
    BeginTurn,
    CommitTurn,
    CreateSession,
    DeleteSession,
    Done,
    ForkSession,
    ListSessions,
    PinSession,
    RemoveTokens,
    RenewTurns,
    SessionHead,
    SessionList,
    SessionRefused,
    ShowSession,
    TruncateSession,
    TurnStarted,
)
from remora.namespaces.session_log import (
    EPOCHS_PER_TURN,
    OwnerChanged,
    SessionState,
    apply,
    check_state,
    pack_tokens,
    unpack_tokens,
)
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import Epoch, ModelId, NamespaceId, ReplicaId, SessionId

_calls = itertools.count()


def new_call() -> str:
    return f"call {next(_calls)}"


class Book:
    """A book, its clock and what a store would hold."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.book = SessionBook()
        self.stored: list[Stored] = []

    def do(self, command: Any) -> Any:
        answer, records = self.book.decide(command, self.now_s)
        self._store(records)
        self.book.check_integrity()
        return answer

    def expire(self) -> None:
        self._store(self.book.expire(self.now_s))
        self.book.check_integrity()

    def _store(self, records: tuple[Stored, ...]) -> None:
        for record in records:
            if record.event is None:
                self.stored = [each for each in self.stored if each.session_id != record.session_id]
            else:
                self.stored.append(record)

    def restart(self) -> None:
        floor = self.book.epoch_floor
        self.book = SessionBook()
        events = [(each.session_id, each.event) for each in self.stored if each.event is not None]
        self.book.restore(events, floor, self.now_s)
        self.book.check_integrity()

    def create(self, name: str = "s", *, max_sessions: int = 100, **more: Any) -> Any:
        command = CreateSession(
            session_id=SessionId(name), model_id=ModelId("m"), namespace_id=NamespaceId("n"),
            call_id=f"create {name}", max_sessions=max_sessions, **more,
        )  # fmt: skip
        return self.do(command)

    def begin(self, name: str = "s", turn: str = "t", **more: Any) -> Any:
        fields = {"model_id": ModelId("m"), **more}
        return self.do(BeginTurn(session_id=SessionId(name), turn_id=turn, **fields))

    def commit(self, name: str, turn: str, epoch: int, prompt: list[int], output: list[int]) -> Any:
        command = CommitTurn(
            session_id=SessionId(name), turn_id=turn, epoch=Epoch(epoch), kind="text",
            prompt_bytes=pack_tokens(prompt), output_bytes=pack_tokens(output), finish_reason="stop",
        )  # fmt: skip
        return self.do(command)

    def say(self, name: str, turn: str, prompt: list[int], output: list[int]) -> SessionHead:
        epoch = self.begin(name, turn).epoch
        head = self.commit(name, turn, epoch, prompt, output)
        assert isinstance(head, SessionHead)
        return head

    def state(self, name: str = "s") -> SessionState:
        head = self.do(ShowSession(session_id=SessionId(name), with_tokens=True))
        assert isinstance(head, SessionHead), head
        return head.state

    def tokens(self, name: str = "s") -> list[int]:
        return list(unpack_tokens(self.state(name).token_bytes))


@pytest.fixture
def book() -> Book:
    made = Book()
    made.create()
    return made


def refused(answer: Any) -> str:
    assert isinstance(answer, SessionRefused), answer
    return answer.error


def test_a_committed_turn_is_prompt_and_answer_behind_the_log(book: Book) -> None:
    book.say("s", "t1", [1, 2], [3])
    head = book.say("s", "t2", [4], [5, 6])
    assert head.num_tokens == 6
    assert head.state.token_bytes == b""
    assert book.tokens() == [1, 2, 3, 4, 5, 6]
    assert [(each.start, each.prompt_end, each.end) for each in book.state().turns] == [(0, 2, 3), (3, 4, 6)]


def test_an_aborted_turn_leaves_the_log_as_it_was(book: Book) -> None:
    book.say("s", "t1", [1], [2])
    epoch = book.begin(turn="t2").epoch
    book.do(AbortTurn(session_id=SessionId("s"), turn_id="t2", reason="disconnected"))
    assert book.tokens() == [1, 2]
    assert refused(book.commit("s", "t2", epoch, [7], [8])) == "Conflict"
    assert book.tokens() == [1, 2]


def test_a_second_writer_is_refused_until_the_first_ends(book: Book) -> None:
    first = book.begin(turn="t1")
    second = book.begin(turn="t2")
    assert refused(second) == "Conflict"
    assert second.busy
    assert refused(book.do(TruncateSession(session_id=SessionId("s"), call_id=new_call(), num_tokens=0))) == "Conflict"
    book.commit("s", "t1", first.epoch, [1], [2])
    assert book.begin(turn="t2").epoch == first.epoch + EPOCHS_PER_TURN


def test_a_writer_that_falls_silent_loses_its_turn_and_one_that_renews_keeps_it(book: Book) -> None:
    old = book.begin(turn="t1").epoch
    book.now_s += 0.8 * LEASE_S
    book.do(RenewTurns(turns=((SessionId("s"), "t1"),)))
    book.now_s += 0.8 * LEASE_S
    assert refused(book.begin(turn="t2")) == "Conflict"
    book.now_s += 0.3 * LEASE_S
    new = book.begin(turn="t2").epoch
    assert new > old
    assert refused(book.commit("s", "t1", old, [1], [2])) == "Conflict"
    book.commit("s", "t2", new, [3], [4])
    assert book.tokens() == [3, 4]


def test_a_repeated_call_is_the_same_call(book: Book) -> None:
    first, again = book.begin(turn="t1"), book.begin(turn="t1")
    assert first == again
    assert book.commit("s", "t1", first.epoch, [1], [2]) == book.commit("s", "t1", first.epoch, [1], [2])
    assert book.tokens() == [1, 2]
    assert isinstance(book.create(), SessionHead)
    fork = ForkSession(session_id=SessionId("s"), new_id=SessionId("f"), call_id="c", max_sessions=100)
    assert book.do(fork) == book.do(fork)


def test_a_taken_name_is_a_conflict(book: Book) -> None:
    other = CreateSession(
        session_id=SessionId("s"), model_id=ModelId("m"), namespace_id=NamespaceId("n"), call_id="x", max_sessions=9
    )
    assert refused(book.do(other)) == "Conflict"


def test_an_open_turn_can_be_committed_after_a_restart_and_again(book: Book) -> None:
    epoch = book.begin(turn="t1").epoch
    book.restart()
    assert isinstance(book.commit("s", "t1", epoch, [1], [2]), SessionHead)
    book.restart()
    assert isinstance(book.commit("s", "t1", epoch, [1], [2]), SessionHead)
    assert book.tokens() == [1, 2]


def test_a_fork_goes_its_own_way_and_outlives_its_parent(book: Book) -> None:
    book.say("s", "t1", [1, 2], [3])
    book.say("s", "t2", [4], [5])
    fork = ForkSession(session_id=SessionId("s"), new_id=SessionId("f"), call_id="c", num_tokens=3, max_sessions=100)
    assert book.do(fork).state.parent_id == "s"
    book.say("f", "t3", [9], [9])
    assert book.tokens("s") == [1, 2, 3, 4, 5]
    assert book.tokens("f") == [1, 2, 3, 9, 9]
    assert isinstance(book.do(DeleteSession(session_id=SessionId("s"))), Done)
    book.restart()
    assert book.tokens("f") == [1, 2, 3, 9, 9]


def test_a_fork_shares_the_bytes_of_its_parents_log(book: Book) -> None:
    book.say("s", "t1", [1] * 1000, [2] * 1000)
    book.do(ForkSession(session_id=SessionId("s"), new_id=SessionId("f"), call_id="c", max_sessions=100))
    assert book.state("f").token_bytes is book.state("s").token_bytes


@pytest.mark.parametrize(
    ("cut", "left", "in_prompt"),
    [
        ({"num_turns": 1}, [1, 2, 3], False),
        ({"num_turns": 0}, [], False),
        ({"num_tokens": 5}, [1, 2, 3, 4, 5], False),
        ({"num_tokens": 4}, [1, 2, 3, 4], True),
        ({"num_tokens": 1}, [1], True),
    ],
)
def test_a_truncated_session_keeps_the_first_tokens(
    book: Book, cut: dict[str, int], left: list[int], in_prompt: bool
) -> None:
    book.say("s", "t1", [1, 2], [3])
    book.say("s", "t2", [4], [5, 6])
    book.do(TruncateSession(session_id=SessionId("s"), call_id=new_call(), **cut))
    assert book.tokens() == left
    assert book.state().ends_in_prompt is in_prompt
    book.say("s", "t3", [7], [8])
    assert book.tokens() == [*left, 7, 8]


@pytest.mark.parametrize("cut", [{"num_tokens": 4}, {"num_tokens": -1}, {"num_turns": 2}, {}, {"num_turns": -1}])
def test_an_impossible_cut_is_refused_by_the_fields_name(book: Book, cut: dict[str, int]) -> None:
    book.say("s", "t1", [1, 2], [3])
    answer = book.do(TruncateSession(session_id=SessionId("s"), call_id=new_call(), **cut))
    assert refused(answer) == "InvalidRequest"
    assert answer.field in ("num_tokens", "num_turns")
    assert book.tokens() == [1, 2, 3]


def test_another_model_or_namespace_is_refused_by_the_fields_name(book: Book) -> None:
    assert book.begin(model_id=ModelId("other")).field == "model"
    assert book.begin(namespace_id=NamespaceId("other")).field == "namespace"
    assert isinstance(book.begin(namespace_id=NamespaceId("n")), TurnStarted)


def test_a_full_namespace_drops_the_least_recently_used_session_that_may_go() -> None:
    book = Book()
    for name in ("a", "b", "c"):
        book.create(name, max_sessions=3)
        book.now_s += 1
    book.do(PinSession(session_id=SessionId("a"), pinned=True))
    book.begin("b")
    book.create("d", max_sessions=3)
    assert refused(book.do(ShowSession(session_id=SessionId("c")))) == "NotFound"
    assert refused(book.create("e", max_sessions=2)) == "OverQuota"
    listed = book.do(ListSessions())
    assert isinstance(listed, SessionList)
    assert [each.state.session_id for each in listed.sessions] == ["a", "b", "d"]


def test_a_session_goes_after_its_ttl_unless_it_is_used_or_pinned() -> None:
    book = Book()
    for name in ("idle", "used", "pinned"):
        book.create(name, ttl_s=10.0)
    book.do(PinSession(session_id=SessionId("pinned"), pinned=True))
    book.now_s += 6
    book.say("used", "t", [1], [2])
    book.now_s += 6
    assert refused(book.do(ShowSession(session_id=SessionId("idle")))) == "NotFound"
    book.expire()
    book.restart()
    assert [each.state.session_id for each in book.do(ListSessions()).sessions] == ["pinned", "used"]


def test_a_new_session_of_an_old_name_writes_under_higher_epochs(book: Book) -> None:
    book.say("s", "t1", [1], [2])
    last = book.begin(turn="t2").epoch
    book.do(DeleteSession(session_id=SessionId("s")))
    book.restart()
    book.create()
    assert book.begin(turn="t3").epoch >= last + EPOCHS_PER_TURN


def test_pages_of_a_list_join_without_gap_or_repeat() -> None:
    book = Book()
    names = [f"s{i:02}" for i in range(7)]
    for name in names:
        book.create(name)
    seen: list[str] = []
    more = True
    while more:
        page = book.do(ListSessions(after=seen[-1] if seen else "", limit=3))
        seen += [each.state.session_id for each in page.sessions]
        more = page.has_more
    assert seen == names


def test_an_owner_changes_only_from_the_expected_epoch(book: Book) -> None:
    state = book.state()
    change = OwnerChanged(at_s=0, old_epoch=state.epoch, epoch=Epoch(state.epoch + 1), owner=ReplicaId("r"))
    moved = apply(state, change)
    assert (moved.epoch, moved.owner) == (state.epoch + 1, "r")
    with pytest.raises(IntegrityError):
        apply(moved, change)


def log_of(book: Book) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the session shows, and what its next turn is computed on."""
    state = book.state()
    check_state(state)
    return unpack_tokens(state.token_bytes), unpack_tokens(state.computed_bytes)


def remove(book: Book, start: int, end: int | None = None) -> Any:
    return book.do(RemoveTokens(session_id=SessionId("s"), call_id=new_call(), start=start, end=end))


def test_a_removed_range_waits_for_the_next_turn_with_its_tokens(book: Book) -> None:
    book.say("s", "t1", [1, 2, 3], [4, 5])
    assert remove(book, 1, 3).num_tokens == 3
    assert remove(book, 1, 2).num_tokens == 2
    book.restart()
    assert log_of(book) == ((1, 5), (1, 2, 3, 4, 5))
    assert removals_of(book.state().pending, 5) == (Removal(at=5, start=1, end=3), Removal(at=3, start=1, end=2))
    started = book.begin(turn="t2")
    edits = (EditRecord(position=1, end=2, digest=b"d", kind="removed"),)
    context = ContextOutcome(edits=edits, removed=((1, 3), (1, 2), (0, 1)))
    book.do(
        CommitTurn(
            session_id=SessionId("s"), turn_id="t2", epoch=started.epoch, kind="text", prompt_bytes=pack_tokens([6]),
            output_bytes=pack_tokens([7]), context=context,
        )
    )  # fmt: skip
    book.restart()
    assert log_of(book) == ((5, 6, 7), (5, 6, 7))
    assert (book.state().edits, book.state().pending) == (edits, ())


@pytest.mark.parametrize(
    "edit",
    [
        RemoveTokens(session_id=SessionId("s"), call_id="edit", start=1, end=3),
        RemoveTokens(session_id=SessionId("s"), call_id="edit", start=3),
        TruncateSession(session_id=SessionId("s"), call_id="edit", num_tokens=3),
        TruncateSession(session_id=SessionId("s"), call_id="edit", num_turns=1),
    ],
)
def test_an_edit_that_is_said_again_after_a_crash_is_made_once(book: Book, edit: Any) -> None:
    book.say("s", "t1", [1, 2, 3], [4, 5])
    book.say("s", "t2", [6], [7])
    first = book.do(edit)
    book.restart()
    assert book.do(edit) == first
    remove(book, 0, 1)
    after = book.tokens()
    assert book.do(edit).num_tokens == len(after), "nor after another one's edit"
    assert book.tokens() == after
    for _ in range(40):
        remove(book, 0, 0)
    assert len(book.state().edit_ids) <= 16


def test_removing_to_the_end_is_a_truncation(book: Book) -> None:
    book.say("s", "t1", [1, 2, 3], [4, 5])
    remove(book, 2)
    assert log_of(book) == ((1, 2), (1, 2))
    assert remove(book, 1, 1).num_tokens == 2


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 1), (0, 6), (6, None)])
def test_only_what_is_in_the_log_can_be_removed(book: Book, start: int, end: int | None) -> None:
    book.say("s", "t1", [1, 2, 3], [4, 5])
    assert refused(remove(book, start, end)) == "InvalidRequest"
    book.begin(turn="t2")
    assert refused(remove(book, 0, 1)) == "Conflict"
    assert log_of(book)[0] == (1, 2, 3, 4, 5)


def test_a_cut_behind_a_removal_keeps_it_and_one_before_it_forgets_it(book: Book) -> None:
    book.say("s", "t1", [1, 2, 3, 4], [5, 6])
    remove(book, 2, 4)
    book.do(ForkSession(session_id=SessionId("s"), new_id=SessionId("f"), call_id="f", num_tokens=2, max_sessions=9))
    fork = book.book._sessions[SessionId("f")]
    assert (unpack_tokens(fork.computed_bytes), fork.pending) == ((1, 2), ())
    book.do(TruncateSession(session_id=SessionId("s"), call_id=new_call(), num_tokens=3))
    assert log_of(book) == ((1, 2, 5), (1, 2, 3, 4, 5))


def test_a_cut_through_kept_kv_says_that_what_follows_is_new() -> None:
    edits = (EditRecord(position=4, end=20, digest=b"d", kind="removed"),)
    assert [(e.position, e.end, e.kind) for e in truncated(edits, 30)] == [(4, 20, "removed")]
    assert [(e.position, e.end, e.kind) for e in truncated(edits, 10)] == [(4, 10, "removed"), (10, 10, "recomputed")]
    assert truncated(edits, 4) == ()
