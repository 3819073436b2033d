#!/usr/bin/env bash
# Sets up what is missing and compares base, SFT, GRPO, ReTerm-GRPO and ReTerm-GRPO with fork_at=error at equal budgets:
# configs/ablation.py, about half an hour a seed on 2 cores.
#   bash launch/ablation.sh [--seeds=N] [--arms=ARM,...] [--workdir=DIR] [--config.FIELD=VALUE ...]
# N seeds from 0 on (default 3); the arms are those of configs/ablation.py. Run again with the same --workdir it resumes;
# with a larger N or with other arms (for all seeds that are there) it adds them to what is there.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

seeds=3
arms="grpo,reterm_grpo,reterm_grpo_error"
workdir="$repo/runs/ablation"
overrides=()
for argument in "$@"; do
  case "$argument" in
    --seeds=*) seeds="${argument#*=}" ;;
    --arms=*) arms="${argument#*=}" ;;
    --workdir=*) workdir="${argument#*=}" ;;
    --config.seed=* | --config.start_from=*) fail "$argument: the ablation sets this itself; see --seeds" ;;
    --config.rl.name=* | --config.rl.states=* | --config.rl.fork_at=*)
      fail "$argument: this is what arms differ in; add one to configs/ablation.py" ;;
    --config.*=*) overrides+=("$argument") ;;
    *) fail "unknown argument $argument; known are --seeds=N, --arms=ARM,..., --workdir=DIR and --config.FIELD=VALUE" ;;
  esac
done
[[ "$seeds" =~ ^[1-9][0-9]*$ ]] || fail "--seeds=$seeds: give how many, 1 or more"
[ -n "${arms//,/}" ] || fail "--arms=$arms: give one arm or more of configs/ablation.py"
known="$(sed -n 's/^    "\(.*\)": {.*/\1/p' "$repo/configs/ablation.py" | grep -vx cold_start)"
IFS=, read -ra chosen <<<"$arms"
for arm in "${chosen[@]}"; do
  grep -qxF -- "$arm" <<<"$known" || fail "--arms=$arms: configs/ablation.py has no arm $arm to train; it has" $known
done
if [ -d "$workdir/seed$seeds" ]; then
  held=("$workdir"/seed*)
  fail "--seeds=$seeds: $workdir has runs of ${#held[@]} seeds, and only arms that all of them have are compared;" \
    "give --seeds=${#held[@]} or more, or another --workdir"
fi

make_environment ""
need_bubblewrap
mkdir -p "$workdir"
workdir="$(cd "$workdir" && pwd)"

# Runs with other fields would be compared as if they were the same.
fields="$(printf '%s\n' "${overrides[@]}")"
if [ -f "$workdir/overrides" ] && [ "$(cat "$workdir/overrides")" != "$fields" ]; then
  fail "$workdir was begun with other fields (its file overrides lists them); give those, or another --workdir"
fi
printf '%s\n' "$fields" >"$workdir/overrides"

child=""
trap '[ -z "$child" ] || { kill -TERM "$child" 2>/dev/null; wait "$child"; }; exit 143' TERM INT HUP

# train SEED ARM [FLAG ...]
train() {
  local seed="$1" arm="$2" directory="$workdir/seed$1/$2"
  shift 2
  if [ -f "$directory/report.html" ]; then
    echo "== seed $seed, $arm: finished before"
    return
  fi
  echo "== seed $seed, $arm"
  "$venv/bin/reterm-train" --config="$repo/configs/ablation.py:$arm" --workdir="$directory" \
    --config.seed="$seed" "${overrides[@]}" "$@" &
  child=$!
  wait "$child" || fail "seed $seed, $arm stopped; its message is above. Started again the ablation goes on from there"
  child=""
}

for ((seed = 0; seed < seeds; seed++)); do
  train "$seed" cold_start --config.rl.steps=0
  for arm in "${chosen[@]}"; do
    train "$seed" "$arm" --config.start_from="$workdir/seed$seed/cold_start"
  done
done
"$venv/bin/reterm-compare" "$workdir"
