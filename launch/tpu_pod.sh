#!/usr/bin/env bash
# Runs a command on a TPU slice of Google Cloud; --help explains how.
set -u

usage() {
  cat <<'TEXT'
launch/tpu_pod.sh --accelerator=TYPE --project=PROJECT --bucket=gs://BUCKET[/PREFIX]
    [OPTIONS] -- python experiments/NAME.py [FLAGS]

This script creates a TPU slice as a queued resource, copies your working tree to
all of its hosts (without the files that git ignores), runs the command there and
shows the output of the first host. At the end, and after Ctrl-C, it deletes the
slice. The run's files are in the bucket. So if the slice is preempted, the script
creates another one, and the run resumes there. Brackets show the defaults:

  --accelerator=TYPE   v4-8, v5e-256, v5p-32, v6e-8 ...
  --project=PROJECT    project of Google Cloud
  --bucket=gs://BUCKET bucket of Google Cloud; the slice's service account must be
                       allowed to write to it (best with a hierarchical namespace,
                       which renames a directory in a single step)
  --name=NAME          name of the slice and the run; the same name resumes the run
                       [podrl-DATE-TIME]
  --zone=ZONE          [a zone that has the accelerator]
  --spot               cheaper, but Google may preempt the slice
  --keep               do not delete the slice; the next run with this name uses it
  --no-check           do not compile the run for the slice before creating it
  --dry-run            print all commands and run none

You need gcloud, and you must be logged in. The script exits with the exit code of
the run: 0 for success, 1 for a failure, 2 for a user's mistake, 130 after Ctrl-C.
TEXT
}

mistake() {
  echo "tpu_pod.sh: $1" >&2
  exit 2
}

say() {
  if [[ $dry_run ]]; then echo "# $*"; else echo "tpu_pod.sh: $*" >&2; fi
}

# Prints a command with the quotes that a shell needs.
quote() {
  local line
  printf -v line ' %q' "$@"
  echo "${line:1}"
}

# Runs a command in the background, so that bash reacts to signals at once.
background() {
  "$@" </dev/null &
  child=$!
  wait "$child"
  local code=$?
  child=''
  return $code
}

# Shows a command, and runs it unless this is a dry run.
run() {
  if [[ $dry_run ]]; then
    quote "$@"
  else
    echo "+ $(quote "$@")" >&2
    background "$@"
  fi
}

tpu() { run "${resource[@]}" "$@" "${where[@]}"; }

everywhere=(--worker=all --batch-size=all)
on_all() { tpu ssh "$name" "--command=bash tpu_worker.sh $1" "${everywhere[@]}"; }
on_first() { tpu ssh "$name" "--command=bash tpu_worker.sh $1" --worker=0; }

create_slice() {
  tpu create "$name" "--node-id=$name" "--runtime-version=$runtime" \
    "--accelerator-type=${accelerator/v5e-/v5litepod-}" ${spot:+--spot} \
    --scopes=https://www.googleapis.com/auth/cloud-platform
}

delete_slice() { tpu delete "$name" --force; }

# Compiles the run on this machine: a run that the compiler refuses or that needs too
# much memory must not create anything.
check_run() {
  until [[ ${1-sweep} =~ (\.py|^train|^sweep)$ ]]; do shift; done
  [[ ${1-} == train ]] && shift
  if [[ ${1-sweep} == sweep ]] || ! python -c 'import libtpu, podrl' 2>/dev/null; then
    say 'the run is not compiled first: it is a sweep or names no experiment, or libtpu' \
      'or podrl is not installed here'
    return
  fi
  run python -m podrl compile "$@" "--target=$accelerator" || mistake \
    "the run does not compile for $accelerator; --no-check creates the slice anyway"
}

# Sets `state` to absent, waiting, up or gone, or to unknown if Google does not answer.
slice_state() {
  local answer
  state=waiting
  if ! answer=$("${query[@]}" 2>&1 </dev/null); then
    state=unknown
    [[ $answer == *NOT_FOUND* || $answer == *'was not found'* ]] && state=absent
  fi
  case $answer in
    ACTIVE) state=up ;;
    FAILED | SUSPEND* | DELETING) state=gone ;;
  esac
  [[ $answer == "$last_answer" ]] || say "$name: $answer"
  last_answer=$answer
}

