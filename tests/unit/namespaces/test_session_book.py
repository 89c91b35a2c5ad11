"""Sessions as pure state: turns, forks, cuts, room, and who may write."""

from __future__ import annotations

from typing import Any

import pytest

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
    RangeRemoved,
    SessionState,
    apply,
    check_state,
    pack_tokens,
    unpack_tokens,
)
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import Epoch, ModelId, NamespaceId, ReplicaId, SessionId


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
    assert refused(book.do(TruncateSession(session_id=SessionId("s"), num_tokens=0))) == "Conflict"
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
    book.do(TruncateSession(session_id=SessionId("s"), **cut))
    assert book.tokens() == left
    assert book.state().ends_in_prompt is in_prompt
    book.say("s", "t3", [7], [8])
    assert book.tokens() == [*left, 7, 8]


@pytest.mark.parametrize("cut", [{"num_tokens": 4}, {"num_tokens": -1}, {"num_turns": 2}, {}, {"num_turns": -1}])
def test_an_impossible_cut_is_refused_by_the_fields_name(book: Book, cut: dict[str, int]) -> None:
    book.say("s", "t1", [1, 2], [3])
    answer = book.do(TruncateSession(session_id=SessionId("s"), **cut))
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


def test_a_removed_range_is_recorded_and_the_session_is_not_served(book: Book) -> None:
    book.say("s", "t1", [1, 2, 3], [4, 5])
    edited = apply(book.state(), RangeRemoved(at_s=0, start=1, end=4))
    check_state(edited)
    assert unpack_tokens(edited.token_bytes) == (1, 5)
    assert [(each.position, each.num_removed) for each in edited.edits] == [(1, 3)]
    events = [(each.session_id, each.event) for each in book.stored if each.event is not None]
    book.book = SessionBook()
    book.book.restore([*events, (SessionId("s"), RangeRemoved(at_s=0, start=1, end=4))], Epoch(0), 0.0)
    assert refused(book.begin(turn="t2")) == "Conflict"
