import html
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from evaluation_demo import attempt, report, tree, write
from test_harbor_job import TRIALS, call, make_trial

from reterm_jax.evaluation import charts, statistics
from reterm_jax.evaluation.records import CurvePoint, EvalResult, RecordError, RunReport
from reterm_jax.evaluation.report import duration, write_report
from reterm_jax.evaluation.terminal_text import readable
from reterm_jax.evaluation.view import ViewError, build_view, find_curves

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and collects them and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def page_text(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    write(workdir)
    return build_view(workdir, workdir / "out" / "report.html").read_text(encoding="utf-8")


def test_what_a_run_lacks_is_not_on_its_page(page_text):
    assert not re.search("Macro|Comparison|own failures", page_text)


def test_page_has_all_parts(page_text):
    page = Page(page_text)
    for expected in (
        "ReTerm-GRPO quickstart", "configs/quickstart.py", "RL 13 min 00 s", "after RL − SFT", "Root reward",
        "Recovery reward", "Gradient norm", "SFT loss", "Pass@1 by family", "Recovery rate by family",
        "1 of 3 recovered 1 not graded", "sed -i 's/^workers = .*/workers = 8/' app/service.conf", "exit 4",
        "State it left", "Recovery 4", "not graded: env_error", "✓ solved", "timed out",
    ):  # fmt: skip
        assert expected in page.text, expected
    estimate = statistics.pass_at_1(report().results[2].attempts)
    assert f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]" in page.text


def test_page_loads_and_runs_nothing(page_text):
    page = Page(page_text)
    assert not {"script", "link", "img", "iframe", "object", "form"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        assert not {name for name in attributes if name.startswith("on") or name in ("src", "href")}
    assert "url(" not in page_text and "@import" not in page_text
    assert (
        "meta",
        {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"},
    ) in page.tags


def test_untrusted_text_is_escaped_everywhere(tmp_path):
    evil = "</pre></style><script>alert(1)</script>\" onload='x'"
    bad = attempt(evil, 0.0, id=evil, family=evil, status=evil, ended=evil, detail=evil, turns=tree().failed.turns)
    made = RunReport(evil, {evil: evil}, {evil: 1.0}, [EvalResult(evil, [bad])], [
        tree().__class__(evil, evil, evil, bad, evil, [bad])
    ])  # fmt: skip
    text = write_report(made, [], tmp_path / "r.html").read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert html.escape("<script>alert(1)</script>") in text


def test_charts_are_well_formed(page_text):
    drawings = re.findall(r"<svg.*?</svg>", page_text, re.DOTALL)
    assert len(drawings) == 6 + 8
    for drawing in drawings:
        ElementTree.fromstring(drawing)
        assert "nan" not in drawing


@pytest.mark.parametrize(
    "values", [[1.0], [0.0, 0.0], [5.0, 5.0, 5.0], [-1e-7, 1e-7], [1e9, 2e9], [1e-12, 3.0], list(range(200))]
)
def test_any_curve_is_drawn_inside_its_frame(values):
    drawing = charts.line_chart(dict(enumerate(values, start=7)), label="x", colour="c1", width=300, height=150)
    root = ElementTree.fromstring(drawing)
    for line in root.iter("polyline"):
        for pair in line.get("points").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 300 and 0 <= y <= 150
    assert 2 <= sum(element.get("class") == "grid" for element in root) <= 8


def test_bounded_chart_has_ticks_from_0_to_1():
    drawing = charts.line_chart({1: 0.4, 2: 0.6}, label="x", colour="c1", width=300, height=150, bounds=(0, 1))
    assert re.findall(r'text-anchor="end">([\d.]+)</text>', drawing)[:5] == ["0", "0.25", "0.5", "0.75", "1"]


def test_running_mean_stays_within_the_curve():
    assert charts.smooth([3.0]) == [3.0] and charts.window(15) == 1 and charts.window(60) == 7
    assert charts.smooth([2.0] * 40) == [2.0] * 40


def test_numbers_and_durations_are_short():
    assert [charts.number(v) for v in (0, 0.25, 123.4, 25_000, 0.0004, 3e7)] == [
        "0",
        "0.25",
        "123",
        "25k",
        "4e-4",
        "3e+07",
    ]
    assert [duration(s) for s in (0.021, 3.4, 59.7, 185, 7440)] == [
        "21 ms",
        "3.4 s",
        "1 min 00 s",
        "3 min 05 s",
        "2 h 04 min",
    ]


def test_terminal_text_is_readable():
    raw = "\x1b]0;title\x07\x1b[1;31mred\x1b[0m\r\nbell\x07nul\x00 10%\r20% \u202egnp \ud800 \x9b"
    assert readable(raw) == "red\nbell␇nul␀ 10%\n20% ⟨U+202E⟩gnp \ufffd \ufffd"
    assert readable("a" * 30 + "b" * 5000 + "c" * 30, 60) == "a" * 30 + "\n… 5,000 characters not shown …\n" + "c" * 30
    assert readable("日本語 é ✓") == "日本語 é ✓"


def test_empty_report_and_single_recovery(tmp_path):
    empty = RunReport("nothing yet", {}, {}, [])
    Page(write_report(empty, [], tmp_path / "a.html").read_text())
    one = tree()
    one = one.__class__(one.task_id, one.family, one.instruction, one.failed, one.state_listing, one.recoveries[:1])
    text = write_report(RunReport("t", {}, {}, [], [one]), [CurvePoint(1, {"train/entropy": 0.1})], tmp_path / "b.html")
    page = Page(text.read_text())
    assert "0 of 1 recovered" in page.text and "Faint: each step. The number" in page.text


def test_view_of_harbor_trials(tmp_path):
    messages = [
        {"role": "user", "content": "fix the <thing>"},
        {"role": "assistant", "content": "t", "tool_calls": [call("cat <file>")]},
        {"role": "tool", "tool_call_id": "c1", "content": "body\n\n(exit_code=0)"},
    ]
    for name, reward in (("fix__a", "1"), ("fix__b", "0")):
        make_trial(tmp_path / "trials" / name, reward=reward, messages=messages)
    page = Page(build_view(tmp_path / "trials", tmp_path / "r.html").read_text())
    for expected in ("Harbor trials: trials", "fix the <thing>", "cat <file>", "1 of 2 solved", "Pass@1 by task"):
        assert expected in page.text, expected


@pytest.mark.skipif(not TRIALS.exists(), reason=f"the trials of {TRIALS.name} are not beside this checkout")
def test_view_of_published_trials(tmp_path):
    page = Page(build_view(TRIALS, tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "0.36 [" in page.text and "0.44 [" in page.text
    assert sum(tag == "details" for tag, _ in page.tags) == 100 + 20


def test_view_errors_name_the_path(tmp_path):
    with pytest.raises(ViewError, match="missing: does not exist"):
        build_view(tmp_path / "missing", tmp_path / "r.html")
    with pytest.raises(ViewError, match="holds neither report.json"):
        build_view(tmp_path, tmp_path / "r.html")
    with pytest.raises(ViewError, match="is a directory; give the file"):
        build_view(tmp_path, tmp_path)
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(RecordError, match=r"report\.json: field 'title'"):
        build_view(tmp_path, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_curves_of_phases_are_told_apart_by_directory(tmp_path):
    for name, value in (("base", 9.0), ("sft", 3.0), ("rl", -0.1)):
        (tmp_path / name).mkdir()
        row = {"step": 1, "train/loss": value, "train/entropy": value}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert [point.values for point in find_curves(tmp_path)] == [
        {"train/loss": -0.1, "train/entropy": -0.1},
        {"sft/loss": 3.0},
    ]
