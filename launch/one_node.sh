#!/usr/bin/env bash
# RL with a rollout service on this machine: vLLM, service and trainer as three processes, sandboxes in Docker.
#
#   bash launch/one_node.sh [--workdir=DIR] [--config=FILE] [--config.FIELD=VALUE ...]
#   bash launch/one_node.sh stop [--workdir=DIR]          # ends all three; Ctrl-C in the first terminal does so too
#
# Started again with the same --workdir it goes on. vLLM is started again whenever it ends, the others when they die of a
# signal; an error of theirs ends the run. Logs and process ids: DIR/{trainer,service,vllm}.{log,pid}.
# Environment: RETERM_VLLM_PORT (8000), RETERM_SERVICE_PORT (8765); RETERM_MAX_LEN (of vLLM, 1024 tokens: at least
# agent.max_tokens); RETERM_VLLM (vLLM's environment; default .venv-vllm-cpu);
# RETERM_PYTHON (an interpreter with the package, instead of .venv).
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

workdir="$repo/runs/one_node"
config="$repo/configs/one_node_vllm.py"
action=run
flags=()
for argument in "$@"; do
  case "$argument" in
  stop) action=stop ;;
  --workdir=*) workdir="${argument#*=}" ;;
  --config=*) config="${argument#*=}" ;;
  --config.*) flags+=("$argument") ;;
  *) fail "unknown argument $argument; the head of launch/one_node.sh lists them" ;;
  esac
done

alive() { [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }

if [ "$action" = stop ]; then
  alive "$workdir/launcher.pid" || { echo "nothing runs in $workdir"; exit 0; }
  kill -TERM "$(cat "$workdir/launcher.pid")"
  while alive "$workdir/launcher.pid"; do sleep 0.2; done
  echo "stopped"
  exit 0
fi

vllm_python="${RETERM_VLLM:-$repo/.venv-vllm-cpu}/bin/python"
[ -x "$vllm_python" ] || fail "vLLM: no environment at ${vllm_python%/bin/python}; run: bash third_party/vllm/install.sh cpu"
docker info >/dev/null 2>&1 || fail "no Docker daemon answers; start it (systemctl start docker, or dockerd)"
docker image inspect reterm-sandbox-base >/dev/null 2>&1 || bash "$repo/third_party/sandbox_base/build.sh"
if [ -n "${RETERM_PYTHON:-}" ]; then
  python="$RETERM_PYTHON"
else
  make_environment "docker"
  need_bubblewrap
  python="$venv/bin/python"
fi

mkdir -p "$workdir"
workdir="$(cd "$workdir" && pwd)"
if alive "$workdir/launcher.pid"; then fail "$workdir is in use; stop it first: bash launch/one_node.sh stop --workdir=$workdir"; fi
vllm_port="${RETERM_VLLM_PORT:-8000}" service_port="${RETERM_SERVICE_PORT:-8765}"
published="$workdir/published"
# A server that fails an update is killed, and started again by `keep` below; one that is gone is being started.
listens="(exec 3<>/dev/tcp/127.0.0.1/$vllm_port) 2>/dev/null"
restart="if $listens; then kill -KILL -- -\$(cat '$workdir/vllm.pid'); fi"
flags=("--config=$config" "--config.rollout.restart=$restart" "${flags[@]}" "--config.rollout.published=$published"
  "--config.rollout.service=http://127.0.0.1:$service_port" "--config.rollout.vllm=('http://127.0.0.1:$vllm_port',)")
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

newest() { ls -1 "$published" 2>/dev/null | grep -E '^[0-9]+$' | sort -n | tail -1; }

trainer() { exec "$python" -m reterm_jax.cli.train "${flags[@]}" --workdir="$workdir/trainer"; }
service() { exec "$python" -m reterm_jax.cli.rollout "${flags[@]}" --workdir="$workdir/service" --listen="127.0.0.1:$service_port"; }
vllm() {
  # Serves the newest publication; the service gives it the right one, and probes it, before it samples.
  while [ -z "$(newest)" ]; do sleep 0.2; done
  export VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
  exec "$vllm_python" -m vllm.entrypoints.openai.api_server --model "$published/$(newest)" --load-format orbax \
    --worker-extension-cls reterm_jax.serving.worker.OrbaxWorker --enable-scale-out \
    --logprobs-mode processed_logprobs --enforce-eager --max-model-len "${RETERM_MAX_LEN:-1024}" \
    --host 127.0.0.1 --port "$vllm_port"
}

# keep NAME: runs the function of that name in a process group of its own, again and again while it dies of signals.
keep() {
  local name="$1" status
  set +e
  while :; do
    set -m
    ("$name") >>"$workdir/$name.log" 2>&1 </dev/null &
    echo $! >"$workdir/$name.pid"
    set +m
    wait $!
    status=$?
    # What the dead left of its group (vLLM's engine) would hold memory and ports.
    kill -KILL -- "-$(cat "$workdir/$name.pid")" 2>/dev/null
    [ -e "$workdir/stopping" ] && return 0
    if [ "$status" -lt 128 ] && [ "$name" != vllm ]; then
      echo "$status" >"$workdir/$name.status"
      return "$status"
    fi
    echo "$(date +%T) $name ended with status $status; starting it again (log: $workdir/$name.log)"
    sleep 1
  done
}

stop_all() {
  trap '' TERM INT HUP
  touch "$workdir/stopping"
  kill "${shown:-}" 2>/dev/null || true
  local name file waited
  for name in trainer service vllm; do
    file="$workdir/$name.pid"
    alive "$file" || continue
    kill -TERM -- "-$(cat "$file")" 2>/dev/null || true
    for waited in $(seq 300); do
      alive "$file" || break
      sleep 0.1
    done
    kill -KILL -- "-$(cat "$file")" 2>/dev/null || true
  done
  wait
  rm -f "$workdir/launcher.pid" "$workdir/stopping"
}

rm -f "$workdir"/{stopping,trainer.status,service.status,vllm.status}
echo $$ >"$workdir/launcher.pid"
trap 'stop_all; exit 130' TERM INT HUP
keep vllm &
keep service &
keep trainer &
echo "status page: http://127.0.0.1:$service_port/status   logs: $workdir/{trainer,service,vllm}.log"
tail -n +1 -F "$workdir/trainer.log" --pid $$ 2>/dev/null &
shown=$!
while [ ! -e "$workdir/trainer.status" ] && [ ! -e "$workdir/service.status" ]; do sleep 0.3; done
status="$(cat "$workdir/trainer.status" 2>/dev/null || cat "$workdir/service.status")"
sleep 0.3
if [ "$status" != 0 ]; then
  echo "error: ended with status $status; the last lines of the logs:" >&2
  tail -n 5 "$workdir/trainer.log" "$workdir/service.log" >&2
fi
stop_all
exit "$status"
