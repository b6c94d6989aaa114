#!/usr/bin/env bash
# Runs a command on a TPU slice of Google Cloud; --help explains how.
set -u

usage() {
  cat <<'TEXT'
launch/tpu_pod.sh --accelerator=TYPE --project=PROJECT --bucket=gs://BUCKET[/PREFIX]
    [OPTIONS] -- python experiments/NAME.py [FLAGS]

This script creates a TPU slice, installs the last commit on all of its hosts, runs
the command there and shows the output of the first host. There must be no
uncommitted changes. At the end, and after Ctrl-C, it fetches the run's files except
the checkpoints to runs/NAME and deletes the slice. All files are in the bucket. So
if the slice is preempted, the script creates another slice, and the run resumes
there. In this list, brackets show the defaults:

  --accelerator=TYPE   v4-8, v5e-256, v5p-32, v6e-8, tpu7x-8 ...
  --project=PROJECT    project of Google Cloud
  --bucket=gs://BUCKET bucket of Google Cloud; the slice's service account must be
                       allowed to write to it (best with a hierarchical namespace,
                       which renames a directory in a single step)
  --name=NAME          name of the slice and the run; the same name resumes the run
                       [podrl-DATE-TIME]
  --zone=ZONE          [a zone that has the accelerator]
  --topology=AxBxC     shape of a tpu7x slice, in chips [as near a cube as possible]
  --spot               cheaper, but Google may preempt the slice
  --keep               do not delete the slice; the next run with this name uses it
  --fetch-checkpoints  fetch the checkpoints too
  --no-check           do not compile the run for the slice before creating it
  --create-attempts=5  give up if no slice works after this many attempts in a row
  --backoff-seconds=30 pause after the first failure; it doubles each time
  --poll-seconds=20    pause between two checks of the slice's state
  --dry-run            print all commands and run none

You need gcloud, and you must be logged in. The script exits with the exit code of
the run: 0 for success, 1 for a failure, 2 for a user's mistake, 130 after Ctrl-C.
TEXT
}

mistake() {
  echo "tpu_pod.sh: $1" >&2
  exit 2
}

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) \
  || mistake 'this script needs bash 4.4 or newer; on a Mac, brew install bash'

say() {
  if [[ $dry_run ]]; then echo "# $*"; else echo "tpu_pod.sh: $*" >&2; fi
}

# Sets family, size, hosts, runtime, zone and topology.
parse_accelerator() {
  local default_zone units=8 shapes index=0
  [[ $accelerator =~ ^(v4|v5e|v5litepod|v5p|v6e|tpu7x)-([1-9][0-9]{0,4})$ ]] \
    || mistake "--accelerator='$accelerator' is unknown; try v4-8, v5e-256, v6e-8 or tpu7x-8"
  family=${BASH_REMATCH[1]} size=${BASH_REMATCH[2]} runtime=''
  # The size of v4, v5p and tpu7x counts cores; a host has eight cores. The size of v5e
  # and v6e counts chips; a host has four chips, or up to eight if it is the only one.
  case $family in
    v4) runtime=tpu-ubuntu2204-base default_zone=us-central2-b ;;
    v5p) runtime=v2-alpha-tpuv5 default_zone=us-east5-a ;;
    v5e | v5litepod)
      family=v5litepod runtime=v2-alpha-tpuv5-lite default_zone=us-west4-a units=4 ;;
    v6e) runtime=v2-alpha-tpuv6e default_zone=us-east5-b units=4 ;;
    tpu7x) default_zone=us-central1-c ;;
  esac
  hosts=$((size > 8 ? size / units : 1))
  zone=${zone:-$default_zone}
  is_group || return 0
  # Default topologies for 8, 16, 32 ... 2,048 cores, with two cores on each chip.
  shapes=(2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16)
  while ((8 << index < size)); do index=$((index + 1)); done
  ((8 << index == size)) && topology=${topology:-${shapes[index]-}}
  [[ $topology ]] \
    || mistake "--accelerator=$accelerator has no default topology; add --topology=AxBxC"
  if ! [[ $topology =~ ^[1-9][0-9]*x[1-9][0-9]*x[1-9][0-9]*$ ]] \
      || ((2 * ${topology//x/*} != size)); then
    mistake "--topology=$topology does not have the $((size / 2)) chips of $accelerator"
  fi
}

# Prints a command with the quotes that a shell needs.
quote() {
  local word line=
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]] || word=${word@Q}
    line+=" $word"
  done
  echo "${line# }"
}

