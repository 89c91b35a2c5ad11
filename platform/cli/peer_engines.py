"""The engines of `remora bench peers`: each runs a case and says how many seconds it took.

vLLM and Remora keep the model loaded in a process of their own that sleeps between cases; llama.cpp's tools are started
for each. All take their settings from the machine: every core this process may use.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from remora.platform.base.errors import RemoraError
from remora.platform.base.ports import free_ports
from remora.platform.cli.peer_rows import Case, PeerModel

_START_TIMEOUT_S = 900.0


class PeerFailed(RemoraError):
    """A peer did not start, or broke off: the message names its log."""

    code = "peer_failed"


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def vllm_environment(folder: Path) -> dict[str, str]:
    """As vLLM's documentation has it for a CPU: all cores, tcmalloc and Intel's OpenMP preloaded where they are."""
    allocators = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1]
    preloaded = [*allocators, *sorted((folder / "vllm").glob("lib/libiomp5.so"))]
    cores = sorted(os.sched_getaffinity(0))
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        # Left to itself it keeps one core free for its other processes.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(map(str, preloaded)),
    }


class WorkerEngine:
    """A process that answers cases, one line each (peer_worker.py, vllm_worker.py)."""

    def __init__(self, label: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        """Waits until the model is loaded. Raises PeerFailed."""
        self.label, self.setting = label, ""
        self._log = tempfile.NamedTemporaryFile(prefix="remora-peer-", suffix=".log", delete=False)  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def measure(self, case: Case) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case.as_dict()) + "\n")
        self._process.stdin.flush()
        times = self._answer()
        return float(times["whole_s"] - times["prompt_s"] if case.kind == "decode" else times["whole_s"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(f"{self.label} ended without an answer; its log: {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        stop_process(self._process)
        self._log.close()


class LlamaEngine:
    """llama.cpp at its best: the first time a case is met every file is tried with flash attention on and off, and the
    fastest of them is what is measured from then on."""

    label = "llama.cpp"

    def __init__(self, folder: Path, model: PeerModel) -> None:
        self._tools, self._models, self._model = folder / "llama" / "bin", folder / "models", model
        self._best: dict[Case, tuple[str, str]] = {}
        self.setting = ""

    def measure(self, case: Case) -> float:
        if case not in self._best:
            tried = {(kind, fa): self._run(case, kind, fa) for kind in ("q4_1", "q8_0") for fa in ("off", "on")}
            self._best[case] = min(tried, key=lambda setting: tried[setting])
            first_s = tried[self._best[case]]
        else:
            first_s = self._run(case, *self._best[case])
        kind, fa = self._best[case]
        self.setting = f"{kind}, -fa {fa}"
        return first_s

    def close(self) -> None:
        pass

    def _run(self, case: Case, kind: str, flash_attention: str) -> float:
        return (self._turn if case.is_next_turn else self._batch)(case, kind, flash_attention)

    def _file(self, kind: str) -> str:
        return str(self._models / f"{self._model.name}-{kind}.gguf")

    def _batch(self, case: Case, kind: str, flash_attention: str) -> float:
        """llama-batched-bench; with a shared prompt its sequences have no part of their own, to its advantage."""
        context = case.num_sequences * (case.prompt_tokens + case.own_tokens + case.output_tokens) + 64
        command = [str(self._tools / "llama-batched-bench"), "-m", self._file(kind), "-c", str(context)]
        command += ["-npp", str(case.prompt_tokens), "-ntg", str(max(1, case.output_tokens - (case.kind == "decode")))]
        command += ["-npl", str(case.num_sequences), "-t", str(num_cores()), "-fa", flash_attention]
        command += ["--output-format", "jsonl", *(["-pps"] if case.kind == "shared" else [])]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"n_kv_max"')]
        if ran.returncode or not lines:
            raise PeerFailed(f"{' '.join(command)}: {ran.stderr[-500:]}")
        times = lines[0]
        if case.kind == "decode":
            return float(times["t_tg"])
        return float(times["t_pp"] if case.output_tokens == 1 else times["t"])

    def _turn(self, case: Case, kind: str, flash_attention: str) -> float:
        draw = random.Random(0)
        tokens = [draw.randrange(1000, 30000) for _ in range(case.prompt_tokens + case.own_tokens)]
        with llama_server(self._tools, self._file(kind), flash_attention, num_slots=1) as url:
            for end in (case.prompt_tokens, len(tokens)):
                started_s = time.perf_counter()
                body = {"prompt": tokens[:end], "n_predict": 1, "temperature": 0, "cache_prompt": True}
                request = urllib.request.Request(
                    f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=600) as response:
                    response.read()
                taken_s = time.perf_counter() - started_s
        return taken_s


def llama_server(
    tools: Path, file: str, flash_attention: str, *, num_slots: int
) -> contextlib.AbstractContextManager[str]:
    (port,) = free_ports(1)
    command = [str(tools / "llama-server"), "-m", file, "--host", "127.0.0.1", "--port", str(port)]
    command += ["-c", str(max(4096, 256 * num_slots)), "-np", str(num_slots), "-t", str(num_cores())]
    command += ["-fa", flash_attention, "--no-warmup", "--alias", "peer"]
    return serving(f"llama-server {file} -fa {flash_attention}", command, {}, port)


@contextlib.contextmanager
def serving(name: str, command: list[str], environment: dict[str, str], port: int) -> Iterator[str]:
    """Runs a server until the block ends; yields its URL once it lists its models. Raises PeerFailed."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile(prefix="remora-peer-", suffix=".log", delete=False) as log:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            deadline_s = time.monotonic() + _START_TIMEOUT_S
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise PeerFailed(f"{name} did not start; its log: {log.name}")
                time.sleep(0.5)
            yield url
        finally:
            stop_process(process)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
            return bool(json.load(response)["data"])
    except (OSError, ValueError, KeyError):
        return False


def stop_process(process: subprocess.Popen[Any]) -> None:
    """Asks, waits, then ends the whole session of a process that was started with one."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def remora_worker(source: str, weights: str) -> WorkerEngine:
    command = [sys.executable, "-m", "remora.platform.cli.peer_worker", source, weights]
    return WorkerEngine(f"remora {weights}", command)


def vllm_worker(folder: Path, scripts: Path, model: PeerModel) -> WorkerEngine:
    python = folder / "vllm" / "bin" / "python"
    command = [str(python), str(scripts / "vllm_worker.py"), str(folder / "models" / model.name)]
    return WorkerEngine("vllm bf16", command, vllm_environment(folder))
