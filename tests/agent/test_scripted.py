import asyncio
from types import SimpleNamespace

from reterm_jax.agent.protocol import parse_turn
from reterm_jax.agent.scripted import ScriptedPolicy


def say(policy, session, max_tokens=100):
    return asyncio.run(
        policy.generate([1], max_tokens=max_tokens, temperature=1.0, seed=0, session=session, parent=None)
    )


def test_sessions_play_the_script_side_by_side_and_then_submit(chat):
    actions = [SimpleNamespace(thought="look", command="ls"), SimpleNamespace(thought="make", command="echo hello")]
    policy = ScriptedPolicy(chat, actions)
    said = [say(policy, session) for session in ("a", "b", "a", "a", "a")]
    turns = [parse_turn(chat.policy_text(completion.ids)) for completion in said]
    assert [turn.command for turn in turns] == ["ls", "ls", "echo hello", "submit", "submit"]
    assert turns[2].thought == "make"
    assert all(c.stop == "stop" and c.ids[-1] == chat.stop_id and set(c.logprobs) == {0.0} for c in said)


def test_a_session_that_ended_begins_again(chat):
    policy = ScriptedPolicy(chat, [SimpleNamespace(thought="look", command="ls")])
    first = say(policy, "a")
    asyncio.run(policy.end("a"))
    assert say(policy, "a") == first


def test_long_turns_are_cut(chat):
    completion = say(ScriptedPolicy(chat, [SimpleNamespace(thought="look", command="ls")]), "a", max_tokens=3)
    assert completion.stop == "length" and len(completion.ids) == 3
