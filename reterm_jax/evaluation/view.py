"""`reterm-view`: a page from what lies on disk, a run's workdir or Harbor trials."""

from pathlib import Path

from reterm_jax.evaluation import harbor_job
from reterm_jax.evaluation.records import CurvePoint, RunReport, read_curves
from reterm_jax.evaluation.report import Gallery, write_report


class ViewError(ValueError):
    """There is nothing to show, or no place to show it in."""


def build_view(path: Path, output: Path) -> Path:
    """Writes the page for a workdir (`report.json` and its metrics), its report.json, or Harbor trials.

    Raises:
        ViewError: the path is none of these, or the output is a directory.
        RecordError, HarborError: a file is malformed; the message names it.
    """
    if output.is_dir():
        raise ViewError(f"{output}: is a directory; give the file to write, for example {output / 'report.html'}")
    if not path.exists():
        raise ViewError(f"{path}: does not exist; give a run's workdir or a directory of Harbor trials")
    report_path = path if path.is_file() else path / "report.json"
    if report_path.is_file():
        return write_report(RunReport.load(report_path), find_curves(report_path.parent), output)
    try:
        results = harbor_job.load_jobs(path)
    except harbor_job.NoTrialsError as error:
        raise ViewError(
            f"{path}: holds neither report.json (a run that has finished) nor Harbor trials (TASK__ID/result.json)"
        ) from error
    tasks = {attempt.task_id for result in results for attempt in result.attempts}
    facts = {"trials": str(sum(len(result.attempts) for result in results)), "tasks": str(len(tasks))}
    report = RunReport(title=f"Harbor trials: {path.resolve().name}", facts=facts, phases={}, results=results)
    galleries = [
        Gallery(result.name, harbor_job.instructions(directory), result.attempts)
        for result, directory in zip(results, harbor_job.job_directories(path), strict=True)
    ]
    return write_report(report, [], output, galleries=galleries)


def find_curves(workdir: Path) -> list[CurvePoint]:
    """The curves of a run: `rl/metrics.jsonl` as it is, and the loss of `sft/metrics.jsonl` as `sft/loss`.

    Both phases log `train/...` by their own steps, so only the directory can tell them apart. Other phases (the warm-up
    of a base model) are not shown.
    """
    points = []
    for name in ("rl", "sft"):
        path = workdir / name / "metrics.jsonl"
        rows = read_curves(path) if path.exists() else []
        if name == "sft":
            rows = [CurvePoint(r.step, {"sft/loss": r.values["train/loss"]}) for r in rows if "train/loss" in r.values]
        points += rows
    return points
