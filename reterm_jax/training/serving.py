"""The rollout service of a run, put together from its config: sandboxes, vLLM servers, store, HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from ml_collections import ConfigDict

from reterm_jax.rollout.groups import Roller
from reterm_jax.rollout.http_server import HttpServer, check_token, parse_address
from reterm_jax.rollout.samplers.base import Sampler
from reterm_jax.rollout.samplers.restart import RestartCommand
from reterm_jax.rollout.samplers.vllm import VllmSampler
from reterm_jax.rollout.service import RolloutService, ServiceParts
from reterm_jax.rollout.store import GroupStore
from reterm_jax.sandbox import SandboxHost
from reterm_jax.tokens.chat import ChatFormat
from reterm_jax.training.pipeline import run_host, run_tasks
from reterm_jax.training.settings import Settings, read_settings, rollout_identity
from reterm_jax.training.workdir import Workdir, open_workdir


def run(config: ConfigDict, workdir: str, listen: str) -> None:
    """Serves until SIGTERM or SIGINT. Raises errors that name file, field or flag."""
    settings, address = read_settings(config), parse_address(listen)
    token = os.environ.get("RETERM_ROLLOUT_TOKEN", "")
    check_token(address, token)
    with open_workdir(workdir, config.to_dict()) as work:
        host = run_host(config, work, config.rollout.sandbox)
        with GroupStore(work.root / "groups.sqlite", rollout_identity(config)) as store:
            asyncio.run(_serve(_parts(config, settings, work, host, store), host, address, token))


async def _serve(parts: ServiceParts, host: SandboxHost, address: tuple[str, int], token: str) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        async with RolloutService(parts) as service:
            server = HttpServer(service, address, token)
            print(f"rollout service: {server.url}/status  tasks {len(parts.tasks)}", flush=True)
            try:
                await ended.wait()
            finally:
                await server.close()
    finally:
        await host.close()  # on this loop, where sandboxes that are being closed can be waited for


def _parts(config: ConfigDict, settings: Settings, work: Workdir, host: SandboxHost, store: GroupStore) -> ServiceParts:
    def new_chat(directory: str) -> ChatFormat:
        from transformers import AutoTokenizer

        return ChatFormat(AutoTokenizer.from_pretrained(Path(directory)))

    def new_sampler(stop_id: int) -> VllmSampler:
        service = settings.service
        return VllmSampler(
            service.vllm,
            stop_id=stop_id,
            on_failure=service.on_failure,
            restart=RestartCommand(service.restart, service.patience) if service.restart else None,
            tolerance=service.probe_tolerance,
            patience=service.patience,
        )

    def new_roller(sampler: Sampler, chat: ChatFormat) -> Roller:
        return Roller(
            host,
            sampler,
            chat,
            settings.limits,
            config.sandbox.concurrent,
            config.agent.retry_message,
            config.rl.temperature,
            settings.live_processes,
            fork_at=settings.rl.loop.fork_at,
            spares=config.rollout.spares,
        )

    return ServiceParts(
        identity=rollout_identity(config),
        schedule=settings.schedule,
        pool=settings.rl.loop.pool,
        tasks=run_tasks(config, work.root, "train"),
        store=store,
        new_chat=new_chat,
        new_sampler=new_sampler,
        new_roller=new_roller,
        patience=config.rollout.patience if config.rollout.on_failure == "exclude" else 0.0,
    )
