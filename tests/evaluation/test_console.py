import io

from evaluation_demo import attempt, report

from reterm_jax.evaluation.console import progress_printer, results_table
from reterm_jax.evaluation.evaluate import Progress
from reterm_jax.evaluation.records import EvalResult


def test_table_lists_policies_and_paired_gains_in_aligned_columns():
    lines = results_table(report().results).splitlines()
    assert [line.split("  ")[0] for line in lines if "---" not in line] == [
        "policy", "base", "SFT", "after RL", "SFT - base", "after RL - SFT",
    ]  # fmt: skip
    column = lines[0].index("recovery rate")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines if len(line) > column)
    assert "71 (36 tasks)" in lines[2] and "144 (36 states)" in lines[2]


def test_table_without_recoveries_or_grades():
    text = results_table([EvalResult("base", [attempt("t", None)])])
    assert text.splitlines()[-1].split() == ["base", "n/a", "0", "n/a", "0", "1"]


def test_progress_prints_sparsely_and_always_the_end():
    stream = io.StringIO()
    show = progress_printer("eval SFT", stream=stream, every=60)
    for done in range(1, 11):
        show(Progress(done=done, total=10, graded=done - 1, solved=done // 2, resumed=0))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("eval SFT: 10/10 attempts, 0.56 solved, 1 not graded")
