"""The native protocol: one `bash` tool, called in Qwen's XML form, one call a turn.

The prompt opens the turn with `<think>`, so a turn's text is `reasoning</think>`, an optional remark, and the call.
The command `submit`, alone, ends the attempt.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

TOOL = "bash"
SUBMIT = "submit"
SYSTEM_PROMPT = "Solve the task with bash, then submit."

BASH_SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Runs a command in a persistent bash session. The command `submit`, alone, ends the task.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command to run."}},
            "required": ["command"],
        },
    },
}

_THINK = re.compile(r"</?think>")
_OPEN = re.compile(r"<tool_call>\s*<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>\n?")
# The whole closing sequence, so that a command may itself contain `</parameter>`.
_CLOSE = re.compile(r"\n?</parameter>\s*</function>\s*</tool_call>")


@dataclasses.dataclass(frozen=True)
class ParsedTurn:
    """What a policy turn says.

    Attributes:
      thought: reasoning and remarks.
      command: what to run; None where there is nothing to run.
      submit: the turn ends the attempt; `command` is then `submit`.
      error: why nothing can be run, in words for the policy; None where `command` is there.
    """

    thought: str
    command: str | None = None
    submit: bool = False
    error: str | None = None


def parse_turn(text: str) -> ParsedTurn:
    """Reads one turn (without stop token). Never raises: whatever is wrong is in `error`."""
    reasoning, closed, body = text.partition("</think>")
    if not closed:
        # Without an end of reasoning all is reasoning, but a call in it is meant as one.
        reasoning, body = "", text
    call = _OPEN.search(body)
    remark = body[: call.start()] if call else body
    parts = (_THINK.sub("", part).strip() for part in (reasoning, remark))
    thought = "\n\n".join(part for part in parts if part)
    if call is None:
        if "<tool_call>" in body or "<function=" in body:
            return ParsedTurn(thought, error=_malformed("<tool_call> must be followed by <function=bash>"))
        return ParsedTurn(thought, error=_malformed("no tool call"))
    if call[1].strip() != TOOL:
        return ParsedTurn(thought, error=f"Error: there is no tool {call[1].strip()!r}; the only tool is bash.")
    parameter = _PARAMETER.match(body, call.end())
    if parameter is None or parameter[1].strip() != "command":
        return ParsedTurn(thought, error=_malformed("bash takes one parameter, command"))
    close = _CLOSE.search(body, parameter.end())
    if close is None:
        return ParsedTurn(thought, error=_malformed("the call is not closed"))
    if _OPEN.search(body, close.end()):
        return ParsedTurn(thought, error="Error: more than one tool call; nothing was run. Make one call a turn.")
    command = body[parameter.end() : close.start()]
    if not command.strip():
        return ParsedTurn(thought, error=_malformed("the command is empty"))
    if command.strip() == SUBMIT:
        return ParsedTurn(thought, SUBMIT, submit=True)
    if "\0" in command:
        return ParsedTurn(thought, error="Error: the command contains a NUL character; nothing was run.")
    return ParsedTurn(thought, command)


def _malformed(problem: str) -> str:
    return f"Error: {problem}; nothing was run. Call bash with a command."


def render_turn(thought: str, command: str, remark: str = "") -> str:
    """The canonical text of a turn, as the chat template writes it; `parse_turn` reads it back."""
    opening = f"{thought.strip()}\n</think>\n\n"
    if remark.strip():
        opening += f"{remark.strip()}\n\n"
    return opening + _call_text(TOOL, {"command": command})


def render_message(message: Mapping[str, Any]) -> str:
    """The canonical text of an assistant message of a data set, following the prompt's `<think>`.

    The call may be part of the content or in `tool_calls`; reasoning may be part of the content or in
    `reasoning_content`.

    Raises:
      ValueError: content or a tool call is not of the expected form; names the field.
    """
    content = message.get("content") or ""
    reasoning = message.get("reasoning_content") or ""
    if not isinstance(content, str) or not isinstance(reasoning, str):
        raise ValueError("content: must be text")
    if not reasoning and "</think>" in content:
        reasoning, _, content = content.partition("</think>")
        reasoning = reasoning.replace("<think>", "")
    text = f"{reasoning.strip()}\n</think>\n\n{content.strip()}"
    for index, call in enumerate(message.get("tool_calls") or ()):
        separator = "\n" if index else "\n\n" if content.strip() else ""
        text += separator + _render_call(call, f"tool_calls[{index}]")
    return text


def _render_call(call: Any, field: str) -> str:
    try:
        function = call["function"]
        name, arguments = function["name"], function.get("arguments") or {}
        if isinstance(arguments, str):  # as the OpenAI form has it
            arguments = json.loads(arguments)
        return _call_text(name, arguments)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{field}: needs function.name and function.arguments ({error!r})") from error


def _call_text(name: str, arguments: Mapping[str, Any]) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"