# Runs a command in the background, so that bash reacts to signals at once. A trap
# for signals ends the processes in `children`.
background() {
  "$@" </dev/null &
  children=($!)
  wait "$!"
  local code=$?
  children=()
  return $code
}

nap() { background sleep "$1"; }

# Shows a command, and runs it unless this is a dry run.
run() {
  if [[ $dry_run ]]; then
    quote "$@"
  else
    echo "+ $(quote "$@")" >&2
    background "$@"
  fi
}

# Runs a command that deletes a resource. It is no error if the resource does not
# exist. (In a trap, a bare return would return the status from before the trap.)
run_delete() {
  [[ $dry_run ]] && { quote "$@"; return 0; }
  run "$@" 2>"$scratch/delete" && return 0
  grep -qE 'NOT_FOUND|was not found' "$scratch/delete" && return 0
  cat "$scratch/delete" >&2
  return 1
}

# Runs a query, and sets `answer` to its output, or to the error if it fails.
ask() {
  answer=$("$@" 2>"$scratch/error" </dev/null) && return
  answer=$(<"$scratch/error")
  return 1
}

# Up to v6e, a slice is a queued resource of the Cloud TPU API. That API does not
# have tpu7x: a tpu7x slice is a managed instance group of Compute Engine, with a
# workload policy if it has several hosts.
is_group() { [[ $family == tpu7x ]]; }

# Runs a gcloud command for queued resources; $1 is, for example, create.
tpu() { run gcloud compute tpus queued-resources "$@" "${where[@]}"; }

