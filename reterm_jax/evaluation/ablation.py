"""Policies that were trained at equal budgets, over several seeds: tables with intervals, curves with bands, a page.

Two kinds of interval answer two questions. One over tasks (those of all seeds, resampled) says how sure the value of
these very runs is; one over runs (Student's t) says what another run of the same training would give. With three runs
the second is wide.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from reterm_jax.evaluation.records import (
    AttemptRecord,
    CurvePoint,
    EvalResult,
    RunReport,
    curve,
    read_curves,
    read_json,
    write_text,
)
from reterm_jax.evaluation.report import duration, write_report
from reterm_jax.evaluation.statistics import Estimate, over_runs, paired_difference, pass_at_1, recovery_rate

SHARED = "cold_start"


class AblationError(ValueError):
    """The runs cannot be compared; the message names directory and remedy."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the RL of one run took. `seconds` are those of rollouts and updates, which other work on the machine
    lengthens."""

    tokens: float
    attempts: float
    updates: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Run:
    """A policy of one seed. Without RL it has neither cost nor curves."""

    result: EvalResult
    curves: list[CurvePoint] = dataclasses.field(default_factory=list)
    cost: Cost | None = None
    report: RunReport | None = None


@dataclasses.dataclass(frozen=True)
class Ablation:
    """By policy, in the order in which they are compared: its runs, one a seed, in the order of `seeds`.

    `left_out` has the arms that some seeds lack, with the seeds that have them.
    """

    seeds: list[int]
    policies: dict[str, list[Run]]
    left_out: dict[str, list[int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Measure:
    """A rate of one policy. `by` is what differences are paired by; empty where there is nothing to pair."""

    name: str
    attempts: Callable[[EvalResult], list[AttemptRecord]]
    estimate: Callable[[list[AttemptRecord]], Estimate]
    by: str


MEASURES = (
    Measure("Pass@1", lambda result: result.attempts, pass_at_1, "task_id"),
    Measure("Pass@1 with one recovery", lambda result: result.with_recovery, pass_at_1, "task_id"),
    Measure("recovery rate, fixed states", lambda result: result.recoveries, recovery_rate, "parent"),
    # Each policy fails elsewhere, a better one where it is harder.
    Measure("recovery rate, own failures", lambda result: result.own, recovery_rate, ""),
)


def load(root: Path) -> Ablation:
    """Reads ROOT/seedN/cold_start and ROOT/seedN/ARM, all of them finished, for the arms that all seeds have.

    Raises:
        AblationError: there are none, one is not finished, or two policies have one name.
        RecordError: a file is malformed.
    """
    directories = sorted(root.glob("seed*"), key=lambda path: (len(path.name), path.name))
    if not directories:
        raise AblationError(f"{root}: holds no seed0/, seed1/ ...; give the --workdir of launch/ablation.sh")
    seeds, policies, holders = [], {}, {}
    for directory in directories:
        report = _report(directory / SHARED)
        seeds.append(int(read_json(directory / SHARED / "config.json")["seed"]))
        for result in report.results:
            policies.setdefault(result.name, []).append(Run(result))
        for path in directory.iterdir():
            if path.is_dir() and path.name != SHARED:
                holders.setdefault(path.name, []).append(seeds[-1])
    arms = [arm for arm in sorted(holders) if len(holders[arm]) == len(seeds)]
    for directory in directories:
        runs = {arm: _report(directory / arm) for arm in arms}
        for arm in arms:
            result = runs[arm].results[-1]
            curves = read_curves(directory / arm / "rl" / "metrics.jsonl")
            cost = _cost(curves, read_json(directory / arm / "config.json"))
            policies.setdefault(result.name, []).append(Run(result, curves, cost, runs[arm]))
    for name, runs in policies.items():
        if len(runs) != len(seeds):
            raise AblationError(
                f"{root}: {len(runs)} policies of {len(seeds)} seeds are called {name}: each arm needs a name that is "
                "its own and the same for all seeds; train it with another rl.name"
            )
    return Ablation(seeds, policies, {arm: there for arm, there in sorted(holders.items()) if arm not in arms})


def _report(directory: Path) -> RunReport:
    path = directory / "report.json"
    if not path.exists():
        raise AblationError(f"{directory}: this run has not finished; start launch/ablation.sh again, and wait for it")
    return RunReport.load(path)


def _cost(curves: Sequence[CurvePoint], config: Any) -> Cost:
    def total(*keys: str) -> float:
        return sum(sum(curve(curves, key).values()) for key in keys)

    skipped = total("train/skipped")
    updates = (
        (len(curve(curves, "rollout/sampled_tokens")) - skipped) * config["rl"]["epochs"] * config["rl"]["updates"]
    )
    attempts = total("rollout/root_attempts", "recovery/attempts")
    # Not the time of the phase, which for a run that was killed is that of its last part.
    return Cost(total("rollout/sampled_tokens"), attempts, updates, total("rollout/seconds", "train/seconds"))


def write(ablation: Ablation, root: Path) -> None:
    """Writes ablation.md, ablation.json (the same numbers), curves.svg and report.html."""
    write_text(root / "ablation.md", markdown(ablation))
    write_text(root / "ablation.json", json.dumps(numbers(ablation), indent=1) + "\n")
    drawing = draw(ablation)
    write_text(root / "curves.svg", drawing)
    last = next(reversed(ablation.policies.values()))[-1].report
    report = RunReport(
        title="Ablation at equal budgets",
        facts={
            **({"model": last.facts["model"]} if last and "model" in last.facts else {}),
            "seeds": ", ".join(map(str, ablation.seeds)),
            "intervals": "over the tasks of all seeds",
            **({"left out": ", ".join(ablation.left_out)} if ablation.left_out else {}),
        },
        phases={name: sum(run.cost.seconds for run in runs if run.cost) for name, runs in _trained(ablation).items()},
        results=[pooled(ablation, name) for name in ablation.policies],
        trees=last.trees if last else [],
    )
    # Without its XML prologue, which has no place inside a page.
    write_report(report, [], root / "report.html", drawing=Markup(drawing[drawing.index("<svg") :]))


def _trained(ablation: Ablation) -> dict[str, list[Run]]:
    return {name: runs for name, runs in ablation.policies.items() if runs[0].cost is not None}


def pooled(ablation: Ablation, name: str) -> EvalResult:
    """All seeds' attempts of one policy, whose tasks are told apart by the seed: each seed has its own."""

    def marked(attempts: Sequence[AttemptRecord], seed: int) -> list[AttemptRecord]:
        return [
            dataclasses.replace(
                attempt,
                id=f"{seed}/{attempt.id}",
                task_id=f"{seed}/{attempt.task_id}",
                parent=None if attempt.parent is None else f"{seed}/{attempt.parent}",
            )
            for attempt in attempts
        ]

    parts = {"attempts": [], "recoveries": [], "own": []}
    for seed, run in zip(ablation.seeds, ablation.policies[name], strict=True):
        for part, attempts in parts.items():
            attempts += marked(getattr(run.result, part), seed)
    return EvalResult(name, **parts)


