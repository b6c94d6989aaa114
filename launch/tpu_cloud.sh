# shellcheck shell=bash disable=SC2034,SC2154 # What tpu_pod.sh sets and reads.
# The two ways to a TPU slice on Google Cloud, for launch/tpu_pod.sh, which sets
# accelerator, name, project, zone, topology, spot, dry_run and scratch:
#
# - up to v6e a queued resource of the Cloud TPU API;
# - from TPU7x on, which that API does not serve, a managed instance group of
#   Compute Engine, with a workload policy where the slice has several hosts.

# Sets family, size, hosts, runtime, zone and topology.
parse_accelerator() {
  local default_zone
  [[ $accelerator =~ ^(v4|v5e|v5litepod|v5p|v6e|tpu7x)-([1-9][0-9]{0,4})$ ]] \
    || mistake "--accelerator='$accelerator' is unknown; try v4-8, v5e-256, v6e-8 or tpu7x-8"
  family=${BASH_REMATCH[1]} size=${BASH_REMATCH[2]} runtime=''
  # v4, v5p and tpu7x count cores, eight a host. v5e and v6e count chips, four a
  # host, or eight where one host is enough.
  hosts=$((size > 8 ? size / 8 : 1))
  case $family in
    v4) runtime=tpu-ubuntu2204-base default_zone=us-central2-b ;;
    v5p) runtime=v2-alpha-tpuv5 default_zone=us-east5-a ;;
    v5e | v5litepod)
      family=v5litepod runtime=v2-alpha-tpuv5-lite default_zone=us-west4-a
      hosts=$((size > 8 ? size / 4 : 1)) ;;
    v6e)
      runtime=v2-alpha-tpuv6e default_zone=us-east5-b
      hosts=$((size > 8 ? size / 4 : 1)) ;;
    tpu7x)
      default_zone=us-central1-c
      [[ $topology ]] || case $size in # Two cores a chip.
        8) topology=2x2x1 ;;
        16) topology=2x2x2 ;;
        32) topology=2x2x4 ;;
        64) topology=2x4x4 ;;
        128) topology=4x4x4 ;;
        256) topology=4x4x8 ;;
        512) topology=4x8x8 ;;
        1024) topology=8x8x8 ;;
        2048) topology=8x8x16 ;;
        *) mistake "--accelerator=$accelerator has no topology of its own; add --topology=AxBxC" ;;
      esac
      if ! [[ $topology =~ ^[1-9][0-9]*x[1-9][0-9]*x[1-9][0-9]*$ ]] \
          || ((2 * ${topology//x/*} != size)); then
        mistake "--topology=$topology has not the $((size / 2)) chips of $accelerator"
      fi ;;
  esac
  zone=${zone:-$default_zone}
}

# As one would type it.
quote() {
  local word line=
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]] || word=${word@Q}
    line+=" $word"
  done
  echo "${line# }"
}

# Waits where a trap is run at once, and notes what the trap has to end.
background() {
  "$@" </dev/null &
  children=($!)
  wait "$!"
  local code=$?
  children=()
  return $code
}

# Shows a command, and runs it unless this is a dry run.
run() {
  if [[ $dry_run ]]; then
    quote "$@"
    return 0
  fi
  echo "+ $(quote "$@")" >&2
  background "$@"
}

# Also where there is nothing to delete. (Called by a trap, where a return without
# a status has that of what came before the trap.)
run_delete() {
  if [[ $dry_run ]]; then
    quote "$@"
    return 0
  fi
  run "$@" 2>"$scratch/delete" && return 0
  grep -qE 'NOT_FOUND|was not found' "$scratch/delete" && return 0
  cat "$scratch/delete" >&2
  return 1
}

is_group() { [[ $family == tpu7x ]]; }

tpu() { # A verb of queued resources, by their name.
  local verb=$1
  shift
  run gcloud compute tpus queued-resources "$verb" "$@" \
    "--project=$project" "--zone=$zone" --quiet
}

create_group() {
  local policy=() spot_flags=()
  # As documented for TPUs; what is stopped this script deletes.
  [[ $spot ]] && spot_flags=(
    --provisioning-model=SPOT --instance-termination-action=STOP)
  run gcloud compute instance-templates create "$name" \
    --machine-type=tpu7x-standard-4t --maintenance-policy=TERMINATE \
    --image-family=ubuntu-accel-2404-amd64-tpu-tpu7x \
    --image-project=ubuntu-os-accelerator-images \
    --boot-disk-size=100GB --boot-disk-type=hyperdisk-balanced \
    --scopes=https://www.googleapis.com/auth/cloud-platform \
    ${spot_flags[@]+"${spot_flags[@]}"} "--project=$project" --quiet || return
  if ((hosts > 1)); then
    run gcloud compute resource-policies create workload-policy "$name" \
      --type=HIGH_THROUGHPUT "--accelerator-topology=$topology" \
      "--region=${zone%-*}" "--project=$project" --quiet || return
    # All hosts or none: a slice with holes is of no use.
    policy=(--target-size-policy-mode=bulk
      "--workload-policy=projects/$project/regions/${zone%-*}/resourcePolicies/$name")
  fi
  # Nobody but this script replaces a host that has gone.
  run gcloud compute instance-groups managed create "$name" "--template=$name" \
    "--size=$hosts" --default-action-on-vm-failure=do-nothing \
    ${policy[@]+"${policy[@]}"} "--project=$project" "--zone=$zone" --quiet
}

create_slice() {
  if is_group; then
    create_group
  else
    tpu create "$name" "--node-id=$name" "--accelerator-type=$family-$size" \
      "--runtime-version=$runtime" \
      --scopes=https://www.googleapis.com/auth/cloud-platform \
      ${spot:+--spot}
  fi
}

