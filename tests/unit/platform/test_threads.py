"""Threads that serve ask Linux for short slices, threads that compute do not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from remora.platform.base import threads

_SCRIPT = """
import ctypes, json, threading
from remora.platform.base.threads import _Attributes, compute_long, show_thread_name, wake_promptly

GET = {314: 315, 274: 275}
from remora.platform.base.threads import _SET_ATTRIBUTES

def slice_ns(thread_id):
    found = _Attributes()
    failed = ctypes.CDLL(None).syscall(GET[_SET_ATTRIBUTES], thread_id, ctypes.byref(found), ctypes.sizeof(found), 0)
    return None if failed else found.runtime

compute_long()  # the tests' process may serve itself
done, named, found = threading.Event(), threading.Event(), {}
def compute():
    show_thread_name("remora-team")
    named.set()
    done.wait()
team, waiter = threading.Thread(target=compute), threading.Thread(target=done.wait)
team.start(), waiter.start()
named.wait()
found["before"] = slice_ns(waiter.native_id)
wake_promptly()
found["serves"], found["computes"] = slice_ns(waiter.native_id), slice_ns(team.native_id)
def engine():
    found["inherits"] = slice_ns(threading.get_native_id())
    compute_long()
    found["engine"] = slice_ns(threading.get_native_id())
later = threading.Thread(target=engine)
later.start(), later.join()
done.set()
print(json.dumps(found))
"""


@pytest.mark.skipif(threads._SET_ATTRIBUTES is None, reason="the number of the system call is not known here")
def test_serving_threads_of_a_process_get_short_slices_and_computing_ones_keep_theirs() -> None:
    found = json.loads(subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, check=True).stdout)
    if not found["before"]:
        pytest.skip("this Linux has no slices to ask for")
    assert found["serves"] == found["inherits"] == 100_000 < found["before"]
    assert found["computes"] == found["engine"] == found["before"]
