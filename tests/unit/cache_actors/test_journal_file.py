"""The journal file: whatever happens to its bytes, what it gives back is a prefix of what was put in, or an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pool_helpers import ReplicaCalls

from remora.cache_actors.journal_file import JournalFile, read_journal_file
from remora.namespaces.commands import AnyCommand
from remora.platform.base.errors import JournalError, Unavailable

SNAPSHOT = b"a snapshot, opaque to the file" + bytes(20)


def commands(count: int, name: str = "l") -> list[AnyCommand]:
    calls = ReplicaCalls(name)
    return [calls.attach(), *(calls.admit(f"s{number}", range(40 + number)) for number in range(count - 1))]


def contents(path: Path) -> list[AnyCommand]:
    return [record.command for record in read_journal_file(path).records]


def test_what_was_appended_is_read_back_in_order_with_numbers_and_times(tmp_path: Path) -> None:
    path, all_commands = tmp_path / "p.journal", commands(9)
    journal = JournalFile(path, SNAPSHOT, 41)
    assert journal.append(all_commands[:4], 1.5) == 45
    assert journal.append(all_commands[4:], 2.0) == 50
    log = read_journal_file(path)
    assert log.snapshot == SNAPSHOT
    assert [record.record_no for record in log.records] == list(range(42, 51))
    assert [record.command for record in log.records] == all_commands
    assert [record.now_s for record in log.records] == [1.5] * 4 + [2.0] * 5
    assert log.last_record_no == 50
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_snapshot_replaces_the_commands_and_numbers_go_on(tmp_path: Path) -> None:
    journal = JournalFile(tmp_path / "p.journal", SNAPSHOT, 0)
    journal.append(commands(5), 0.0)
    journal.compact(b"newer")
    assert read_journal_file(journal.path).snapshot == b"newer"
    assert contents(journal.path) == []
    assert journal.append(commands(1), 0.0) == 6
    assert [record.record_no for record in read_journal_file(journal.path).records] == [6]
    assert list(tmp_path.iterdir()) == [journal.path]


def test_a_journal_asks_for_a_snapshot_before_it_outgrows_it_by_much(tmp_path: Path) -> None:
    journal = JournalFile(tmp_path / "p.journal", SNAPSHOT, 0)
    allocated = journal.path.stat().st_size
    batch = commands(200)
    while not journal.is_due:
        journal.append(batch, 0.0)
    assert journal.num_bytes < journal.path.stat().st_size == allocated, "due well before the allocated end"
    for _ in range(200):
        journal.append(batch, 0.0)
    assert journal.num_bytes <= journal.path.stat().st_size, "and it goes on when nobody compacts it"
    assert len(contents(journal.path)) == journal.last_record_no


def test_no_room_refuses_the_commands_whole_and_keeps_the_journal_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = JournalFile(tmp_path / "p.journal", SNAPSHOT, 0)
    journal.append(commands(3), 0.0)
    real_pwrite = os.pwrite

    def half_then_full(fd: int, data: memoryview, offset: int) -> int:
        monkeypatch.setattr(os, "pwrite", no_room)
        return real_pwrite(fd, data[: len(data) // 2], offset)

    def no_room(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", half_then_full)
    with pytest.raises(Unavailable, match="No space left"):
        journal.append(commands(3, "other"), 0.0)
    with pytest.raises(JournalError, match="cannot allocate"):
        journal.compact(b"x")
    assert contents(journal.path) == commands(3)
    monkeypatch.setattr(os, "pwrite", real_pwrite)
    assert journal.append(commands(2, "third"), 0.0) == 5
    assert contents(journal.path) == commands(3) + commands(2, "third")


@pytest.fixture(scope="module")
def journal_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("journal") / "p.journal"
    journal = JournalFile(path, SNAPSHOT, 0)
    journal.append(commands(12), 3.0)
    data = path.read_bytes()
    return data[: journal.num_bytes]


fuzz = hypothesis_settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@fuzz
@given(cut=st.integers(0, 10_000), padding=st.integers(0, 300))
def test_a_journal_cut_anywhere_gives_a_prefix_or_an_error(
    tmp_path: Path, journal_bytes: bytes, cut: int, padding: int
) -> None:
    path = tmp_path / "cut.journal"
    path.write_bytes(journal_bytes[:cut] + bytes(padding))
    try:
        log = read_journal_file(path)
    except JournalError:
        assert cut < 28 + len(SNAPSHOT) + 1
        return
    assert log.snapshot == SNAPSHOT
    got = [record.command for record in log.records]
    assert got == commands(12)[: len(got)]
    assert log.last_record_no == len(got)
    if cut >= len(journal_bytes):
        assert len(got) == 12


@fuzz
@given(
    flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=4),
    tail=st.binary(max_size=200),
)
def test_damaged_bytes_never_give_other_commands(
    tmp_path: Path, journal_bytes: bytes, flips: list[tuple[int, int]], tail: bytes
) -> None:
    data = bytearray(journal_bytes + tail)
    for position, mask in flips:
        data[position % len(data)] ^= mask
    path = tmp_path / "damaged.journal"
    path.write_bytes(data)
    try:
        log = read_journal_file(path)
    except JournalError:
        return
    assert log.snapshot == SNAPSHOT
    got = [record.command for record in log.records]
    assert got == commands(12)[: len(got)]


@pytest.mark.parametrize("data", [b"", b"REMORAJ1", b"other", bytes(100)])
def test_what_is_no_journal_is_an_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.journal"
    path.write_bytes(data)
    with pytest.raises(JournalError):
        read_journal_file(path)
    with pytest.raises(JournalError):
        read_journal_file(tmp_path / "missing.journal")
