import asyncio
import dataclasses
import json
import re

import numpy as np
import pytest

from reterm_jax.agent.episode import RETRY_MESSAGE, Attempt, FailureState, fixed_texts, run_attempt, start_messages
from reterm_jax.agent.protocol import BASH_SCHEMA
from reterm_jax.rollout.samplers.base import SamplerError
from reterm_jax.sandbox.base import ExecResult, SandboxError, Snapshot
from reterm_jax.tasks.config import AgentConfig

SUBMIT = "submit"


@pytest.fixture
def run(task, chat, fakes):
    """Runs an attempt of a sampler that says these texts. Returns attempt, snapshot, sampler, sandbox, releases."""

    def go(*says, sandbox=None, limits=fakes.LIMITS, **options):
        sampler, sandbox = fakes.FakeSampler(chat, list(says)), sandbox or fakes.FakeSandbox()
        released = []

        async def release(snapshot):
            released.append(snapshot)

        options = {"seed": 3, "release": release} | options
        attempt, snapshot = asyncio.run(run_attempt(task, sandbox, sampler, chat, limits, **options))
        return attempt, snapshot, sampler, sandbox, released

    return go


def rendered(chat, messages, generation):
    text = chat.tokenizer.apply_chat_template(
        messages, tools=[BASH_SCHEMA], tokenize=False, add_generation_prompt=generation
    )
    return chat.tokenizer.encode(text, add_special_tokens=False)


def limits_of(fakes, **changes):
    return dataclasses.replace(fakes.LIMITS, **changes)


def test_a_solved_attempt(run, chat, fakes):
    sandbox = fakes.FakeSandbox(reward="1", answers={"ls": ExecResult("notes\n", 0, 0.2, False)})
    says = fakes.does("ls"), fakes.does("cat notes"), fakes.does(SUBMIT, "done")
    attempt, snapshot, sampler, _, released = run(*says, sandbox=sandbox, keep_failure=True)
    assert attempt.solved and attempt.ended == "submit" and snapshot is None
    assert sandbox.log == ["ls", "cat notes", "SNAPSHOT", "VERIFY"] and len(released) == 1
    assert [turn.command for turn in attempt.turns] == ["ls", "cat notes", SUBMIT]
    assert (attempt.prefix_len, attempt.version, attempt.depth, attempt.parent) == (0, 7, 0, None)
    assert set(attempt.timings) == {"sampling", "commands", "snapshot", "verify"}
    # The ids are the template's, and the sampler saw each turn extend the one before.
    messages = start_messages("copy notes")
    for said, output in zip(says, ["notes\n", "", None], strict=True):
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": output}]
    assert attempt.transcript.ids == rendered(chat, messages[:-1], False)[:-1]  # the template adds a newline
    for before, after in zip(sampler.calls, sampler.calls[1:], strict=False):
        assert after["ids"][: len(before["ids"])] == before["ids"]
    assert len({call["seed"] for call in sampler.calls}) == 3 and {c["session"] for c in sampler.calls} == {attempt.id}
    assert attempt.transcript.arrays()[1].sum() == sum(len(chat.policy_ids(said)) for said in says)


def test_a_failed_attempt_keeps_the_state_from_before_the_tests(run, fakes):
    attempt, snapshot, _, sandbox, released = run(fakes.does("ls"), fakes.does(SUBMIT), keep_failure=True)
    assert attempt.outcome.status == "failed" and attempt.outcome.reward == 0
    assert isinstance(snapshot, Snapshot) and not released
    assert sandbox.log.index("SNAPSHOT") < sandbox.log.index("VERIFY")


def test_nothing_is_saved_unasked(run, fakes):
    assert "SNAPSHOT" not in run(fakes.does(SUBMIT))[3].log


def test_what_is_not_graded_keeps_no_state(run, fakes):
    attempt, snapshot, *_, released = run(fakes.does(SUBMIT), sandbox=fakes.FakeSandbox(reward=None), keep_failure=True)
    assert attempt.outcome.status == "verifier_error" and snapshot is None and len(released) == 1


