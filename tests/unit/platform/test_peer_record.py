"""`remora bench peers`: ratios, bars and floors follow from what was measured, and a record is taken up again."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora.platform.cli.calibration import Calibration
from remora.platform.cli.peer_record import Measurement, PeerRecord
from remora.platform.cli.peer_rows import ROWS, SMOLLM2, Case, Row

BY_NAME = {row.name: row for row in ROWS}


def record(path: Path, row: str, **seconds: float) -> PeerRecord:
    kept = PeerRecord(path)
    for engine, taken_s in seconds.items():
        kept.add(Measurement(row=row, engine=engine.replace("_", " "), seconds=taken_s))
    return kept


def test_bars_hold_the_named_precision_against_the_named_peer_and_best_is_the_fastest(tmp_path: Path) -> None:
    kept = record(
        tmp_path / "r", "decode", vllm_bf16=4.4, llama_cpp=2.0, remora_bf16=2.0, remora_int8=1.0, remora_int4=0.5
    )
    assert kept.bars([BY_NAME["decode"]]) == [
        ["decode", "best", "llama", "4.00", "2.5", "reached"],
        ["decode", "bf16", "vllm", "2.20", "2.2", "reached"],
    ]
    kept = record(tmp_path / "b", "batch-16", vllm_bf16=4.0, llama_cpp=2.0, remora_bf16=1.0, remora_int8=0.5)
    assert [line[3:] for line in kept.bars([BY_NAME["batch-16"]])] == [
        ["2.00", "2.3", "missed"],
        ["4.00", "3.5", "reached"],
    ]


def test_the_median_of_repeats_counts(tmp_path: Path) -> None:
    kept = PeerRecord(tmp_path / "r")
    for seconds in (9.0, 1.0, 2.0):
        kept.add(Measurement(row="prefill", engine="remora int4", seconds=seconds))
    assert kept.medians_s(BY_NAME["prefill"]) == {"remora int4": 2.0}


def test_tails_over_http_are_those_of_the_fastest_precision_against_the_better_peer(tmp_path: Path) -> None:
    kept = PeerRecord(tmp_path / "r")
    for engine, seconds, tail_s in (
        ("vllm bf16", 0.4, 0.2),
        ("llama.cpp q4_1 -fa on", 0.5, 0.3),
        ("remora bf16", 0.3, 0.1),
        ("remora int4", 0.1, 0.25),
    ):
        more = {"ttft_p99_s": tail_s, "inter_token_p99_s": tail_s / 10}
        kept.add(Measurement(row="http-8", engine=engine, seconds=seconds, more=more))
    lines = kept.bars([BY_NAME["http-8"]])
    assert lines[0][3:] == ["4.00", "2.5", "reached"]
    assert lines[1] == ["http-8 ttft_p99_s", "int4", "better", "0.80", "1", "missed"]


def test_a_record_is_read_again(tmp_path: Path) -> None:
    first = record(tmp_path / "r", "prefill", vllm_bf16=1.0)
    assert PeerRecord(tmp_path / "r").measurements == first.measurements


def rates(memory: float, gemm: float) -> Calibration:
    return Calibration(memory_bytes_per_s=memory, gemm_flops_per_s=gemm)


@pytest.mark.parametrize("row", [row for row in ROWS if row.case is not None], ids=lambda row: row.name)
def test_a_floor_falls_with_the_rate_that_binds_it(row: Row) -> None:
    assert row.case is not None
    slow = row.case.floor_s(row.model, "bf16", rates(1e10, 1e11))
    assert row.case.floor_s(row.model, "bf16", rates(2e10, 2e11)) == pytest.approx(slow / 2)
    assert row.case.floor_s(row.model, "int4", rates(1e10, 1e11)) <= slow


def test_one_stream_is_bound_by_reading_the_weights_once_a_token() -> None:
    case = Case(kind="decode", prompt_tokens=16, output_tokens=11)
    weights = SMOLLM2.layer_weights + SMOLLM2.head_weights
    assert case.floor_s(SMOLLM2, "bf16", rates(1e10, 1e15)) == pytest.approx(10 * 2 * weights / 1e10)


def test_a_next_turn_does_not_compute_what_is_cached() -> None:
    turn = Case(kind="shared", prompt_tokens=2048, own_tokens=32, output_tokens=1)
    assert turn.floor_s(SMOLLM2, "bf16", rates(1e15, 1e11)) == pytest.approx(
        2 * (32 * SMOLLM2.layer_weights + SMOLLM2.head_weights) / 1e11
    )
