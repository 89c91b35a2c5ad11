from __future__ import annotations

import socket
from pathlib import Path

import pytest

from remora.platform.base import ports
from remora.platform.base.ports import free_ports


def test_ports_are_different_free_and_none_that_an_outgoing_connection_can_take() -> None:
    found = free_ports(20)
    assert len(set(found)) == 20
    lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(found) < lowest_outgoing
    for port in found:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_that_somebody_listens_on_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setattr(ports, "_PORTS", range(port, port + 200))
    with socket.create_server(("127.0.0.1", port)):
        assert port not in free_ports(50)
    monkeypatch.setattr(ports, "_PORTS", [port] * 200)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match="in use"):
        free_ports(1)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign"):
        free_ports(1, "192.0.2.1")
