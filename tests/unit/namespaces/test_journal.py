"""The journal as bytes: what was answered is read back, a torn tail is cut, damage is not overlooked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_driver import Driver, prompt

from remora.namespaces.commands import AnyCommand, Detach, Release, Tick
from remora.namespaces.journal import encode_record, read_journal
from remora.namespaces.pool import PoolState
from remora.platform.base.errors import JournalError

COMMANDS: list[AnyCommand] = [
    Tick(lease_id="", call_no=0),
    Release(lease_id="l", call_no=2, sequence_ids=("a", "b")),
    Detach(lease_id="l", call_no=3),
]
FRAMES = [encode_record(number, command, number / 2) for number, command in enumerate(COMMANDS, 7)]
JOURNAL = b"".join(FRAMES)


def test_records_come_back_as_they_were_written() -> None:
    contents = read_journal(JOURNAL, first_record_no=7)
    assert [tuple(record) for record in contents.records] == [
        (number, command, number / 2) for number, command in enumerate(COMMANDS, 7)
    ]
    assert (contents.valid_bytes, contents.torn_bytes) == (len(JOURNAL), 0)
    assert read_journal(b"") == ((), 0, 0)


@given(st.integers(0, len(JOURNAL)))
def test_a_journal_cut_anywhere_gives_its_whole_records_and_the_length_of_the_torn_tail(cut: int) -> None:
    contents = read_journal(JOURNAL[:cut], first_record_no=7)
    whole = sum(1 for number in range(1, 4) if sum(map(len, FRAMES[:number])) <= cut)
    assert len(contents.records) == whole
    assert contents.valid_bytes == sum(map(len, FRAMES[:whole]))
    assert contents.valid_bytes + contents.torn_bytes == cut


@given(st.integers(0, len(JOURNAL) - 1), st.integers(1, 255))
def test_one_damaged_byte_is_never_read_as_something_else(position: int, change: int) -> None:
    damaged = bytearray(JOURNAL)
    damaged[position] ^= change
    last_start = len(JOURNAL) - len(FRAMES[-1])
    if position < last_start:
        with pytest.raises(JournalError):
            read_journal(bytes(damaged), first_record_no=7)
    else:
        contents = read_journal(bytes(damaged), first_record_no=7)
        assert len(contents.records) == 2
        assert contents.torn_bytes == len(FRAMES[-1])


def test_zeros_behind_the_last_record_are_a_torn_tail() -> None:
    contents = read_journal(JOURNAL + bytes(100), first_record_no=7)
    assert (len(contents.records), contents.torn_bytes) == (3, 100)


def test_a_missing_record_a_repeated_one_and_a_wrong_start_are_damage() -> None:
    for data, first in ((FRAMES[0] + FRAMES[2], 7), (FRAMES[0] * 2, 7), (JOURNAL, 6)):
        with pytest.raises(JournalError, match="belongs"):
            read_journal(data, first_record_no=first)


def test_a_record_of_an_unknown_command_is_an_error_not_a_tail() -> None:
    import struct
    import zlib

    import msgspec

    payload = msgspec.msgpack.encode([{"type": "Unheard"}, 0.0])
    number = struct.pack("<Q", 1)
    crc = zlib.crc32(payload, zlib.crc32(number))
    with pytest.raises(JournalError, match="cannot be understood"):
        read_journal(b"\xa7\x4a" + struct.pack("<II", len(payload), crc) + number + payload)


@pytest.mark.parametrize("damage", [b"", b"x", b"remora-pool-snapshot-0\n", None])
def test_a_damaged_or_foreign_snapshot_is_refused(damage: bytes | None) -> None:
    driver = Driver()
    driver.namespace("a")
    driver.lease().run("s", "a", prompt(3))
    snapshot = driver.state.snapshot()
    if damage is None:
        damage = snapshot[:-1] + bytes([snapshot[-1] ^ 1])
    with pytest.raises(JournalError):
        PoolState.restore(damage)