# Compiles the run for the slice, on this machine: a run that the compiler refuses or
# that needs too much memory must not create anything.
check_run() {
  local python words=() word before=''
  python=$(command -v python || command -v python3)
  if ! "$python" -c 'import libtpu, podrl' 2>/dev/null; then
    say "libtpu or podrl is not installed here, so the run is not compiled first"
    return
  fi
  for word in "$@"; do
    if [[ ${before##*/} == podrl && $word == sweep ]]; then
      say 'podrl compile does not know sweeps, so the run is not compiled first'
      return
    fi
    [[ ${words[0]-} || $word == *.py || $before == train ]] && words+=("$word")
    before=$word
  done
  if [[ ! ${words[0]-} ]]; then
    say 'the command names no experiment and no environment, so the run is not compiled first'
    return
  fi
  run "$python" -m podrl compile "${words[@]}" "--target=$accelerator" \
    || mistake "the run does not compile for $accelerator; --no-check creates the slice anyway"
}

create_slice() {
  local policy=() spot_flags=() region=${zone%-*}
  if ! is_group; then
    tpu create "$name" "--node-id=$name" "--accelerator-type=$family-$size" \
      "--runtime-version=$runtime" "$scopes" ${spot:+--spot}
    return
  fi
  # Google stops a preempted machine, and this script deletes it.
  [[ $spot ]] && spot_flags=(
    --provisioning-model=SPOT --instance-termination-action=STOP)
  run gcloud compute instance-templates create "$name" \
    --machine-type=tpu7x-standard-4t --maintenance-policy=TERMINATE \
    --image-family=ubuntu-accel-2404-amd64-tpu-tpu7x \
    --image-project=ubuntu-os-accelerator-images \
    --boot-disk-size=100GB --boot-disk-type=hyperdisk-balanced "$scopes" \
    ${spot_flags[@]+"${spot_flags[@]}"} "--project=$project" --quiet || return
  if ((hosts > 1)); then
    run gcloud compute resource-policies create workload-policy "$name" \
      --type=HIGH_THROUGHPUT "--accelerator-topology=$topology" \
      "--region=$region" "--project=$project" --quiet || return
    # The group gets all hosts or none, because a part of a slice is useless.
    policy=(--target-size-policy-mode=bulk
      "--workload-policy=projects/$project/regions/$region/resourcePolicies/$name")
  fi
  # Compute Engine must not replace a lost host: this script replaces the slice.
  run gcloud compute instance-groups managed create "$name" "--template=$name" \
    "--size=$hosts" --default-action-on-vm-failure=do-nothing \
    ${policy[@]+"${policy[@]}"} "${where[@]}"
}

delete_slice() {
  local code=0
  if ! is_group; then
    run_delete gcloud compute tpus queued-resources delete "$name" --force "${where[@]}"
    return $?
  fi
  run_delete gcloud compute instance-groups managed delete "$name" "${where[@]}" \
    || code=1
  run_delete gcloud compute instance-templates delete "$name" \
    "--project=$project" --quiet || code=1
  ((hosts == 1)) || run_delete gcloud compute resource-policies delete "$name" \
    "--region=${zone%-*}" "--project=$project" --quiet || code=1
  return $code
}

# Sets `detail` to the state that Google reports. Sets `state` to absent, waiting, up
# or gone, or to unknown if Google does not answer.
slice_state() {
  local answer
  state=waiting
  if ! ask "${query[@]}"; then
    state=unknown detail=$answer
    [[ $answer == *NOT_FOUND* || $answer == *'was not found'* ]] && state=absent
    return
  fi
  detail=$(sort -u <<<"$answer" | paste -sd ' ' -)
  case " $detail " in
    *' FAILED '* | *' SUSPEND'* | *' TERMINATED '* | *' STOP'* | *' DELETING '* | \
      *' PREEMPTED '* | *' REPAIRING '*)
      state=gone ;;
    ' RUNNING ') (($(wc -l <<<"$answer") == hosts)) && state=up ;;
    ' ACTIVE ')
      # A queued resource stays active for a while after its node is gone.
      ask gcloud compute tpus tpu-vm describe "$name" '--format=value(state)' \
        "${where[@]}"
      detail+=" $answer"
      case $answer in
        READY) state=up ;;
        PREEMPTED | TERMINATED | STOPPED | STOPPING | DELETING) state=gone ;;
      esac ;;
  esac
}

# Sets `first` to the machine of process 0, whose output the script shows. If this
# machine cannot be found, `first` is any machine.
find_first() {
  local answer zero
  is_group || return 0
  ask "${listing[@]}" || return
  first=$(sort <<<"$answer" | head -n 1)
  ((hosts > 1)) || return 0
  zero=$(gcloud compute ssh "$first" '--command=bash tpu_worker.sh first' \
    "${where[@]}" </dev/null)
  [[ $zero ]] && grep -qxF -- "$zero" <<<"$answer" && first=$zero
  return 0
}

# Runs gcloud's ssh or scp for all hosts at once; $host stands for a host's name.
everywhere() {
  local line
  if ! is_group; then
    tpu "${@/#$host/$name}" --worker=all --batch-size=all
    return
  fi
  line=$(quote "${listing[@]}")
  line+=" | $(quote xargs -P 0 -I "$host" gcloud compute "$@" "${where[@]}")"
  if [[ $dry_run ]]; then
    echo "$line"
  else
    echo "+ $line" >&2
    background bash -o pipefail -c "$line"
  fi
}

copy_to_all() { everywhere scp "$archive" launch/tpu_worker.sh "$host:"; }

# Runs a line of shell code on all hosts.
on_all() { everywhere ssh "$host" "--command=$1"; }

# Runs a line of shell code on the first host.
on_first() {
  if ! is_group; then
    tpu ssh "$name" "--command=$1" --worker=0
  elif [[ $dry_run ]]; then
    echo "gcloud compute ssh \"\$($(quote "${listing[@]}" --limit=1))\"" \
      "$(quote "--command=$1" "${where[@]}")"
  else
    run gcloud compute ssh "$first" "--command=$1" "${where[@]}"
  fi
}

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
  say "no slice works: failure $failures of at most $create_attempts in a row"
  ((failures < create_attempts)) && return
  say 'gave up; try another --zone, or try again later'
  exit 1
}

