#!/usr/bin/env bash
# What launch/tpu_pod.sh runs on each worker (host) of a TPU slice:
#
#   setup BUCKET DIRECTORY  mount the bucket, install the project from podrl.tar.gz
#   start COMMAND ...       begin the run, detached
#   follow LINE             print its output from LINE on, at last "exit CODE"
#   stop                    SIGTERM, and wait until it has saved
#   first                   the name of the slice's first worker
set -u

archive=$HOME/podrl.tar.gz
project=$HOME/podrl
environment=$HOME/podrl-venv
run=$HOME/podrl-run # run.pid, run.log, run.code

fail() {
  echo "tpu_worker.sh on $(hostname): $1" >&2
  exit 1
}

apt_get() {
  # A new machine's own updates hold the lock for its first minutes.
  {
    sudo DEBIAN_FRONTEND=noninteractive apt-get -q -y \
      -o DPkg::Lock::Timeout=600 "$@"
  } >>"$HOME/podrl-setup.log" 2>&1 || fail "apt-get $1 failed; see podrl-setup.log"
}

install_gcsfuse() {
  local keys=/usr/share/keyrings/cloud.google.asc
  local packages=https://packages.cloud.google.com/apt
  curl -fsS "$packages/doc/apt-key.gpg" | sudo tee "$keys" >/dev/null \
    || fail "the key of $packages could not be had"
  echo "deb [signed-by=$keys] $packages gcsfuse-$(lsb_release -cs) main" \
    | sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
  apt_get update
  apt_get install fuse gcsfuse
}

setup() {
  local bucket=$1 mount=$2
  command -v gcsfuse >/dev/null || install_gcsfuse
  # Once mounted it belongs to who mounted it.
  if ! mountpoint -q "$mount"; then
    sudo install -d -o "$(id -un)" "$mount" || fail "$mount could not be made"
  fi
  # Checkpoints get their names by renaming a directory, all hosts must see what
  # one has written, and what was synchronised must be in the bucket: none of
  # the three is gcsfuse's default.
  mountpoint -q "$mount" || gcsfuse --implicit-dirs --rename-dir-limit=1000000 \
    --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 \
    --enable-streaming-writes=false "$bucket" "$mount" \
    >>"$HOME/podrl-setup.log" 2>&1 || fail \
    "gs://$bucket could not be mounted; may this machine's service account write there?"

  local digest
  digest=$(sha256sum <"$archive") || fail "$archive is missing"
  [[ $(cat "$environment/digest" 2>/dev/null) == "$digest" ]] && return 0
  rm -rf "$project"
  mkdir "$project"
  tar -xzf "$archive" -C "$project" || fail "$archive could not be unpacked"
  # The images bring Python 3.10 to 3.12, and JAX wants a recent one.
  if [[ ! -x $environment/bin/python ]]; then
    apt_get update
    apt_get install python3-venv
    if ! { python3 -m venv "$HOME/podrl-uv" \
        && "$HOME/podrl-uv/bin/pip" install -q uv \
        && "$HOME/podrl-uv/bin/uv" venv -q --python 3.12 "$environment"; }; then
      fail 'no Python environment could be made'
    fi
  fi
  "$HOME/podrl-uv/bin/uv" pip install -q --python "$environment/bin/python" \
    -e "${project}[tpu]" || fail 'the project could not be installed'
  echo "$digest" >"$environment/digest"
}

# Which process is to be sent signals; none where the run has ended.
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
  fail "the run was killed, since it had not ended $((attempt / 5)) s after SIGTERM"
}

start() {
  stop
  rm -f "$run".*
  : >"$run.log"
  # In a session of its own, which outlives the connection.
  setsid nohup bash "$0" run "$@" </dev/null >>"$run.log" 2>&1 &
  until [[ -s $run.pid ]]; do sleep 0.1; done
}

run() {
  trap : TERM # For the command, which is sent it too; the code is still to come.
  echo $$ >"$run.pid"
  cd "$project" || exit 1
  PATH=$environment/bin:$PATH PYTHONUNBUFFERED=1 "$@"
  echo $? >"$run.code.new"
  mv "$run.code.new" "$run.code"
}

follow() {
  [[ -f $run.pid ]] || fail 'there is no run'
  tail -n "+$1" --pid="$(<"$run.pid")" -s 0.5 -f "$run.log"
  # What was killed with its shell, as by a restart of the machine, has left no
  # code, and is to go on from its last checkpoint.
  echo "exit $(cat "$run.code" 2>/dev/null || echo 75)"
}

first() {
  local url=http://metadata.google.internal/computeMetadata/v1/instance endpoints
  endpoints=$(curl -fsS -H 'Metadata-Flavor: Google' \
    "$url/attributes/worker-network-endpoints" 2>/dev/null)
  endpoints=${endpoints%%,*}
  echo "${endpoints%%:*}"
}

case ${1-} in
  setup | start | run | stop | follow | first) "$@" ;;
  *) fail "'${1-}' is none of setup, start, stop, follow and first" ;;
esac
