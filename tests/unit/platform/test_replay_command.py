"""`remora replay`: table, lines, plot and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

Run = Callable[..., Any]


@pytest.fixture
def trace_path(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    chains = [[1, 2, 3], [1, 4, 5], [1, 2, 3], [6, 7], [1, 2, 3, 8]] * 4
    path.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": chain}) + "\n" for chain in chains))
    return path


def test_a_replay_prints_a_row_for_each_policy_and_writes_lines_and_a_plot(run: Run, trace_path: Path) -> None:
    lines, plot = trace_path.with_name("out.jsonl"), trace_path.with_name("out.svg")
    capacity = ("--capacity", "50%,8")
    ran = run("replay", "--trace", trace_path, "--policy", "lru,value", *capacity, "--jsonl", lines, "--plot", plot)
    assert (ran.code, ran.err) == (0, "")
    rows = [line.split() for line in ran.out.splitlines()]
    assert ["POLICY", "50%", "(4)", "8", "(8)"] in rows
    assert [row[0] for row in rows[-3:]] == ["lru", "value", "optimum"]
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(record["policy"], record["capacity_blocks"]) for record in records] == [
        (policy, blocks) for policy in ("lru", "value", "optimum") for blocks in (4, 8)
    ]
    assert all(record["num_lookups"] == 60 for record in records)
    assert records[1]["num_hits"] == 52
    assert rows[-3][1:] == [f"{100 * record['hit_rate']:.2f}" for record in records[:2]]
    drawn = ElementTree.fromstring(plot.read_text())
    assert len(drawn.findall("{http://www.w3.org/2000/svg}polyline")) == 3
    assert "hit rate in percent" in plot.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "mru"], "policy: 'mru' is not allowed; one of ['lru', 's3fifo', 'arc', 'value', 'optimum']"),
        (["--capacity", "50%,none"], "capacity: 'none' is not allowed"),
    ],
)
def test_a_wrong_value_is_refused_by_name(run: Run, trace_path: Path, options: list[str], message: str) -> None:
    ran = run("replay", "--trace", trace_path, *options)
    assert ran.code == 2
    assert message in ran.err
    assert "Traceback" not in ran.err


def test_a_broken_trace_is_refused_by_line(run: Run, trace_path: Path) -> None:
    trace_path.write_text('{"hash_ids": [1]}\n{"hash_ids"\n')
    ran = run("replay", "--trace", trace_path)
    assert ran.code == 1
    assert "line 2 of the trace" in ran.err