def estimates(ablation: Ablation, name: str, measure: Measure) -> tuple[list[Estimate], Estimate, Estimate]:
    """A rate of one policy: of each seed, with its interval over tasks, and with that over runs."""
    runs = [measure.estimate(measure.attempts(run.result)) for run in ablation.policies[name]]
    return runs, measure.estimate(measure.attempts(pooled(ablation, name))), over_runs(runs, rate=True)


def differences(
    ablation: Ablation, before: str, after: str, measure: Measure
) -> tuple[list[Estimate], Estimate, Estimate]:
    """`after` minus `before`, paired within each seed: of each seed, over tasks, and over runs."""
    pairs = [
        (first.result, second.result)
        for first, second in zip(ablation.policies[before], ablation.policies[after], strict=True)
    ]
    pairs.append((pooled(ablation, before), pooled(ablation, after)))
    *runs, over_tasks = [
        paired_difference(measure.attempts(first), measure.attempts(second), by=measure.by) for first, second in pairs
    ]
    return runs, over_tasks, over_runs(runs)


def compared(ablation: Ablation) -> list[tuple[str, str]]:
    """Which policies are set against each other: every later one against every earlier, base only against the next."""
    names = list(ablation.policies)
    return [(a, b) for j, b in enumerate(names) for i, a in enumerate(names[:j]) if i > 0 or j == 1]


def markdown(ablation: Ablation) -> str:
    """The tables."""
    seeds = [f"seed {seed}" for seed in ablation.seeds]
    several = len(seeds) > 1
    left_out = [
        f"Left out, as not all seeds have it: {arm} (seed {', '.join(map(str, there))}). To add it: "
        f"launch/ablation.sh --arms={arm} --seeds={len(seeds)}"
        for arm, there in ablation.left_out.items()
    ]
    over = "runs (Student's t)" if several else "tasks: one run says nothing of others"
    lines = [f"Mean of {len(seeds)} seed{'s' if several else ''}, with 95 % intervals over {over}.", *left_out, ""]
    lines += _table(
        ["policy", *(measure.name for measure in MEASURES)],
        [
            [name, *(str(estimates(ablation, name, measure)[2 if several else 1]) for measure in MEASURES)]
            for name in ablation.policies
        ],
    )
    lines += ["", "Differences, paired by task (by state for recovery rates).", ""]
    rows = []
    for measure in MEASURES:
        for before, after in compared(ablation) if measure.by else ():
            runs, over_tasks, between = differences(ablation, before, after, measure)
            values = [f"{run.value:+.2f}" if run.units else "n/a" for run in runs]
            rows.append([measure.name, f"{after} − {before}", *values, over_tasks.signed(), between.signed()])
    lines += _table(["measure", "policies", *seeds, "mean [95 % over tasks]", "mean [95 % over runs]"], rows)
    lines += ["", "What RL took, mean over seeds.", ""]
    rows = []
    for name, runs in _trained(ablation).items():
        tokens, attempts, updates, seconds = np.mean([dataclasses.astuple(run.cost) for run in runs], axis=0)
        rows.append([name, f"{tokens:,.0f}", f"{attempts:,.0f}", f"{updates:.1f}", duration(seconds)])
    lines += _table(["policy", "sampled tokens", "attempts", "updates", "wall time"], rows)
    return "\n".join(lines) + "\n"


