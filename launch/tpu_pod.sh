#!/usr/bin/env bash
# A run on a TPU slice of Google Cloud; --help says how.
set -u

usage() {
  cat <<'TEXT'
launch/tpu_pod.sh --accelerator=TYPE --project=PROJECT --bucket=gs://BUCKET[/PREFIX]
    [OPTIONS] -- python experiments/NAME.py [FLAGS]

Creates a TPU slice, installs the project's HEAD on all of its hosts, runs the
command there, shows the first host's output, and at the end (Ctrl-C included)
fetches the run's files to runs/NAME and deletes the slice. The run is kept in the
bucket; where the slice is preempted, another is created and the run goes on.

  --accelerator=TYPE   v4-8, v5e-256, v5p-32, v6e-8, tpu7x-8 ...
  --project, --bucket  of Google Cloud; the slice's service account must be allowed
                       to write to the bucket (one with a hierarchical namespace
                       renames directories in one step)
  --name=NAME          of the slice and the run: the same name goes on with the run
                       [podrl-DATE-TIME]
  --zone=ZONE          [one that has the accelerator]
  --topology=AxBxC     of tpu7x, in chips [as near to a cube as it gets]
  --spot               cheaper, and preempted at times
  --keep               leave the slice where it is; the next run with this name uses it
  --fetch-checkpoints  fetch the checkpoints too
  --create-attempts=5  failures to create a slice, in a row, before giving up
  --backoff-seconds=30 after the first of them; it doubles
  --poll-seconds=20    how often the slice's state is asked for
  --dry-run            print all commands, and run none

Needs gcloud, logged in. Exit codes are the run's: 0 done, 1 failed, 2 a mistake,
130 Ctrl-C.
TEXT
}

mistake() {
  echo "tpu_pod.sh: $1" >&2
  exit 2
}

say() {
  if [[ $dry_run ]]; then echo "# $*"; else echo "tpu_pod.sh: $*" >&2; fi
}

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# shellcheck source=launch/tpu_cloud.sh
. launch/tpu_cloud.sh

# So that a signal is answered meanwhile.
nap() { background sleep "$1"; }

wait_until_up() {
  local last=none
  while :; do
    slice_state
    [[ $detail == "$last" ]] || say "$name: ${detail:-no hosts yet}"
    last=$detail
    case $state in
      up) return 0 ;;
      gone | absent) return 1 ;;
    esac
    nap "$poll_seconds"
  done
}

count_failure() {
  failures=$((failures + 1))
  say "failure $failures of $create_attempts in a row to get a slice to work"
  ((failures < create_attempts)) && return
  say 'gave up; try another --zone, or later'
  exit 1
}

# One that is there already, from --keep, is used.
make_slice() {
  local pause=$backoff_seconds status
  slice_state
  while :; do
    exists=yes
    : >"$scratch/create"
    [[ $state == gone ]] && delete_slice
    [[ $state == up || $state == waiting ]] || create_slice 2>"$scratch/create"
    status=$?
    cat "$scratch/create" >&2
    ((status == 0)) && wait_until_up && return 0
    if grep -qE 'PERMISSION_DENIED|INVALID_ARGUMENT|unrecognized arguments|Invalid choice' \
        "$scratch/create"; then
      say 'the slice cannot be created like this; the message above says why'
      exit 2
    fi
    delete_slice
    count_failure
    say "again in $pause s"
    nap "$pause"
    pause=$((pause < 300 ? 2 * pause : 600))
    slice_state
  done
}

# Installs and starts; a new machine takes a while until it answers.
begin_run() {
  local attempt
  for attempt in 1 2 3 4 5; do
    started=yes
    list_machines && copy "$archive" launch/tpu_worker.sh && put_zero_first \
      && on_all "$setup_line" && on_all "$start_line" && return 0
    slice_state
    case $state in gone | absent) return 75 ;; esac
    say "attempt $attempt of 5 to set up the hosts failed"
    nap "$poll_seconds"
  done
  return 1
}

