"""One vLLM server over HTTP: its calls with their answers checked, and nothing about several of them.

The server runs with `--enable-scale-out` (token ids in and out), `--logprobs-mode processed_logprobs` (logprobs at the
request's temperature), `VLLM_SERVER_DEV_MODE=1` (pause, resume and calls to its workers) and the plugin in `serving/`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import httpx2
import orjson

from reterm_jax.rollout.samplers.base import SamplerError
from reterm_jax.rollout.samplers.connections import Connections

LOGPROBS_MODE = "processed_logprobs"


class ServerFailed(RuntimeError):
    """The server did not answer, not in time, or not what was asked for. Another one may."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds until a call counts as failed.

    Attributes:
      connect: to open a connection.
      generate: of one turn, the time that the server stands still for an update included.
      control: of a call that only changes a state: pause, resume, caches, version.
      load: of reading other weights.
      probe: of the probe after it.
    """

    connect: float = 10.0
    generate: float = 1800.0
    control: float = 60.0
    load: float = 600.0
    probe: float = 120.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """Sampled ids with their logprobs; `version` is the oldest of the weights that sampled one of them."""

    ids: list[int]
    logprobs: list[float]
    stop: Literal["stop", "length"]
    version: str


class VllmServer:
    """A server at `url`, for example http://127.0.0.1:8000. Every method raises ServerFailed, but for `close`.

    Args:
      turns: sampled at once, at most; others wait here, and do not keep an update waiting.
    """

    def __init__(self, url: str, limits: Limits, turns: int) -> None:
        self.url = url.rstrip("/")
        self._connections, self._limits = Connections(), limits
        self._turns = asyncio.Semaphore(turns)
        self._seeded = True

    async def close(self) -> None:
        """Closes its connections."""
        await self._connections.close()

    async def max_len(self) -> int:
        """Longest sequence in tokens. Raises SamplerError where the server was started in a way that cannot train."""
        models = await self._call("GET", "/v1/models", seconds=self._limits.control)
        info = await self._call("GET", "/server_info?config_format=json", seconds=self._limits.control)
        with _reading(self.url, "/server_info"):
            mode = info["vllm_config"]["model_config"]["logprobs_mode"]
            # On CPU a request with a seed ends the engine of vLLM 0.32 when its prompt is computed in parts, as beside
            # others or after an update: it sets the generator back, which torch cannot do on CPU.
            self._seeded = info["vllm_config"].get("device_config", {}).get("device") != "cpu"
        if mode != LOGPROBS_MODE:
            raise SamplerError(
                f"{self.url}: logprobs are {mode}, not those of the sampling distribution; start the server with "
                f"--logprobs-mode {LOGPROBS_MODE}"
            )
        with _reading(self.url, "/v1/models"):
            return int(models["data"][0]["max_model_len"])

    async def generate(
        self, ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int, stop_id: int
    ) -> Answer:
        """Continues `ids` up to `stop_id`. Nothing but temperature shapes the distribution. On CPU `seed` is not used.

        Raises SamplerError where the server refuses the request itself.
        """
        params = {"max_tokens": max_tokens, "temperature": temperature, "logprobs": 0}
        params |= {"seed": seed % 2**63} if self._seeded else {}
        params |= {"stop_token_ids": [stop_id], "ignore_eos": True}
        async with self._turns:
            answer = await self._generate(ids, params, self._limits.generate)
        with _reading(self.url, "/inference/v1/generate"):
            choice = answer["choices"][0]
            reason, out = choice["finish_reason"], choice["token_ids"]
            logprobs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
            versions = [span["version"] for span in choice["weight_versions"]]
        if reason not in ("stop", "length"):
            raise ServerFailed(f"{self.url}: the request ended by {reason!r} after {len(out)} tokens")
        sound = (
            0 < len(out) <= max_tokens
            and len(logprobs) == len(out)
            and all(math.isfinite(x) and x <= 1e-4 for x in logprobs)
            and (reason == "stop") == (out[-1] == stop_id)
        )
        if not sound:
            raise ServerFailed(
                f"{self.url}: an unsound answer: {len(out)} ids for at most {max_tokens}, {len(logprobs)} logprobs, "
                f"finish_reason {reason!r}"
            )
        return Answer(out, logprobs, reason, versions[0] if versions else "")

    async def prompt_logprobs(self, ids: Sequence[int]) -> list[float]:
        """Logprobs of ids[1:], computed anew, not from a cache."""
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = await self._generate(ids, params, self._limits.probe)
        with _reading(self.url, "/inference/v1/generate"):
            given = answer["prompt_logprobs"]
            return [float(given[t][str(ids[t])]["logprob"]) for t in range(1, len(ids))]

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Stops the scheduler; what runs is kept for later, or aborted."""
        await self._call("POST", f"/pause?mode={mode}", seconds=self._limits.control)

    async def resume(self) -> None:
        await self._call("POST", "/resume", seconds=self._limits.control)

    async def load(self, directory: str) -> None:
        """Has every worker load the published directory in place."""
        body = {"method": "load_published", "kwargs": {"directory": directory}}
        await self._call("POST", "/collective_rpc", json=body, seconds=self._limits.load)

    async def reset_caches(self) -> None:
        """Forgets what older weights computed; requests that are kept are computed again."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        answer = await self._call("POST", path, seconds=self._limits.control)
        if not (isinstance(answer, dict) and answer.get("success")):
            raise ServerFailed(f"{self.url}: the prefix cache was not reset: {answer}")

    async def set_version(self, version: str) -> None:
        body = {"new_version": version}
        await self._call("POST", "/update_weight_version", json=body, seconds=self._limits.control)

    async def _generate(self, ids: Sequence[int], params: dict[str, Any], seconds: float) -> Any:
        # Said in full: what is left out the server takes from the model's generation_config.json.
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
        neutral |= {"frequency_penalty": 0.0, "detokenize": False}
        body = {"token_ids": list(ids), "sampling_params": {**neutral, **params}}
        return await self._call("POST", "/inference/v1/generate", json=body, seconds=seconds)

    async def _call(self, method: str, path: str, *, seconds: float, json: Any = None) -> Any:
        place = f"{self.url}{path.partition('?')[0]}"
        timeout = httpx2.Timeout(seconds, connect=self._limits.connect)
        said: dict[str, Any] = {}
        if json is not None:  # ids by the ten thousand: httpx2's own encoder takes twenty times as long
            said = {"content": orjson.dumps(json), "headers": {"content-type": "application/json"}}
        try:
            response = await self._connections.request(method, self.url + path, timeout=timeout, **said)
        except httpx2.TimeoutException as error:
            raise ServerFailed(f"{place}: no answer within {seconds:g} s ({type(error).__name__})") from error
        except httpx2.TransportError as error:
            raise ServerFailed(f"{place}: {type(error).__name__}: {error}") from error
        if response.status_code in (400, 413, 422):
            raise SamplerError(f"{place}: refused the request ({response.status_code}): {response.text[:500]}")
        if response.status_code != 200:
            raise ServerFailed(f"{place}: HTTP {response.status_code}: {response.text[:500]}")
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise ServerFailed(f"{place}: answered what is not JSON: {response.text[:200]!r}") from error


class _reading:
    """Turns what a malformed answer raises into ServerFailed."""

    def __init__(self, url: str, path: str) -> None:
        self._place = url + path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (KeyError, IndexError, TypeError, ValueError)):
            raise ServerFailed(f"{self._place}: an answer of another form ({error!r}); is it vLLM 0.32?") from error
