import json
from pathlib import Path

import pytest

from reterm_jax.evaluation import harbor_job, statistics

TRIALS = Path(__file__).parents[3] / "shared" / "data" / "tb2_trials"


def make_trial(directory, *, reward="1\n", messages=None, **result):
    (directory / "agent").mkdir(parents=True)
    (directory / "verifier").mkdir()
    base = {"task_name": "fix", "agent_result": {"n_output_tokens": 12}, "verifier_result": None}
    (directory / "result.json").write_text(json.dumps({**base, **result}))
    if messages is not None:
        (directory / "agent" / "trajectory.json").write_text(json.dumps(messages))
    if reward is not None:
        (directory / "verifier" / "reward.txt").write_text(reward)
    return directory


def call(command, call_id="c1", name="bash"):
    arguments = command if name != "bash" else json.dumps({"command": command})
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_messages_become_turns(tmp_path):
    trial = make_trial(
        tmp_path / "fix__a",
        messages=[
            {"role": "system", "content": "s"},
            {"role": "user", "content": "fix it"},
            {"role": "assistant", "content": "look first\n</think>\n\n", "tool_calls": [call("ls")]},
            {"role": "tool", "tool_call_id": "c1", "content": "a b\n\n(exit_code=2)"},
            {"role": "assistant", "content": "I ramble"},
            {"role": "user", "content": "Format error"},
            {"role": "assistant", "content": None, "tool_calls": [call("{broken", "c2", "edit")]},
            {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "no such tool"}]},
            {"role": "assistant", "content": "", "tool_calls": [call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]},
        ],
        agent_execution={"started_at": "2026-06-06T01:00:00Z", "finished_at": "2026-06-06T01:00:02.5Z"},
    )
    attempt = harbor_job.load_trial(trial)
    first, second, third, last = attempt.turns
    assert (first.thought, first.command, first.output, first.exit_code) == ("look first", "ls", "a b", 2)
    assert (second.command, second.output, second.error) == (None, "Format error", "no tool call")
    assert (third.command, third.output, third.error) == ("{broken", "no such tool", "arguments are not JSON")
    assert last.exit_code is None
    assert (attempt.status, attempt.ended, attempt.tokens, attempt.seconds) == ("solved", "submit", 12, 2.5)
    assert harbor_job.instructions(tmp_path) == {"fix": "fix it"}


@pytest.mark.parametrize(
    ("reward", "exception", "status", "graded"),
    [
        ("0", None, "failed", True),
        ("0.5", None, "failed", True),
        ("0", "AgentTimeoutError", "timeout", True),
        ("1", "AgentTimeoutError", "solved", True),
        ("0", "ContextLengthExceededError", "overflow", True),
        ("", None, "verifier_error", False),
        ("nan", None, "verifier_error", False),
        ("yes", None, "verifier_error", False),
        (None, "VerifierTimeoutError", "verifier_error", False),
        (None, "EnvironmentStartError", "env_error", False),
    ],
)
def test_verdicts(tmp_path, reward, exception, status, graded):
    info = exception and {"exception_type": exception, "exception_message": "m"}
    attempt = harbor_job.load_trial(make_trial(tmp_path / "fix__a", reward=reward, exception_info=info))
    assert (attempt.status, attempt.graded) == (status, graded)
    assert (exception or "") in attempt.detail


def test_where_the_reward_is_looked_for(tmp_path):
    both = make_trial(tmp_path / "a", reward="0")
    (both / "verifier" / "reward.json").write_text('{"reward": 1.0, "style": 0.2}')
    assert harbor_job.load_trial(both).reward == 1.0
    neither = make_trial(tmp_path / "b", reward=None, verifier_result={"rewards": {"reward": 0.0}})
    assert harbor_job.load_trial(neither).reward == 0.0


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("result.json", "{", "result.json: not JSON"),
        ("result.json", "[]", "result.json: expected an object"),
        ("result.json", "{}", "result.json: field 'task_name' must be str"),
        ("result.json", '{"task_name": "t", "agent_result": 3}', "result.json: field 'agent_result' must be dict"),
        (
            "result.json",
            '{"task_name": "t", "agent_execution": {"started_at": 1, "finished_at": 2}}',
            "result.json: ag",
        ),
        ("agent/trajectory.json", "{}", "trajectory.json: expected a list"),
        ("agent/trajectory.json", "[3]", "trajectory.json: message 0 has no field 'role'"),
        ("agent/trajectory.json", '[{"role": "tool", "content": "x"}]', "trajectory.json: message 0: a tool result"),
        (
            "agent/trajectory.json",
            '[{"role": "assistant", "tool_calls": [3]}]',
            "trajectory.json: message 0: a tool call",
        ),
        (
            "agent/trajectory.json",
            '[{"role": "assistant", "tool_calls": {"a": 1}}]',
            "message 0: tool_calls is not a list",
        ),
        ("verifier/reward.json", "{", "reward.json: not JSON"),
    ],
)
def test_malformed_files_are_named(tmp_path, file, content, message):
    trial = make_trial(tmp_path / "fix__a")
    (trial / file).write_text(content)
    with pytest.raises(harbor_job.HarborError, match=message):
        harbor_job.load_trial(trial)


def test_a_missing_result_is_named_and_an_empty_directory_is_no_job(tmp_path):
    (tmp_path / "fix__a" / "agent").mkdir(parents=True)
    with pytest.raises(harbor_job.HarborError, match=r"fix__a/result\.json: cannot be read"):
        harbor_job.load_jobs(tmp_path)
    with pytest.raises(harbor_job.NoTrialsError, match="no Harbor trials"):
        harbor_job.load_jobs(tmp_path / "fix__a" / "agent")


@pytest.mark.skipif(not TRIALS.exists(), reason=f"the trials of {TRIALS.name} are not beside this checkout")
def test_published_trials_give_the_published_numbers():
    results = harbor_job.load_jobs(TRIALS)
    estimates = {result.name: statistics.pass_at_1(result.attempts) for result in results}
    assert {name: round(e.value, 2) for name, e in estimates.items()} == {"Qwen3.5-9B": 0.36, "tmax-9b": 0.44}
    assert all((e.units, e.n, e.excluded) == (10, 50, 0) for e in estimates.values())
    attempts = [attempt for result in results for attempt in result.attempts]
    assert sum(attempt.status == "timeout" for attempt in attempts) == 12
    assert sum(len(attempt.turns) for attempt in attempts) == 3225 + 11
    assert all(turn.exit_code is not None for a in attempts for turn in a.turns[:-1] if turn.command)
