"""What the rollout service itself costs, and how busy it keeps its sampler, with samplers and sandboxes that only wait.

    python benchmarks/rollout.py [--attempts=64] [--turns=16] [--sampling=2.0] [--command=0.5] [--output=2000]

A server in another process answers like vLLM after `--sampling` seconds, commands take `--command` seconds and print
`--output` characters, and a trainer in a third process fetches the batches over HTTP. What is left is the service's own
work: transcripts, requests, scheduling, the store. Bar: at most 5 ms of CPU a turn. The table also says how often at
least one turn was being sampled, and how many were on average.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from absl import app, flags, logging
from reporting import finish
from transformers import AutoTokenizer

from reterm_jax.agent.attempt import AgentLimits
from reterm_jax.agent.protocol import render_turn
from reterm_jax.rollout.client import ServiceClient
from reterm_jax.rollout.groups import Roller
from reterm_jax.rollout.http_server import HttpServer
from reterm_jax.rollout.pool import PoolConfig
from reterm_jax.rollout.protocol import Opening, Weights, tokenizer_digest
from reterm_jax.rollout.samplers.vllm import VllmSampler
from reterm_jax.rollout.samplers.vllm_server import LOGPROBS_MODE
from reterm_jax.rollout.scheduler import Schedule
from reterm_jax.rollout.service import RolloutService, ServiceParts
from reterm_jax.rollout.store import GroupStore
from reterm_jax.sandbox.base import ExecResult, Snapshot
from reterm_jax.serving.published import Manifest, Probe
from reterm_jax.tasks import families
from reterm_jax.tokens import tiny_tokenizer
from reterm_jax.tokens.chat import ChatFormat

_ATTEMPTS = flags.DEFINE_integer("attempts", 64, "At one time.", lower_bound=8)
_TURNS = flags.DEFINE_integer("turns", 16, "Of an attempt.", lower_bound=1)
_SAMPLING = flags.DEFINE_float("sampling", 2.0, "Seconds of a turn at the server.")
_COMMAND = flags.DEFINE_float("command", 0.5, "Seconds of a command.")
_OUTPUT = flags.DEFINE_integer("output", 2000, "Characters that a command prints.")
_STEPS = flags.DEFINE_integer("steps", 3, "Batches, the first one not measured.", lower_bound=2)

_PROBE = Probe((1, 2, 3), (-1.0, -1.0))
_GROUP = 8


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)  # httpx2 tells of every request
    with tempfile.TemporaryDirectory() as root:
        asyncio.run(_measure(Path(root)))


async def _measure(root: Path) -> None:
    tiny_tokenizer.build(["ls -la /app"], root / "model")
    chat = ChatFormat(AutoTokenizer.from_pretrained(root / "model"))
    turn = chat.policy_ids(render_turn("look", "ls -la /app"))
    tasks = families.generate(root / "tasks", split="train", per_family=1, seed=0)
    groups = _ATTEMPTS.value // _GROUP
    schedule = Schedule(0, _STEPS.value, groups, _GROUP, 0, 0, max_staleness=1)
    context = multiprocessing.get_context("spawn")
    ready, ports = context.Queue(), context.Queue()
    server = context.Process(target=_serve_like_vllm, args=(turn, chat.stop_id, _SAMPLING.value, ports), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{await asyncio.to_thread(ports.get)}"
    limits = AgentLimits(_TURNS.value, 10**6, 512, 60.0, 3600.0, output_limit=_OUTPUT.value)
    with GroupStore(root / "groups", {}) as store:
        parts = ServiceParts(
            {},
            schedule,
            PoolConfig(),
            tasks,
            store,
            new_chat=lambda directory: chat,
            new_sampler=lambda stop_id: VllmSampler([url], stop_id=stop_id),
            new_roller=lambda sampler, chat: Roller(_Waiting(), sampler, chat, limits, _ATTEMPTS.value, "again"),
        )
        async with RolloutService(parts) as service:
            http = HttpServer(service, ("127.0.0.1", 0), "")
            known = {task.id: task.fingerprint() for task in tasks}
            opening = Opening({}, known, {}, tokenizer_digest(root / "model"), 0)
            trainer = context.Process(
                target=_train, args=(http.url, str(root), opening, _STEPS.value, ready), daemon=True
            )
            trainer.start()
            await asyncio.to_thread(ready.get)  # the first batch: everything is warm
            begun = _Marks(service)
            in_flight, samples = 0, 0
            done = asyncio.create_task(asyncio.to_thread(lambda: [ready.get() for _ in range(_STEPS.value - 1)]))
            while not done.done():
                in_flight, samples = in_flight + service.meter.running, samples + 1
                await asyncio.sleep(0.05)
            spent = _Marks(service).since(begun)
            trainer.join()
            await http.close()
    server.kill()
    overhead = 1000 * spent.cpu / spent.turns
    print(f"turns {spent.turns}  seconds {spent.wall:.1f}  turns/s {spent.turns / spent.wall:.1f}")
    print(f"sampler busy {1 - spent.idle / spent.wall:.1%} of the time, {in_flight / samples:.1f} turns at once")
    print(f"own CPU {overhead:.2f} ms a turn, {spent.cpu / spent.wall:.0%} of one core")
    finish("rollout_overhead", overhead, "ms CPU a turn", 5.0, at_least=False)


class _Marks(SimpleNamespace):
    def __init__(self, service: RolloutService) -> None:
        meter = service.meter
        super().__init__(cpu=time.process_time(), wall=time.monotonic(), turns=meter.turns, idle=meter.idle_seconds)

    def since(self, before: _Marks) -> SimpleNamespace:
        return SimpleNamespace(**{name: value - getattr(before, name) for name, value in vars(self).items()})


class _Waiting:
    """Sandboxes of which a command takes its time and does nothing; half of the verdicts are 1."""

    workdir, lingers, verdicts = "/app", False, 0

    async def start(self, task: Any) -> _Waiting:
        return self

    async def exec(self, command: str, *, timeout: float, **_: Any) -> ExecResult:
        if command.startswith("ls"):
            await asyncio.sleep(_COMMAND.value)
        return ExecResult("-rw-r--r-- 1 app\n" * (_OUTPUT.value // 17), 0, 0.0, False)

    async def upload(self, source: Path, target: str, **_: Any) -> None: ...

    async def download(self, source: str, target: Path, **_: Any) -> None:
        _Waiting.verdicts += 1
        target.mkdir()
        (target / "reward.txt").write_text(f"{_Waiting.verdicts % 2}\n")

    async def snapshot(self) -> Snapshot:
        raise NotImplementedError

    async def release(self, snapshot: Snapshot) -> None: ...

    async def close(self) -> None: ...


def _train(url: str, root: str, opening: Opening, steps: int, ready: Any) -> None:
    """Fetches, publishes and acknowledges like a trainer whose updates take no time."""
    with ServiceClient(url) as client:
        client.open(opening)
        for step in range(steps):
            directory = Path(root) / "published" / str(step)
            directory.mkdir(parents=True)
            (directory / "tokenizer.json").write_bytes((Path(root) / "model" / "tokenizer.json").read_bytes())
            for name in ("tokenizer_config.json", "chat_template.jinja"):
                if (Path(root) / "model" / name).exists():
                    (directory / name).write_bytes((Path(root) / "model" / name).read_bytes())
            (directory / "manifest.json").write_text(Manifest(step, {}, _PROBE).to_json())
            client.weights(Weights(step, str(directory)))
            client.batch(step)
            client.acknowledge(step + 1)
            ready.put(step)


def _serve_like_vllm(turn: list[int], stop_id: int, seconds: float, ports: Any) -> None:
    """Answers the sampler's calls; a turn is always the same one, after its time."""
    version = ["0"]

    async def reply(path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"data": [{"max_model_len": 10**6}]}
        if path == "/server_info":
            return {"vllm_config": {"model_config": {"logprobs_mode": LOGPROBS_MODE}}}
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == "/update_weight_version":
            version[0] = body["new_version"]
        if path != "/inference/v1/generate":
            return {}
        choice = {
            "finish_reason": "stop",
            "token_ids": turn,
            "logprobs": {"content": [{"logprob": -0.123456789}] * len(turn)},
            "weight_versions": [{"version": version[0], "start": 0, "end": 1}],
        }
        if "prompt_logprobs" in body["sampling_params"]:
            given = [{str(token): {"logprob": -1.0}} for token in body["token_ids"][1:]]
            return {"choices": [choice], "prompt_logprobs": [None, *given]}
        await asyncio.sleep(seconds)
        return {"choices": [choice], "prompt_logprobs": None}

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            path, length = line.split()[1].decode().partition("?")[0], 0
            while (header := await reader.readline()).strip():
                name, _, value = header.decode().partition(":")
                length = int(value) if name.lower() == "content-length" else length
            body = json.loads(await reader.readexactly(length)) if length else None
            data = json.dumps(await reply(path, body)).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
            await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(connection, "127.0.0.1", 0)
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


if __name__ == "__main__":
    app.run(main)
