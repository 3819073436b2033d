"""Bounding and cleaning of output."""

from __future__ import annotations

import time

import pytest

from reterm_jax.sandbox.output import BoundedOutput, clean, shorten


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("plain\n\ttab\n", "plain\n\ttab\n"),
        ("a\r\nb\r\n", "a\nb\n"),
        ("0%\r50%\r100%\ndone", "100%\ndone"),
        ("keep\r\n", "keep\n"),
        ("trailing\r", "trailing"),
        ("\x1b[1;31mred\x1b[0m \x1b[?25lx\x1b[2K", "red x"),
        ("\x1b]0;title\x07a\x1b]8;;url\x1b\\link\x1b]8;;\x1b\\", "alink"),
        ("\x1b(Ba\x1b=b\x1b", "ab"),
        ("abc\b\bX", "aX"),
        ("\b\ba\n\bb", "a\nb"),
        ("nul\x00 bell\x07 \x9b", "nul bell "),
    ],
)
def test_clean(raw: str, text: str) -> None:
    assert clean(raw) == text


def test_clean_takes_linear_time() -> None:
    started = time.monotonic()
    for part in ("\x1b[", "\x1b]", "\r", "x\r", "\x1b", "1;", "\x1b[1;", "\b"):
        clean(part * 100_000)
    assert time.monotonic() - started < 5


def test_small_output_is_whole() -> None:
    output = BoundedOutput(keep=8)
    for piece in (b"abc", b"", b"defgh", b"ijklmnop"):
        output.feed(piece)
    assert output.text() == "abcdefghijklmnop" and output.elided == 0


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
def test_head_and_tail_are_kept(piece: int) -> None:
    data = bytes(range(97, 123)) * 10
    output = BoundedOutput(keep=8)
    for start in range(0, len(data), piece):
        output.feed(data[start : start + piece])
    assert output.elided == 244
    assert output.text() == "abcdefgh\n[... 244 bytes of output left out ...]\nstuvwxyz"


def test_memory_is_bounded() -> None:
    output = BoundedOutput(keep=1000)
    for _ in range(1000):
        output.feed(b"x" * 10_000)
        assert len(output._tail) <= 12_000
    assert output.elided == 10_000_000 - 2000


def test_characters_cut_at_the_gap_are_dropped() -> None:
    output = BoundedOutput(keep=4)
    output.feed("ab€cdefgh€xy".encode())
    text = output.text()
    assert "\ufffd" not in text and text.startswith("ab\n") and text.endswith("\nxy")


def test_bad_bytes_are_replaced() -> None:
    output = BoundedOutput()
    output.feed(b"a\xff\xfeb")
    assert output.text() == "a\ufffd\ufffdb"


def test_shorten() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("abcdefghij", 5) == "ab\n[... 5 characters of output left out ...]\nhij"
    assert shorten("abc", 1) == "\n[... 2 characters of output left out ...]\nc"
