"""The trainer's side of the rollout service: calls that wait, and go on where the service was away."""

from __future__ import annotations

import dataclasses
import time
import urllib.parse
from collections.abc import Callable
from typing import Any, Self, TypeVar

import httpx2

from reterm_jax.evaluation.json_codec import RecordError, decode
from reterm_jax.rollout.groups import Group
from reterm_jax.rollout.protocol import (
    HEADER,
    PROTOCOL,
    Acknowledgement,
    Opened,
    Opening,
    Ready,
    Served,
    Validation,
    Weights,
)
from reterm_jax.rollout.wire import WireError, decode_group

T = TypeVar("T")

_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 3600.0  # for a group of validation
_WAIT_SECONDS = 5.0  # of one request; as long as a trainer that is stopped may still wait
_PAUSE = 1.0  # between two tries
_AWAY = (502, 503, 504)  # what a proxy or an ending service says


class ServiceError(RuntimeError):
    """The service refused, failed, or was away for too long. The message is the service's own where it gave one."""


class ServiceClient:
    """Calls of one service. They block; each may be made again, and is where the service does not answer.

    Args:
      url: such as http://127.0.0.1:8765.
      token: see `http_server`.
      patience: seconds for which a service that is away is waited for.
      log: told when it is away, and when it is back.
    """

    def __init__(
        self, url: str, token: str = "", *, patience: float = 600.0, log: Callable[[str], None] = print
    ) -> None:
        self.url = url.rstrip("/")
        self._patience, self._log = patience, log
        headers = {HEADER: str(PROTOCOL)} | ({"authorization": f"Bearer {token}"} if token else {})
        timeout = httpx2.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS)
        self._http = httpx2.Client(headers=headers, timeout=timeout, trust_env=False)
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends calls that wait in other threads, too."""
        self._closed = True
        self._http.close()

    def open(self, opening: Opening) -> Opened:
        return self._post("open", opening, Opened)

    def weights(self, weights: Weights) -> Served:
        """Returns when the samplers serve them."""
        return self._read(self._waited("POST", "/v1/weights", weights), Served)

    def batch(self, step: int) -> tuple[Ready, list[bytes]]:
        """Waits until the batch is whole; its groups are bytes for `decode_group`."""
        ready = self._read(self._waited("GET", f"/v1/batches/{step}"), Ready)
        places = (f"/v1/batches/{step}/groups/{urllib.parse.quote(key, safe='')}" for key in ready.groups)
        return ready, [self._call("GET", place).content for place in places]

    def acknowledge(self, step: int) -> None:
        self._call("POST", "/v1/acknowledge", Acknowledgement(step))

    def validate(self, validation: Validation) -> Group:
        data = self._call("POST", "/v1/validate", validation).content
        try:
            return decode_group(data)
        except WireError as error:
            raise ServiceError(f"{self.url}: {error}") from error

    def _waited(self, method: str, path: str, message: Any = None) -> httpx2.Response:
        """Asks again while the answer is 202. No request takes long, so that `close` is heeded."""
        while True:
            response = self._call(method, f"{path}?wait={_WAIT_SECONDS:g}", message)
            if response.status_code != 202:
                return response

    def _post(self, name: str, message: Any, answer: type[T]) -> T:
        return self._read(self._call("POST", f"/v1/{name}", message), answer)

    def _read(self, response: httpx2.Response, answer: type[T]) -> T:
        try:
            return decode(answer, response.json(), str(response.url))
        except (ValueError, RecordError) as error:
            raise ServiceError(f"{error}; install the same reterm_jax for trainer and service") from error

    def _call(self, method: str, path: str, message: Any = None) -> httpx2.Response:
        body = None if message is None else dataclasses.asdict(message)
        deadline, away = time.monotonic() + self._patience, False
        while True:
            try:
                response = self._http.request(method, self.url + path, json=body)
                # The service's own errors are told; those of a proxy before it say that it is away.
                if response.status_code not in _AWAY or (HEADER in response.headers and response.status_code != 503):
                    break
                problem = f"HTTP {response.status_code}"
            except httpx2.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            except RuntimeError as error:
                if not self._closed:
                    raise
                problem = str(error)
            if self._closed:
                raise ServiceError(f"{self.url}: the client was closed")
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"{self.url}: the rollout service did not answer for {self._patience:g} s ({problem}); start it, "
                    "or correct config.rollout.service"
                )
            if not away:
                self._log(f"rollout service {self.url} is away ({problem}); waiting for it")
            away = True
            time.sleep(_PAUSE)
        if away:
            self._log(f"rollout service {self.url} is back")
        return self._checked(response)

    def _checked(self, response: httpx2.Response) -> httpx2.Response:
        place = response.url
        theirs = response.headers.get(HEADER)
        if theirs != str(PROTOCOL):
            raise ServiceError(
                f"{place}: answers with protocol {theirs}, the trainer speaks {PROTOCOL}; is this a rollout service of "
                "the same reterm_jax?"
            )
        if response.status_code >= 400:
            try:
                said = response.json()["error"]
            except (ValueError, KeyError, TypeError):
                said = response.text[:500]
            raise ServiceError(f"{place}: refused ({response.status_code}): {said}")
        return response
