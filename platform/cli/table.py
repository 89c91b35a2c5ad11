"""Tables for terminals: columns padded to their widest cell, nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import click


def table_lines(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """The header and one line for each row; numbers are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(header), *cells]) for column in range(len(header))]
    numeric = [
        bool(rows) and all(isinstance(row[column], int | float) for row in rows) for column in range(len(header))
    ]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in [list(header), *cells]
    ]


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table after an empty line."""
    click.echo("")
    for line in table_lines(header, rows):
        click.echo(line)
