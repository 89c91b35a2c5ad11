"""The ring between two stages: everything arrives in order, nobody waits for the dead."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.cache_actors.process_watch import process_identity
from remora.deployments.pipeline.hops import open_ring
from remora.deployments.pipeline.message import Kind, Message, MicroTime, forward_bytes, result_bytes
from remora.deployments.pipeline.ring import Ring
from remora.platform.base.errors import StageLost

MAX_BYTES = 500


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ring = tmp_path / "ring"
    Ring.create(ring, max_message_bytes=MAX_BYTES, num_messages=2)
    return ring


def soon() -> float:
    return time.monotonic() + 10


def put(ring: Ring, data: bytes) -> None:
    ring.reserve(len(data), soon())[:] = np.frombuffer(data, np.uint8)
    ring.commit()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, MAX_BYTES), max_size=60), st.integers(0, 3))
def test_messages_of_any_length_arrive_whole_and_in_order(tmp_path_factory, lengths: list[int], naps: int) -> None:
    path = tmp_path_factory.mktemp("ring") / "ring"
    Ring.create(path, max_message_bytes=MAX_BYTES, num_messages=2)
    me = process_identity()
    messages = [bytes([number % 251]) * length for number, length in enumerate(lengths)]
    reader = open_ring(path, me)
    got: list[bytes] = []

    def read() -> None:
        for number in range(len(messages)):
            if naps and number % 7 < naps:
                time.sleep(0.0005)
            got.append(reader.peek(soon()).tobytes())
            reader.release()

    thread = threading.Thread(target=read)
    thread.start()
    writer = open_ring(path, me)
    for message in messages:
        put(writer, message)
    thread.join(20)
    assert got == messages
    assert not reader.has_message()


def test_a_writer_waits_for_room_and_a_reader_for_a_message_until_the_deadline(path: Path) -> None:
    me = process_identity()
    writer, reader = open_ring(path, me), open_ring(path, me)
    with pytest.raises(StageLost, match="in time"):
        reader.peek(time.monotonic() + 0.02)
    put(writer, b"a" * MAX_BYTES)
    put(writer, b"b" * MAX_BYTES)
    with pytest.raises(StageLost, match="in time"):
        writer.reserve(1, time.monotonic() + 0.02)
    with pytest.raises(StageLost, match="a message of 900 bytes"):
        writer.reserve(900, soon())
    writer.close()
    # What was sent before the end still comes.
    assert reader.peek(soon()).tobytes() == b"a" * MAX_BYTES
    reader.release()
    reader.peek(soon())
    reader.release()
    with pytest.raises(StageLost, match="closed"):
        reader.peek(math.inf)
    with pytest.raises(StageLost, match="closed"):
        writer.reserve(1, soon())


def test_waiting_for_a_process_ends_when_it_is_killed(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1) as other:
        assert other.stdout is not None
        other.stdout.readline()
        ring = open_ring(path, process_identity(other.pid))
        killer = threading.Timer(0.1, os.kill, (other.pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(StageLost, match="is gone"):
            ring.peek(math.inf)
        killer.join()
    with pytest.raises(StageLost):
        open_ring(path, process_identity(os.getpid()).__class__(pid=other.pid, start_time_ticks=1, boot_id="x"))


def test_a_file_that_is_no_ring_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(bytes(4096))
    for name, message in [("other", "no channel"), ("missing", "cannot be opened")]:
        with pytest.raises(StageLost, match=message):
            open_ring(tmp_path / name, process_identity())


def test_a_micro_batch_is_read_as_it_was_written_and_fits_its_bound() -> None:
    rng = np.random.default_rng(0)
    message = Message(
        kind=Kind.WORK,
        ticket=7,
        micro=2,
        num_tokens=5,
        times_K7=rng.random((2, len(MicroTime._fields))),
        tables_KSB=rng.integers(0, 99, (2, 3, 4)).astype(np.int32),
        query_start_S=np.array([0, 1, 2, 5], np.int32),
        context_len_S=np.array([9, 1, 40], np.int32),
        logit_rows_R=np.array([0, 4], np.int32),
        not_finite_S=np.array([0, 1, 0], np.uint8),
        fault="KernelError: stage 1: block 99 lies outside an arena, é" * 60,
        values=rng.random((5, 8)).astype(np.float32),
    )
    buffer = np.zeros(message.num_bytes(), np.uint8)
    bound = forward_bytes(num_stages=3, num_sequences=3, num_columns=4, num_tokens=5, hidden_size=8)
    assert len(buffer) <= bound
    assert result_bytes(num_stages=3, num_sequences=3, num_logits=5, vocab_size=8) <= bound
    message.write_into(buffer)
    again = Message.read(buffer)
    for name in ("times_K7", "tables_KSB", "query_start_S", "context_len_S", "logit_rows_R", "not_finite_S", "values"):
        assert (getattr(again, name) == getattr(message, name)).all(), name
    assert (again.kind, again.ticket, again.micro, again.num_tokens) == (Kind.WORK, 7, 2, 5)
    assert again.fault.startswith("KernelError: stage 1")
    assert abs(again.sent_unix_s - time.time()) < 60
