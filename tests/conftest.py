"""What all tests share: isolation, one local Ray, rules for skipping, and a check that nothing is left behind."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from remora.kernels.cuda.host.runtime import EmulatedRuntime

sys.path.append(str(Path(__file__).parent))

# Ignored where a shell has started the tests in the background: what they start would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Set before any module of Remora is imported: nothing of a test is seen by, or mixed up with, a running platform.
_SESSION_VARIABLE = "REMORA_TEST_SESSION"
_SESSION = secrets.token_hex(4)
_STATE_DIR = Path(tempfile.mkdtemp(prefix="remora-tests-"))
_SHM_DIR = Path("/dev/shm") / f"remora-tests-{os.getpid()}-{_SESSION}"
for _path in _SHM_DIR.parent.glob("remora-tests-*-*"):  # of sessions that were killed
    if _path.stat().st_uid == os.getuid() and not Path("/proc", _path.name.split("-")[2]).exists():
        shutil.rmtree(_path, ignore_errors=True)
_SHM_DIR.mkdir(mode=0o700)
for _name in [name for name in os.environ if name.startswith(("REMORA_", "RAY_"))]:
    if _name not in ("REMORA_REQUIRE_ALL", "REMORA_TRACES", "REMORA_KUBERAY_CRDS", "REMORA_TEST_THREADS"):
        del os.environ[_name]
os.environ[_SESSION_VARIABLE] = _SESSION
os.environ["REMORA_STATE_DIR"] = str(_STATE_DIR)
os.environ["REMORA_SHM_DIR"] = str(_SHM_DIR)
os.environ["HF_HUB_OFFLINE"] = "1"

# Ray reads this when it is imported, which test modules do before any fixture runs: its sockets bind to loopback.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
# A node that is killed counts as dead after 1.5 s and not 15.
os.environ.update(
    {
        "RAY_health_check_initial_delay_ms": "0",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "3",
    }
)

REQUIRE_ALL = os.environ.get("REMORA_REQUIRE_ALL") == "1"

settings.register_profile("dev", deadline=None, max_examples=50)
settings.register_profile(
    "ci",
    deadline=None,
    max_examples=100,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

_PROGRAMS = {
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
    "postgresql": ("pg_ctl", "postgres"),
    "node": ("node",),
    "g++": ("g++", "clang++"),
}


def find_program(name: str) -> str | None:
    """Path of a program that tests may need, also where Debian hides it."""
    places = [os.environ.get("PATH", ""), *(str(path) for path in Path("/usr/lib/postgresql").glob("*/bin"))]
    for candidate in _PROGRAMS.get(name, (name,)):
        found = shutil.which(candidate, path=os.pathsep.join(places))
        if found:
            return found
    return None


@pytest.fixture(scope="session")
def require() -> Callable[[str], str]:
    """`require("chromium")` returns the program's path, or skips the test by the program's name."""

    def find_or_skip(name: str) -> str:
        found = find_program(name)
        if found is None:
            pytest.skip(f"needs {name}")
        return found

    return find_or_skip


@pytest.fixture(scope="session")
def require_data() -> Callable[[str], Path]:
    """`require_data("REMORA_TRACES")` returns the folder or file that the variable names, or skips by its name."""

    def find_or_skip(variable: str) -> Path:
        value = os.environ.get(variable)
        if not value:
            pytest.skip(f"needs data: {variable} is not set")
        path = Path(value)
        if not path.exists():
            pytest.fail(f"{variable} names {path}, which does not exist")
        return path

    return find_or_skip


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One Ray of the session's own with 16 logical CPUs: free ports, loopback only.

    Named actors need names of their own. Serve's environment is set, Serve itself is not started.
    """
    from remora.platform.base.local_ray import new_temp_dir, start_local_ray, stop_local_ray

    temp_dir = new_temp_dir()
    start_local_ray(temp_dir, namespace="remora-tests", num_cpus=16, object_store_bytes=128 * 1024 * 1024)
    yield
    stop_local_ray(temp_dir)


@pytest.fixture(scope="session")
def host_cache(pytestconfig: pytest.Config) -> Path:
    """CUDA sources that were compiled for the host, kept for all processes and later runs under names of their own."""
    assert pytestconfig.cache is not None, "pytest runs with its cache"
    return Path(pytestconfig.cache.mkdir("cuda-host"))


