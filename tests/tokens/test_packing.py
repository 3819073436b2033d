import numpy as np
import pytest

from reterm_jax.tokens.packing import Batch, Example, PackingError, pack, unpack


def example(n, first=0, **fields):
    ids = np.arange(first, first + n)
    mask = np.arange(n) >= n // 2
    mask[0] = False
    return Example(ids, mask, **fields)


def test_targets_are_the_next_token_inside_each_document():
    a = Example([1, 2, 3, 4], [0, 0, 1, 1], advantage=0.5, old_logprobs=[0, 0, -0.3, -0.4], weight=2.0)
    b = Example([7, 8, 9], [0, 1, 0], advantage=np.array([0.0, -1.0, -2.0]))
    batch, _ = pack([b, a], length=6)
    np.testing.assert_array_equal(batch.tokens, [[1, 2, 3, 7, 8, 0]])
    np.testing.assert_array_equal(batch.targets, [[2, 3, 4, 8, 9, 0]])
    np.testing.assert_array_equal(batch.segments, [[1, 1, 1, 2, 2, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 0, 1, 0]])
    np.testing.assert_array_equal(batch.loss_mask, [[0, 1, 1, 1, 0, 0]])
    np.testing.assert_allclose(batch.advantages, [[0.5, 0.5, 0.5, -1, -2, 0]])
    np.testing.assert_allclose(batch.old_logprobs, [[0, -0.3, -0.4, 0, 0, 0]])
    np.testing.assert_allclose(batch.weights, [[2, 2, 2, 1, 1, 0]])
    assert (batch.used_tokens, batch.loss_tokens) == (5, 3)
    assert batch.padding_fraction == pytest.approx(1 / 6)


def test_every_document_is_packed_once_and_can_be_read_back():
    rng = np.random.default_rng(0)
    examples = [example(int(n), first=1000 * i, name=str(i)) for i, n in enumerate(rng.integers(2, 65, 40))]
    batch, placements = pack(examples, length=64)
    assert batch.used_tokens == sum(len(e.ids) - 1 for e in examples)
    for one, placement in zip(examples, placements, strict=True):
        np.testing.assert_array_equal(unpack(batch.targets, placement)[1:], one.ids[1:])
    assert batch.rows <= np.ceil(11 / 9 * batch.used_tokens / 64) + 1  # the guarantee of first-fit decreasing


def test_rows_are_rounded_up_to_whole_micro_batches():
    batch, _ = pack([example(9)] * 5, length=8, rows_multiple=4)
    assert batch.rows == 8
    assert not batch.segments[5:].any()
    assert pack([], length=8, rows_multiple=4)[0].rows == 4


def test_a_given_number_of_rows_is_kept_or_refused():
    assert pack([example(9)], length=8, rows=3)[0].rows == 3
    with pytest.raises(PackingError, match="need 2 rows of 8 tokens, only 1"):
        pack([example(9)] * 2, length=8, rows=1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (example(10, name="task-3"), r"example 1 \(task-3\) has 10 tokens, a row holds 9"),
        (Example([5], [False]), "at least 2"),
        (Example([5, 6], [True, True]), "first token"),
        (Example([5, 6, 7], [False, True]), "loss_mask has length 2"),
        (Example([5, 6], [False, True], old_logprobs=[0.0]), "old_logprobs has length 1"),
    ],
)
def test_a_document_that_cannot_be_packed_is_named(bad, message):
    with pytest.raises(PackingError, match=message):
        pack([example(5), bad], length=8)


def test_take_fills_up_with_empty_rows():
    batch, _ = pack([example(9, first=10 * i) for i in range(3)], length=8)
    taken = batch.take([2, 0], count=4)
    np.testing.assert_array_equal(taken.tokens[:2], batch.tokens[[2, 0]])
    assert taken.rows == 4 and not taken.segments[2:].any()
    assert taken.tokens.dtype == np.int32 and taken.loss_mask.dtype == bool
    with pytest.raises(ValueError, match="do not fit"):
        batch.take([0, 1], count=1)
    assert Batch.empty(2, 3).used_tokens == 0
