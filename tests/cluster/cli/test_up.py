"""An instance as its user sees it: what it prints, what listens, and that it ends without a trace."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from remora.platform.base import telemetry_names as names
from remora.platform.base.span_file import traces_dir
from remora.platform.base.trace_store import TraceStore

if TYPE_CHECKING:
    from tests.cluster.cli.conftest import Up

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

_LISTEN = "0A"


@pytest.fixture(scope="module")
def running(make_up: Callable[[str], Up]) -> Up:
    up = make_up("blue")
    up.start()
    up.await_line("Ctrl-C stops everything")
    return up


def listening_addresses(pids: set[int]) -> set[str]:
    """Addresses on which these processes accept TCP connections, as hexadecimal text of /proc/net."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(entry)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def test_every_step_of_the_start_is_told_with_seconds(running: Up) -> None:
    for step in ("model tiny: llama", "Ray: ", "pool cpu0: created", "Serve: started", "tiny: running", "ready: http"):
        assert running.await_line(step).startswith("[")


def test_the_curl_line_that_it_prints_works(running: Up) -> None:
    text = running.text
    lines = text[text.index("  curl ") :].split("\n\n")[0]
    answer = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, timeout=60, check=True).stdout
    assert '"content":"' in answer.replace(" ", "")
    assert '"finish_reason"' in answer


def test_every_listening_socket_is_on_loopback(running: Up) -> None:
    pids = {process.pid for process in running.processes()} | {running.process.pid}
    addresses = listening_addresses(pids)
    assert addresses
    allowed = {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F"}
    assert addresses <= allowed


def test_chat_status_ns_and_down_find_the_instance_by_themselves(running: Up) -> None:
    answer = running.run("chat", "--temperature", "0", "--max-tokens", "8", "Say hello.")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
    status = running.run("status").stdout
    assert f"blue: ready at {running.record.url}" in status
    assert "tiny" in status
    assert "tiny" in running.run("ns", "list").stdout


def test_one_request_is_one_trace_below_its_callers_span(running: Up) -> None:
    trace_id, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    response = httpx.post(
        f"{running.record.url}/v1/chat/completions",
        json=body,
        headers={"traceparent": f"00-{trace_id}-{parent}-01"},
        timeout=60,
        trust_env=False,
    )
    assert response.status_code == 200
    wanted = {names.ROUTER_ROUTE, names.POOL_ADMIT, names.ENGINE_PREFILL, names.ENGINE_DECODE}
    found: set[str] = set()
    roots: list[str | None] = []
    store = TraceStore(traces_dir(running.state_dir))
    for _ in range(200):  # each process writes its spans in its own time: the outermost may come last
        spans = store.spans(trace_id)
        found, known = {span.name for span in spans}, {span.span_id for span in spans}
        roots = [span.parent_span_id for span in spans if span.parent_span_id not in known]
        if wanted <= found and roots == [parent]:
            break
        time.sleep(0.1)
    assert wanted <= found
    assert roots == [parent]
    shown = running.run("trace", "show", trace_id[:12]).stdout
    assert all(name in shown for name in wanted)


def test_a_second_one_of_the_same_name_is_refused_with_the_firsts_address(running: Up) -> None:
    second = running.run("up", str(running.config_path), "--port", "0")
    assert second.returncode == 1
    assert running.record.url in second.stderr
    assert "Traceback" not in second.stderr


def test_a_port_that_is_taken_is_told_before_anything_starts(running: Up) -> None:
    port = running.record.url.rpartition(":")[2]
    other = running.run("up", str(running.config_path), "--port", port, "--name", "other")
    assert other.returncode == 2
    assert f"http.port: {port}" in other.stderr
    assert "--port 0" in other.stderr


def test_down_stops_its_own_instance_and_no_other_ray(running: Up, ray_cluster: None) -> None:
    import ray

    record = running.record
    done = running.run("down", "--name", "blue")
    assert done.returncode == 0, done.stderr
    assert "Stopped 'blue'" in done.stdout
    assert running.await_end(10) == 0, running.text
    running.assert_nothing_left(record)
    host, port = record.url.removeprefix("http://").split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)

    @ray.remote(num_cpus=0)
    def answer() -> int:
        return 42

    assert ray.get(answer.remote(), timeout=30) == 42