is_lost() {
  slice_state
  [[ $state == gone || $state == absent ]]
}

give_up() {
  say "$1; try another --zone, or try again later; --name=$name resumes the run"
  exit 1
}

# Creates the slice, or uses the slice that an earlier run left with --keep.
make_slice() {
  exists=yes
  if is_lost; then
    [[ $state == absent ]] || delete_slice
    create_slice || give_up "$name could not be created"
  fi
  until slice_state; [[ $state == up ]]; do
    [[ $state == waiting || $state == unknown ]] || give_up "Google gives no slice"
    background sleep 20
  done
}

# Installs the project and starts the run. It tries several times, because a new
# machine does not answer at once.
begin_run() {
  local attempt
  for attempt in 1 2 3 4 5; do
    started=yes
    tpu scp "$archive" launch/tpu_worker.sh "$name:" "${everywhere[@]}" \
      && on_all "$setup" && on_all "$start" && return
    is_lost && return 75
    say "attempt $attempt of 5 to set up the hosts failed"
    background sleep 20
  done
  return 1
}

# shellcheck disable=SC2329 # `background` calls it.
follow_once() { on_first "follow $1" 2>"$scratch/error" | tee -a "$scratch/seen"; }

# Shows the output of the first host until the run ends; returns its exit code, or 75 if
# the slice is gone.
follow_run() {
  local code='' lines silent=0
  while [[ -z $code ]] && ((silent < 30)); do
    lines=$(wc -l <"$scratch/seen")
    background follow_once $((lines + 1))
    if [[ $(tail -n 1 "$scratch/seen") =~ ^exit\ ([0-9]+)$ ]]; then
      code=${BASH_REMATCH[1]}
    else # Only the connection is lost, and the run continues, or the slice is gone.
      is_lost && return 75
      silent=$((silent + 1))
      (($(wc -l <"$scratch/seen") > lines)) && silent=0
      background sleep 20
    fi
  done
  if ((${code:-1} == 1)); then
    [[ $code ]] || say "the first host is silent: $(tail -n 1 "$scratch/error")"
    background sleep 60 # The run may fail before Google reports a preemption.
    is_lost && return 75
  fi
  return "${code:-75}"
}

# shellcheck disable=SC2329 # Traps call this function and the next one.
interrupted() {
  trap '' INT TERM HUP
  [[ $child ]] && kill -TERM -- "-$child" 2>/dev/null
  say "interrupted${started:+; the run may take 90 s to save a checkpoint}"
  [[ $started ]] && on_all stop
  exit "$1"
}

# shellcheck disable=SC2329
leave() {
  trap '' INT TERM HUP
  if [[ $exists ]] && slice_state && [[ $state != absent ]]; then
    if [[ $keep ]] || ! delete_slice; then
      say "$name still exists, and costs money until you delete it with:"
      (dry_run=yes; delete_slice) >&2
    fi
  fi
  rm -rf "$scratch"
}

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
accelerator='' name='' zone='' project='' bucket='' spot='' keep='' no_check='' dry_run=''
while (($#)); do
  word=${1%%=*} word=${word#--}
  case $1 in
    --help | -h) usage; exit 0 ;;
    --accelerator=* | --name=* | --zone=* | --project=* | --bucket=*)
      printf -v "$word" %s "${1#*=}" ;;
    --spot | --keep | --no-check | --dry-run) printf -v "${word//-/_}" yes ;;
    --) break ;;
    *) mistake "'$1' is unknown; --help lists the options; put the command after --" ;;
  esac
  shift
