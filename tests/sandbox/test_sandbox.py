"""What every kind of sandbox promises: isolation, files, snapshots and forks, limits, an end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from reterm_jax.sandbox import SandboxError

if TYPE_CHECKING:
    from sandbox_bench import Bench


async def test_environment(bench: Bench) -> None:
    bench.set_task(env={"FROM_TASK": "a b"})
    box = await bench.start()
    assert box.workdir == "/app"
    assert await bench.sh(box, 'pwd; echo "$HOME|$LANG|$FROM_TASK"; ls -d /logs/* /tests 2>&1; true') == (
        "/app\n/home/agent|C.UTF-8|a b\n"
        "ls: cannot access '/tests': No such file or directory\n/logs/agent\n/logs/artifacts\n/logs/verifier\n"
    )
    await bench.sh(box, "touch /app/x /tmp/x ~/x /logs/verifier/x && mkdir /srv/y")
    assert await bench.sh(box, "grep CapEff /proc/self/status") == "CapEff:\t0000000000000000\n"
    assert await bench.sh(box, "grep NoNewPrivs /proc/self/status") == "NoNewPrivs:\t1\n"


async def test_host_is_not_visible(bench: Bench) -> None:
    secret = bench.directory / "secret"
    secret.write_text("x")
    box = await bench.start()
    result = await box.exec(f"cat {secret}; ls {bench.run_dir}; ls /root /work; cat /proc/1/environ", timeout=20)
    assert result.exit_code == 0 or "x\n" not in result.output
    assert "secret" not in result.output.replace(str(secret), "")
    processes = await bench.sh(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert str(bench.directory) not in processes and "pytest" not in processes
    # No variable of this process, through any process that is visible inside.
    assert "PYTEST_CURRENT_TEST" not in (await box.exec("cat /proc/[0-9]*/environ", timeout=20)).output


async def test_no_network(bench: Bench) -> None:
    box = await bench.start()
    assert await bench.sh(box, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '") == "lo\n"
    result = await box.exec("exec 3<>/dev/tcp/192.0.2.1/80", timeout=20)
    assert result.exit_code != 0 and "unreachable" in result.output


async def test_permissions_deny(bench: Bench) -> None:
    box = await bench.start()
    await bench.sh(box, "echo a > f; chmod a-w f; mkdir d; chmod a-w d; echo b > g; chmod 000 g")
    for command in ("echo b > f", "touch d/x", "cat g", "ls g/ "):
        result = await box.exec(command, timeout=20)
        assert result.exit_code != 0, command
        assert "Permission denied" in result.output or "Not a directory" in result.output
    assert await bench.sh(box, "cat f; chmod u+w f; echo c > f; cat f") == "a\nc\n"


async def test_output_is_bounded_and_clean(bench: Bench) -> None:
    box = await bench.start()
    result = await box.exec("echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo; echo last", timeout=30)
    assert result.output.startswith("first\nxxx") and result.output.endswith("xxx\nlast\n")
    assert len(result.output) < 200_000 and result.truncated > 4_500_000
    assert f"{result.truncated} bytes" in result.output
    assert await bench.sh(box, r"printf '\033[31mred\033[0m\r\n10%%\r20%%\n\0\377\b|\n'") == "red\n20%\n|\n"
    assert await bench.sh(box, "echo err >&2; echo out") == "err\nout\n"


async def test_upload_and_download(bench: Bench) -> None:
    source = bench.directory / "tests"
    (source / "data").mkdir(parents=True)
    (source / "test.sh").write_text("echo ran")
    (source / "test.sh").chmod(0o755)
    (source / "data" / "x").write_bytes(b"\x00\xff")
    (source / "link").symlink_to("data/x")
    box = await bench.start()
    await box.upload(source, "/tests")
    assert await bench.sh(box, "/tests/test.sh; readlink /tests/link; stat -c %s /tests/data/x") == "ran\ndata/x\n2\n"
    await box.upload(source / "test.sh", "/opt/new/place/script")
    await box.upload(source / "test.sh", "/opt/")
    assert await bench.sh(box, "/opt/new/place/script; /opt/test.sh") == "ran\nran\n"
    await bench.sh(
        box, "mkdir out; echo 1 > out/reward.txt; ln -s /etc/passwd out/link; mkfifo out/fifo; chmod 0 out/reward.txt"
    )
    if bench.kind == "bubblewrap":  # its one user reads files by the modes it set; Docker's daemon is not bound by them
        await bench.sh(box, "chmod 600 out/reward.txt; rm out/fifo")
    await box.download("/app/out", bench.directory / "got")
    assert (bench.directory / "got" / "reward.txt").read_text() == "1\n"
    assert not (bench.directory / "got" / "link").is_symlink() and not (bench.directory / "got" / "fifo").exists()
    await box.download("/opt/test.sh", bench.directory / "one")
    assert (bench.directory / "one").read_text() == "echo ran"
    with pytest.raises(FileNotFoundError, match="/logs/verifier/reward.json"):
        await box.download("/logs/verifier/reward.json", bench.directory / "none")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        await box.upload(bench.directory / "nowhere", "/x")
    with pytest.raises(ValueError, match="absolute"):
        await box.upload(source, "x")


async def test_links_made_by_the_agent_lead_nowhere(bench: Bench) -> None:
    victim = bench.directory / "victim"
    victim.write_text("untouched")
    file = bench.directory / "file"
    file.write_text("new")
    box = await bench.start()
    await bench.sh(box, f"ln -s {bench.directory} /app/dir; ln -s {victim} /app/link")
    try:
        await box.upload(file, "/app/link")
        await box.upload(file, "/app/dir/victim")
    except SandboxError:
        pass
    assert victim.read_text() == "untouched"
    try:
        await box.download("/app/link", bench.directory / "got")
    except (FileNotFoundError, SandboxError):
        pass
    got = bench.directory / "got"
    assert not got.exists() or got.read_text() != "untouched"


async def test_forks_start_from_the_snapshot_and_are_independent(bench: Bench) -> None:
    box = await bench.start()
    await bench.sh(
        box, "echo sentinel > f; mkdir -m 500 ro; ln -s f l; cd /tmp; export A=1; g() { echo g; }; touch -d @5 f"
    )
    await bench.sh(box, "cd /app; touch -d @1000 f; chmod 640 f; cd /tmp")
    snapshot = await box.snapshot()
    assert snapshot.kind == bench.kind
    await bench.sh(box, "echo later > /app/f; cd /; export A=2")
    await box.close()
    forks = await asyncio.gather(*(bench.host.fork(snapshot, bench.task) for _ in range(3)))
    state = 'pwd; echo $A; g; cat /app/f; readlink /app/l; stat -c "%a %Y" /app/f; stat -c %a /app/ro'
    for index, fork in enumerate(forks):
        assert await bench.sh(fork, state) == "/tmp\n1\ng\nsentinel\nf\n640 1000\n500\n"
        await bench.sh(fork, f"echo {index} > /app/f; cd /srv; export A=f{index}")
    for index, fork in enumerate(forks):
        assert await bench.sh(fork, "pwd; echo $A; cat /app/f") == f"/srv\nf{index}\n{index}\n"
    second = await forks[1].snapshot()
    await bench.host.release(snapshot)
    await bench.host.release(snapshot)
    assert await bench.sh(forks[2], "cat /app/f") == "2\n"
    await forks[0].close()
    deeper = await bench.host.fork(second, bench.task)
    assert await bench.sh(deeper, "cat /app/f; pwd") == "1\n/srv\n"
    with pytest.raises(SandboxError, match=snapshot.id):
        await bench.host.fork(snapshot, bench.task)


async def test_modes_of_standard_directories_survive_a_fork(bench: Bench) -> None:
    box = await bench.start()
    await bench.sh(box, "chmod 555 /app; chmod 700 /logs/agent; rmdir /logs/artifacts")
    fork = await bench.host.fork(await box.snapshot(), bench.task)
    assert await bench.sh(fork, "stat -c %a /app /logs/agent; ls /logs") == "555\n700\nagent\nverifier\n"


async def test_unreadable_trees_are_saved_and_removed(bench: Bench) -> None:
    box = await bench.start()
    await bench.sh(box, "mkdir -p a/b; echo x > a/b/c; chmod 000 a/b/c a/b a; mkdir q; chmod 000 q; chmod 000 /app")
    snapshot = await box.snapshot()
    await box.close()
    fork = await bench.host.fork(snapshot, bench.task)
    assert (
        await bench.sh(fork, "cd /; chmod 700 /app; stat -c %a /app/a; chmod -R u+rwx /app; cat /app/a/b/c", fresh=True)
        == "0\nx\n"
    )


async def test_closed_sandbox(bench: Bench) -> None:
    box = await bench.start()
    await box.close()
    await box.close()
    for call in (box.exec("true", timeout=1), box.snapshot(), box.upload(Path(__file__), "/x")):
        with pytest.raises(SandboxError, match="closed"):
            await call


async def test_starts_wait_for_a_free_place(bench: Bench) -> None:
    boxes = [await bench.start() for _ in range(4)]
    fifth = asyncio.ensure_future(bench.start())
    await asyncio.sleep(0.2)
    assert not fifth.done()
    await boxes[0].close()
    assert await bench.sh(await asyncio.wait_for(fifth, 20), "echo in") == "in\n"


async def test_sandboxes_of_one_task_are_independent(bench: Bench) -> None:
    one, two = await asyncio.gather(bench.start(), bench.start())
    await bench.sh(one, "echo 1 > f; mkdir -p /tests")
    assert await bench.sh(two, "ls /app; ls -d /tests 2>/dev/null || echo none") == "none\n"
    outputs = await asyncio.gather(
        *(bench.sh(box, f"sleep 0.1; echo {i}") for i, box in enumerate((one, two, one, two)))
    )
    assert outputs == ["0\n", "1\n", "2\n", "3\n"]


async def test_cancelled_command_leaves_a_usable_sandbox(bench: Bench) -> None:
    box = await bench.start()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(box.exec("sleep 3; touch /app/late", timeout=4), 0.3)
    assert await bench.sh(box, "echo ok") == "ok\n"
    await box.close()


async def test_dockerfile(bench: Bench) -> None:
    files = {
        "Dockerfile": """
