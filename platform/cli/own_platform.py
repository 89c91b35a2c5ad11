"""A platform that runs for the time of a measurement."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remora.platform.base.errors import RemoraError
from remora.platform.cli.instance import InstanceStore

_START_TIMEOUT_S = 600.0
_NAME = "bench"


@contextmanager
def own_platform(config: Path | None = None) -> Iterator[str]:
    """`remora up` with a state of its own until the block ends; yields its URL when it is ready. Default: what
    `remora up` serves. Raises RemoraError when it does not start; its messages are on standard error."""
    with tempfile.TemporaryDirectory(prefix="remora-bench-") as state_dir:
        files = [] if config is None else [str(config)]
        environment = {**os.environ, "REMORA_STATE_DIR": state_dir}
        process = subprocess.Popen(
            [sys.executable, "-m", "remora.platform.cli.main", "up", *files, "--port", "0", "--name", _NAME],
            env=environment,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield _await_url(process, Path(state_dir))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=120)


def _await_url(process: subprocess.Popen[bytes], state_dir: Path) -> str:
    store = InstanceStore(state_dir, _NAME)
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        record = store.read()
        if record is not None and record.status == "ready":
            return record.url
        time.sleep(0.2)
    raise RemoraError("the platform did not start; its messages are above")
