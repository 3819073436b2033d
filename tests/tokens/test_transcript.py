import json

import numpy as np
import pytest

from reterm_jax.tokens.transcript import Span, Transcript, TranscriptError

PROMPT = Span("prompt", (5, 6))
POLICY = Span("policy", (7, 8), (-0.5, -1.0), 3)
OBSERVATION = Span("observation", (9,))


def test_arrays_mark_policy_tokens_only():
    ids, mask, logprobs, versions = Transcript([PROMPT, POLICY, OBSERVATION]).arrays()
    np.testing.assert_array_equal(ids, [5, 6, 7, 8, 9])
    np.testing.assert_array_equal(mask, [False, False, True, True, False])
    np.testing.assert_allclose(logprobs, [0, 0, -0.5, -1, 0])
    np.testing.assert_array_equal(versions, [-1, -1, 3, 3, -1])
    assert (ids.dtype, mask.dtype, logprobs.dtype, versions.dtype) == (np.int32, bool, np.float32, np.int32)


def test_arrays_of_nothing_are_empty():
    assert [array.shape for array in Transcript().arrays()] == [(0,)] * 4


def test_forks_do_not_touch_each_other():
    transcript = Transcript([PROMPT, POLICY])
    fork = transcript.fork()
    fork.append(OBSERVATION)
    transcript.ids.append(99)
    assert (transcript.ids, fork.ids) == ([5, 6, 7, 8], [5, 6, 7, 8, 9])
    assert len(transcript) == 4 and len(fork) == 5 and len(transcript.spans) == 2


def test_json_round_trip():
    transcript = Transcript([PROMPT, POLICY, OBSERVATION])
    assert Transcript.from_dict(json.loads(json.dumps(transcript.to_dict()))) == transcript


@pytest.mark.parametrize(
    "arguments",
    [
        ("user", (1,)),
        ("prompt", ()),
        ("prompt", (1,), (0.0,)),
        ("observation", (1,), None, 4),
        ("policy", (1,)),
        ("policy", (1, 2), (0.0,), 0),
        ("policy", (1,), (0.0,), None),
    ],
)
def test_spans_that_do_not_hold_together(arguments):
    with pytest.raises(TranscriptError):
        Span(*arguments)


@pytest.mark.parametrize("spans", [None, [3], [{"source": "prompt"}], [{"source": "prompt", "ids": ["x"]}]])
def test_bad_stored_transcripts_name_the_place(spans):
    with pytest.raises(TranscriptError, match="spans"):
        Transcript.from_dict({"spans": spans})
