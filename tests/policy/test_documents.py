"""Documents that fork from a shared trunk, against each of them alone with a copy of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import forward, slow_params, tiny_config

from reterm_jax.policy.documents import Documents
from reterm_jax.policy.forward import hidden_states

# (trunk length, branch lengths) of the groups of one row; no branches: a document that shares nothing. Chunks are of 16
# tokens and attention blocks of 24: trunks end within, at and just behind the end of a chunk, several branches begin in
# one chunk, trunks and branches are shorter than the convolution or cover several chunks.
ROWS = {
    "one trunk over several chunks": [(37, (5, 40, 1, 20))],
    "trunk ends at the end of a chunk": [(16, (3, 30)), (32, (17,))],
    "shorter than the convolution": [(1, (1, 2, 9)), (2, (1, 1, 1, 1)), (3, (2, 19))],
    "groups and plain documents": [(20, ()), (9, (4, 4)), (1, ()), (50, (2, 2, 33)), (18, ())],
    "many branches": [(21, tuple(range(1, 33)))],
    "empty branches": [(10, (0, 5, 0, 7))],
}


def forked(groups, width, seed=0):
    """One row of [1,width] arrays (tokens, segments, positions, trunks), and (columns, ids) of every full document."""
    rng = np.random.default_rng(seed)
    tokens, segments, positions, trunks = (np.zeros((1, width), np.int32) for _ in range(4))
    at, segment, documents = 0, 0, []

    def put(length, first, trunk):
        nonlocal at, segment
        segment += 1
        span = np.arange(at, at + length)
        tokens[0, span] = rng.integers(0, 97, length)
        segments[0, span], trunks[0, span] = segment, trunk or segment
        positions[0, span] = first + np.arange(length)
        at += length
        return segment, span

    for length, branches in groups:
        trunk, shared = put(length, 0, None)
        if not branches:
            documents.append(shared)
        for branch in branches:
            documents.append(np.concatenate([shared, put(branch, length, trunk)[1]]))
    return (tokens, segments, positions, trunks), documents


def one_by_row(tokens_BT, documents):
    """The full documents as the rows of one batch (tokens, segments, positions), padded at the end."""
    tokens, segments, positions = np.zeros((3, len(documents), max(map(len, documents))), np.int32)
    for row, columns in enumerate(documents):
        tokens[row, : len(columns)] = tokens_BT[0, columns]
        segments[row, : len(columns)] = 1
        positions[row, : len(columns)] = np.arange(len(columns))
    return tokens, segments, positions


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_forked_equals_alone(config, key, row):
    params = slow_params(config, key)
    used = sum(length + sum(branches) for length, branches in row)
    arrays, documents = forked(row, used + 7)
    found = forward(params, config, *arrays)[0]
    assert jnp.isfinite(found).all()
    alone = forward(params, config, *one_by_row(arrays[0], documents))
    for columns, expected in zip(documents, alone, strict=True):
        np.testing.assert_allclose(found[columns], expected[: len(columns)], atol=3e-5)


def test_gradients_are_those_of_the_full_documents(config, key):
    """Each document has its own loss on its branch; a trunk's gradient is the sum over its branches."""
    params = slow_params(config, key)
    # The first trunk's state passes whole chunks, and a branch that begins from it then goes on into the next chunk.
    row = [(37, (5, 40, 1, 20)), (11, ()), (16, (3, 3))]
    arrays, documents = forked(row, 144)
    rng = np.random.default_rng(1)
    lengths = [b for _, branches in row for b in (branches or (None,))]
    weights = [rng.normal(size=(length or 11, config.hidden_size)).astype(np.float32) for length in lengths]

    def branch_losses(hidden_of):
        return sum(jnp.sum(hidden_of(d)[-len(w) :] * w) for d, w in zip(documents, weights, strict=True))

    def together(params):
        hidden = hidden_states(params, config, *arrays)[0]
        return branch_losses(lambda columns: hidden[columns])

    rows = one_by_row(arrays[0], documents)

    def separately(params):
        hidden = hidden_states(params, config, *rows)
        pairs = enumerate(zip(documents, weights, strict=True))
        return sum(jnp.sum(hidden[i, len(d) - len(w) : len(d)] * w) for i, (d, w) in pairs)

    found, expected = (jax.jit(jax.grad(loss))(params) for loss in (together, separately))
    for path, want in jax.tree_util.tree_leaves_with_path(expected):
        got = found
        for entry in path:
            got = got[entry.key]
        scale = float(jnp.abs(want).max()) + 1e-6
        np.testing.assert_allclose(got / scale, want / scale, atol=2e-5, err_msg=str(path))


@pytest.mark.parametrize("trunk", [63, 4_000])
def test_long_trunks(key, trunk):
    config = tiny_config("qwen3_5", chunk_size=64, attention_block=512)
    params = slow_params(config, key)
    arrays, documents = forked([(trunk, (9, 70))], trunk + 80)
    found = forward(params, config, *arrays)[0]
    alone = forward(params, config, *one_by_row(arrays[0], documents))
    for columns, expected in zip(documents, alone, strict=True):
        np.testing.assert_allclose(found[columns[trunk:]], expected[trunk : len(columns)], atol=1e-4)


def test_segment_ids_may_be_used_again_without_trunks():
    segments = jnp.array([[1, 1, 2, 2, 1, 0, 0]])
    assert Documents.of(segments, segments).index_BT.tolist() == [[0, 0, 1, 1, 2, 3, 3]]


def test_before_steps_from_a_branch_into_its_trunk():
    (_, segments, positions, trunks), _ = forked([(2, ()), (3, (2, 1))], 9)
    column, exists = Documents.of(*map(jnp.asarray, (segments, positions, trunks))).before(2)
    assert exists[0].tolist() == [False, False, False, False, True, True, True, True, False]
    assert column[0, [4, 5, 6, 7]].tolist() == [2, 3, 4, 3]
