"""Which tokens of a packed row belong together: documents side by side, and documents that fork from a shared trunk.

A row holds documents one after another. With trunks, documents of one row may share their beginning: the trunk stands
in the row once, followed by its branches, and each branch's tokens see the trunk's and their own. So the K recoveries
of a failed state, or the G attempts on a task, go through the policy with what they share computed once, and a branch
has the values and gradients that it would have alone, behind a copy of the trunk.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Documents:
    """
    Attributes:
      index_BT: which document a token belongs to; no number is used twice in a row.
      positions_BT: a token's position in its document; in a branch it goes on from the trunk's.
      trunk_BT: the number of the document that a token's document continues, its own where it continues none. Branches
        come after their trunk, with no other trunk between. None: nothing is forked, and nothing is spent on it.
    """

    index_BT: jax.Array
    positions_BT: jax.Array
    trunk_BT: jax.Array | None = None

    @classmethod
    def of(cls, segments_BT: jax.Array, positions_BT: jax.Array, trunks_BT: jax.Array | None = None) -> Documents:
        """From the segment ids of a batch. Without trunks an id may be used again, where it is not next to itself."""
        if trunks_BT is not None:
            return cls(segments_BT, positions_BT, trunks_BT)
        change_BT = segments_BT[:, 1:] != segments_BT[:, :-1]
        index_BT = jnp.pad(jnp.cumsum(change_BT, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
        return cls(index_BT, positions_BT)

    def before(self, distance: int) -> tuple[jax.Array, jax.Array]:
        """Where the token lies that comes `distance` before each token: (columns [B,T], is there one [B,T])."""
        columns_T = jnp.arange(self.index_BT.shape[1])
        starts = jnp.pad(self.index_BT[:, 1:] != self.index_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        start_BT = jax.lax.cummax(jnp.where(starts, columns_T, 0), axis=1)
        column_BT = columns_T - distance
        trunk_starts = starts if self.trunk_BT is None else starts & (self.index_BT == self.trunk_BT)
        trunk_start_BT = jax.lax.cummax(jnp.where(trunk_starts, columns_T, 0), axis=1)
        position_BT = self.positions_BT - distance
        column_BT = jnp.where(column_BT >= start_BT, column_BT, trunk_start_BT + position_BT)
        return jnp.maximum(column_BT, 0), position_BT >= 0
