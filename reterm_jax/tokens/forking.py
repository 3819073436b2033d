"""Packing of groups whose documents begin alike: the shared beginning stands in a row once, its branches behind it.

All attempts on a task share the prompt; all recoveries of a failed state share its whole history, which is most of
their tokens. What is shared carries no loss, so a trunk costs one pass and its branches get exactly the values and
gradients that they would have alone (`policy.documents` says how the layers see to that).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from reterm_jax.tokens.packing import (
    Batch,
    Example,
    Placement,
    checked_size,
    first_fit_decreasing,
    has_reference,
    pack,
    write,
)


@dataclasses.dataclass(frozen=True)
class _Unit:
    """A trunk with its branches, or with a trunk of length 0 one example by itself. They stay in one row.

    Attributes:
      trunk: positions of the shared beginning.
      members: indices of the examples whose first `trunk` positions are the same.
      size: positions in all.
    """

    trunk: int
    members: list[int]
    size: int


def pack_forked(examples: Sequence[Example], *, length: int, rows_multiple: int = 1) -> tuple[Batch, list[Placement]]:
    """Packs examples, those of one `group` behind one copy of what they share, first-fit decreasing.

    A group that does not fit into a row is divided, and each part has its own copy of the trunk. Where nothing is
    shared the batch is that of `pack`.

    Args:
      length: positions in a row.
      rows_multiple: the number of rows is rounded up to a multiple of it.

    Returns:
      (batch, placements); placements[i] says where the branch of examples[i] went: its size is what is not shared.

    Raises:
      PackingError: an example is malformed, or longer than a row.
    """
    for index, example in enumerate(examples):
        checked_size(example, index, length)
    groups: dict[tuple[str, int], list[int]] = {}
    for index, example in enumerate(examples):
        key = ("alone", index) if example.group is None else ("group", example.group)
        groups.setdefault(key, []).append(index)
    units = [unit for group in groups.values() for unit in _units(examples, group, length)]
    if not any(unit.trunk for unit in units):
        return pack(examples, length=length, rows_multiple=rows_multiple)

    places, needed = first_fit_decreasing([unit.size for unit in units], length)
    rows = -(-needed // rows_multiple) * rows_multiple
    batch = Batch.empty(rows, length, reference=has_reference(examples))
    batch = dataclasses.replace(batch, trunks=np.zeros((rows, length), np.int32))
    placements: list[Placement] = [Placement(0, 0, 0)] * len(examples)
    segments = [0] * rows
    for unit, place in sorted(zip(units, places, strict=True), key=lambda pair: (pair[1].row, pair[1].start)):
        row, start, trunk_segment = place.row, place.start, 0
        if unit.trunk:
            segments[row] += 1
            trunk_segment = segments[row]
            ids = examples[unit.members[0]].ids[: unit.trunk + 1]
            write(batch, Example(ids, np.zeros(len(ids), bool), weight=0.0), row, start, trunk_segment)
            batch.trunks[row, start : start + unit.trunk] = trunk_segment
            start += unit.trunk
        for index in unit.members:
            segments[row] += 1
            size = len(examples[index].ids) - 1 - unit.trunk
            write(batch, examples[index], row, start, segments[row], first=unit.trunk)
            batch.trunks[row, start : start + size] = trunk_segment or segments[row]
            placements[index] = Placement(row, start, size)
            start += size
    return batch, placements


def shared_positions(examples: Sequence[Example]) -> int:
    """How many positions all examples begin with, up to the first whose target one of them trains on.

    A position holds a token and what is learned about the next one, so the last shared token opens the branches.
    """
    tokens = min(len(example.ids) for example in examples)
    first = np.asarray(examples[0].ids)
    for example in examples:
        ids = np.asarray(example.ids)
        different = np.flatnonzero(ids[:tokens] != first[:tokens])
        trained = np.flatnonzero(np.asarray(example.loss_mask, bool)[:tokens])
        tokens = min([tokens, *different[:1], *trained[:1]])
    return max(0, int(tokens) - 1)


def _units(examples: Sequence[Example], group: list[int], length: int) -> list[_Unit]:
    """The group as one trunk with its branches, or as several where one does not fit into a row."""
    whole = [len(examples[index].ids) - 1 for index in group]
    trunk = shared_positions([examples[index] for index in group]) if len(group) > 1 else 0
    if not trunk:
        return [_Unit(0, [index], size) for index, size in zip(group, whole, strict=True)]
    branches, parts = first_fit_decreasing([size - trunk for size in whole], length - trunk)
    units = []
    for part in range(parts):
        members = [index for index, place in zip(group, branches, strict=True) if place.row == part]
        size = trunk + sum(place.size for place in branches if place.row == part)
        units.append(_Unit(trunk if len(members) > 1 else 0, members, size))
    return units
