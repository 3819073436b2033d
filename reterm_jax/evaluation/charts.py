"""Inline SVG for the report. Colours are CSS classes, so that one drawing serves light and dark pages."""

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup, escape

from reterm_jax.evaluation.statistics import Estimate

_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 10, 24


def line_chart(
    points: Mapping[int, float],
    *,
    label: str,
    colour: str,
    width: int,
    height: int,
    bounds: tuple[float, float] | None = None,
) -> Markup:
    """A curve over steps: the logged values faint, and their running mean (`smooth`) on top.

    Args:
        points: step to value, at least one, all finite.
        label: what a screen reader says.
        colour: CSS class of the line.
        width, height: in CSS pixels.
        bounds: fixed range of the vertical axis; None fits it to the values.
    """
    steps, values = list(points), list(points.values())
    low, high, ticks = _axis(values, bounds)
    right, bottom = width - _RIGHT, height - _BOTTOM
    span = max(1, steps[-1] - steps[0])

    def x(step: float) -> float:
        return _LEFT + (step - steps[0]) / span * (right - _LEFT)

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - _TOP)

    def path(series: Sequence[float]) -> str:
        return " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in zip(steps, series, strict=True))

    parts = [
        f'<svg viewBox="0 0 {width} {height}" class="chart" role="img" aria-label="{escape(label)}">',
        *(
            f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>'
            f'<text class="tick" x="{_LEFT - 8}" y="{y(t) + 3.5:.1f}" text-anchor="end">{number(t)}</text>'
            for t in ticks
        ),
    ]
    step_ticks = _step_ticks(steps[0], steps[-1])
    for index, step in enumerate(step_ticks):
        # The outer labels lean inwards, or they would be cut at the drawing's edge.
        anchor = "middle" if 0 < index < len(step_ticks) - 1 else "start" if index == 0 and span > 1 else "end"
        parts.append(f'<text class="tick" x="{x(step):.1f}" y="{height - 6}" text-anchor="{anchor}">{step}</text>')
    if len(steps) == 1:
        parts.append(f'<circle class="dot {colour}" cx="{x(steps[0]):.1f}" cy="{y(values[0]):.1f}" r="3"/>')
    else:
        parts.append(f'<polyline class="raw {colour}" points="{path(values)}"/>')
        mean = smooth(values)
        parts.append(f'<polyline class="mean {colour}" points="{path(mean)}"/>')
        parts.append(f'<circle class="dot {colour}" cx="{x(steps[-1]):.1f}" cy="{y(mean[-1]):.1f}" r="3"/>')
    return Markup("".join(parts) + "</svg>")


def interval_chart(estimate: Estimate, *, colour: str, width: int = 140, height: int = 26) -> Markup:
    """A value between 0 and 1 as a dot on its 95 % interval."""
    middle, pad = height / 2, 5

    def x(value: float) -> float:
        return pad + value * (width - 2 * pad)

    grid = "".join(
        f'<line class="grid" x1="{x(t):.1f}" x2="{x(t):.1f}" y1="0" y2="{height}"/>' for t in (0, 0.25, 0.5, 0.75, 1)
    )
    mark = ""
    if estimate.units:
        mark = (
            f'<line class="whisker {colour}" x1="{x(estimate.low):.1f}" x2="{x(estimate.high):.1f}" '
            f'y1="{middle}" y2="{middle}"/>'
            f'<circle class="dot {colour}" cx="{x(estimate.value):.1f}" cy="{middle}" r="5"/>'
        )
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" class="interval" role="img" '
        f'aria-label="{escape(str(estimate))}">{grid}{mark}</svg>'
    )


def smooth(values: Sequence[float]) -> list[float]:
    """Centred running mean over about an eighth of the curve (`window` values); at the ends, over what is there."""
    half = window(len(values)) // 2
    near = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(group) / len(group) for group in near]


def window(count: int) -> int:
    """Length of the running mean, odd."""
    return 2 * (count // 16) + 1


def number(value: float) -> str:
    """Three significant digits at most, short enough for an axis."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:.0f}k" if abs(value) < 1e6 else f"{value:.0e}"
    if abs(value) < 0.001:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.3g}"


def _axis(values: Sequence[float], bounds: tuple[float, float] | None) -> tuple[float, float, list[float]]:
    """Range and ticks: steps of 1, 2 or 5 times a power of ten, about four of them."""
    low, high = bounds or (min(values), max(values))
    if bounds is None and low >= 0 and low < 0.5 * high:
        low = 0.0
    if high - low < 1e-12 * max(1.0, abs(high)):
        pad = abs(high) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    if bounds is None:
        low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    first = math.ceil(low / step - 1e-9)
    ticks = [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
    return low, high, ticks


def _step_ticks(first: int, last: int) -> list[int]:
    if last - first < 4:
        return list(range(first, last + 1))
    return [first, round((first + last) / 2), last]