def numbers(ablation: Ablation) -> dict[str, Any]:
    """What the tables hold, for programs; an interval without bounds has null."""

    def plain(estimate: Estimate) -> dict[str, Any]:
        values = dataclasses.asdict(estimate)
        return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in values.items()}

    def three(found: tuple[list[Estimate], Estimate, Estimate]) -> dict[str, Any]:
        runs, over_tasks, between = found
        return {"seeds": list(map(plain, runs)), "over_tasks": plain(over_tasks), "over_runs": plain(between)}

    return {
        "seeds": ablation.seeds,
        "left_out": ablation.left_out,
        "policies": {
            name: {measure.name: three(estimates(ablation, name, measure)) for measure in MEASURES}
            for name in ablation.policies
        },
        "differences": {
            f"{after} - {before}": {
                measure.name: three(differences(ablation, before, after, measure)) for measure in MEASURES if measure.by
            }
            for before, after in compared(ablation)
        },
        "cost": {name: [dataclasses.asdict(run.cost) for run in runs] for name, runs in _trained(ablation).items()},
    }


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def draw(ablation: Ablation) -> str:
    """An SVG: rewards while training against sampled tokens (mean over seeds; band: lowest to highest), and the final
    rates (bar: mean over seeds; dots: seeds)."""
    import io

    import matplotlib
    from matplotlib.figure import Figure

    colours = {name: f"C{index}" for index, name in enumerate(ablation.policies)}
    # Made without pyplot, which would look for a display. The salt gives equal runs equal bytes.
    with matplotlib.rc_context({"svg.hashsalt": "reterm", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(11, 3.7), layout="constrained")
        roots, recoveries, final = figure.subplots(1, 3, width_ratios=(1, 1, 1.4))
        for axes, key, title in (
            (roots, "rollout/root_reward", "Root reward while training"),
            (recoveries, "recovery/reward", "Recovery reward while training"),
        ):
            for name, runs in _trained(ablation).items():
                tokens_S, rewards_RS = _curves(runs, key)
                if len(tokens_S):
                    axes.plot(tokens_S, rewards_RS.mean(0), color=colours[name])
                    axes.fill_between(
                        tokens_S, rewards_RS.min(0), rewards_RS.max(0), color=colours[name], alpha=0.2, linewidth=0
                    )
            axes.set(title=title, xlabel="sampled tokens (thousands)", ylim=(0, 1))
            axes.grid(alpha=0.3)
        width = 0.8 / len(ablation.policies)
        for index, name in enumerate(ablation.policies):
            for place, measure in enumerate(MEASURES):
                runs, _, between = estimates(ablation, name, measure)
                x = place + (index - (len(ablation.policies) - 1) / 2) * width
                if between.units:
                    label = name if place == 0 else None
                    final.bar(x, between.value, 0.9 * width, color=colours[name], alpha=0.5, label=label)
                    final.plot([x] * len(runs), [run.value for run in runs], ".", color="black", markersize=3)
        names = ["Pass@1", "Pass@1 with\none recovery", "recovery,\nfixed states", "recovery,\nown failures"]
        final.set_xticks(range(len(names)), names)
        final.set(title="Held-out tasks", ylim=(0, 1))
        final.grid(alpha=0.3, axis="y")
        figure.legend(loc="outside lower center", ncols=len(ablation.policies))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _curves(runs: Sequence[Run], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Thousands of tokens sampled up to each step that all runs have, [S], their mean; and the values, [R,S]."""
    values = [curve(run.curves, key) for run in runs]
    steps = [step for step in values[0] if all(step in each for each in values)]
    totals = []
    for run in runs:
        sampled = curve(run.curves, "rollout/sampled_tokens")
        totals.append([sum(count for at, count in sampled.items() if at <= step) for step in steps])
    return np.mean(totals, axis=0) / 1000, np.array([[each[step] for step in steps] for each in values])
