"""Samples through any OpenAI-compatible server by text: for evaluation, and for teachers. Never for training.

Such a server takes and gives text, so ids are decoded and its answers encoded again: what it sampled and what the
transcript holds can differ in their ids, and the logprobs are not known. Completions therefore carry version -1, which
is no trained policy's, and logprobs of 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

import httpx2

from reterm_jax.rollout.samplers.base import Completion, SamplerError
from reterm_jax.tokens.chat import ChatFormat

_BUSY = (408, 409, 425, 429, 500, 502, 503, 504)


class TextSampler:
    """Implements `rollout.samplers.base.Sampler` over `POST URL/completions`. Use it as an async context manager.

    Args:
      url: of the API, such as http://127.0.0.1:8000/v1.
      model: its name there.
      chat: of the model; its template renders the prompt, and its stop token ends a turn.
      api_key: sent as a bearer token where it is not empty.
      timeout: seconds for one turn.
      tries: of a turn at a server that is busy, away or failing; between them `pause` seconds, each time twice as many.
    """

    def __init__(
        self,
        url: str,
        model: str,
        chat: ChatFormat,
        *,
        api_key: str = "",
        timeout: float = 600.0,
        tries: int = 6,
        pause: float = 1.0,
    ) -> None:
        self._place, self._model, self._chat = f"{url.rstrip('/')}/completions", model, chat
        self._tries, self._pause = tries, pause
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(timeout, connect=10.0))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def generate(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        session: str,
        parent: str | None = None,
    ) -> Completion:
        """Continues the text of `ids`. See `Sampler.generate`; raises SamplerError where no try gave an answer."""
        del parent
        tokenizer = self._chat.tokenizer
        answer = await self._post(
            session,
            {
                "model": self._model,
                "prompt": tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False),
                "max_tokens": max_tokens,
                "temperature": temperature,
                "seed": seed,
                "stop": [self._chat.stop_token],
            },
        )
        try:
            text, reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
        except (KeyError, IndexError, TypeError) as error:
            raise SamplerError(f"{self._place}: an answer of another form ({error!r})") from error
        if reason not in ("stop", "length"):
            raise SamplerError(f"{self._place}: the request ended by {reason!r}")
        # The server need not count as this tokenizer does.
        out = tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
        if reason == "stop" and len(out) < max_tokens:
            out.append(self._chat.stop_id)
        if not out:
            raise SamplerError(f"{self._place}: an empty answer")
        stop = "stop" if out[-1] == self._chat.stop_id else "length"
        return Completion(out, [0.0] * len(out), stop, -1)

    async def end(self, session: str) -> None:
        """Nothing is held."""

    async def _post(self, session: str, body: dict[str, Any]) -> Any:
        problem, pause = "", self._pause
        for attempt in range(self._tries):
            if attempt:
                await asyncio.sleep(pause)
                pause *= 2
            try:
                response = await self._client.post(self._place, json=body)
            except httpx2.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                try:
                    return response.json()
                except ValueError:
                    problem = f"answered what is not JSON: {response.text[:200]!r}"
                    continue
            problem = f"HTTP {response.status_code}: {response.text[:500]}"
            if response.status_code not in _BUSY:
                break
        raise SamplerError(f"{self._place}: session {session}: {problem}")