def test_malformed_turns_run_nothing_and_say_why(run, chat, fakes):
    attempt, _, sampler, sandbox, _ = run("I am done.", fakes.does(SUBMIT))
    assert sandbox.log == ["VERIFY"] and attempt.ended == "submit"
    assert "no tool call" in attempt.turns[0].error
    assert "no tool call" in chat.tokenizer.decode(sampler.calls[1]["ids"])
    assert attempt.errors == ["tool_use", "verification"]


@pytest.mark.parametrize("text", ["look", "look</think>\n\n<tool_call>\n<function=bash>\n<parameter=command>\nrm"])
def test_a_turn_cut_by_length_runs_nothing_and_is_closed(run, chat, fakes, text):
    attempt, _, sampler, sandbox, _ = run((text, "length"), fakes.does(SUBMIT))
    assert sandbox.log == ["VERIFY"] and "cut off" in attempt.turns[0].error
    # The stop token that the policy did not sample is there, and carries no loss.
    ids, mask, *_ = attempt.transcript.arrays()
    stops = np.flatnonzero(ids == chat.stop_id)
    assert mask[stops].tolist() == [False, False, False, True]  # system, user, the cut turn, the submit
    assert chat.tokenizer.decode(sampler.calls[1]["ids"]).count(f"{text}<|im_end|>\n<|im_start|>user\n") == 1


def test_turn_limit(run, fakes):
    attempt, snapshot, *_ = run(fakes.does("ls"), keep_failure=True)
    assert attempt.ended == "turn_limit" and len(attempt.turns) == 4
    assert attempt.outcome.status == "failed" and snapshot is not None
    assert attempt.transcript.spans[-1].source == "policy"


def test_token_limit_ends_before_the_context_is_full(run, fakes):
    output = ExecResult("zebra " * 100, 0, 0.1, False)
    sandbox = fakes.FakeSandbox(answers={"ls": output})
    attempt, snapshot, sampler, *_ = run(fakes.does("ls"), sandbox=sandbox, keep_failure=True)
    assert attempt.ended == "token_limit" and attempt.outcome.status == "failed"
    assert len(attempt.transcript) <= fakes.LIMITS.max_tokens and len(attempt.turns) == 1
    assert all(len(call["ids"]) + call["max_tokens"] <= fakes.LIMITS.max_tokens for call in sampler.calls)
    assert attempt.transcript.spans[-1].source == "policy" and snapshot is None


def test_a_state_without_room_to_recover_is_not_kept(run, fakes):
    output = ExecResult("zebra " * 90, 0, 0.1, False)
    sandbox = fakes.FakeSandbox(answers={"ls": output})
    attempt, snapshot, *_ = run(
        fakes.does("ls"), sandbox=sandbox, limits=limits_of(fakes, max_turns=1), keep_failure=True
    )
    assert attempt.ended == "turn_limit" and attempt.outcome.graded and snapshot is None
    attempt, snapshot, *_ = run(fakes.does("ls"), limits=limits_of(fakes, max_turns=99), keep_failure=True)
    assert attempt.ended == "token_limit" and attempt.outcome.graded and snapshot is None


def test_a_prompt_that_fills_the_context_overflows(run, fakes):
    attempt, snapshot, sampler, sandbox, _ = run(
        fakes.does("ls"), limits=limits_of(fakes, max_tokens=10), keep_failure=True
    )
    assert attempt.ended == attempt.outcome.status == "overflow" and attempt.outcome.reward == 0
    assert "10" in attempt.outcome.detail and not sampler.calls and not sandbox.log and snapshot is None


@pytest.mark.parametrize(("reward", "status"), [("0", "timeout"), ("0.5", "timeout"), ("1", "solved")])
def test_time_limit_while_sampling_is_still_verified(run, fakes, reward, status):
    async def never():
        await asyncio.sleep(60)

    sandbox = fakes.FakeSandbox(reward=reward)
    attempt, snapshot, *_ = run(
        fakes.does("ls"), never, sandbox=sandbox, limits=limits_of(fakes, attempt_timeout=0.2), keep_failure=True
    )
    assert attempt.ended == "time_limit" and attempt.outcome.status == status
    assert attempt.outcome.reward == float(reward) and (snapshot is None) == (status == "solved")
    # It ends with a policy turn, so that a recovery can go on from it.
    assert attempt.transcript.spans[-1].source == "policy" and len(attempt.turns) == 1