# Creates the slice, or uses the slice that an earlier run left with --keep.
make_slice() {
  local pause=$backoff_seconds status
  while :; do
    slice_state
    exists=yes
    : >"$scratch/create"
    [[ $state == gone ]] && delete_slice
    [[ $state == up || $state == waiting ]] || create_slice 2>"$scratch/create"
    status=$?
    cat "$scratch/create" >&2
    ((status == 0)) && wait_until_up && return 0
    if grep -qE 'PERMISSION_DENIED|INVALID_ARGUMENT|unrecognized arguments|Invalid choice' \
        "$scratch/create"; then
      say 'the cloud refuses to create this slice; the message above says why'
      exit 2
    fi
    delete_slice
    count_failure
    say "trying again in $pause s"
    nap "$pause"
    pause=$((pause < 300 ? 2 * pause : 600))
  done
}

# Installs the project and starts the run. It tries several times, because a new
# machine does not answer at once.
begin_run() {
  local attempt
  for attempt in 1 2 3 4 5; do
    started=yes
    copy_to_all && find_first && on_all "$setup_line" \
      && on_all "$start_line" && return 0
    slice_state
    case $state in gone | absent) return 75 ;; esac
    say "attempt $attempt of 5 to set up the hosts failed"
    nap "$poll_seconds"
  done
  return 1
}

# Shows the first host's output from line $1 on.
# shellcheck disable=SC2329 # `background` calls it.
follow_once() {
  on_first "bash tpu_worker.sh follow $1" 2>>"$scratch/ssh" \
    | tee -a "$scratch/seen" "runs/$name/worker_0.log"
}

# Sets `code` to the run's exit code, or to 75 if the slice is gone.
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
    # Only the connection is lost: the run continues.
    silent=$((silent + 1))
    (($(wc -l <"$scratch/seen") > lines)) && silent=0
    nap "$poll_seconds"
  done
  if [[ -z $code ]]; then
    say "the first host of $name ($detail) does not answer: $(tail -n 1 "$scratch/ssh")"
    code=75
  fi
  # If Google preempts a host, the run may fail before the state of the slice changes.
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

