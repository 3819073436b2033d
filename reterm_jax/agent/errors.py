"""Labels failed turns with one of five error categories, by rules on what the terminal printed.

The categories are those that recovery rates are reported by. The rules are read from top to bottom, the first that
fits gives the label; they look at exit status, output and command only, so they are cheap and can be checked by hand.

| category | rule |
|---|---|
| `tool_use` | the call was malformed; or exit 126/127, or the command refused its own arguments |
| `resource_management` | the command ran into its time limit, was killed, or met a lock, a full disk, missing memory or missing rights |
| `verification` | a check said no (`test`, `diff`, `cmp`, `grep -q`, a test runner, an assertion); or the attempt was submitted right after a command that failed |
| `code_implementation` | a program or script is wrong: syntax error, traceback, crash, failed compilation |
| `planning` | any other failure: the step did not fit the state (a path that is not there, a repeated command) |
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Sequence

from reterm_jax.agent.turns import Turn

CATEGORIES = ("planning", "tool_use", "code_implementation", "verification", "resource_management")

_BAD_USAGE = re.compile(
    r"command not found|invalid option|unrecognized option|unknown option|illegal option|invalid argument|"
    r"missing (?:file )?operand|option requires an argument|too (?:many|few) arguments|^usage:",
    re.IGNORECASE | re.MULTILINE,
)
_RESOURCE = re.compile(
    r"no space left|disk quota|cannot allocate memory|out of memory|memoryerror|too many open files|"
    r"address already in use|resource temporarily unavailable|text file busy|device or resource busy|"
    r"permission denied|operation not permitted|read-only file system|timed out|"
    r"\block(?:ed|file)?\b|\.lock\b|broken pipe|connection refused|network is unreachable",
    re.IGNORECASE,
)
_ASSERTION = re.compile(r"assertionerror|assertion failed|^FAILED\b|\d+ failed|checksum did not match", re.I | re.M)
_CHECK = re.compile(
    r"(?:^|[;&|]\s*)(?:test|\[\[?|diff|cmp|pytest|python3? -m (?:pytest|unittest)|make (?:test|check)|"
    r"grep (?:-\w*q|--quiet)|\S+ -c \S*sum\S*|\S*sum -c)(?:\s|$)"
)
_CODE = re.compile(
    r"syntax error|syntaxerror|traceback \(most recent|unexpected (?:token|end of file|eof)|indentationerror|"
    r"(?:name|type|value|key|index|attribute|import|modulenotfound|zerodivision)error\b|segmentation fault|"
    r"undefined reference|\berror: expected|compilation terminated|panicked at|unterminated|unbound variable|"
    r"unknown command: |parse error",
    re.IGNORECASE,
)

_PROGRAM = re.compile(r"\s*(?:cd\s+\S+\s*(?:&&|;|\n)\s*|[A-Za-z_]\w*=\S*\s+|sudo\s+)*([^\s;&|()<>]+)")


def label_turn(turn: Turn, previous: Turn | None = None) -> str | None:
    """The category of one turn, or None where nothing went wrong. `previous` is the turn before it."""
    if turn.error is not None:
        return "tool_use"
    if turn.exit_code is None:  # submitted
        return "verification" if previous is not None and _failed(previous) else None
    if not _failed(turn):
        return None
    if turn.exit_code in (126, 127) and not turn.timed_out and not _RESOURCE.search(turn.output):
        return "tool_use"
    if _BAD_USAGE.search(turn.output):
        return "tool_use"
    if turn.timed_out or turn.exit_code in (124, 137) or _RESOURCE.search(turn.output):
        return "resource_management"
    if _ASSERTION.search(turn.output):
        return "verification"
    if turn.exit_code in (132, 134, 136, 139) or _CODE.search(turn.output):
        return "code_implementation"
    if _CHECK.search(turn.command or ""):
        return "verification"
    return "planning"


def label_turns(turns: Sequence[Turn]) -> list[str | None]:
    """The category of each turn of an attempt."""
    return [label_turn(turn, before) for before, turn in zip([None, *turns], turns, strict=False)]


def unrepaired(turns: Sequence[Turn]) -> list[int]:
    """Indices of the turns that went wrong and were not made good later.

    An error counts as repaired once the same program runs without one: the `cat` of a path that is not there by the
    `cat` of another path, a failed `pytest` by one that passes, a malformed call by any call that is well formed.
    """
    labels = label_turns(turns)
    return [
        index
        for index, label in enumerate(labels)
        if label is not None
        and not any(
            later is None and (turns[index].error is not None or _program(turn) == _program(turns[index]))
            for turn, later in zip(turns[index + 1 :], labels[index + 1 :], strict=True)
        )
    ]


def _program(turn: Turn) -> str:
    """The first word of a command, behind changes of directory, assignments and `sudo`."""
    found = _PROGRAM.match(turn.command or "")
    return found[1] if found else ""


def _failed(turn: Turn) -> bool:
    return turn.error is not None or turn.timed_out or bool(turn.exit_code)
