#!/usr/bin/env bash
# Sets up what is missing and runs the main job on one machine: SFT cold start, ReTerm-GRPO, evaluation, report.
#   bash launch/quickstart.sh [--workdir=DIR] [--config.FIELD=VALUE ...]
# Run again with the same --workdir it resumes.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

make_environment ""
need_bubblewrap

workdir="$repo/runs/quickstart"
for argument in "$@"; do
  case "$argument" in --workdir=*) workdir="" ;; esac
done
exec "$venv/bin/reterm-train" --config="$repo/configs/quickstart.py" ${workdir:+--workdir="$workdir"} "$@"
