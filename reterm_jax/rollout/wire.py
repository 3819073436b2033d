"""Groups as bytes: what the store keeps and what HTTP carries. Ids, logprobs and versions come back exactly.

The form is JSON, deflated. What a recovery group's attempts inherited is written once, with their state.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from reterm_jax.agent.attempt import Attempt, FailureState
from reterm_jax.agent.turns import Turn
from reterm_jax.rollout.groups import Group
from reterm_jax.sandbox.base import Snapshot
from reterm_jax.tokens.transcript import Span, Transcript

# Ids and logprobs are most of it; a higher level takes several times as long for a few per cent.
_LEVEL = 1


class WireError(ValueError):
    """Bytes that are no group."""


def encode_group(group: Group) -> bytes:
    """The inverse of `decode_group`."""
    prefix = () if group.state is None else group.state.transcript.spans
    record = {
        "kind": group.kind,
        "task_id": group.task_id,
        "attempts": [_attempt(attempt, prefix) for attempt in group.attempts],
        "state": None if group.state is None else _state(group.state),
    }
    return zlib.compress(json.dumps(record, separators=(",", ":"), allow_nan=False).encode(), _LEVEL)


def decode_group(data: bytes) -> Group:
    """Raises WireError where `data` is not what `encode_group` gives."""
    try:
        record = json.loads(zlib.decompress(data))
        state = None if record["state"] is None else _read_state(record["state"])
        prefix = [] if state is None else list(state.transcript.spans)
        attempts = tuple(_read_attempt(attempt, prefix) for attempt in record["attempts"])
        return Group(record["kind"], record["task_id"], attempts, state)
    except (zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WireError(f"not a group: {error!r}") from error


def _attempt(attempt: Attempt, prefix: Sequence[Span]) -> dict[str, Any]:
    spans = attempt.transcript.spans
    inherits = bool(prefix) and attempt.prefix_len > 0 and spans[: len(prefix)] == tuple(prefix)
    return {
        **{field.name: getattr(attempt, field.name) for field in dataclasses.fields(attempt)},
        "inherits": inherits,
        "transcript": _spans(spans[len(prefix) :] if inherits else spans),
        "outcome": None if attempt.outcome is None else vars(attempt.outcome),
        "turns": [vars(turn) for turn in attempt.turns],
    }


def _read_attempt(record: Mapping[str, Any], prefix: list[Span]) -> Attempt:
    fields = dict(record)
    own = Transcript.from_dict({"spans": fields.pop("transcript")})
    transcript = Transcript([*prefix, *own.spans]) if fields.pop("inherits") else own
    # Whole again only as an object: the prefix is shared, not copied.
    attempt = Attempt.from_dict({**fields, "transcript": {"spans": []}})
    attempt.transcript = transcript
    return attempt


def _state(state: FailureState) -> dict[str, Any]:
    return {
        **{field.name: getattr(state, field.name) for field in dataclasses.fields(state)},
        "snapshot": vars(state.snapshot),
        "transcript": _spans(state.transcript.spans),
        "turns": [vars(turn) for turn in state.turns],
    }


def _read_state(record: Mapping[str, Any]) -> FailureState:
    snapshot = dict(record["snapshot"])
    snapshot["live_processes"] = tuple(snapshot["live_processes"])
    return FailureState(
        **{
            **record,
            "snapshot": Snapshot(**snapshot),
            "transcript": Transcript.from_dict({"spans": record["transcript"]}),
            "turns": tuple(Turn(**turn) for turn in record["turns"]),
        }
    )


def _spans(spans: Sequence[Span]) -> list[dict[str, Any]]:
    # Not dataclasses.asdict, which copies every id.
    return [{key: value for key, value in vars(span).items() if value is not None} for span in spans]
