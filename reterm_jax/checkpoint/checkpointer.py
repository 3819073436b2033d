"""Checkpoints of a training phase: Orbax directories, one per step, written atomically.

A step's directory holds the items `params` and `opt_state` (so that evaluation and export read the first alone),
`average` where a moving average of the parameters is kept, and `metadata` (JSON: what the loop needs beside arrays). It
gets its final name only when everything is on disk. A process killed while saving leaves the previous step as the
latest one; the leftover is removed when the directory is opened.

Steps are written in the background, while training goes on from a state whose values are copied already.
"""

import contextlib
import errno
import json
import logging as std_logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from absl import logging

from reterm_jax.policy.spec import param_name
from reterm_jax.training.state import TrainState

_FINGERPRINT = "fingerprint"
_STEP = "step"
# What tensorstore says when the operating system reports ENOSPC or EDQUOT.
_NO_SPACE = ("No space left", "RESOURCE_EXHAUSTED", "Disk quota exceeded")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or does not fit. The message names the directory and the remedy."""


class Checkpointer:
    """Saves and restores `TrainState`s under one directory.

    Args:
        directory: created if missing.
        keep: how many of the latest steps stay on disk.
        fingerprint: of the configuration. It is saved with every step, and a checkpoint with another one is refused.
    """

    def __init__(self, directory: Path | str, *, keep: int = 2, fingerprint: str | None = None) -> None:
        self.directory = Path(directory).absolute()
        self._fingerprint = fingerprint
        self._writing: int | None = None
        self.directory.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, cleanup_tmp_directories=True, enable_async_checkpointing=True
            ),
            item_handlers={
                "params": ocp.StandardCheckpointHandler(),
                "opt_state": ocp.StandardCheckpointHandler(),
                "average": ocp.StandardCheckpointHandler(),
                "metadata": ocp.JsonCheckpointHandler(),
            },
        )

    @property
    def latest_step(self) -> int | None:
        """The latest finished step, or None. One that is being written is finished first."""
        self.wait()
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, metadata: Mapping[str, Any] | None = None) -> None:
        """Starts to write `state` and `metadata` (JSON values) as `step`; returns when the state may be donated.

        The step counts once it is on disk, which `wait` waits for. A step that is still being written is finished
        first.

        Raises:
            CheckpointError: if the disk is full, here or for the step before. Earlier steps are left as they are.
        """
        self.wait()
        record = {_FINGERPRINT: self._fingerprint, "step": int(state.step), **(metadata or {})}
        arrays = {"params": state.params, "opt_state": _counted(state)}
        if state.average is not None:
            arrays["average"] = state.average
        items = ocp.args.Composite(
            metadata=ocp.args.JsonSave(record),
            **{name: ocp.args.StandardSave(tree) for name, tree in arrays.items()},
        )
        json.dumps(record)  # in the background nobody would see what is wrong with it
        self._writing = step
        with self._no_space_named():
            self._manager.save(step, args=items)

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            CheckpointError: if the disk was full.
        """
        with self._no_space_named():
            self._manager.wait_until_finished()
        self._writing = None

    @contextlib.contextmanager
    def _no_space_named(self) -> Iterator[None]:
        """Turns a full disk, while `_writing` is written, into a CheckpointError, and removes what there is of it."""
        try:
            with _no_space_reported_once():
                yield
        except Exception as error:
            step, self._writing = self._writing, None
            if not _is_no_space(error):
                raise
            # What could be written takes the very space that is missing.
            for leftover in self.directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(leftover, ignore_errors=True)
            free = shutil.disk_usage(self.directory).free / 2**20
            latest = self._manager.latest_step()
            onwards = "nothing was saved here before" if latest is None else f"the run continues from step {latest}"
            raise CheckpointError(
                f"no space left to save step {step} in {self.directory} ({free:.0f} MiB free); free some space and "
                f"start again: {onwards}"
            ) from error

    def restore(self, abstract: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
        """The state of `step` (the latest if None), placed as `abstract` says, and its metadata.

        Args:
            abstract: shapes, dtypes and shardings, from `training.state.abstract_state`.

        Raises:
            CheckpointError: if there is no such step, or it belongs to another configuration, model or optimizer.
        """
        step = self._existing(step)
        metadata = self.metadata(step)
        self._check_tree(step, "params", abstract.params, "model")
        abstract_opt = _counted(abstract)
        self._check_tree(step, "opt_state", abstract_opt, "optimizer")
        trees = {"params": abstract.params, "opt_state": abstract_opt}
        if abstract.average is not None:
            self._check_tree(step, "average", abstract.average, "average of the parameters")
            trees["average"] = abstract.average
        restored = self._manager.restore(
            step, args=ocp.args.Composite(**{name: ocp.args.StandardRestore(tree) for name, tree in trees.items()})
        )
        counted = dict(restored["opt_state"])
        counter = counted.pop(_STEP)
        leaves = [leaf for _, leaf in sorted(counted.items())]
        opt_state = jax.tree.unflatten(jax.tree.structure(abstract.opt_state), leaves)
        state = TrainState(restored["params"], opt_state, counter, restored.get("average"))
        return state, metadata

    def restore_params(self, abstract_params: Any, step: int | None = None) -> Any:
        """`TrainState.result` alone, for evaluation and export: the average of the parameters where one was kept, else
        the parameters. `abstract_params` may carry shardings."""
        step = self._existing(step)
        self.metadata(step)
        item = "params" if self._saved(step, "average") is None else "average"
        self._check_tree(step, item, abstract_params, "model")
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(abstract_params)})
        return self._manager.restore(step, args=args)[item]

    def discard_after(self, step: int) -> None:
        """Removes the steps beyond `step`, from which a run that resumes there comes again."""
        self.wait()
        for later in [found for found in self._manager.all_steps() if found > step]:
            self._manager.delete(later)

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """What was saved beside the arrays: `fingerprint`, `step`, and what the loop gave to `save`."""
        step = self._existing(step)
        record = self._manager.restore(step, args=ocp.args.Composite(metadata=ocp.args.JsonRestore()))["metadata"]
        saved = record.get(_FINGERPRINT)
        if self._fingerprint is not None and saved != self._fingerprint:
            raise CheckpointError(
                f"{self.directory / str(step)} was written with another configuration (fingerprint {saved}, this run's "
                f"is {self._fingerprint}); choose another --workdir, or the configuration that it was made with"
            )
        return record

    def close(self) -> None:
        """Waits for what is being written."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _existing(self, step: int | None) -> int:
        self.wait()
        steps = sorted(self._manager.all_steps())
        if not steps:
            raise CheckpointError(f"{self.directory} holds no finished checkpoint; train first, or correct the path")
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.directory} has no checkpoint of step {step}; it has {steps}")
        return steps[-1] if step is None else step

    def _saved(self, step: int, item: str) -> dict[str, Any] | None:
        """The tree that was saved as `item`, without its values; None where there is none."""
        found = self._manager.item_metadata(step).get(item)
        return None if found is None else dict(found)

    def _check_tree(self, step: int, item: str, expected: Any, what: str) -> None:
        """Compares names and shapes before reading anything, so that the message can name the first difference."""
        saved = _shapes(self._saved(step, item) or {})
        wanted = _shapes(expected)
        place = f"{self.directory / str(step)} is a checkpoint of another {what}"
        for name in [*wanted, *(name for name in saved if name not in wanted)]:
            if saved.get(name) != wanted.get(name):
                raise CheckpointError(
                    f"{place}: {item} {name} is {_describe(saved.get(name))} there and {_describe(wanted.get(name))} "
                    f"in this configuration; choose another --workdir, or the configuration that it was made with"
                )


def _counted(state: TrainState) -> dict[str, Any]:
    """Step and optimizer state as a flat dict, whose names sort in leaf order.

    Optimizer states are nested tuples of many classes, of which Orbax restores none; and some are empty, which Orbax
    does not save, so that the step goes with them.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state.opt_state)
    names = (jax.tree_util.keystr(path, simple=True, separator=":") for path, _ in leaves)
    named = {f"{index:04d}:{name}": leaf for index, (name, (_, leaf)) in enumerate(zip(names, leaves, strict=True))}
    return {**named, _STEP: state.step}


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {param_name(path): tuple(leaf.shape) for path, leaf in leaves}


def _describe(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {list(shape)}"


@contextlib.contextmanager
def _no_space_reported_once() -> Iterator[None]:
    """Keeps Orbax's writing threads from logging a traceback each for the error that `save` raises in one line."""

    def keep(record: std_logging.LogRecord) -> bool:
        return not (record.exc_info and _is_no_space(record.exc_info[1]))

    logger = logging.get_absl_logger()
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _is_no_space(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(text in str(error) for text in _NO_SPACE):
            return True
        error = error.__cause__ or error.__context__
    return False