# Into `query` the question how the slice is.
set_query() {
  if is_group; then
    query=(gcloud compute instance-groups managed list-instances "$name"
      '--format=value(instanceStatus)')
  else
    query=(gcloud compute tpus queued-resources describe "$name"
      '--format=value(state.state)')
  fi
  query+=("--project=$project" "--zone=$zone" --quiet)
}

ask() { # Into `answer`; where that fails, the error.
  answer=$("$@" 2>"$scratch/error" </dev/null) && return
  answer=$(<"$scratch/error")
  return 1
}

# Into `detail` what the cloud says, and into `state`: absent, waiting, up, gone;
# or unknown, where it could not be asked.
slice_state() {
  local answer status query
  set_query
  ask "${query[@]}"
  status=$?
  state=waiting detail=$(sort -u <<<"$answer" | paste -sd ' ')
  if ((status)); then
    state=unknown
    [[ $answer == *NOT_FOUND* || $answer == *'was not found'* ]] && state=absent
    return
  fi
  case " $detail " in
    *' FAILED '* | *' SUSPEND'* | *' TERMINATED '* | *' STOP'* | *' DELETING '* | \
      *' PREEMPTED '* | *' REPAIRING '*)
      state=gone ;;
    ' RUNNING ') (($(wc -l <<<"$answer") == hosts)) && state=up ;;
    ' ACTIVE ')
      # The request is still active for a while when its node has gone.
      ask gcloud compute tpus tpu-vm describe "$name" '--format=value(state)' \
        "--project=$project" "--zone=$zone" --quiet
      detail+=" $answer"
      case $answer in
        READY) state=up ;;
        PREEMPTED | TERMINATED | STOPPED | STOPPING | DELETING) state=gone ;;
      esac ;;
  esac
}

delete_slice() {
  if ! is_group; then
    run_delete gcloud compute tpus queued-resources delete "$name" --force \
      "--project=$project" "--zone=$zone" --quiet
    return $?
  fi
  local code=0
  run_delete gcloud compute instance-groups managed delete "$name" \
    "--project=$project" "--zone=$zone" --quiet || code=1
  run_delete gcloud compute instance-templates delete "$name" \
    "--project=$project" --quiet || code=1
  ((hosts == 1)) || run_delete gcloud compute resource-policies delete "$name" \
    "--region=${zone%-*}" "--project=$project" --quiet || code=1
  return $code
}

# Into `machines`: the group's.
list_machines() {
  local answer
  is_group || return 0
  ask gcloud compute instance-groups managed list-instances "$name" \
    '--format=value(name)' "--project=$project" "--zone=$zone" --quiet || return
  mapfile -t machines < <(sort <<<"$answer")
}

# Whose output is shown; where it cannot be told, any host's will do.
put_zero_first() {
  local zero
  is_group && ((hosts > 1)) || return 0
  zero=$(gcloud compute ssh "${machines[0]}" '--command=bash tpu_worker.sh first' \
    "--project=$project" "--zone=$zone" --quiet </dev/null)
  [[ $zero && " ${machines[*]} " == *" $zero "* ]] || return 0
  mapfile -t machines < <(
    echo "$zero"; printf '%s\n' "${machines[@]}" | grep -vxF "$zero")
}

# In a dry run the machines have no names yet: commands find them themselves.
show_for_machine() { # What to put for {}, and a command.
  local machine=$1 line
  shift
  line=$(quote "$@")
  line=${line//"'{}:'"/"$machine:"}
  echo "${line//"'{}'"/"$machine"}"
}

listing() { # And flags.
  quote gcloud compute instance-groups managed list-instances "$name" \
    '--format=value(name)' "--project=$project" "--zone=$zone" "$@"
}

# For all of the group's machines at once; {} is the machine.
each_machine() {
  local machine word pid code=0 words
  if [[ $dry_run ]]; then
    echo "for machine in \$($(listing)); do"
    # shellcheck disable=SC2016 # For the reader's shell to expand.
    echo "  $(show_for_machine '"$machine"' "$@") &"
    echo 'done; wait'
    return 0
  fi
  children=()
  for machine in "${machines[@]}"; do
    words=()
    for word in "$@"; do words+=("${word/#"{}"/$machine}"); done
    echo "+ $(quote "${words[@]}")" >&2
    "${words[@]}" </dev/null &
    children+=($!)
  done
  for pid in "${children[@]}"; do wait "$pid" || code=$?; done
  children=()
  return $code
}

# gcloud's ssh or scp for all hosts at once; {} is the host.
everywhere() {
  local verb=$1
  shift
  if is_group; then
    each_machine gcloud compute "$verb" "$@" "--project=$project" \
      "--zone=$zone" --quiet
  else
    tpu "$verb" "${@/#'{}'/$name}" --worker=all --batch-size=all
  fi
}

# To all hosts' home directories.
copy() { everywhere scp "$@" '{}:'; }

# A line of shell on all hosts at once.
on_all() { everywhere ssh '{}' "--command=$1"; }

# And on the first alone.
on_first() {
  if ! is_group; then
    tpu ssh "$name" "--command=$1" --worker=0
    return $?
  fi
  local words=(gcloud compute ssh '{}' "--command=$1" "--project=$project"
    "--zone=$zone" --quiet)
  if [[ $dry_run ]]; then
    show_for_machine "\"\$($(listing --limit=1))\"" "${words[@]}"
  else
    words[3]=${machines[0]}
    run "${words[@]}"
  fi
}
