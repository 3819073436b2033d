"""What the entry points share: flags, logging, and errors as one line with exit status 1."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from absl import app, flags, logging


class UserError(Exception):
    """Something that the user can mend: the message names the file, field or flag and the remedy."""


def run_main(main: Callable[[Sequence[str]], None], *, positional: int = 0) -> None:
    """Runs an absl main. Known errors become one line on stderr and exit status 1; others keep their traceback."""

    def guarded(argv: Sequence[str]) -> None:
        if len(argv) > 1 + positional:
            raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
        logging.set_verbosity(logging.WARNING)  # Orbax narrates every save
        try:
            main(argv)
        except _known_errors() as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.ENOENT, errno.EROFS):
                raise
            print(f"error: {error.strerror}: {error.filename or 'while writing'}. {_remedy(error)}", file=sys.stderr)
            sys.exit(1)

    try:
        app.run(guarded)
    except (AttributeError, KeyError, TypeError) as error:
        # ml_collections reports an unknown or mistyped override while absl parses the command line.
        if flags.FLAGS.is_parsed():
            raise
        print(f"error: config override: {error}. `--help` and the config file list the fields.", file=sys.stderr)
        sys.exit(1)


def _known_errors() -> tuple[type[BaseException], ...]:
    """Errors whose message is for the user. Imported late, so that `--help` is quick."""
    from reterm_jax.checkpoint.checkpointer import CheckpointError
    from reterm_jax.checkpoint.publish import PublishError
    from reterm_jax.evaluation.ablation import AblationError
    from reterm_jax.evaluation.harbor_job import HarborError
    from reterm_jax.evaluation.journal import JournalError
    from reterm_jax.evaluation.json_codec import RecordError
    from reterm_jax.evaluation.view import ViewError
    from reterm_jax.policy.config import ConfigError
    from reterm_jax.policy.hf import WeightsError
    from reterm_jax.policy.sharding import ShardingError
    from reterm_jax.recovery.dataset import DatasetError
    from reterm_jax.rollout.client import ServiceError
    from reterm_jax.rollout.http_server import ListenError
    from reterm_jax.rollout.store import StoreError
    from reterm_jax.sandbox.base import SandboxError
    from reterm_jax.tasks.task import TaskError
    from reterm_jax.tokens.chat import ChatFormatError
    from reterm_jax.tokens.packing import PackingError
    from reterm_jax.training.settings import SettingsError
    from reterm_jax.training.workdir import WorkdirError

    return (
        AblationError,
        CheckpointError,
        ChatFormatError,
        ConfigError,
        DatasetError,
        HarborError,
        JournalError,
        ListenError,
        PackingError,
        PublishError,
        RecordError,
        SandboxError,
        ServiceError,
        SettingsError,
        ShardingError,
        StoreError,
        TaskError,
        UserError,
        ViewError,
        WeightsError,
        WorkdirError,
    )


def end_on_signals() -> None:
    """SIGTERM and SIGHUP unwind like Ctrl-C, so that what a run made (sandboxes, images) goes with it."""

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


def _remedy(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "The disk is full: free space or choose another --workdir; the run resumes from its last checkpoint."
    return "Check the path and its permissions."


def quiet_environment() -> None:
    """Sets, before JAX is imported, what keeps its start quiet and quick on a machine without accelerators."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch is missing is as it should be
