"""Three namespaces that want twice the pool, in simulated time: shares as a table, and over time as a plot.

    python tests/bench/bench_quotas.py [docs/quotas.svg]

Runs the pool's own state (namespaces/) under simulated clients and engines; the same seed gives the same figures.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from remora.namespaces.load_simulation import Group, LoadSimulation, served_after_s
from remora.platform.cli.line_plot import line_plot_svg
from remora.platform.cli.table import print_table

#: A decode step of SmolLM2-135M on two cores with AVX2 (README: 48 tokens in 1.49 s).
STEP_S = 0.031
AWAY_S, BACK_S, END_S = 120.0, 240.0, 400.0


def simulate(layers_of_code: int) -> LoadSimulation:
    """The arena grows with the blocks of `code`, and with it the load of the others."""
    others = 62 * layers_of_code
    groups = (
        Group(
            name="chat", guaranteed=0.25, weight=1.0, num_clients=others, prompt_blocks=(4, 16), output_blocks=(2, 12),
        ),
        Group(
            name="code", guaranteed=0.15, weight=2.0, num_clients=31, prompt_blocks=(16, 40), output_blocks=(1, 10),
            active_s=((0.0, AWAY_S), (BACK_S, END_S)), num_layers=layers_of_code,
        ),
        Group(
            name="batch", guaranteed=0.0, weight=1.0, num_clients=others, prompt_blocks=(2, 10), output_blocks=(4, 20),
        ),
    )  # fmt: skip
    made = LoadSimulation(groups, arena_extents=32 * layers_of_code, seed=7, step_s=STEP_S, timeout_s=120.0)
    made.run(END_S, sample_every_s=0.1)
    made.state.check_integrity()
    return made


def show(title: str, simulation: LoadSimulation) -> None:
    spans = {"all (30 - 120 s)": (30.0, AWAY_S), "without code (180 - 240 s)": (180.0, BACK_S),
             "all again (280 - 400 s)": (280.0, END_S)}  # fmt: skip
    print(f"\n{title}: share of the arena in use by running sequences")
    names = [group.name for group in simulation.groups]
    rows: list[list[object]] = [
        [label, *(f"{100 * share:.1f} %" for share in simulation.mean_shares(*span).values())]
        for label, span in spans.items()
    ]
    print_table(["", *names], rows)
    back_s = served_after_s(simulation.samples, "code", BACK_S)
    print(f"nothing that fits the guarantee of code waits {back_s:.1f} s after it came back")
    print(f"finished {simulation.num_finished}, preempted {simulation.num_preempted}")
    print(f"failed {simulation.num_failed}; longest wait in s {simulation.longest_wait_s}")


def main() -> None:
    started_s = time.perf_counter()
    simulation = simulate(1)
    show("one geometry", simulation)
    if len(sys.argv) > 1:
        lines = {
            group.name: [(s.time_s, 100 * s.shares[group.name]) for s in simulation.samples[::5]]
            for group in simulation.groups
        }
        plot = line_plot_svg(
            "Three namespaces want twice the pool", "seconds", "% of the arena in use", lines, is_time=True
        )
        Path(sys.argv[1]).write_text(plot, encoding="utf-8")
    show("blocks of code twice as large", simulate(2))
    print(f"{time.perf_counter() - started_s:.0f} s")


if __name__ == "__main__":
    main()
