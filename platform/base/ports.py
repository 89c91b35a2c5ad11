"""Ports for servers that start a little later."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

#: Above what Ray gives its workers, below what Serve gives its replicas, and far below what the system takes for
#: outgoing connections: one of those could have the port before the server comes to bind it.
_PORTS: Final = range(20_000, 30_000)
_MAX_TRIES: Final = 200


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports of that address that nobody listens on now. Raises OSError when none is found, or there is no
    such address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        problem = OSError("no port is free")
        for port in random.SystemRandom().sample(_PORTS, _MAX_TRIES):
            if len(found) == count:
                break
            probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            try:
                probe.bind((host, port))
            except OSError as error:
                problem = error
            else:
                found.append(port)
        if len(found) < count:
            raise problem
        return found