# The first host's output, from line $1 on.
# shellcheck disable=SC2329 # Called through `background`.
follow_once() {
  on_first "bash tpu_worker.sh follow $1" 2>>"$scratch/ssh" \
    | tee -a "$scratch/seen" "runs/$name/worker_0.log"
}

# Into `code` the run's exit code; 75 where the slice has gone.
follow_run() {
  local lines silent=0 polls=0
  code=''
  mkdir -p "runs/$name"
  while ((silent < 30)); do
    lines=$(wc -l <"$scratch/seen")
    background follow_once $((lines + 1))
    if [[ $(tail -n 1 "$scratch/seen") =~ ^exit\ ([0-9]+)$ ]]; then
      code=${BASH_REMATCH[1]}
      break
    fi
    slice_state
    case $state in gone | absent) code=75; return ;; esac
    # The connection was lost, not the run.
    silent=$((silent + 1))
    (($(wc -l <"$scratch/seen") > lines)) && silent=0
    nap "$poll_seconds"
  done
  if [[ -z $code ]]; then
    say "$name: $detail, and its first host does not answer: $(tail -n 1 "$scratch/ssh")"
    code=75
  fi
  # A failure may be that of a host that is being taken away.
  while ((code != 0 && code != 2 && code != 75 && code != 130 && polls++ < 3)); do
    slice_state
    case $state in gone | absent) code=75; return ;; esac
    nap "$poll_seconds"
  done
}

fetch() {
  run gcloud storage rsync --recursive \
    ${exclude_checkpoints:+'--exclude=(.*/)?checkpoints/.*'} \
    "gs://$bucket_name/$path" "runs/$name" "--project=$project" \
    || say "the run's files could not be fetched; they are in gs://$bucket_name/$path"
}

# shellcheck disable=SC2329 # Called by traps, as the next one.
interrupted() {
  trap '' INT TERM HUP
  local child
  for child in "${children[@]}"; do kill -TERM -- "-$child" 2>/dev/null; done
  say "interrupted${started:+; the run may take 90 s to save a checkpoint}"
  if [[ $started ]]; then
    on_all 'bash tpu_worker.sh stop'
    fetch
  fi
  exit "$1"
}

# shellcheck disable=SC2329
leave() {
  trap '' INT TERM HUP
  if [[ $exists && $keep ]]; then
    say "$name is kept, and is paid for until you delete it:"
    (dry_run=yes; delete_slice) >&2
  elif [[ $exists ]]; then
    say "deleting $name"
    if ! delete_slice; then
      say "$name could not be deleted, and is paid for until you delete it:"
      (dry_run=yes; delete_slice) >&2
    fi
  fi
  rm -rf "$scratch"
}

mount=/mnt/podrl # Of the bucket, on each host.
accelerator='' name='' zone='' project='' bucket='' topology='' spot='' keep=''
dry_run='' exclude_checkpoints=yes
create_attempts=5 backoff_seconds=30 poll_seconds=20
while (($#)); do
  case $1 in
    --help | -h) usage; exit 0 ;;
    --accelerator=* | --name=* | --zone=* | --project=* | --bucket=* | --topology=*)
      word=${1%%=*}
      printf -v "${word#--}" %s "${1#*=}" ;;
    --create-attempts=* | --backoff-seconds=* | --poll-seconds=*)
      [[ ${1#*=} =~ ^[0-9]{1,5}$ ]] || mistake "$1 is not a number"
      word=${1%%=*} word=${word#--}
      printf -v "${word//-/_}" %s "${1#*=}" ;;
    --spot) spot=yes ;;
    --keep) keep=yes ;;
    --dry-run) dry_run=yes ;;
    --fetch-checkpoints) exclude_checkpoints='' ;;
    --) break ;;
    *) mistake "'$1' is unknown; --help lists the options, a command goes after --" ;;
  esac
  shift
