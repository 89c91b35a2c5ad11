"""A line plot as SVG text: enough for hit rates over sizes and shares over time, and nothing to install."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import ceil, log10

_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 40, 56
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")


def line_plot_svg(
    title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[tuple[float, float]]], *, is_time: bool = False
) -> str:
    """One line with dots for each name; x is logarithmic and positive, y starts at 0. For times x is linear, without
    dots."""
    scale: Callable[[float], float] = float if is_time else log10
    points = [point for line in lines.values() for point in line]
    low, high = scale(min(x for x, _ in points)), scale(max(x for x, _ in points))
    top = _round_up(max(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        along = (scale(x) - low) / (high - low) if high > low else 0.5
        across = _WIDTH - _LEFT - _RIGHT
        return _LEFT + along * across, _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM)

    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="13"><rect width="100%" height="100%" fill="white"/>',
        _text(middle, 24, title, anchor="middle", more=' font-weight="bold"'),
        _text(middle, _HEIGHT - 14, x_label, anchor="middle"),
        f'<g transform="rotate(-90)">{_text(-(_HEIGHT - _BOTTOM + _TOP) / 2, 18, y_label, anchor="middle")}</g>',
    ]
    for step in range(6):
        value = top * step / 5
        _, y = place(points[0][0], value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{value:g}", anchor="end"))
    ticks = [low + (high - low) * step / 8 for step in range(9)] if is_time else sorted({x for x, _ in points})
    for x_value in ticks:
        x, y = place(x_value, 0)
        parts.append(f'<path d="M{x:.1f} {y:.1f}v5" stroke="black"/>')
        parts.append(_text(x, y + 20, f"{x_value:g}", anchor="middle"))
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [place(x, y) for x, y in sorted(line)]
        route = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{route}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if not is_time:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        y = _TOP + 20 * number
        parts.append(f'<path d="M{_WIDTH - _RIGHT + 14} {y}h20" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(_WIDTH - _RIGHT + 40, y + 4, name))
    return "\n".join([*parts, "</svg>\n"])


def _round_up(value: float) -> float:
    """The next of 1, 2, 5 and 10 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** (ceil(log10(value)) - 1)
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))


def _text(x: float, y: float, text: str, *, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
