"""The append-only token history of an attempt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

Source = Literal["prompt", "observation", "policy"]
_SOURCES = ("prompt", "observation", "policy")


class TranscriptError(ValueError):
    """A span or a stored transcript that does not hold together."""


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive ids of one source.

    Attributes:
      source: `policy` for ids that a sampler produced (these are trained on), else `prompt` or `observation`.
      ids: never empty.
      logprobs: the sampler's, one per id; policy spans only.
      version: training step of the weights that sampled them; policy spans only.
    """

    source: Source
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    version: int | None = None

    def __post_init__(self):
        if self.source not in _SOURCES:
            raise TranscriptError(f"span source is {self.source!r}; one of {', '.join(_SOURCES)}")
        if not self.ids:
            raise TranscriptError(f"a {self.source} span has no ids")
        if self.source != "policy" and (self.logprobs is not None or self.version is not None):
            raise TranscriptError(f"a {self.source} span has logprobs or a version; only policy spans do")
        if self.source == "policy":
            if self.logprobs is None or self.version is None:
                raise TranscriptError("a policy span needs logprobs and a version")
            if len(self.logprobs) != len(self.ids):
                raise TranscriptError(f"a policy span has {len(self.ids)} ids, but {len(self.logprobs)} logprobs")


class Transcript:
    """Spans in order. It only grows: what a sampler has seen is never decoded, re-encoded or replaced."""

    def __init__(self, spans: Iterable[Span] = ()):
        self._spans: list[Span] = []
        self._ids: list[int] = []
        for span in spans:
            self.append(span)

    def append(self, span: Span) -> None:
        self._spans.append(span)
        self._ids.extend(span.ids)

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans)

    @property
    def ids(self) -> list[int]:
        """All ids, as a new list."""
        return list(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transcript) and self._spans == other._spans

    __hash__ = None  # it grows

    def __repr__(self) -> str:
        return f"Transcript({len(self._spans)} spans, {len(self)} ids)"

    def fork(self) -> Transcript:
        """An independent copy to continue from."""
        return Transcript(self._spans)

    def until_turn(self, turns: int, *, after: int = 0) -> Transcript:
        """A copy that ends with the `turns`-th policy span of those behind the first `after` ids.

        Raises TranscriptError where there are not as many.
        """
        start = 0
        for index, span in enumerate(self._spans):
            if turns == 0 and start >= after:
                return Transcript(self._spans[:index])
            turns -= span.source == "policy" and start >= after
            start += len(span.ids)
        if turns:
            raise TranscriptError(f"{self!r} has {turns} policy spans too few behind its first {after} ids")
        return self.fork()

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The transcript as arrays of shape [T], T = len(self).

        Returns:
          ids int32; loss_mask bool, true on policy ids; logprobs float32, 0 elsewhere; versions int32, -1 elsewhere.
        """
        loss_mask_T = np.zeros(len(self), bool)
        logprobs_T = np.zeros(len(self), np.float32)
        versions_T = np.full(len(self), -1, np.int32)
        start = 0
        for span in self._spans:
            stop = start + len(span.ids)
            if span.source == "policy":
                loss_mask_T[start:stop] = True
                logprobs_T[start:stop] = span.logprobs
                versions_T[start:stop] = span.version
            start = stop
        return np.asarray(self._ids, np.int32), loss_mask_T, logprobs_T, versions_T

    def to_dict(self) -> dict[str, Any]:
        """JSON form; `from_dict` gives back an equal transcript."""
        return {
            "spans": [
                {key: value for key, value in dataclasses.asdict(span).items() if value is not None}
                for span in self._spans
            ]
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Transcript:
        """Raises TranscriptError naming the span where `data` is not what `to_dict` gives."""
        if not isinstance(data, Mapping) or not isinstance(data.get("spans"), list):
            raise TranscriptError("a stored transcript needs a list 'spans'")
        transcript = cls()
        for index, item in enumerate(data["spans"]):
            try:
                logprobs = item.get("logprobs")
                transcript.append(
                    Span(
                        item["source"],
                        tuple(int(token) for token in item["ids"]),
                        None if logprobs is None else tuple(float(value) for value in logprobs),
                        item.get("version"),
                    )
                )
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise TranscriptError(f"spans[{index}]: {error!r}") from error
        return transcript
