"""The hop between two nodes: what the ring of one node promises, over a connection."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from remora.deployments.pipeline.link_hop import LinkReceiver, LinkSender
from remora.platform.base.errors import StageLost

MAX_BYTES = 200_000


@pytest.fixture
def receiver() -> Iterator[LinkReceiver]:
    made = LinkReceiver("127.0.0.1", max_message_bytes=MAX_BYTES, num_messages=2)
    yield made
    made.close()


def soon() -> float:
    return time.monotonic() + 10


def put(sender: LinkSender, data: bytes, deadline_s: float) -> None:
    sender.reserve(len(data), deadline_s)[:] = np.frombuffer(data, np.uint8)
    sender.commit()


def test_messages_of_any_length_arrive_whole_and_in_order(receiver: LinkReceiver) -> None:
    messages = [bytes([number % 251]) * length for number, length in enumerate([0, 1, 4096, 7, MAX_BYTES, 0, 99] * 20)]
    sender = LinkSender(receiver.address)

    def send() -> None:
        for message in messages:
            put(sender, message, soon())

    thread = threading.Thread(target=send)
    thread.start()
    for number, message in enumerate(messages):
        assert receiver.peek(soon()).tobytes() == message
        if number % 5 == 0:
            time.sleep(0.001)
        receiver.release()
    thread.join()
    assert not receiver.has_message()
    sender.close()
    with pytest.raises(StageLost, match=r"closed.*closed the link"):
        receiver.peek(math.inf)


def test_a_writer_waits_for_a_slow_reader_until_the_deadline_and_a_reader_for_a_message(receiver: LinkReceiver) -> None:
    with pytest.raises(StageLost, match="in time"):
        receiver.peek(time.monotonic() + 0.02)
    sender = LinkSender(receiver.address)
    deadline_s, num_sent, reason = time.monotonic() + 0.3, 0, ""
    while not reason:
        try:
            put(sender, b"x" * MAX_BYTES, deadline_s)
            num_sent += 1
        except StageLost as lost:
            reason = str(lost)
    assert "too slow" in reason
    assert 2 <= num_sent < 100, "the ring, and what the system keeps for a connection"
    assert receiver.peek(soon()).tobytes() == b"x" * MAX_BYTES


def is_cut_off(sender: LinkSender) -> bool:
    try:
        put(sender, b"other", soon())
    except StageLost:
        return True
    return False


def test_one_sender_only_that_knows_the_secret_and_no_message_larger_than_agreed(receiver: LinkReceiver) -> None:
    with pytest.raises(StageLost, match="cannot be reached"):
        LinkSender(msgspec.structs.replace(receiver.address, secret=b"another"))
    first, second = LinkSender(receiver.address), LinkSender(receiver.address)
    put(first, b"one", soon())
    assert receiver.peek(soon()).tobytes() == b"one"
    receiver.release()
    while not is_cut_off(second):
        time.sleep(0.01)
    assert not receiver.has_message()
    put(first, b"x" * (MAX_BYTES + 1), soon())
    with pytest.raises(StageLost, match="too many"):
        receiver.peek(soon())


SENDER = """
import sys, time, msgspec
from remora.cache_actors.byte_link import LinkAddress
from remora.deployments.pipeline.link_hop import LinkSender
sender = LinkSender(msgspec.json.decode(sys.argv[1], type=LinkAddress))
sender.reserve(4, time.monotonic() + 10)[:] = 7
sender.commit()
time.sleep(60)
"""


def test_waiting_for_a_process_ends_when_it_is_killed(receiver: LinkReceiver) -> None:
    address = msgspec.json.encode(receiver.address).decode()
    with subprocess.Popen([sys.executable, "-c", SENDER, address]) as other:
        assert receiver.peek(time.monotonic() + 60).tobytes() == b"\7" * 4
        receiver.release()
        killer = threading.Timer(0.1, os.kill, (other.pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(StageLost, match="closed"):
            receiver.peek(math.inf)
        killer.join()
