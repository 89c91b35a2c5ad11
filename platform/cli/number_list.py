"""Options that take several numbers."""

from __future__ import annotations

import click


def number_list(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[int] | None:
    """The callback of an option such as `1,8,32`; None when it is not given. Raises BadParameter unless all numbers are
    at least 1."""
    if value is None:
        return None
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"{value!r} is no list of numbers such as 1,8,32")
    return numbers