# shellcheck disable=SC2329 # Traps call this function and the next one.
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
  local problem=''
  if [[ $exists && $keep ]]; then
    problem='is kept'
  elif [[ $exists ]]; then
    say "deleting $name"
    delete_slice || problem='could not be deleted'
  fi
  if [[ $problem ]]; then
    say "$name $problem, and costs money until you delete it with:"
    (dry_run=yes; delete_slice) >&2
  fi
  rm -rf "$scratch"
}

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
mount=/mnt/podrl # Each host mounts the bucket here.
scopes=--scopes=https://www.googleapis.com/auth/cloud-platform
accelerator='' name='' zone='' project='' bucket='' topology='' spot='' keep=''
no_check='' dry_run='' exclude_checkpoints=yes
create_attempts=5 backoff_seconds=30 poll_seconds=20
while (($#)); do
  word=${1%%=*} word=${word#--}
  case $1 in
    --help | -h) usage; exit 0 ;;
    --accelerator=* | --name=* | --zone=* | --project=* | --bucket=* | --topology=*)
      printf -v "$word" %s "${1#*=}" ;;
    --create-attempts=* | --backoff-seconds=* | --poll-seconds=*)
      [[ ${1#*=} =~ ^[0-9]{1,5}$ ]] || mistake "$1 is not a number"
      printf -v "${word//-/_}" %s "${1#*=}" ;;
    --spot | --keep | --no-check | --dry-run) printf -v "${word//-/_}" yes ;;
    --fetch-checkpoints) exclude_checkpoints='' ;;
    --) break ;;
    *) mistake "'$1' is unknown; --help lists the options; put the command after --" ;;
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
[[ $project ]] || mistake '--project is missing; give your project of Google Cloud'
[[ $bucket ]] || mistake '--bucket is missing; give the bucket for the checkpoints'
[[ $bucket =~ ^gs://([^/]+)/?(.*)$ ]] || mistake "--bucket=$bucket is not gs://NAME"
bucket_name=${BASH_REMATCH[1]} prefix=${BASH_REMATCH[2]%/}
name=${name:-podrl-$(date +%Y%m%d-%H%M%S)}
[[ $name =~ ^[a-z]([-a-z0-9]{0,48}[a-z0-9])?$ ]] || mistake \
  "--name=$name: use at most 50 small letters, digits and -, and begin with a letter"
path=${prefix:+$prefix/}$name
parse_accelerator
where=("--project=$project" "--zone=$zone" --quiet)
listing=(gcloud compute instance-groups managed list-instances "$name"
  '--format=value(name)' "${where[@]}")
query=(gcloud compute tpus queued-resources describe "$name"
  '--format=value(state.state)' "${where[@]}")
is_group && query=("${listing[@]/#--format=*/--format=value(instanceStatus)}")
command -v gcloud >/dev/null || [[ $dry_run ]] \
  || mistake 'gcloud is missing; install the Google Cloud CLI'

before=''
for word in "$@"; do
  case $word in
    --workdir* | --coordinator* | --num_processes* | --process_id*)
      mistake "this script sets ${word%%=*}; leave it out" ;;
    -*) ;;
    *.py)
      # Another word may end in .py without being a file that the hosts need.
      [[ -e $word || ${before##*/} =~ ^python[0-9.]*$ ]] \
        && ! git cat-file -e "HEAD:$word" 2>/dev/null \
        && mistake "$word is not in the last commit, so the hosts do not get it; commit it" ;;
  esac
  before=$word
done
if [[ $(git status --porcelain --untracked-files=no) ]]; then
  [[ $dry_run ]] || mistake \
    'there are uncommitted changes, which the hosts would not get; commit or stash them'
  say 'there are uncommitted changes, which the hosts will not get'
fi

words=("$@") host=@host
# xargs would replace it in the words of the command too.
while [[ "${words[*]}" == *"$host"* ]]; do host+=_; done
((hosts > 1)) && words+=(--coordinator=auto)
words+=("--workdir=$mount/$path" --resume)
setup_line="bash tpu_worker.sh setup $(quote "$bucket_name" "$mount")"
start_line="bash tpu_worker.sh start $(quote "${words[@]}")"

if [[ $dry_run ]]; then
  archive=${TMPDIR:-/tmp}/podrl.tar.gz
  say "$accelerator in $zone, $hosts host(s), commit $(git rev-parse --short HEAD)"
  [[ $no_check ]] || check_run "$@"
  run git archive --format=tar.gz "--output=$archive" HEAD
  create_slice
  say 'the script repeats this query until the slice is up:'
  quote "${query[@]}"
  say 'then it runs these commands on the hosts:'
  copy_to_all
  on_all "$setup_line"
  on_all "$start_line"
  on_first 'bash tpu_worker.sh follow 1'
  say 'after a preemption, the script deletes the slice, creates a new one and starts again;'
  say 'at the end, the script runs:'
  fetch
  [[ $keep ]] && say 'the slice is kept; to delete it:'
  delete_slice
  exit 0
fi

# Each child gets its own process group. So Ctrl-C reaches only this script, and a
# signal to the group of gcloud also ends the ssh that gcloud started.
set -m
scratch=$(mktemp -d) || exit 1
archive=$scratch/podrl.tar.gz
children=() exists='' started='' failures=0 code=1
trap leave EXIT
trap 'interrupted 130' INT
trap 'interrupted 143' TERM HUP
[[ $no_check ]] || check_run "$@"
git archive --format=tar.gz "--output=$archive" HEAD || exit 1
while :; do
  : >"$scratch/seen"
  make_slice
  begin_run
  code=$?
  ((code == 0)) && follow_run
  ((code == 75)) || break
  say 'the slice is lost; the run resumes on another one'
  delete_slice
  started=''
  # A run that fails before it prints a line was probably not preempted.
  if (($(wc -l <"$scratch/seen") > 1)); then failures=0; else count_failure; fi
done
fetch
say "the run ended with exit code $code; see runs/$name and gs://$bucket_name/$path"
exit "$code"
