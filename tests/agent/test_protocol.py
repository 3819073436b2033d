import pytest

from reterm_jax.agent.protocol import ParsedTurn, parse_turn, render_message, render_turn

CALL = "<tool_call>\n<function=bash>\n<parameter=command>\nls -la\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    "command",
    [
        "ls",
        "  indented",
        "a\n\nb\n",
        "cat <<'E'\n</parameter>\nE",
        "echo '<tool_call>'",
        "printf '</think>'",
        "é\t$(x)",
    ],
)
@pytest.mark.parametrize("thought", ["", "look around", "two\n\nparagraphs"])
def test_a_rendered_turn_is_read_back(thought, command):
    assert parse_turn(render_turn(thought, command)) == ParsedTurn(thought, command)


def test_reasoning_and_remark_are_both_thought():
    assert parse_turn(render_turn("why", "ls", remark="so")) == ParsedTurn("why\n\nso", "ls")


@pytest.mark.parametrize(
    ("text", "thought"),
    [
        (f"why</think>{CALL}", "why"),
        (f"why\n</think>\n\n{CALL}", "why"),
        (f"<think>\nwhy\n</think>\n\n{CALL}", "why"),
        (f"why\n{CALL}", "why"),
        (CALL, ""),
        (f"why</think>\n{CALL}\ntrailing words", "why"),
        (f"{CALL.replace('ls', 'rm')}\nno, rather\n</think>\n\n{CALL}", CALL.replace("ls", "rm") + "\nno, rather"),
        (f"why</think>{CALL.replace(chr(10), '')}", "why"),
    ],
)
def test_forms_that_are_understood(text, thought):
    assert parse_turn(text) == ParsedTurn(thought, "ls -la")


@pytest.mark.parametrize("command", ["submit", " submit\n", "\nsubmit"])
def test_submit(command):
    turn = parse_turn(render_turn("done", command))
    assert turn.submit and turn.command == "submit" and turn.error is None


@pytest.mark.parametrize("command", ["submit now", "echo submit", "submit;"])
def test_commands_that_only_mention_submit(command):
    assert not parse_turn(render_turn("", command)).submit


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no tool call"),
        ("I am done.", "no tool call"),
        ("why</think>\n\nAll is well.", "no tool call"),
        ("x</think>ls -la", "no tool call"),
        ("x</think><tool_call>\nls\n</tool_call>", "must be followed by"),
        (f"{CALL}</think>\n\n", "no tool call"),
        (f"x</think>{CALL.replace('bash', 'python')}", "'python'"),
        (f"x</think>{CALL.replace('command', 'cmd')}", "one parameter"),
        (f"x</think>{CALL.removesuffix('</tool_call>')}", "not closed"),
        (f"x</think>{CALL[:40]}", "one parameter"),
        (f"x</think>{CALL}\n{CALL}", "more than one"),
        (render_turn("", "ls") * 2, "more than one"),
        (render_turn("", " \n"), "empty"),
        (render_turn("", "echo \0"), "NUL"),
    ],
)
def test_what_cannot_be_run_says_why(text, error):
    turn = parse_turn(text)
    assert turn.command is None and not turn.submit and error in turn.error


@pytest.mark.parametrize(
    "message",
    [
        {"content": render_turn("why", "ls")},
        {"content": f"<think>\n{render_turn('why', 'ls')}"},
        {"content": "why</think>", "tool_calls": [{"function": {"name": "bash", "arguments": '{"command": "ls"}'}}]},
        {
            "content": None,
            "reasoning_content": "why",
            "tool_calls": [{"function": {"name": "bash", "arguments": {"command": "ls"}}}],
        },
    ],
)
def test_forms_of_assistant_messages(message):
    assert render_message(message) == render_turn("why", "ls")


def test_messages_without_reasoning_or_call():
    assert render_message({"content": "All done."}) == "\n</think>\n\nAll done."


@pytest.mark.parametrize(
    "message",
    [
        {"content": 3},
        {"content": "", "tool_calls": [{}]},
        {"content": "", "tool_calls": [{"function": {"name": "bash", "arguments": "{"}}]},
        {"content": "", "tool_calls": [{"function": {"name": "bash", "arguments": "[1]"}}]},
    ],
)
def test_bad_assistant_messages_name_the_field(message):
    with pytest.raises(ValueError, match="content|tool_calls\\[0\\]"):
        render_message(message)
