"""Which positions a sequence has, and what an operation on a range of them does.

A sequence's tokens lie one behind the other in the slots of its table; a run is a piece of them with consecutive
positions. Positions rise with the slots.

    slots      0 1 2 3 4 | 5 6 7          after seq_rm of positions 5 to 9: two runs
    positions  0 1 2 3 4 | 9 10 11        (0, 5) and (9, 3)
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Run(NamedTuple):
    position: int
    num_tokens: int


class Piece(NamedTuple):
    """Tokens that stay: where they lie now, and the position of the first of them afterwards."""

    slot: int
    num_tokens: int
    position: int
    delta: int


Runs = tuple[Run, ...]


def num_tokens_of(runs: Runs) -> int:
    return sum(run.num_tokens for run in runs)


def pos_min(runs: Runs) -> int:
    """The first position, -1 if there is none."""
    return runs[0].position if runs else -1


def pos_max(runs: Runs) -> int:
    """The last position, -1 if there is none."""
    return runs[-1].position + runs[-1].num_tokens - 1 if runs else -1


def grown(runs: Runs, num_tokens: int) -> Runs:
    """With as many tokens more at the end as are missing to `num_tokens`."""
    missing = num_tokens - num_tokens_of(runs)
    if missing <= 0:
        return runs
    if not runs:
        return (Run(0, missing),)
    return (*runs[:-1], Run(runs[-1].position, runs[-1].num_tokens + missing))


def in_range(start: int, end: int) -> tuple[int, int]:
    """llama.cpp's ranges: a negative start is 0, a negative end is behind everything."""
    return max(0, start), end if end >= 0 else sys.maxsize


def taken(runs: Runs, start: int, end: int) -> list[Piece]:
    """Only the tokens with positions in [start, end)."""
    return [piece for piece, inside in _split(runs, start, end) if inside]


def removed(runs: Runs, start: int, end: int, *, close_gap: bool) -> list[Piece]:
    """The tokens with positions outside [start, end); with `close_gap` those behind it move down by its length."""
    length = min(end, pos_max(runs) + 1) - start
    delta = -length if close_gap and length > 0 else 0
    return [
        _moved(piece, delta if piece.position >= end else 0) for piece, inside in _split(runs, start, end) if not inside
    ]


def shifted(runs: Runs, start: int, end: int, delta: int) -> list[Piece]:
    """The tokens with positions in [start, end) moved by `delta`; those that would become negative are gone."""
    pieces = []
    for piece, inside in _split(runs, start, end):
        moved = _moved(piece, delta if inside else 0)
        gone = min(max(0, -moved.position), moved.num_tokens)
        if gone < moved.num_tokens:
            pieces.append(Piece(moved.slot + gone, moved.num_tokens - gone, moved.position + gone, moved.delta))
    return pieces


def are_in_order(pieces: Sequence[Piece]) -> bool:
    """Whether positions rise with the slots."""
    return all(before.position + before.num_tokens <= after.position for before, after in pairwise(pieces))


def runs_of(pieces: Iterable[Piece]) -> Runs:
    """The runs of what stays, joined where positions go on."""
    runs: list[Run] = []
    for piece in pieces:
        if runs and runs[-1].position + runs[-1].num_tokens == piece.position:
            runs[-1] = Run(runs[-1].position, runs[-1].num_tokens + piece.num_tokens)
        else:
            runs.append(Run(piece.position, piece.num_tokens))
    return tuple(runs)


def num_untouched(pieces: Sequence[Piece]) -> int:
    """Tokens at the beginning that keep slot and position."""
    slot = 0
    for piece in pieces:
        if piece.slot != slot or piece.delta:
            break
        slot += piece.num_tokens
    return slot


def _moved(piece: Piece, delta: int) -> Piece:
    return piece._replace(position=piece.position + delta, delta=delta)


def _split(runs: Runs, start: int, end: int) -> list[tuple[Piece, bool]]:
    """All tokens, cut at the borders of the range; each piece with whether it lies inside."""
    found: list[tuple[Piece, bool]] = []
    slot = 0
    for position, num_tokens in runs:
        last = position + num_tokens
        cuts = sorted({position, last, *(cut for cut in (start, end) if position < cut < last)})
        for first, behind in pairwise(cuts):
            found.append((Piece(slot, behind - first, first, 0), start <= first < end))
            slot += behind - first
    return found
