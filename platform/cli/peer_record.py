"""The figures of `remora bench peers`, kept line by line so that a run can be taken up again, and their table."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from remora.platform.cli.calibration import Calibration
from remora.platform.cli.peer_rows import Bar, Row

COLUMNS = ["ROW", "ENGINE", "MEDIAN", "LOWEST", "HIGHEST", "N", "OF FASTEST PEER", "OF FLOOR"]
BAR_COLUMNS = ["ROW", "REMORA", "AGAINST", "RATIO", "BAR", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One engine, one row, once. `more`: what HTTP rows know beside the time."""

    row: str
    engine: str
    seconds: float
    setting: str = ""
    memory_bytes_per_s: float = 0.0
    gemm_flops_per_s: float = 0.0
    more: dict[str, float] = field(default_factory=dict)


class PeerRecord:
    """A JSON-lines file of measurements."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.measurements: list[Measurement] = []
        if path.exists():
            self.measurements = [Measurement(**json.loads(line)) for line in path.read_text().splitlines() if line]

    def add(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(measurement)) + "\n")

    def of(self, row: Row) -> dict[str, list[Measurement]]:
        """By engine."""
        found: dict[str, list[Measurement]] = {}
        for measurement in self.measurements:
            if measurement.row == row.name:
                found.setdefault(measurement.engine, []).append(measurement)
        return found

    def medians_s(self, row: Row) -> dict[str, float]:
        return {engine: statistics.median(m.seconds for m in found) for engine, found in self.of(row).items()}

    def table(self, rows: list[Row]) -> list[list[object]]:
        lines: list[list[object]] = []
        for row in rows:
            medians_s = self.medians_s(row)
            fastest_s = _fastest_peer_s(medians_s)
            for engine, found in self.of(row).items():
                times_s = [measurement.seconds for measurement in found]
                shown = [_shown(row, value) for value in (medians_s[engine], max(times_s), min(times_s))]
                ratio = "" if fastest_s is None else f"{fastest_s / medians_s[engine]:.2f}"
                setting = found[-1].setting
                name = engine + (f" ({setting})" if setting else "")
                lines.append([row.name, name, *shown, len(found), ratio, _of_floor(row, engine, found)])
        return lines

    def bars(self, rows: list[Row]) -> list[list[object]]:
        """Each bar with the ratio that was measured and whether it is reached."""
        lines: list[list[object]] = []
        for row in rows:
            medians_s = self.medians_s(row)
            for bar in row.bars:
                ours_s, peer_s = _ours_s(medians_s, bar), _peer_s(medians_s, bar)
                if ours_s is None or peer_s is None:
                    continue
                ratio = peer_s / ours_s
                verdict = "reached" if ratio >= bar.factor else "missed"
                lines.append([row.name, bar.precision, bar.peer, f"{ratio:.2f}", f"{bar.factor:g}", verdict])
            lines += self._tails(row)
        return lines

    def _tails(self, row: Row) -> list[list[object]]:
        """HTTP: the 99th percentiles of Remora's fastest precision are to be no worse than the better peer's."""
        medians_s = {e: s for e, s in self.medians_s(row).items() if e.startswith("remora ")}
        lines: list[list[object]] = []
        for name in ("ttft_p99_s", "inter_token_p99_s") if row.case is None and medians_s else ():
            ours = min(medians_s, key=lambda engine: medians_s[engine])
            tails_s = {e: statistics.median(m.more[name] for m in found) for e, found in self.of(row).items()}
            peer_s = _fastest_peer_s(tails_s)
            if peer_s is not None:
                ratio = peer_s / tails_s[ours]
                verdict = "reached" if ratio >= 1 else "missed"
                lines.append(
                    [f"{row.name} {name}", ours.removeprefix("remora "), "better", f"{ratio:.2f}", "1", verdict]
                )
        return lines


def _shown(row: Row, seconds: float) -> str:
    return f"{row.num_tokens / seconds:.1f} tok/s" if row.num_tokens else f"{seconds:.3f} s"


def _of_floor(row: Row, engine: str, found: list[Measurement]) -> str:
    """Remora's share of what the machine could do at the rates of the same minute."""
    if row.case is None or not engine.startswith("remora "):
        return ""
    precision = engine.removeprefix("remora ")
    shares = [
        row.case.floor_s(
            row.model,
            precision,
            Calibration(memory_bytes_per_s=m.memory_bytes_per_s, gemm_flops_per_s=m.gemm_flops_per_s),
        )
        / m.seconds
        for m in found
    ]
    return f"{100 * statistics.median(shares):.0f} %"


def _peers(medians_s: dict[str, float], name: str) -> list[float]:
    return [seconds for engine, seconds in medians_s.items() if engine.startswith(name)]


def _fastest_peer_s(medians_s: dict[str, float]) -> float | None:
    return min([*_peers(medians_s, "vllm"), *_peers(medians_s, "llama")], default=None)


def _peer_s(medians_s: dict[str, float], bar: Bar) -> float | None:
    return _fastest_peer_s(medians_s) if bar.peer == "faster" else min(_peers(medians_s, bar.peer), default=None)


def _ours_s(medians_s: dict[str, float], bar: Bar) -> float | None:
    name = "remora " if bar.precision == "best" else f"remora {bar.precision}"
    return min(_peers(medians_s, name), default=None)
