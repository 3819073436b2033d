"""Seeds that follow from names, so that whatever is done again is done alike."""

import hashlib


def seed_of(name: str) -> int:
    """A 31-bit seed from a name such as `7/step12/task3/0`."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") & 0x7FFFFFFF