def test_the_tasks_own_time_limit_holds_too(run, task, fakes):
    async def never():
        await asyncio.sleep(60)

    task.config = dataclasses.replace(task.config, agent=AgentConfig(timeout_sec=0.1))
    assert run(never)[0].ended == "time_limit"


def test_a_command_past_its_time_is_told(run, chat, fakes):
    sandbox = fakes.FakeSandbox(answers={"cat": ExecResult("part", 124, 5.0, True)})
    attempt, _, sampler, *_ = run(fakes.does("cat"), fakes.does(SUBMIT), sandbox=sandbox)
    assert attempt.turns[0].timed_out and attempt.errors[0] == "resource_management"
    assert "part\n(stopped: time limit of 5 s)" in chat.tokenizer.decode(sampler.calls[1]["ids"])


def test_long_output_keeps_head_and_tail(run, fakes):
    sandbox = fakes.FakeSandbox(answers={"cat": ExecResult("a" * 50 + "b" * 50, 0, 0.1, False)})
    attempt, *_ = run(fakes.does("cat"), fakes.does(SUBMIT), sandbox=sandbox, limits=limits_of(fakes, output_limit=20))
    output = attempt.turns[0].output
    assert output.startswith("a" * 10 + "\n") and output.endswith("\n" + "b" * 10) and "80" in output


@pytest.mark.parametrize("fault", [SamplerError("server is gone"), RuntimeError("boom"), TimeoutError("http")])
def test_a_sampler_fault_is_not_graded_and_not_raised(run, fakes, fault):
    attempt, snapshot, _, sandbox, _ = run(fakes.does("ls"), fault, keep_failure=True)
    assert attempt.ended == attempt.outcome.status == "env_error" and attempt.outcome.reward is None
    assert str(fault) in attempt.outcome.detail and snapshot is None and "VERIFY" not in sandbox.log


def test_a_sandbox_fault_is_not_graded_and_not_raised(run, fakes):
    sandbox = fakes.FakeSandbox(answers={"ls": SandboxError("container is gone")})
    attempt, *_ = run(fakes.does("ls"), sandbox=sandbox)
    assert attempt.outcome.status == "env_error" and "container is gone" in attempt.outcome.detail


def test_a_state_that_cannot_be_saved_costs_no_verdict(run, fakes):
    sandbox = fakes.FakeSandbox()

    async def full():
        raise SandboxError("disk is full")

    sandbox.snapshot = full
    attempt, snapshot, *_ = run(fakes.does(SUBMIT), sandbox=sandbox, keep_failure=True)
    assert attempt.outcome.status == "failed" and snapshot is None


def test_cancelling_releases_the_state(task, chat, fakes):
    released, sandbox = [], fakes.FakeSandbox()

    async def hang(source, target, *, private):
        await asyncio.sleep(60)

    async def release(snapshot):
        released.append(snapshot)

    async def go():
        sandbox.upload = hang
        sampler = fakes.FakeSampler(chat, [fakes.does(SUBMIT)])
        async with asyncio.timeout(0.2):
            await run_attempt(task, sandbox, sampler, chat, fakes.LIMITS, seed=0, keep_failure=True, release=release)

    with pytest.raises(TimeoutError):
        asyncio.run(go())
    assert len(released) == 1


