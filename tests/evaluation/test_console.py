import io

from evaluation_demo import attempt, report

from reterm_jax.evaluation.console import pass_at_k_table, progress_printer, results_table
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


def test_pass_at_k_up_to_the_attempts_of_a_task():
    # Task a is solved once in three attempts, b never: Pass@2 of a is 1 − C(2,2)/C(3,2) = 2/3.
    result = EvalResult("p", [attempt("a", r) for r in (1.0, 0.0, 0.0)] + [attempt("b", 0.0)] * 3)
    header, _, row = pass_at_k_table([result]).splitlines()
    assert header.split() == ["policy", "Pass@1", "[95", "%]", "Pass@2", "[95", "%]"]
    assert row.split()[1] == "0.17" and row.split()[4] == "0.33"


def test_a_recovery_of_ones_own_failure_counts_where_there_is_one():
    attempts = [attempt(f"t{i}", float(i == 0), id=f"p/t{i}") for i in range(4)]
    own = [attempt("t1", 1.0, parent="p/t1"), attempt("t2", 0.0, parent="p/t2")]  # of the last no state was left
    result = EvalResult("p", attempts, [], own)
    assert [a.solved for a in result.with_recovery] == [True, True, False, False]
    table = results_table([result, EvalResult("q", attempts)])
    assert "0.25 [" in table and "0.50 [" in table and "own failures [95 %]" in table
    assert "own failures" not in results_table([EvalResult("q", attempts)])
    two = EvalResult("p", attempts, [], [*own, attempt("t2", 1.0, parent="p/t2")])
    assert two.with_recovery == result.with_recovery  # the first counts
