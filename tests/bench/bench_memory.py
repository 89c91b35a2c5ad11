"""Memory of a platform and of its replicas: `python tests/bench/bench_memory.py [CONFIG]`; default: two models, 1 GiB.

Proportional set size (PSS), so that pages that several processes map are counted once, of every process of the
platform: when it is ready, and after a load on each model. Arenas are told apart by their place in shared memory. Other
work on the machine does not change these figures.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from remora.platform.base.paths import SHARED_MEMORY_DIR
from remora.platform.cli.client import get_json, make_client
from remora.platform.cli.lengths import Lengths
from remora.platform.cli.load_generator import LoadPlan, run_load
from remora.platform.cli.own_platform import own_platform

MiB = 1024 * 1024
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+\s*(.*)$")


@dataclass(slots=True)
class Memory:
    """Bytes of one process, by what they are."""

    own: int = 0
    arena: int = 0

    @classmethod
    def of(cls, pid: int) -> Memory:
        """Raises OSError when the process is gone."""
        memory, is_arena = cls(), False
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            mapping = _MAPPING.match(line)
            if mapping:
                is_arena = mapping[1].startswith(f"{SHARED_MEMORY_DIR}/remora-")
            elif line.startswith("Pss:"):
                pss = int(line.split()[1]) * 1024
                if is_arena:
                    memory.arena += pss
                else:
                    memory.own += pss
        return memory


def descendants(root: int) -> set[int]:
    """The process and all below it; Ray's processes are found by the session that they belong to."""
    sessions = defaultdict(set)
    parents = defaultdict(set)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(fields[1])].add(int(entry.name))
            sessions[int(fields[3])].add(int(entry.name))
    found: set[int] = set()
    waiting = {root}
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        waiting |= (parents[pid] | sessions[pid]) - found
    return found


def title(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()
    if not words:
        return "?"
    return words[0] if words[0].startswith("ray::") else Path(words[0]).name + " " + " ".join(words[1:4])[:60]


def report(moment: str) -> None:
    total = Memory()
    lines = []
    for pid in descendants(os.getpid()) - {os.getpid()}:
        try:
            memory, name = Memory.of(pid), title(pid)
        except OSError:
            continue
        total.own, total.arena = total.own + memory.own, total.arena + memory.arena
        lines.append((memory.own, memory.arena, name))
    print(f"{moment}: {(total.own + total.arena) / MiB:.0f} MiB, of which arenas {total.arena / MiB:.0f}")
    for own, arena, name in sorted(lines, reverse=True)[:12]:
        print(f"  {own / MiB:7.0f} MiB  + arena {arena / MiB:6.0f}  {name}", flush=True)


def main() -> None:
    config = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with own_platform(config) as url:
        report("ready")
        with make_client(url) as client:
            models = [entry["id"] for entry in get_json(client, "/v1/models")["data"]]
        for model in models:
            plan = LoadPlan(
                url=url,
                model=model,
                num_clients=8,
                num_requests=8,
                prompt_tokens=Lengths(low=128),
                output_tokens=Lengths(low=8),
            )
            asyncio.run(run_load(plan))
        report("after a load")


if __name__ == "__main__":
    main()