@pytest.mark.parametrize("failed_by", ["submit", "turn_limit"])
def test_a_recovery_goes_on_where_the_failure_ended(run, chat, fakes, failed_by):
    says = [fakes.does("cat notes"), fakes.does(SUBMIT)] if failed_by == "submit" else [fakes.does("cat notes")]
    sandbox = fakes.FakeSandbox(answers={"cat notes": ExecResult("cat: notes: hello\n", 1, 0.1, False)})
    failed, snapshot, *_ = run(
        *says, sandbox=sandbox, limits=limits_of(fakes, max_turns=2), keep_failure=True, attempt_id="root"
    )
    state = FailureState.of(failed, snapshot)
    assert failed.ended == failed_by and (state.depth, state.version, state.attempt_id) == (0, 7, "root")
    recovery, _, sampler, *_ = run(
        fakes.does("ls"), fakes.does(SUBMIT), sandbox=fakes.FakeSandbox(reward="1"), start=state,
        retry_message=RETRY_MESSAGE, attempt_id="fork",
    )  # fmt: skip
    assert recovery.solved and (recovery.parent, recovery.depth) == ("root", 1)
    assert recovery.prefix_len == len(failed.transcript)
    assert recovery.transcript.ids[: recovery.prefix_len] == failed.transcript.ids == state.transcript.ids
    assert [call["parent"] for call in sampler.calls] == ["root", "root"]
    # What the sampler saw is what the template renders, the failed attempt's reasoning included.
    messages = start_messages("copy notes")
    answer = "cat: notes: hello\n(exit code 1)"
    for said, tools in zip(
        [fakes.does("cat notes"), says[-1]],
        [[answer], [RETRY_MESSAGE] if failed_by == "submit" else [answer, RETRY_MESSAGE]],
        strict=True,
    ):
        messages.append({"role": "assistant", "content": said})
        messages += [{"role": "tool", "content": text} for text in tools]
    assert sampler.calls[0]["ids"] == rendered(chat, messages, True)


def test_a_recovery_without_anything_to_say(run, chat, fakes):
    failed, snapshot, *_ = run(fakes.does(SUBMIT), keep_failure=True)
    with pytest.raises(ValueError, match="retry message"):
        run(fakes.does("ls"), start=FailureState.of(failed, snapshot))


def test_failures_deepen(run, fakes):
    failed, snapshot, *_ = run(fakes.does(SUBMIT), keep_failure=True)
    state = FailureState.of(failed, snapshot)
    again, snapshot, *_ = run(fakes.does(SUBMIT), start=state, retry_message="again", keep_failure=True)
    deeper = FailureState.of(again, snapshot)
    assert deeper.depth == 1 and len(deeper.turns) == 1 and len(deeper.transcript) > again.prefix_len > 0


def test_an_error_that_was_not_repaired_is_where_recoveries_start(run, chat, fakes):
    """The second `cat` repairs the first error, so its snapshot goes; that of `make` stays; the end is not saved."""
    wrong = ExecResult("no such file\n", 1, 0.1, False)
    sandbox = fakes.FakeSandbox(answers={"cat file": wrong, "make": wrong})
    says = [fakes.does(text) for text in ("cat file", "cat notes", "make", "ls", SUBMIT)]
    options = {"sandbox": sandbox, "keep_failure": True, "limits": limits_of(fakes, max_turns=9)}
    failed, snapshot, sampler, _, released = run(*says, fork_at="error", **options)
    assert sandbox.log == ["cat file", "SNAPSHOT", "cat notes", "make", "SNAPSHOT", "ls", "VERIFY"]
    assert [s.id for s in released] == ["snapshot-2"] and snapshot.id == "snapshot-5"
    assert failed.forked_after == 3 and len(failed.turns) == 5
    state = FailureState.of(failed, snapshot)
    assert [turn.command for turn in state.turns] == ["cat file", "cat notes", "make"]
    # The prefix is what the sampler had seen when it was about to answer the error.
    assert [*state.transcript.ids, *chat.turn_boundary_ids("no such file\n(exit code 1)", True)] == (
        sampler.calls[3]["ids"]
    )
    recovery, _, again, *_ = run(fakes.does(SUBMIT), start=state, retry_message=RETRY_MESSAGE)
    assert recovery.prefix_len == len(state.transcript) < len(failed.transcript)
    assert chat.tokenizer.decode(again.calls[0]["ids"]).count("no such file\n(exit code 1)") == 2


def test_the_end_is_forked_where_no_error_shows(run, fakes):
    failed, snapshot, *_ = run(fakes.does("ls"), fakes.does(SUBMIT), keep_failure=True, fork_at="error")
    assert failed.forked_after == 2 and FailureState.of(failed, snapshot).transcript == failed.transcript


