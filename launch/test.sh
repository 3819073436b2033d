#!/usr/bin/env bash
# Sets up what is missing and runs every test that this machine can run; names what it left out and why.
#   bash launch/test.sh [PYTEST ARGUMENTS]
# --require-all makes a test that was left out a failure (as .ci/run does). Two processes share the test files, as many
# of which wait for other programs; -n 0 runs all in one.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

make_environment "dev"
need_bubblewrap

cd "$repo"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
exec "$venv/bin/python" -m pytest -rs -n 2 --dist loadfile "$@"
