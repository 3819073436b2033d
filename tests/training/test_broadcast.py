"""Two processes: what process 0 got is what both have, and its failure is nobody's endless wait."""

import asyncio

import pytest

from reterm_jax.training.broadcast import from_process_0

SCRIPT = """
import asyncio, sys
import jax
rank, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from reterm_jax.training.broadcast import from_process_0

calls = []
async def get(data):
    calls.append(data)
    if data is None:
        raise ValueError("the service is gone")
    return data

for data in (b"", b"a\\0b" * 1000, b"z"):
    assert asyncio.run(from_process_0(lambda: get(data))) == data
kind = ValueError if rank == 0 else RuntimeError
try:
    asyncio.run(from_process_0(lambda: get(None)))
except kind as error:
    assert "the service is gone" in str(error)
else:
    raise AssertionError("nothing was raised")
assert len(calls) == (4 if rank == 0 else 0)
print("done")
"""


def test_two_processes_agree(on_two_processes):
    on_two_processes(SCRIPT)


def test_one_process_is_not_asked_to_agree():
    async def fails():
        raise KeyError("as it is")

    with pytest.raises(KeyError, match="as it is"):
        asyncio.run(from_process_0(fails))
