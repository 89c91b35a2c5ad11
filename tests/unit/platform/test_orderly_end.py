"""What a bench has started ends with it, also when somebody ends the bench."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import sys, time
from remora.platform.cli.orderly_end import ends_in_order
from remora.platform.cli.peer_engines import WorkerEngine

class Peer(WorkerEngine):
    def _answer(self):
        print("waits", flush=True)
        return super()._answer()

with ends_in_order():
    engine = Peer("peer", ["sh", "-c", sys.argv[1]])
    try:
        print("loaded", flush=True)
        time.sleep(600)
    finally:
        engine.close()
"""


@pytest.mark.parametrize("moment", ["while it loads", "when it is loaded"])
def test_a_peer_ends_with_the_bench_that_is_told_to_end(moment: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid")
    says = "echo {};" if moment == "when it is loaded" else ""
    peer_script = f"{says} echo $$ > {tmp_path}/pid; exec sleep 600"
    bench = subprocess.Popen([sys.executable, "-c", _SCRIPT, peer_script], stdout=subprocess.PIPE, text=True)
    peer = int((tmp_path / "pid").read_text())
    assert bench.stdout is not None
    assert bench.stdout.readline() == "waits\n"
    if says:
        assert bench.stdout.readline() == "loaded\n"
    bench.send_signal(signal.SIGTERM)
    assert bench.wait(timeout=30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(peer, 0)