@pytest.fixture(scope="session")
def runtime(require: Callable[[str], str], host_cache: Path) -> EmulatedRuntime:
    """What a decoder on a GPU runs on, by emulation; tests/gpu has a card."""
    from remora.kernels.cuda.host.runtime import EmulatedRuntime

    return EmulatedRuntime(host_cache, require("g++"))


# ---- which tests run -------------------------------------------------------------------------------------------------

_deselected = pytest.StashKey[dict[str, list[str]]]()
_leftovers = pytest.StashKey[list[str]]()
#: What a process of several tells the one that started it.
_LEFT_OUT, _LEFT_BEHIND = "left_out", "left_behind"
#: Quick ones first. What tests share of Ray and of the platform stays up to the end and costs every test behind it.
_ORDER = ("unit", "kernels", "gpu", "engine", "cluster", "e2e")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders the folders; leaves out, by name, tests of a GPU that is not there and soak tests unless asked for."""
    items.sort(key=lambda item: next((_ORDER.index(part) for part in item.nodeid.split("/") if part in _ORDER), 0))
    reasons = {}
    if not Path("/dev/nvidiactl").exists():
        reasons["gpu"] = "no NVIDIA GPU here"
    if "soak" not in (config.option.markexpr or ""):
        reasons["soak"] = "run by `make soak`"
    left_out: dict[str, list[str]] = {}
    kept, removed = [], []
    for item in items:
        marker = next((name for name in reasons if item.get_closest_marker(name)), None)
        if marker is None:
            kept.append(item)
        else:
            removed.append(item)
            left_out.setdefault(f"{marker}: {reasons[marker]}", []).append(item.nodeid)
    if removed:
        config.hook.pytest_deselected(items=removed)
        items[:] = kept
    config.stash[_deselected] = left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """One of several processes that tests run in (pytest-xdist) is done: what it found counts for the whole."""
    output = getattr(node, "workeroutput", {})
    node.config.stash.setdefault(_deselected, {}).update(output.get(_LEFT_OUT, {}))
    node.config.stash.setdefault(_leftovers, []).extend(output.get(_LEFT_BEHIND, []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for reason, names in config.stash.get(_deselected, {}).items():
        files = Counter(name.partition("::")[0] for name in names)
        counts = ", ".join(f"{count} of {name}" for name, count in files.items())
        terminalreporter.write_line(f"left out ({reason}): {counts}")
    for line in config.stash.get(_leftovers, []):
        terminalreporter.write_line(f"LEFT BEHIND: {line}", red=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail"):  # type: ignore[attr-defined]
        _fail_instead(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    if REQUIRE_ALL and report.skipped:  # type: ignore[attr-defined]
        _fail_instead(report)
    return report


def _fail_instead(report: object) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr  # type: ignore[attr-defined]
    report.outcome = "failed"  # type: ignore[attr-defined]
    report.longrepr = f"REMORA_REQUIRE_ALL=1 allows no skip: {reason}"  # type: ignore[attr-defined]


# ---- nothing is left behind ------------------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Processes and shared memory that tests leave behind fail the session, and are removed."""
    from remora.platform.cli.processes import command_of, kill_processes, marked_processes

    left = session.config.stash.setdefault(_leftovers, [])
    processes = _settled(lambda: marked_processes(_SESSION_VARIABLE, _SESSION))
    left += [f"process {process.pid}: {command_of(process.pid)}" for process in processes]
    kill_processes(processes)
    left += [f"shared memory: {path}" for path in sorted(_SHM_DIR.iterdir())]
    shutil.rmtree(_SHM_DIR, ignore_errors=True)
    shutil.rmtree(_STATE_DIR, ignore_errors=True)
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output.update({_LEFT_OUT: session.config.stash.get(_deselected, {}), _LEFT_BEHIND: left})
    if left and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _settled(find: Callable[[], list]) -> list:  # type: ignore[type-arg]
    """What is still there after a grace of a few seconds: children that were told to end need a moment."""
    import time

    deadline_s = time.monotonic() + 5
    while (found := find()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return found
