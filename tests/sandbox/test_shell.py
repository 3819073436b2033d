"""The shell that an agent sees: what persists between commands, and commands that try to break it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reterm_jax.sandbox import shell

if TYPE_CHECKING:
    from sandbox_bench import Bench


async def test_directory_exports_functions_and_umask_persist(bench: Bench) -> None:
    box = await bench.start()
    await bench.sh(
        box, "mkdir -p '/tmp/a b'; cd '/tmp/a b'; export A=1 B=$'x\\n\"y\" $z'; f() { echo \"f:$1\"; }; umask 027"
    )
    assert await bench.sh(box, 'pwd; echo "$A|$B"; f 3; umask') == '/tmp/a b\n1|x\n"y" $z\nf:3\n0027\n'
    await bench.sh(box, "unset A; unset -f f; cd -")
    assert await bench.sh(box, 'pwd; echo "${A-none}"; type f 2>/dev/null || echo gone') == "/app\nnone\ngone\n"


async def test_unexported_variables_and_options_do_not_persist(bench: Bench) -> None:
    box = await bench.start()
    await bench.sh(box, "plain=1; set -f; set -u")
    assert await bench.sh(box, 'echo "[$plain]" /et[c]') == "[] /etc\n"


async def test_state_survives_however_the_shell_ends(bench: Bench) -> None:
    box = await bench.start()
    for index, (ending, status) in enumerate(
        [
            ("exit 3", 3),
            ("set -e; false; echo unreached", 1),
            ("set -u; : $nothing_here; echo unreached", 127),
            ("trap 'echo bye' EXIT", 0),
            ("set -x; set -C; IFS=/", 0),
            ("kill -TERM $$; sleep 5", 143),
        ]
    ):
        result = await box.exec(f"cd /tmp; export N={index}; {ending}", timeout=20)
        assert result.exit_code == status, (ending, result)
        assert "unreached" not in result.output and "_reterm" not in result.output
        assert await bench.sh(box, "pwd; echo $N; cd /app") == f"/tmp\n{index}\n", ending


async def test_exec_keeps_the_state_from_before(bench: Bench) -> None:
    box = await bench.start()
    await bench.sh(box, "cd /tmp; export A=1")
    assert await bench.sh(box, "cd /; exec printf done") == "done"
    assert await bench.sh(box, "pwd; echo $A") == "/tmp\n1\n"


async def test_syntax_errors_are_results(bench: Bench) -> None:
    box = await bench.start()
    await bench.sh(box, "cd /tmp")
    for command in ("echo (", "if true", "echo 'open", ")"):
        result = await box.exec(command, timeout=20)
        assert result.exit_code != 0 and result.output.startswith("bash: "), result
    result = await box.exec("true\nno-such-command", timeout=20)
    assert (result.exit_code, result.output) == (127, "bash: line 2: no-such-command: command not found\n")
    assert await bench.sh(box, "pwd") == "/tmp\n"


async def test_heredocs_quotes_and_long_commands(bench: Bench) -> None:
    box = await bench.start()
    assert await bench.sh(box, "cat <<'EOF' > f\n$x `y` \"z\" \\ '\nEOF\ncat f") == '$x `y` "z" \\ \'\n'
    long = "x" * 300_000
    assert await bench.sh(box, f"cat > long <<'EOF'\n{long}\nEOF\nwc -c < long") == "300001\n"
    assert await bench.sh(box, "printf '\\n' ; echo 'é€😀'") == "\né€😀\n"
    assert await bench.sh(box, "echo 'a\0b \ud800'") == "ab ?\n"
    assert await bench.sh(box, "") == ""


async def test_standard_input_is_empty(bench: Bench) -> None:
    box = await bench.start()
    assert await bench.sh(box, 'cat; read -r line || echo "end[$line]"; echo "$0 $#"') == "end[]\nbash 0\n"


async def test_the_command_does_not_find_itself(bench: Bench) -> None:
    box = await bench.start()
    assert await bench.sh(box, "pkill -f unlikely_name_7531; echo alive") == "alive\n"


async def test_background_job_does_not_hold_the_command(bench: Bench) -> None:
    box = await bench.start()
    result = await box.exec("sleep 30 & echo started", timeout=20)
    assert result.output == "started\n" and result.duration < 5


async def test_time_limit_kills_and_the_shell_goes_on(bench: Bench) -> None:
    box = await bench.start()
    # TERM leaves time to save the state; a shell that ignores it is killed and keeps the state from before.
    result = await box.exec("cd /tmp; echo before; sleep 60", timeout=0.5)
    assert result.timed_out and result.exit_code == 124 and result.output.startswith("before\n") and result.duration < 4
    assert await bench.sh(box, "pwd") == "/tmp\n"
    result = await box.exec("trap '' TERM; cd /; while :; do :; done", timeout=0.5)
    assert result.timed_out and result.exit_code == 137
    assert await bench.sh(box, "pwd") == "/tmp\n"
    result = await box.exec("exit 124", timeout=20)
    assert result.exit_code == 124 and not result.timed_out


async def test_time_limit_kills_the_whole_tree(bench: Bench) -> None:
    box = await bench.start()
    command = (
        "for i in 1 2 3; do (setsid nohup sh -c 'sleep 2.75; touch /tmp/survived' >/dev/null 2>&1 &) ; done; sleep 60"
    )
    assert (await box.exec(command, timeout=0.5)).timed_out
    assert await bench.sh(box, "sleep 3; ls /tmp; pgrep -x sleep | wc -l") in ("0\n", "1\n")  # 1: the container's own


async def test_lost_working_directory(bench: Bench) -> None:
    box = await bench.start()
    await bench.sh(box, "mkdir /tmp/d; cd /tmp/d; rmdir /tmp/d")
    assert await bench.sh(box, "pwd") == "The working directory /tmp/d cannot be entered; now in /app\n/app\n"
    await bench.sh(box, "cd /; rm -rf /app")
    assert await bench.sh(box, "pwd") == "/\n"
    assert await bench.sh(box, "pwd", fresh=True) == "/\n"


async def test_fresh_uses_and_changes_nothing(bench: Bench) -> None:
    box = await bench.start()
    await bench.sh(box, "cd /tmp; export A=1 PATH=/nowhere; f() { :; }; ls() { echo mine; }")
    assert await bench.sh(box, 'pwd; echo "[$A]"; cd /; export B=2; type f 2>/dev/null || echo none', fresh=True) == (
        "/app\n[]\nnone\n"
    )
    assert await bench.sh(box, 'pwd; echo "$A[$B]"; ls') == "/tmp\n1[]\nmine\n"


async def test_env_holds_for_one_command(bench: Bench) -> None:
    box = await bench.start()
    await bench.sh(box, "export A=old")
    assert (
        await bench.sh(box, 'echo "$A $Q"; export A=new', env={"A": "given", "Q": 'a "b"\n$c'}) == 'given a "b"\n$c\n'
    )
    assert await bench.sh(box, 'echo "$A[$Q]"') == "old[]\n"
    assert await bench.sh(box, 'echo "$A"', env={"A": "v"}, fresh=True) == "v\n"
    with pytest.raises(ValueError, match="not a shell name"):
        await box.exec("true", timeout=1, env={"A-B": "1"})


async def test_hostile_state(bench: Bench) -> None:
    """Functions that hide builtins, broken variables and a destroyed state: later commands still run."""
    box = await bench.start()
    await bench.sh(box, 'cd() { builtin cd "$@" && echo moved; }; printf() { echo no; }; mv() { echo no; }; cd /tmp')
    assert await bench.sh(box, "pwd; unset -f cd printf mv") == "/tmp\n"
    await bench.sh(box, "export BIG=$(head -c 300000 /dev/zero | tr '\\0' x)")
    assert await bench.sh(box, "echo ${#BIG}; unset BIG") == "300000\n"
    await bench.sh(box, "export PATH=/nowhere SHELLOPTS; readonly -f x 2>/dev/null; export LD_PRELOAD=")
    assert await bench.sh(box, "echo $PATH; export PATH=/usr/bin:/bin") == "/nowhere\n"
    await bench.sh(box, f"echo 'if (' > {shell.STATE}; chmod 400 {shell.STATE}; exec true")
    assert await bench.sh(box, "pwd; cd /") == "/app\n"
    await box.exec("rm -rf /var/lib/reterm /tmp/* 2>/dev/null; chmod 000 /var/lib /tmp", timeout=20)
    assert "alive" in await bench.sh(box, "echo alive")
    assert await bench.sh(box, "echo alive", fresh=True) == "alive\n"


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_time_limit_must_be_finite(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        shell.seconds(timeout)