@pytest.mark.parametrize("fork_at", ["error", "uniform"])
def test_states_saved_on_the_way_go_when_the_attempt_succeeds(run, fakes, fork_at):
    sandbox = fakes.FakeSandbox(reward="1", answers={"make": ExecResult("no", 1, 0.1, False)})
    attempt, snapshot, *_, released = run(
        fakes.does("make"), fakes.does(SUBMIT), sandbox=sandbox, keep_failure=True, fork_at=fork_at
    )
    assert attempt.solved and snapshot is None and attempt.forked_after is None
    assert len(released) == sandbox.log.count("SNAPSHOT") > 0


def test_uniform_takes_every_turn_as_often(run, fakes):
    taken, says = [], [*(fakes.does("ls") for _ in range(2)), fakes.does(SUBMIT)]
    for seed in range(240):
        sandbox = fakes.FakeSandbox()
        failed, snapshot, *_, released = run(*says, sandbox=sandbox, keep_failure=True, fork_at="uniform", seed=seed)
        taken.append(failed.forked_after)
        assert len(released) == sandbox.log.count("SNAPSHOT") - 1
        # Moment of the snapshot: as many commands before it as turns in the prefix (the submit runs none).
        before = sandbox.log[: int(snapshot.id.split("-")[1]) - 1]
        assert before.count("ls") == min(failed.forked_after, 2)
    counts = np.bincount(taken, minlength=4)[1:]
    assert counts.sum() == 240 and (abs(counts - 80) < 27).all()  # 3.7 standard deviations; the seeds are fixed


def test_an_unknown_fork_point_is_named(run, fakes):
    with pytest.raises(ValueError, match="fork_at 'start' is unknown; one of end, error, uniform"):
        run(fakes.does(SUBMIT), keep_failure=True, fork_at="start")


def test_a_recovery_has_the_turns_that_were_left(run, fakes):
    limits = limits_of(fakes, max_turns=5, recovery_budget="remaining", max_tokens=2000)
    failed, snapshot, *_ = run(*[fakes.does("ls")] * 2, fakes.does(SUBMIT), limits=limits, keep_failure=True)
    state = FailureState.of(failed, snapshot)
    recovery, again, *_ = run(fakes.does("ls"), start=state, retry_message="again", limits=limits, keep_failure=True)
    assert recovery.ended == "turn_limit" and len(recovery.turns) == 2
    assert again is None  # no turn is left for its own recovery
    assert run(fakes.does("ls"), limits=limits, keep_failure=True)[1] is None
    fresh, *_ = run(fakes.does("ls"), start=state, retry_message="again", limits=limits_of(fakes, max_tokens=2000))
    assert len(fresh.turns) == 4
    with pytest.raises(ValueError, match="recovery_budget is 'none'"):
        limits_of(fakes, recovery_budget="none")


def test_an_attempt_survives_json(run, fakes):
    attempt, *_ = run(fakes.does("ls"), fakes.does(SUBMIT))
    assert Attempt.from_dict(json.loads(json.dumps(attempt.to_dict()))) == attempt
    lost = Attempt.not_run("a", "t", attempt.outcome)
    assert Attempt.from_dict(json.loads(json.dumps(lost.to_dict()))) == lost
    with pytest.raises(ValueError, match="transcript"):
        Attempt.from_dict({"id": "a"})
    with pytest.raises(ValueError, match="ended"):
        Attempt.from_dict(attempt.to_dict() | {"ended": "tired"})


def test_limits_must_be_positive(fakes):
    with pytest.raises(ValueError, match="max_turns"):
        limits_of(fakes, max_turns=0)


def test_all_that_the_loop_says_is_known(chat):
    # No word of it is spelled in bytes by a tokenizer made for it.
    for text in fixed_texts():
        pieces = [chat.tokenizer.decode([index]) for index in chat.tokenizer.encode(text, add_special_tokens=False)]
        words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", re.sub(r"</?[a-z_=]+>", "", text))
        assert text and [word for word in words if word not in pieces] == []
