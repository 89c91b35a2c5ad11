"""Logs that go on with another model: what the book keeps, and when it refuses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_session_book import Book, refused

from remora.namespaces.session_commands import ForkSession, MoveSession, SessionHead, ShowSession
from remora.namespaces.session_log import ModelLog, SessionState, pack_tokens
from remora.namespaces.session_turn import Turn
from remora.platform.base.ids import ModelId, NamespaceId, ReplicaId, SessionId


@pytest.fixture
def book() -> Book:
    made = Book()
    made.create()
    made.say("s", "t1", [1, 2], [3])
    return made


def other_log(state: SessionState, tokens: list[int], **changes: Any) -> ModelLog:
    log = ModelLog(
        version=state.version,
        model_id=ModelId("other"),
        namespace_id=NamespaceId("o"),
        token_bytes=pack_tokens(tokens),
        turns=(Turn(kind="text", start=0, prompt_end=1, end=len(tokens)),),
    )
    return msgspec.structs.replace(log, **changes)


def move(book: Book, log: ModelLog, **more: Any) -> Any:
    command = MoveSession(session_id=SessionId("s"), owner=ReplicaId("r"), log=log, **{"max_sessions": 3, **more})
    return book.do(command)


def test_a_session_that_changed_its_model_has_the_log_of_that_model_also_after_a_restart(book: Book) -> None:
    before = book.state()
    head = move(book, other_log(before, [7, 8, 9, 10]))
    assert isinstance(head, SessionHead)
    for _ in range(2):
        state = book.state()
        assert (state.model_id, state.namespace_id, state.owner) == ("other", "o", "r")
        assert book.tokens() == [7, 8, 9, 10]
        assert (state.version, state.epoch > before.epoch) == (before.version + 1, True)
        book.restart()
    assert refused(book.begin(turn="t2")) == "InvalidRequest", "it is no session of the old model any more"
    book.begin(turn="t3", model_id=ModelId("other"))


def test_a_log_that_was_made_before_another_turn_is_refused(book: Book) -> None:
    log = other_log(book.state(), [7])
    book.say("s", "t2", [4], [5])
    assert refused(move(book, log)) == "Conflict"
    fork = ForkSession(
        session_id=SessionId("s"), new_id=SessionId("f"), call_id="fork", max_sessions=3, log=log
    )  # fmt: skip
    assert refused(book.do(fork)) == "Conflict"
    assert book.tokens() == [1, 2, 3, 4, 5]


def test_a_move_to_another_model_that_is_said_again_changes_nothing(book: Book) -> None:
    log = other_log(book.state(), [7, 8])
    move(book, log)
    after = book.state()
    for _ in range(2):
        assert isinstance(move(book, log), SessionHead)
        assert book.state() == after
        book.restart()
    assert refused(move(book, msgspec.structs.replace(log, token_bytes=pack_tokens([7, 9])))) == "Conflict"


def test_a_session_does_not_change_its_model_under_a_writer(book: Book) -> None:
    book.begin(turn="t2")
    assert refused(move(book, other_log(book.state(), [7]))) == "Conflict"


def test_the_namespace_of_the_other_model_makes_room_or_refuses(book: Book) -> None:
    for name in ("a", "b"):
        log = other_log(book.state(), [7])
        command = ForkSession(
            session_id=SessionId("s"), new_id=SessionId(name), call_id=name, max_sessions=1, log=log,
            owner=ReplicaId("r"),
        )  # fmt: skip
        assert isinstance(book.do(command), SessionHead)
    assert refused(book.do(ShowSession(session_id=SessionId("a")))) == "NotFound", "the older one went"
    fork = book.state("b")
    assert (fork.model_id, fork.namespace_id, fork.parent_id, fork.owner) == ("other", "o", "s", "r")
    assert book.tokens("b") == [7]
    assert book.tokens() == [1, 2, 3], "the parent is as it was"
    book.begin("b", "t", model_id=ModelId("other"))
    assert refused(move(book, other_log(book.state(), [7]), max_sessions=1)) == "OverQuota"
