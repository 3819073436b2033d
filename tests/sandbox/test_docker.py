"""What only Docker sandboxes do."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from reterm_jax.sandbox import SandboxError, SnapshotLost, dockersnapshot
from reterm_jax.sandbox.reaper import run_label

if TYPE_CHECKING:
    from sandbox_bench import Bench

pytestmark = pytest.mark.parametrize("bench", ["docker"], indirect=True)


async def test_container_is_confined(bench: Bench) -> None:
    bench.set_task(memory_mb=256, cpus=64)
    box = await bench.start()
    attributes: Any = box._container.client.api.inspect_container(box.id)
    host = attributes["HostConfig"]
    assert host["CapDrop"] == ["ALL"] and not host["Privileged"] and not host["Binds"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"] and host["NetworkMode"] == "none"
    assert host["PidsLimit"] == 512 and host["Memory"] == host["MemorySwap"] == 256 << 20 and host["NanoCpus"] > 0
    labels = attributes["Config"]["Labels"]
    assert labels["reterm.run"] == "test" and labels["reterm.run_dir"] == run_label(bench.run_dir)
    assert labels["reterm.owner"].startswith("host-")


async def test_live_processes_are_recorded_and_not_in_forks(bench: Bench) -> None:
    box = await bench.start()
    assert (await box.snapshot()).live_processes == ()
    await bench.sh(box, "setsid sleep 85.5 >/dev/null 2>&1 &")
    assert await bench.sh(box, "pgrep -fc 'sleep 85.5'") == "1\n"
    snapshot = await box.snapshot()
    assert snapshot.live_processes == ("sleep 85.5",)
    fork = await bench.host.fork(snapshot, bench.task)
    assert await bench.sh(fork, "pgrep -fc 'sleep 85.5' || true") == "0\n"


async def test_background_processes_outlive_a_later_time_limit(bench: Bench) -> None:
    box = await bench.start()
    for before in range(8):  # the kernel tells when a process started to a hundredth of a second only
        await bench.sh(box, "sleep 85.5 &")
        assert (await box.exec("sleep 60", timeout=0.2)).timed_out
        left = await bench.sh(box, "pgrep -fc '^sleep 85.5'; pgrep -fc '^sleep 60' || true")
        assert left == f"{before + 1}\n0\n"


# Above the command's own shell is `timeout`, and above that the one that runs commands.
RUNNER = "ps -o ppid= -p $PPID | tr -d ' '"


async def test_one_shell_runs_the_commands_of_a_user_and_none_of_others(bench: Bench) -> None:
    box = await bench.start()
    first = await bench.sh(box, RUNNER)
    assert await bench.sh(box, RUNNER) == first and (await box.snapshot()).live_processes == ()
    others = [await bench.sh(box, RUNNER, **options) for options in ({"user": "agent"}, {"fresh": True})]
    assert len({first, *others, await bench.sh(box, RUNNER, fresh=True)}) == 4
    assert await bench.sh(box, RUNNER) == first


async def test_a_shell_that_is_attacked_is_replaced_or_goes_on(bench: Bench) -> None:
    box = await bench.start()
    first = await bench.sh(box, f"export A=1; {RUNNER}")
    assert (await box.exec("pkill bash; sleep 5", timeout=20)).exit_code == 143
    assert await bench.sh(box, RUNNER) == first
    await bench.sh(box, f"(sleep 0.2; echo junk > /proc/{first.strip()}/fd/1) >/dev/null 2>&1 &")
    await asyncio.sleep(0.8)
    assert await bench.sh(box, "echo $A") == "1\n"
    await bench.sh(box, "(sleep 0.2; kill -9 -1) >/dev/null 2>&1 &")
    await asyncio.sleep(0.8)
    assert await bench.sh(box, f"echo $A; {RUNNER}") not in ("1\n", f"1\n{first}")
    result = await box.exec("kill -9 -1; sleep 5", timeout=20)
    assert result.exit_code == 137 and "everything else that ran was killed" in result.output


async def test_agent_removes_its_shell(bench: Bench) -> None:
    box = await bench.start()
    await box.exec("rm /bin/bash", timeout=20)
    for fresh, status in ((False, 127), (True, 126)):
        result = await box.exec("true", timeout=20, fresh=fresh)
        assert result.exit_code == status and "bash" in result.output


async def test_images(bench: Bench) -> None:
    bench.set_task({"a": ""}, docker_image="reterm-sandbox-base")
    assert await bench.sh(await bench.start(), "pwd") == "/app\n"
    bench.set_task({"b": ""}, docker_image="reterm-sandbox-base:missing")
    with pytest.raises(SandboxError, match=r"sandbox_base/build\.sh"):
        await bench.start()
    bench.set_task({"c": ""}, gpus=1)
    if "nvidia" not in bench.host.client.info()["Runtimes"]:
        with pytest.raises(SandboxError, match="task example.*environment.gpus = 1.*NVIDIA container toolkit"):
            await bench.start()
    bench.set_task({"Dockerfile": "FROM scratch\nCOPY Dockerfile /\n"})
    with pytest.raises(SandboxError, match="task example"):
        await bench.start()


async def test_user(bench: Bench) -> None:
    bench.set_task({"Dockerfile": "FROM reterm-sandbox-base\nRUN chown agent /app\n"})
    box = await bench.start()
    assert await bench.sh(box, "id -un; cd /tmp; export A=1", user="agent") == "agent\n"
    assert await bench.sh(box, "pwd; echo $A", user="agent") == "/tmp\n1\n"
    assert await bench.sh(box, "id -un", user="root", fresh=True) == "root\n"


async def test_what_a_commit_leaves_out_is_in_the_forks(bench: Bench) -> None:
    bench.set_task({"Dockerfile": "FROM reterm-sandbox-base\nRUN mkdir /data; echo old > /data/old\nVOLUME /data\n"})
    box = await bench.start()
    await bench.sh(
        box, "rm /data/old; mkdir -m 750 /data/d; echo v > /data/d/v; echo s > /dev/shm/s; ln -s s /dev/shm/l"
    )
    snapshot = await box.snapshot()
    await bench.sh(box, "echo later > /data/later; echo later > /dev/shm/s")
    look = "cd /; find data dev/shm -mindepth 1 | sort; cat data/d/v /dev/shm/l; stat -c %a data/d"
    fork = await bench.host.fork(snapshot, bench.task)
    found = "data/d\ndata/d/v\ndev/shm/l\ndev/shm/s\nv\ns\n750\n"
    assert await bench.sh(fork, look, fresh=True) == found
    deeper = await bench.host.fork(await fork.snapshot(), bench.task)
    assert await bench.sh(deeper, look, fresh=True) == found


async def test_what_cannot_be_saved_is_refused(bench: Bench) -> None:
    box = await bench.start()
    await bench.sh(box, "echo x > /dev/file")
    with pytest.raises(SandboxError, match="/dev/file is a file in /dev"):
        await box.snapshot()
    await bench.sh(box, "rm /dev/file; echo x > /dev/shm/unreadable", user="root")
    await bench.sh(box, "chmod 000 /dev/shm/unreadable")
    with pytest.raises(SandboxError, match="cannot be saved.*unreadable"):
        await box.snapshot()


async def test_a_state_that_is_not_complete_is_refused(bench: Bench) -> None:
    box = await bench.start()
    snapshot = await box.snapshot()
    host: Any = bench.host
    host._snapshots[snapshot.id] = dataclasses.replace(host._snapshots[snapshot.id], sentinel="other")
    fork = await bench.host.fork(snapshot, bench.task)
    with pytest.raises(SnapshotLost, match="is not complete"):
        await fork.exec("touch /app/here", timeout=20)


async def test_forks_of_forks_stay_below_the_layer_limit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.set_task(env={"QUOTED": 'a "b" $c \\d'})
    box = await bench.start()
    host: Any = bench.host
    monkeypatch.setattr(dockersnapshot, "MAX_LAYERS", box._image.layers + 2)
    layers = []
    for depth in range(5):
        await bench.sh(
            box, f"mkdir -m 711 /app/{depth}; echo {depth} > /app/{depth}/x; export DEPTH={depth}; cd /app/{depth}"
        )
        snapshot = await box.snapshot()
        await box.close()
        layers.append(len(host.client.images.get(host._snapshots[snapshot.id].name).attrs["RootFS"]["Layers"]))
        box = await bench.host.fork(snapshot, bench.task)
        await bench.host.release(snapshot)
    assert max(layers) <= box._image.layers + 3 and 1 in layers
    assert (
        await bench.sh(box, "cat /app/*/x | tr -d '\\n'; echo $DEPTH $PWD; stat -c %a /app/3") == "012344 /app/4\n711\n"
    )
    assert await bench.sh(box, 'echo "$QUOTED"; pwd', fresh=True) == 'a "b" $c \\d\n/app\n'


async def test_capabilities_are_those_that_the_task_names(bench: Bench) -> None:
    bench.set_task({"x": ""}, capabilities=("CHOWN",))
    box = await bench.start()
    assert await bench.sh(box, "grep CapEff /proc/self/status; touch f; chown 5 f; stat -c %u f") == (
        "CapEff:\t0000000000000001\n5\n"
    )


async def test_a_quota_is_asked_for_once_where_the_storage_has_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.set_task(storage_mb=300)
    host: Any = bench.host
    real, asked = host.client.api.create_container_from_config, []

    def create(config: Any, *rest: Any) -> Any:
        asked.append(config["HostConfig"].get("StorageOpt"))
        if asked[-1]:  # whatever the storage of this machine
            raise host.errors.APIError(
                "--storage-opt is supported only for overlay over xfs with 'pquota' mount option"
            )
        return real(config, *rest)

    monkeypatch.setattr(host.client.api, "create_container_from_config", create)
    boxes = [await bench.start() for _ in range(2)]
    assert asked == [{"size": "556m"}, None, None]
    assert await bench.sh(boxes[1], "echo started") == "started\n"
