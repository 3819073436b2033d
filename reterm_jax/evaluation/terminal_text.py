"""Makes what a terminal printed safe and readable on a page: it is untrusted and may hold any character."""

import re

_ANSI = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # operating system commands (titles, links)
    r"|\x1b[PX^_].*?\x1b\\"  # device control and other strings
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor moves
    r"|\x1b[ -/]*[0-~]",
    re.DOTALL,
)
# Characters that reorder or hide what stands around them, so that a line reads other than it is.
_INVISIBLE = re.compile("[\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def readable(text: str, limit: int | None = None) -> str:
    """Drops terminal escapes, shows control characters as symbols, and keeps head and tail of what exceeds `limit`."""
    text = _ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    text = _INVISIBLE.sub(lambda match: f"⟨U+{ord(match.group()):04X}⟩", text)
    text = _UNPRINTABLE.sub(lambda match: _symbol(ord(match.group())), text)
    if limit is None or len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters not shown …\n{text[-half:]}"


def _symbol(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else "\ufffd"