done
(($#)) || mistake '-- and a command are missing'
shift
(($#)) || mistake 'a command is missing after --'
[[ $accelerator ]] || mistake '--accelerator is missing; try --accelerator=v4-8'
if [[ $dry_run ]]; then
  project=${project:-PROJECT} bucket=${bucket:-gs://BUCKET}
fi
[[ $project ]] || mistake '--project is missing: the Google Cloud project that pays'
[[ $bucket ]] || mistake '--bucket is missing: checkpoints outlive the slice there'
[[ $bucket =~ ^gs://([^/]+)/?(.*)$ ]] || mistake "--bucket=$bucket is not gs://NAME"
bucket_name=${BASH_REMATCH[1]} prefix=${BASH_REMATCH[2]%/}
name=${name:-podrl-$(date +%Y%m%d-%H%M%S)}
[[ $name =~ ^[a-z]([-a-z0-9]{0,48}[a-z0-9])?$ ]] || mistake \
  "--name=$name: try small letters, digits and -, at most 50, a letter first"
path=${prefix:+$prefix/}$name
parse_accelerator
command -v gcloud >/dev/null || [[ $dry_run ]] \
  || mistake 'gcloud is missing; install the Google Cloud CLI'

for word in "$@"; do
  case $word in
    --workdir* | --coordinator* | --num_processes* | --process_id*)
      mistake "${word%%=*} is set by this script; leave it out" ;;
    *.py)
      git cat-file -e "HEAD:$word" 2>/dev/null \
        || mistake "$word is not in the last commit, which is what the hosts get" ;;
  esac
done
if [[ $(git status --porcelain --untracked-files=no) ]]; then
  [[ $dry_run ]] || mistake \
    'there are uncommitted changes, which the hosts would not get; commit or stash them'
  say 'there are uncommitted changes, which the hosts will not get'
fi

words=("$@")
# A single host is a run like any other.
((hosts > 1)) && words+=(--coordinator=auto)
words+=("--workdir=$mount/$path" --resume)
setup_line="bash tpu_worker.sh setup $(quote "$bucket_name" "$mount")"
start_line="bash tpu_worker.sh start $(quote "${words[@]}")"

if [[ $dry_run ]]; then
  archive=${TMPDIR:-/tmp}/podrl.tar.gz
  say "$accelerator in $zone, $hosts host(s); this is commit $(git rev-parse --short HEAD)"
  run git archive --format=tar.gz "--output=$archive" HEAD
  create_slice
  say 'until it is up, and each time the connection is lost:'
  set_query
  quote "${query[@]}"
  say 'then on the hosts:'
  copy "$archive" launch/tpu_worker.sh
  on_all "$setup_line"
  on_all "$start_line"
  on_first 'bash tpu_worker.sh follow 1'
  say 'preempted: delete, create and start again, as above and below; at the end:'
  fetch
  if [[ $keep ]]; then say 'kept; to delete it:'; fi
  delete_slice
  exit 0
fi

# Each child in a group of its own: Ctrl-C comes to this script alone, and ending
# gcloud ends its ssh.
set -m
scratch=$(mktemp -d) || exit 1
archive=$scratch/podrl.tar.gz
children=() machines=() exists='' started='' failures=0 code=1
trap leave EXIT
trap 'interrupted 130' INT
trap 'interrupted 143' TERM HUP
git archive --format=tar.gz "--output=$archive" HEAD || exit 1
while :; do
  : >"$scratch/seen"
  make_slice
  begin_run
  code=$?
  ((code == 0)) && follow_run
  ((code == 75)) || break
  say 'preempted; the run goes on on another slice'
  delete_slice
  started=''
  # What never gets to a line of output is not preempted by chance for ever.
  if (($(wc -l <"$scratch/seen") > 1)); then failures=0; else count_failure; fi
done
fetch
say "the run ended with $code; see runs/$name and gs://$bucket_name/$path"
exit "$code"