# a comment
FROM reterm-sandbox-base
ENV NAME=value PATHLIKE="a b" \\
    # inside
    THIRD=$HOME/x
WORKDIR /srv/project
COPY data/ ./data/
COPY one.txt two.txt dest/
COPY one.txt renamed
RUN mkdir made && \\
    echo "$NAME" > made/name && chmod 600 made/name
RUN ["bash", "-c", "[[ $PWD == /srv/project ]] && echo json > made/json"]
WORKDIR sub
""",
        "data/deep/x": "X",
        "one.txt": "1",
        "two.txt": "2",
    }
    bench.set_task(files)
    box = await bench.start()
    assert box.workdir == "/srv/project/sub"
    listing = await bench.sh(box, 'echo "$NAME|$PATHLIKE|$THIRD"; pwd; cd ..; find . -type f | sort; cat made/*')
    assert listing == (
        "value|a b|/home/agent/x\n/srv/project/sub\n./data/deep/x\n./dest/one.txt\n./dest/two.txt\n"
        "./made/json\n./made/name\n./renamed\njson\nvalue\n"
    )


async def test_failing_build_names_the_instruction(bench: Bench) -> None:
    bench.set_task({"Dockerfile": "FROM reterm-sandbox-base\nRUN echo why; exit 7\n"})
    with pytest.raises(SandboxError, match=r"(?s)task example: .*Dockerfile.*7"):
        await bench.start()
    bench.set_task({"Dockerfile": "FROM reterm-sandbox-base\nCOPY missing /x\n"})
    with pytest.raises(SandboxError, match="missing"):
        await bench.start()


async def test_workdir_of_the_task_wins(bench: Bench) -> None:
    bench.set_task(workdir="/data/work")
    box = await bench.start()
    assert await bench.sh(box, "pwd") == "/data/work\n"


async def test_fork_bomb_is_contained(bench: Bench) -> None:
    box = await bench.start()
    await box.exec("bomb() { bomb | bomb & }; bomb; sleep 1", timeout=3)
    assert (await bench.sh(box, "echo alive", fresh=True)).endswith("alive\n")


async def test_healthcheck_is_waited_for(bench: Bench) -> None:
    check = SimpleNamespace(command="", interval_sec=0.05, timeout_sec=20, start_period_sec=0, retries=3)
    check.command = "echo x >> /tmp/tries; [ $(wc -l < /tmp/tries) = 2 ]"
    bench.set_task(healthcheck=check)
    assert await bench.sh(await bench.start(), "wc -l < /tmp/tries") == "2\n"
    check.command = "echo broken; false"
    with pytest.raises(SandboxError, match="task example: environment.healthcheck failed 3 times: broken"):
        await bench.start()
