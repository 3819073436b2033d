"""The rollout service over HTTP; `protocol.py` lists the requests.

The standard library's server: one thread for each of the few connections (a trainer, Prometheus, a browser), which hand
what they are asked to the service's event loop. Attempts do not wait for a request to be read or packed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import hmac
import ipaddress
import json
import logging
import threading
import urllib.parse
from collections.abc import Callable, Coroutine
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

from reterm_jax.evaluation.json_codec import RecordError, decode
from reterm_jax.rollout.protocol import HEADER, PROTOCOL, Acknowledgement, Opening, Validation, Weights
from reterm_jax.rollout.service import Refused, RolloutService

T = TypeVar("T")

_MAX_BODY = 64 * 2**20
_SOCKET_SECONDS = 120.0  # without a byte
_MAX_WAIT = 60.0  # seconds of one request for a batch
_JSON, _BYTES, _TEXT, _HTML = "application/json", "application/octet-stream", "text/plain", "text/html"


class ListenError(ValueError):
    """An address that cannot be listened on. The message says what to do."""


def parse_address(listen: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`. Raises ListenError."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ListenError(f"--listen {listen!r}: write HOST:PORT, such as 127.0.0.1:8765")
    return host.strip("[]"), int(port)


def check_token(address: tuple[str, int], token: str) -> None:
    """Raises ListenError where other machines could reach a service that asks for no token."""
    host, port = address
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not token and not loopback:
        raise ListenError(
            f"--listen {host}:{port} can be reached from other machines; set RETERM_ROLLOUT_TOKEN to a secret, here "
            "and for the trainer, or listen on 127.0.0.1"
        )


class HttpServer:
    """Serves `service`, whose event loop is the running one, until `close`.

    Args:
      address: host and port; port 0 takes a free one, see `url`.
      token: asked of every request but `/healthz`; "" asks for none, on loopback only.

    Raises ListenError.
    """

    def __init__(self, service: RolloutService, address: tuple[str, int], token: str) -> None:
        host, port = address
        check_token(address, token)
        loop = asyncio.get_running_loop()
        handler = type("Handler", (_Handler,), {"service": service, "loop": loop, "token": token})
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as error:
            raise ListenError(f"--listen {host}:{port}: {error.strerror or error}; choose another address") from error
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_port}"
        serve = {"target": self._server.serve_forever, "kwargs": {"poll_interval": 0.05}}
        self._thread = threading.Thread(**serve, name="http", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        self._server.RequestHandlerClass.ending = True  # of connections that are kept open, too
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    service: RolloutService
    loop: asyncio.AbstractEventLoop
    token: str
    ending = False
    protocol_version = "HTTP/1.1"
    timeout = _SOCKET_SECONDS
    server_version, sys_version = "reterm-rollout", ""

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > _MAX_BODY:
            self.close_connection = True
            return self._send(411 if not length else 413, _error(f"content-length {length!r}: at most {_MAX_BODY}"))
        self._answer(self.rfile.read(int(length)))

    def log_message(self, format: str, *args: Any) -> None:
        logging.debug(f"{self.client_address[0]} {format}", *args)

    def _answer(self, body: bytes | None) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        try:
            self._send(*self._reply(url.path, query, body))
        except Refused as refused:
            self._send(refused.status, _error(str(refused)))
        except RecordError as error:
            self._send(400, _error(str(error)))
        except (Exception, concurrent.futures.CancelledError) as error:
            if isinstance(error, concurrent.futures.CancelledError) or self.ending or self.loop.is_closed():
                self.close_connection = True  # who asks again is to reach the next service, not this thread
                self._send(503, _error("the service is ending"))
            else:
                logging.exception("%s %s", self.command, url.path)
                self._send(500, _error(f"{type(error).__name__}: {error}; the service's log has the traceback"))

    def _reply(self, path: str, query: dict[str, str], body: bytes | None) -> tuple[int, bytes, str]:
        service = self.service
        if (self.command, path) == ("GET", "/healthz"):
            return 200, b"ok\n", _TEXT
        self._check_token(query if path == "/status" else {})
        if self.command == "GET" and path in ("/metrics", "/status"):
            read: Callable[[], bytes | str] = service.metrics.prometheus if path == "/metrics" else service.metrics.page
            text = self._call(_on_loop(read))
            return 200, text.encode() if isinstance(text, str) else text, _HTML if path == "/status" else _TEXT
        self._check_protocol()
        if self.command == "GET" and path.startswith("/v1/batches/"):
            return self._batch(path.removeprefix("/v1/batches/").split("/"), query)
        calls: dict[str, tuple[type, Callable[[Any], Coroutine[Any, Any, Any]]]] = {
            "/v1/open": (Opening, service.open),
            "/v1/weights": (Weights, lambda weights: service.weights(weights, _seconds(query))),
            "/v1/acknowledge": (Acknowledgement, service.acknowledge),
            "/v1/validate": (Validation, service.validate),
        }
        if self.command != "POST" or path not in calls:
            raise Refused(404, f"{self.command} {path} is not served; see reterm_jax/rollout/protocol.py")
        kind, call = calls[path]
        answer = self._call(call(decode(kind, _json(body), path)))
        if isinstance(answer, bytes):
            return 200, answer, _BYTES
        if answer is None and path == "/v1/weights":
            return 202, b"{}", _JSON
        return 200, json.dumps(dataclasses.asdict(answer) if answer is not None else {}).encode(), _JSON

    def _batch(self, parts: list[str], query: dict[str, str]) -> tuple[int, bytes, str]:
        if not parts[0].isdecimal() or len(parts) not in (1, 3) or (len(parts) == 3 and parts[1] != "groups"):
            raise Refused(404, f"{self.path} is not served; see reterm_jax/rollout/protocol.py")
        step = int(parts[0])
        if len(parts) == 3:
            return 200, self.service.group_data(step, urllib.parse.unquote(parts[2])), _BYTES
        ready = self._call(self.service.batch(step, _seconds(query)))
        return (202, b"{}", _JSON) if ready is None else (200, json.dumps(dataclasses.asdict(ready)).encode(), _JSON)

    def _check_token(self, query: dict[str, str]) -> None:
        given = self.headers.get("authorization", "").removeprefix("Bearer ") or query.get("token", "")
        if self.token and not hmac.compare_digest(given.encode(), self.token.encode()):
            raise Refused(401, "the token is missing or wrong; set RETERM_ROLLOUT_TOKEN to that of the service")

    def _check_protocol(self) -> None:
        theirs = self.headers.get(HEADER, "none")
        if theirs != str(PROTOCOL):
            raise Refused(
                426,
                f"the service speaks protocol {PROTOCOL}, the request {theirs}; install the same reterm_jax on both",
            )

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:  # the loop has ended
            work.close()
            raise
        return future.result()

    def _send(self, status: int, body: bytes, kind: str = _JSON) -> None:
        try:
            self.send_response(status)
            self.send_header(HEADER, str(PROTOCOL))
            self.send_header("content-type", kind if kind == _BYTES else f"{kind}; charset=utf-8")
            self.send_header("content-length", str(len(body)))
            if self.close_connection:
                self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True


async def _on_loop(read: Callable[[], T]) -> T:
    return read()


def _seconds(query: dict[str, str]) -> float:
    try:
        return min(max(float(query.get("wait", "0")), 0.0), _MAX_WAIT)
    except ValueError:
        raise Refused(400, f"wait={query['wait']!r} is no number of seconds") from None


def _error(message: str) -> bytes:
    return json.dumps({"error": message}).encode()


def _json(body: bytes | None) -> Any:
    try:
        return json.loads(body or b"")
    except ValueError as error:
        raise Refused(400, f"the body is not JSON ({error})") from None
