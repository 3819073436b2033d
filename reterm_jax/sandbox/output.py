"""Command output as text that can be shown to a model: bounded while it is read, decoded, and cleaned."""

from __future__ import annotations

import codecs
import re

KEEP_BYTES = 64 * 1024  # kept of the head, and again of the tail, while reading

_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement
    r"|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # OSC, DCS, SOS, PM, APC with their strings
    r"|[ -/]*[0-~])?"  # other escapes, and an escape that was cut
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    """Removes terminal control: escapes, overwritten progress lines, backspaces, NUL and other control characters."""
    text = _ESCAPES.sub("", text)
    if "\r" in text:
        # What a progress bar drew before it returned to column 0 is gone from a screen.
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    if "\b" in text:
        kept: list[str] = []
        for character in text:
            if character != "\b":
                kept.append(character)
            elif kept and kept[-1] != "\n":
                kept.pop()
        text = "".join(kept)
    return _CONTROLS.sub("", text)


def elision(count: int, unit: str = "bytes") -> str:
    """The line that stands for left-out output."""
    return f"\n[... {count} {unit} of output left out ...]\n"


def shorten(text: str, limit: int) -> str:
    """Keeps `limit` characters, half from each end, with a line between them that says how many are missing."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    return text[:head] + elision(len(text) - limit, "characters") + (text[-tail:] if tail else "")


class BoundedOutput:
    """Collects bytes in bounded memory: the first and the last `keep` bytes, and a count of those between."""

    def __init__(self, keep: int = KEEP_BYTES) -> None:
        self._keep = keep
        self._head = bytearray()
        self._tail = bytearray()
        self._elided = 0

    @classmethod
    def of(cls, line: str) -> BoundedOutput:
        """Output that is one line."""
        output = cls()
        output.feed(f"{line}\n".encode())
        return output

    def feed(self, data: bytes) -> None:
        room = self._keep - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            # Trimmed at twice the size, so that many small reads do not move the tail each time.
            if len(self._tail) > 2 * self._keep:
                self._trim()

    def skip(self, count: int) -> None:
        """Counts bytes that were left out before they came here (between what was fed so far and what follows)."""
        self._elided += count

    def _trim(self) -> None:
        excess = len(self._tail) - self._keep
        if excess > 0:
            del self._tail[:excess]
            self._elided += excess

    @property
    def elided(self) -> int:
        """Bytes left out of `text()`."""
        self._trim()
        return self._elided

    def text(self) -> str:
        """The collected output, decoded with replacement and cleaned."""
        self._trim()
        if not self._elided:
            return clean(bytes(self._head + self._tail).decode("utf-8", "replace"))
        # A character cut in two at the gap is not the command's fault: drop its pieces instead of replacing them.
        head = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(self._head))
        tail = bytes(self._tail)
        cut = next((i for i, byte in enumerate(tail[:4]) if byte & 0xC0 != 0x80), 0)
        return clean(head) + elision(self._elided) + clean(tail[cut:].decode("utf-8", "replace"))
