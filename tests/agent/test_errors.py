import pytest

from reterm_jax.agent.errors import CATEGORIES, label_turn, label_turns, unrepaired
from reterm_jax.agent.turns import Turn


def ran(command, output="", exit_code=1, timed_out=False):
    return Turn("", command, output, exit_code, 0.1, timed_out)


@pytest.mark.parametrize(
    ("turn", "category"),
    [
        (ran("ls", "notes", 0), None),
        (Turn("", "submit"), None),
        (Turn("", error="Error: no tool call"), "tool_use"),
        (ran("foo", "bash: line 1: foo: command not found", 127), "tool_use"),
        (ran("ls -Z9", "ls: invalid option -- '9'\nTry 'ls --help'", 2), "tool_use"),
        (ran("cp a", "cp: missing destination file operand after 'a'", 1), "planning"),
        (ran("mkdir", "mkdir: missing operand", 1), "tool_use"),
        (ran("sleep 99", "", 124, True), "resource_management"),
        (ran("cp a b", "cp: cannot create regular file 'b': Permission denied"), "resource_management"),
        (ran("./run.sh", "bash: ./run.sh: Permission denied", 126), "resource_management"),
        (ran("./run.sh", "locked by a.lock, remove it"), "resource_management"),
        (ran("dd", "dd: error writing 'x': No space left on device"), "resource_management"),
        (ran("python3 x.py", "Traceback (most recent call last):\nKeyError: 1"), "code_implementation"),
        (ran("python3 t.py", "Traceback (most recent call last):\nAssertionError"), "verification"),
        (ran("bash x.sh", "x.sh: line 3: syntax error near unexpected token `fi'", 2), "code_implementation"),
        (ran("./a.out", "Segmentation fault", 139), "code_implementation"),
        (ran("make && diff a b", "1c1\n< x\n---\n> y"), "verification"),
        (ran("grep -q x notes", ""), "verification"),
        (ran("cat x", "cat: x: No such file or directory"), "planning"),
        (ran("cat clock", "cat: clock: No such file or directory"), "planning"),
        (ran("grep x notes", ""), "planning"),
    ],
)
def test_rules(turn, category):
    assert label_turn(turn) == category
    assert category is None or category in CATEGORIES


def test_submitting_after_a_failure_is_a_fault_of_verification():
    turns = [ran("ls", "", 0), ran("cat x", "cat: x: No such file or directory"), Turn("", "submit")]
    assert label_turns(turns) == [None, "planning", "verification"]
    assert label_turns([ran("ls", "", 0), Turn("", "submit")]) == [None, None]
    assert label_turns([]) == []


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        (["!cat a", "ls", "cat b"], []),
        (["!cat a", "ls", "!cat b"], [0, 2]),
        (["!cd /app && make -j2", "LANG=C make", "submit"], []),
        (["!make", "ls", "submit"], [0]),
        (["ls", "!make", "submit"], [1, 2]),  # submitted on top of a failure, which is an error of its own
        ([None, "!make", "ls"], [1]),
        ([None, None], [0, 1]),
        (["ls", "submit"], []),
    ],
)
def test_errors_are_repaired_by_the_same_program(commands, expected):
    def made(command):
        if command is None:
            return Turn("", error="malformed")
        code = None if command == "submit" else int(command.startswith("!"))
        return Turn("", command.lstrip("!"), "no such file" if code else "", code)

    assert unrepaired([made(command) for command in commands]) == expected
