#!/usr/bin/env bash
# launch/tpu_pod.sh runs this script on each worker (host) of a TPU slice:
#
#   setup BUCKET DIRECTORY  mounts the bucket and installs the project's archive
#   start COMMAND ...       starts the run in the background
#   follow LINE             prints the run's output from LINE on, then "exit CODE"
#   stop                    sends SIGTERM to the run and waits until it has ended
set -u

project=$HOME/podrl
environment=$HOME/podrl-venv
run=$HOME/podrl-run # The prefix of run.pid, run.log and run.code.

fail() {
  echo "tpu_worker.sh on $(hostname): $1" >&2
  exit 1
}

install_gcsfuse() {
  local keys=/usr/share/keyrings/cloud.google.asc
  local packages=https://packages.cloud.google.com/apt
  curl -fsS "$packages/doc/apt-key.gpg" | sudo tee "$keys" >/dev/null
  echo "deb [signed-by=$keys] $packages gcsfuse-$(lsb_release -cs) main" \
    | sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
  # A new machine updates itself in its first minutes, and apt is locked meanwhile.
  local apt=(sudo DEBIAN_FRONTEND=noninteractive apt-get -qy -o DPkg::Lock::Timeout=600)
  "${apt[@]}" update && "${apt[@]}" install fuse gcsfuse
}

setup() {
  local bucket=$1 mount=$2 log=$HOME/podrl-setup.log
  stop # A slice that was kept may have a run.
  command -v gcsfuse >/dev/null || install_gcsfuse >>"$log" 2>&1 \
    || fail "gcsfuse could not be installed: $(tail -n 1 "$log")"
  if ! mountpoint -q "$mount"; then
    sudo install -d -o "$(id -un)" "$mount" || fail "$mount could not be created"
    # Three defaults of gcsfuse do not suit podrl. podrl renames the directories of
    # checkpoints. A host must immediately see what another host writes. After a file
    # is synchronised, its data must be in the bucket.
    gcsfuse --implicit-dirs --rename-dir-limit=1000000 --metadata-cache-ttl-secs=0 \
      --metadata-cache-negative-ttl-secs=0 --enable-streaming-writes=false \
      "$bucket" "$mount" >>"$log" 2>&1 || fail \
      "gs://$bucket could not be mounted; allow the machine's service account to write to it"
  fi
  rm -rf "$project"
  mkdir "$project"
  tar -xzf "$HOME/podrl.tar.gz" -C "$project" || fail 'podrl.tar.gz could not be unpacked'
  # uv installs Python 3.12, because Python 3.10 of some images is too old for JAX.
  {
    python3 -m pip install -q --user uv \
      && { [[ -x $environment/bin/python ]] \
        || python3 -m uv venv -q --python 3.12 "$environment"; } \
      && python3 -m uv pip install -q --python "$environment/bin/python" -e "${project}[tpu]"
  } || fail 'the project could not be installed'
}

# Succeeds if a run has started and has not ended yet.
running() {
  [[ -f $run.pid && ! -f $run.code ]] && kill -0 "$(<"$run.pid")" 2>/dev/null
}

stop() {
  running || return 0
  local group attempt
  group=$(<"$run.pid")
  kill -TERM -- "-$group"
  for attempt in {1..450}; do
    running || return 0
    sleep 0.2
  done
  kill -KILL -- "-$group"
  fail "the run did not end within $((attempt / 5)) s after SIGTERM, and was killed"
}

start() {
  stop
  rm -f "$run".*
  : >"$run.log"
  # Because of its own session, the run continues when the connection ends.
  setsid nohup bash "$0" run "$@" </dev/null >>"$run.log" 2>&1 &
  until [[ -s $run.pid ]]; do sleep 0.1; done
}

run() {
  trap : TERM # SIGTERM ends only the command: this shell writes its exit code.
  echo $$ >"$run.pid"
  cd "$project" || exit 1
  PATH=$environment/bin:$PATH PYTHONUNBUFFERED=1 "$@"
  echo $? >"$run.code.new"
  mv "$run.code.new" "$run.code"
}

follow() {
  [[ -f $run.pid ]] || fail 'no run was started here'
  tail -n "+$1" --pid="$(<"$run.pid")" -s 0.5 -f "$run.log"
  # If the run was killed together with its shell, for example by a restart of the
  # machine, it has no exit code. It can then resume from its last checkpoint, as
  # after a preemption (75).
  echo "exit $(cat "$run.code" 2>/dev/null || echo 75)"
}

case ${1-} in
  setup | start | run | stop | follow) "$@" ;;
  *) fail "'${1-}' is unknown; try setup, start, follow or stop" ;;
esac