done
(($# > 1)) || mistake '-- and a command are missing'
shift
if [[ $dry_run ]]; then
  project=${project:-PROJECT} bucket=${bucket:-gs://BUCKET}
fi
[[ $project ]] || mistake '--project is missing; give your project of Google Cloud'
[[ $bucket =~ ^gs://([^/]+)/?(.*)$ ]] || mistake "--bucket=$bucket is not gs://NAME"
bucket=${BASH_REMATCH[1]} prefix=${BASH_REMATCH[2]%/}
name=${name:-podrl-$(date +%Y%m%d-%H%M%S)}
[[ $name =~ ^[a-z]([-a-z0-9]{0,48}[a-z0-9])?$ ]] || mistake \
  "--name=$name: use at most 50 small letters, digits and -, and begin with a letter"
[[ $accelerator =~ ^(v4|v5e|v5litepod|v5p|v6e)-([1-9][0-9]{0,4})$ ]] || mistake \
  "--accelerator='$accelerator' is unknown; try v4-8 or v5e-256; tpu7x needs Kubernetes"
size=${BASH_REMATCH[2]} # In cores for v4 and v5p, in chips for v5e and v6e.
case ${BASH_REMATCH[1]} in
  v4) runtime=tpu-ubuntu2204-base zone=${zone:-us-central2-b} ;;
  v5p) runtime=v2-alpha-tpuv5 zone=${zone:-us-east5-a} ;;
  v5*) runtime=v2-alpha-tpuv5-lite zone=${zone:-us-west4-a} ;;
  v6e) runtime=v2-alpha-tpuv6e zone=${zone:-us-east5-b} ;;
esac
where=("--project=$project" "--zone=$zone" --quiet)
resource=(gcloud compute tpus queued-resources)
query=("${resource[@]}" describe "$name" '--format=value(state.state)' "${where[@]}")
command -v gcloud >/dev/null || [[ $dry_run ]] \
  || mistake 'gcloud is missing; install the Google Cloud CLI'

path=/mnt/podrl/${prefix:+$prefix/}$name # Each host mounts the bucket at /mnt/podrl.
words=("$@" "--workdir=$path" --resume)
((size > 8)) && words+=(--coordinator=auto) # A slice of at most 8 is one host.
for word in "$@"; do
  [[ $word =~ ^--(workdir|coordinator|num_processes|process_id)(=|$) ]] \
    && mistake "this script sets --${BASH_REMATCH[1]}; leave it out"
done
setup="setup $(quote "$bucket" /mnt/podrl)"
start="start $(quote "${words[@]}")"

if [[ $dry_run ]]; then
  archive=${TMPDIR:-/tmp}/podrl.tar.gz
  [[ $no_check ]] || check_run "$@"
  echo "git ls-files -co --exclude-standard | tar -czf $(quote "$archive") -T -"
  create_slice
  say 'the script repeats this query until the slice is up:'
  quote "${query[@]}"
  begin_run
  on_first 'follow 1'
  say 'after a preemption, the script deletes the slice and begins again; at the end:'
  [[ $keep ]] || delete_slice
  exit 0
fi

# Each child gets its own process group. So Ctrl-C reaches only this script, and a
# signal to the group of gcloud also ends the ssh that gcloud started.
set -m
scratch=$(mktemp -d) || exit 1
archive=$scratch/podrl.tar.gz
child='' exists='' started='' last_answer='' failures=0
trap leave EXIT
trap 'interrupted 130' INT
trap 'interrupted 143' TERM HUP
[[ $no_check ]] || check_run "$@"
git ls-files -co --exclude-standard | tar -czf "$archive" -T - || exit 1
while :; do
  : >"$scratch/seen"
  make_slice
  begin_run && follow_run
  code=$?
  ((code == 75)) || break
  # A run that printed no line was probably not preempted.
  failures=$((failures + 1))
  (($(wc -l <"$scratch/seen") > 1)) && failures=0
  ((failures < 3)) || give_up '3 slices in a row printed no line of output'
  say 'the slice is lost; the run resumes on another one'
  is_lost || delete_slice
  started=''
done
say "the run ended with exit code $code; to fetch its files:" \
  "gcloud storage rsync --recursive gs://$bucket/${path#/mnt/podrl/} runs/$name"
exit "$code"
