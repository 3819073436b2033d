"""What one process knows and all need: bytes from process 0."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

_FAILED, _GIVEN = b"\0", b"\1"


async def from_process_0(get: Callable[[], Awaitable[bytes]]) -> bytes:
    """What `get` returns on process 0, on every process; the others do not call it, but wait.

    Raises what it raised there, and on the others a RuntimeError with its message: nobody waits for ever.
    """
    if jax.process_count() == 1:
        return await get()
    payload, failure = b"", None
    if jax.process_index() == 0:
        try:
            payload = _GIVEN + await get()
        except Exception as error:
            failure, payload = error, _FAILED + str(error).encode()
    # Shapes must agree before arrays can be exchanged.
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(payload))))
    buffer = np.zeros(size, np.uint8)
    buffer[: len(payload)] = np.frombuffer(payload, np.uint8)
    payload = np.asarray(multihost_utils.broadcast_one_to_all(buffer)).tobytes()
    if failure is not None:
        raise failure
    if payload[:1] == _FAILED:
        raise RuntimeError(f"process 0: {payload[1:].decode()}")
    return payload[1:]
