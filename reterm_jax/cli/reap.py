"""`reterm-reap [RUN_DIR ...]`: removes what killed runs left: containers and images of this machine, and directories.

Without an argument, containers and images of every dead run that was started on this machine; with run directories
(the directory that holds `sandboxes/`), also their leftover sandbox directories. Runs that are alive are left alone.
"""

from collections.abc import Sequence
from pathlib import Path

from reterm_jax.cli import common


def main(argv: Sequence[str]) -> None:
    from reterm_jax.sandbox.base import SandboxUnavailable
    from reterm_jax.sandbox.dockerimage import connect
    from reterm_jax.sandbox.hosts import docker_urls
    from reterm_jax.sandbox.reaper import reap_directory, reap_docker

    for name in argv[1:]:
        if not Path(name).is_dir():
            raise common.UserError(f"{name}: not a directory; give run directories, or nothing")
        _say(reap_directory(Path(name)), f"directories in {name}")
    for url in docker_urls() or [None]:
        try:
            client, _ = connect(url=url)
        except SandboxUnavailable as error:
            if not argv[1:]:  # then Docker was all that was asked for
                raise
            print(f"Docker was left out: {error}")
            continue
        _say(reap_docker(client), f"containers and images{f' at {url}' if url else ''}")


def _say(hosts: Sequence[str], what: str) -> None:
    print(f"{what}: removed those of {', '.join(hosts)}" if hosts else f"{what}: nothing was left")


def run() -> None:
    """Console entry point."""
    common.run_main(main, positional=1000)


if __name__ == "__main__":
    run()
