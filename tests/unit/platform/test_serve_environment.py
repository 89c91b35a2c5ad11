"""Where Serve listens: the HAProxy wrapper, and addresses that need keys."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from remora.platform.base.errors import ConfigError
from remora.platform.base.serve_environment import (
    is_loopback,
    require_loopback,
    serve_environment,
    write_haproxy_wrapper,
)

CONFIG = """global
    maxconn 10
defaults
    mode http
    timeout connect 1s
    timeout client 1s
    timeout server 1s
    errorfile 502 /nowhere/500.http
    errorfile 503 /nowhere/500.http
frontend prometheus
    bind :9101
    mode http
    no log
frontend http_frontend
    bind 127.0.0.1:8000
    default_backend default_backend
backend default_backend
    http-request return status 404
listen stats
  bind *:8404
  stats enable
"""


def test_haproxy_starts_without_pages_on_all_interfaces(tmp_path: Path) -> None:
    wrapper = write_haproxy_wrapper(tmp_path / "haproxy")
    config = tmp_path / "c"
    config.write_text(CONFIG)
    checked = subprocess.run([wrapper, "-c", "-f", str(config)], capture_output=True, text=True, timeout=20)
    assert checked.returncode == 0, checked.stderr
    kept = config.read_text()
    assert [line.strip() for line in kept.splitlines() if "bind" in line] == ["bind 127.0.0.1:8000"]
    assert "/nowhere" not in kept
    again = kept
    subprocess.run([wrapper, "-c", "-f", str(config)], check=True, capture_output=True, timeout=20)
    assert config.read_text() == again


def test_a_wrapper_never_starts_another_wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sets its environment twice, as tests do, would make HAProxy start itself for ever."""
    for name in ("first", "second"):
        for variable, value in serve_environment(tmp_path / name).items():
            monkeypatch.setenv(variable, value)
    version = subprocess.run(
        [os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"], "-v"], capture_output=True, text=True, timeout=20, check=True
    )
    assert version.stdout.startswith("HAProxy version")


def test_an_operators_haproxy_is_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.write_text("#!/bin/sh\necho mine $@\n")
    own.chmod(0o755)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(own))
    wrapper = write_haproxy_wrapper(tmp_path / "haproxy")
    assert subprocess.run([wrapper, "-v"], capture_output=True, text=True, timeout=20).stdout == "mine -v\n"


def test_haproxys_own_answer_is_an_openai_error_with_retry_after(tmp_path: Path) -> None:
    write_haproxy_wrapper(tmp_path)
    head, _, body = (tmp_path / "unavailable.http").read_bytes().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1" in head
    assert f"Content-Length: {len(body)}".encode() in head
    assert b'"code":"unavailable"' in body


def test_the_instances_files_are_private_and_its_socket_paths_short(tmp_path: Path) -> None:
    folder = Path("/tmp/remora-1000-abcdefgh")
    environment = serve_environment(tmp_path)
    assert (tmp_path / "haproxy").stat().st_mode & 0o077 == 0
    # HAProxy binds PATH.PID.tmp; Serve adds the node's id of 56 characters.
    socket = environment["RAY_SERVE_HAPROXY_SOCKET_PATH"].replace(str(tmp_path), str(folder))
    assert len(os.path.join(os.path.dirname(socket), "n" * 56, os.path.basename(socket))) + len(".4194304.tmp") < 107


def test_without_a_folder_haproxy_is_not_used() -> None:
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in serve_environment()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert is_loopback(host)
    require_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.org", ""])
def test_other_addresses_are_refused_by_name_without_keys(host: str) -> None:
    with pytest.raises(ConfigError, match=r"http\.host"):
        require_loopback(host)
