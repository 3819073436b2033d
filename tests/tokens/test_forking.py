import numpy as np
import pytest

from reterm_jax.tokens.forking import pack_forked, shared_positions
from reterm_jax.tokens.packing import Example, PackingError, pack


def group(name, shared, lengths, rng):
    """Examples that begin with `shared` equal tokens and train on all that follow."""
    start = rng.integers(0, 1000, shared)
    return [
        Example(
            np.concatenate([start, rng.integers(0, 1000, n)]),
            np.arange(shared + n) >= shared,
            advantage=float(rng.normal()),
            old_logprobs=rng.normal(size=shared + n),
            weight=float(rng.uniform(0.5, 2)),
            name=f"{name}/{i}",
            group=name,
        )
        for i, n in enumerate(lengths)
    ]


def read_back(batch, placement):
    """The whole document of a branch, trunk first: columns in its row."""
    row, own = placement.row, np.arange(placement.start, placement.start + placement.size)
    trunk, segment = batch.trunks[row, own[0]], batch.segments[row, own[0]]
    before = np.flatnonzero(batch.segments[row] == trunk) if trunk != segment else np.array([], int)
    return row, np.concatenate([before, own])


@pytest.mark.parametrize("length", [64, 100, 300])
def test_every_document_can_be_read_back_and_is_trained_on_once(length):
    rng = np.random.default_rng(length)
    examples = [
        *group(0, 30, [5, 20, 1, 30], rng),
        *group(1, 50, [3] * 8, rng),
        *group(2, 1, [9, 4], rng),  # one token in common: nothing to share
        *group(3, 20, [7], rng),
        Example([1, 2, 3], [0, 1, 1], name="alone"),
    ]
    batch, placements = pack_forked(examples, length=length, rows_multiple=2)
    assert batch.rows % 2 == 0
    assert batch.loss_tokens == sum(int(np.sum(e.loss_mask)) for e in examples)
    for example, placement in zip(examples, placements, strict=True):
        row, columns = read_back(batch, placement)
        np.testing.assert_array_equal(batch.tokens[row, columns], example.ids[:-1])
        np.testing.assert_array_equal(batch.targets[row, columns], example.ids[1:])
        np.testing.assert_array_equal(batch.positions[row, columns], np.arange(len(example.ids) - 1))
        np.testing.assert_array_equal(batch.loss_mask[row, columns], np.asarray(example.loss_mask)[1:])
        trained = columns[batch.loss_mask[row, columns]]
        assert set(trained) <= set(columns[-placement.size :])
        np.testing.assert_allclose(batch.advantages[row, trained], example.advantage, rtol=1e-6)
        np.testing.assert_allclose(batch.weights[row, trained], example.weight, rtol=1e-6)
        if example.old_logprobs is not None:
            expected = np.asarray(example.old_logprobs)[np.asarray(example.loss_mask, bool)]
            np.testing.assert_allclose(batch.old_logprobs[row, trained], expected, rtol=1e-6)
    for row in range(batch.rows):
        # No number twice in a row, and no other trunk between a trunk and its branches.
        changes = np.flatnonzero(np.diff(batch.segments[row])) + 1
        numbers = batch.segments[row, [0, *changes]]
        assert len(set(numbers)) == len(numbers)
        assert np.all(np.diff(batch.trunks[row][batch.segments[row] > 0]) >= 0)


def test_shared_tokens_are_stored_once():
    examples = group(0, 101, [10] * 8, np.random.default_rng(0))
    batch, _ = pack_forked(examples, length=256)
    assert batch.used_tokens == 100 + 8 * 10
    assert pack(examples, length=256)[0].used_tokens == 8 * 110


def test_a_trunk_ends_where_training_begins():
    """Attempts may sample the same first tokens; these are trained on, so they are each branch's own."""
    alike = [Example([1, 2, 3, 4, 5, end], [0, 0, 0, 1, 1, 1]) for end in (6, 7)]
    assert shared_positions(alike) == 2  # positions of tokens 1 and 2; 3 predicts the first trained one
    assert shared_positions([Example([1, 2], [0, 1]), Example([9, 2], [0, 1])]) == 0
    assert shared_positions([Example([1, 2, 3], [0, 0, 1]), Example([1, 2], [0, 0])]) == 1


def test_without_groups_it_is_plain_packing():
    examples = [Example([1, 2, 3], [0, 1, 1]), Example([1, 2, 4], [0, 1, 1])]
    batch, placements = pack_forked(examples, length=8)
    plain, expected = pack(examples, length=8)
    assert batch.trunks is None and placements == expected
    np.testing.assert_array_equal(batch.tokens, plain.tokens)


def test_an_example_that_is_too_long_is_named():
    with pytest.raises(PackingError, match=r"0/1\) has 41 tokens"):
        pack_forked(group(0, 20, [4, 21], np.random.default_rng(0)), length=32)
