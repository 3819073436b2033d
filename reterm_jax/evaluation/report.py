"""Writes report.html: one file that needs nothing else, without scripts, safe to open with untrusted output in it."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from reterm_jax.evaluation import charts
from reterm_jax.evaluation.records import (
    AttemptRecord,
    CurvePoint,
    EvalResult,
    RunReport,
    by_family,
    curve,
    write_text,
)
from reterm_jax.evaluation.statistics import Estimate, paired_difference, pass_at_1, recovery_rate
from reterm_jax.evaluation.terminal_text import readable

_TEMPLATES = Path(__file__).parent / "templates"
_OUTPUT_LIMIT = 6000
_COLOURS = 6


@dataclasses.dataclass(frozen=True)
class Chart:
    """A curve of the report: the metric's key, its title, and what one step is."""

    key: str
    title: str
    axis: str = "RL step"
    bounds: tuple[float, float] | None = None
    large: bool = False


CHARTS = (
    Chart("rollout/root_reward", "Root reward", bounds=(0.0, 1.0), large=True),
    Chart("recovery/reward", "Recovery reward", bounds=(0.0, 1.0), large=True),
    Chart("sft/loss", "SFT loss", axis="SFT step"),
    Chart("train/entropy", "Entropy (nats per token)"),
    Chart("train/logprob_diff_mean", "|Δ logprob|, sampler to trainer"),
    Chart("rollout/tokens_per_attempt", "Tokens per attempt"),
    Chart("train/grad_norm", "Gradient norm"),
    Chart("rollout/seconds", "Rollout seconds per step"),
)


@dataclasses.dataclass(frozen=True)
class Gallery:
    """Attempts of one policy to browse, by task."""

    name: str
    instructions: dict[str, str]
    attempts: list[AttemptRecord]


def write_report(
    report: RunReport,
    curves: Sequence[CurvePoint],
    output: Path,
    *,
    galleries: Sequence[Gallery] = (),
    drawing: Markup | None = None,
) -> Path:
    """Renders the page and moves it into place whole.

    Args:
        report: facts, results (in the order in which the policies came about) and fork trees.
        curves: rows of metrics.jsonl; metrics that are not in `CHARTS` are not drawn.
        output: the HTML file, replaced if it exists.
        galleries: attempts to browse below the results.
        drawing: an SVG to show above the curves.
    """
    page = (
        _environment()
        .get_template("report.html.jinja")
        .render(
            title=report.title,
            facts=report.facts,
            phases=_phases(report.phases),
            results=[_result_row(i, result) for i, result in enumerate(report.results)],
            gains=_gains(report.results),
            recoveries=any(result.recoveries for result in report.results),
            own=any(result.own for result in report.results),
            drawing=drawing,
            large_charts=_charts(curves, large=True),
            small_charts=_charts(curves, large=False),
            families=_families(report.results),
            families_title="Tasks" if galleries else "Families",
            trees=report.trees,
            galleries=[(gallery, by_family(gallery.attempts)) for gallery in galleries],
        )
    )
    write_text(output, page)
    return output


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["readable"] = readable
    environment.filters["output"] = lambda text: readable(text, _OUTPUT_LIMIT)
    environment.filters["duration"] = duration
    return environment


def duration(seconds: float) -> str:
    """Wall time for people: 21 ms, 3.4 s, 12 s, 3 min 05 s, 2 h 04 min."""
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _phases(phases: dict[str, float]) -> list[dict]:
    total = sum(phases.values()) or 1.0
    return [{"name": name, "seconds": s, "share": 100 * s / total} for name, s in phases.items()]


def _colour(index: int) -> str:
    return f"c{index % _COLOURS}"


def _result_row(index: int, result: EvalResult) -> dict:
    colour = _colour(index)
    passed, recovered, rescued = pass_at_1(result.attempts), recovery_rate(result.recoveries), recovery_rate(result.own)
    return {
        "name": result.name,
        "colour": colour,
        "passed": passed,
        "passed_chart": charts.interval_chart(passed, colour=colour),
        "recovered": recovered,
        "recovered_chart": charts.interval_chart(recovered, colour=colour),
        "again": pass_at_1(result.with_recovery),
        "rescued": rescued,
        "excluded": passed.excluded + recovered.excluded + rescued.excluded,
    }


def _gains(results: Sequence[EvalResult]) -> list[dict]:
    """Each policy against the one before it, paired."""
    return [
        {
            "name": f"{after.name} − {before.name}",
            "passed": paired_difference(before.attempts, after.attempts),
            "again": paired_difference(before.with_recovery, after.with_recovery),
            "recovered": paired_difference(before.recoveries, after.recoveries, by="parent"),
        }
        for before, after in zip(results, results[1:], strict=False)
    ]


def _charts(curves: Sequence[CurvePoint], *, large: bool) -> list[dict]:
    drawn = []
    for chart in CHARTS:
        points = curve(curves, chart.key)
        if chart.large != large or not points:
            continue
        width, height = (500, 210) if large else (330, 150)
        colour = _colour(2 if large else 1)
        svg = charts.line_chart(
            points, label=chart.title, colour=colour, width=width, height=height, bounds=chart.bounds
        )
        last = charts.smooth(list(points.values()))[-1]
        drawn.append(
            {
                "title": chart.title,
                "axis": chart.axis,
                "svg": svg,
                "last": f"{last:.2f}" if chart.bounds else charts.number(last),
                "window": charts.window(len(points)),
            }
        )
    return drawn


def _families(results: Sequence[EvalResult]) -> list[dict]:
    """One panel a measure; in it one row a family with a bar for each policy."""
    everything = [attempt for result in results for attempt in result.attempts]
    # Imported trials have no families: there each task stands for itself.
    kind = "task" if all(attempt.family == attempt.task_id for attempt in everything) else "family"
    measures = (
        (f"Pass@1 by {kind}", [by_family(result.attempts) for result in results], pass_at_1),
        (f"Recovery rate by {kind}", [by_family(result.recoveries) for result in results], recovery_rate),
    )
    panels = []
    for title, groups, measure in measures:
        rows = []
        for family in sorted({family for group in groups for family in group}):
            estimates: list[Estimate] = [measure(group.get(family, [])) for group in groups]
            bars = [
                {"name": result.name, "colour": _colour(i), "estimate": estimate}
                for i, (result, estimate) in enumerate(zip(results, estimates, strict=True))
            ]
            if any(estimate.units for estimate in estimates):
                rows.append({"family": family, "bars": bars})
        if rows:
            panels.append({"title": title, "rows": rows})
    return panels
