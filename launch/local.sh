#!/usr/bin/env bash
# A run of several processes on this machine; --help says how.
set -u

usage() {
  cat <<'TEXT'
launch/local.sh N [--grace_seconds=30] [--kill_seconds=30] -- COMMAND ...

Runs N processes of a run on this machine, for example

  launch/local.sh 2 -- python experiments/anakin_cartpole.py --workdir=runs/two

Each gets --coordinator, --num_processes and --process_id, its share of the
cores and, where there are any, of the GPUs. Process I's lines begin with [I].
The first failure's code is this script's: the others then have grace_seconds to
end by themselves, before SIGTERM, and kill_seconds more before SIGKILL. Ctrl-C
and SIGTERM are passed on, once for each that comes.
TEXT
}

mistake() {
  echo "local.sh: $1" >&2
  exit 2
}

say() { echo "local.sh: $*" >&2; }

# Into `share`: what process $1 of $2 gets of the words that follow.
share_of() {
  local index=$1 count=$2
  shift 2
  local begin=$((index * $# / count)) end=$(((index + 1) * $# / count))
  share=$(IFS=,; echo "${*:begin + 1:end - begin}")
}

# Into `cores`: the ones this script may use, one a word.
find_cores() {
  local part
  cores=()
  command -v taskset >/dev/null || return 0
  part=$(taskset -cp $$ 2>/dev/null) || return 0
  for part in $(tr , ' ' <<<"${part##*: }"); do
    # A part is 5, 0-3 or, rarely, 0-6:2.
    local range=${part%%:*} step=1
    [[ $part == *:* ]] && step=${part##*:}
    mapfile -t -O "${#cores[@]}" cores < <(
      seq "${range%-*}" "$step" "${range#*-}")
  done
}

# Into `gpus`: the ones to be shared; none where the user has chosen already.
find_gpus() {
  gpus=()
  [[ -z ${CUDA_VISIBLE_DEVICES+set} && ${JAX_PLATFORMS-} != cpu ]] || return 0
  command -v nvidia-smi >/dev/null || return 0
  mapfile -t gpus < <(nvidia-smi -L 2>/dev/null \
    | sed -n 's/^GPU \([0-9]*\):.*/\1/p')
}

# Below the ports that outgoing connections take, so that none takes it first.
find_port() {
  local attempt
  for attempt in {1..100}; do
    port=$((20000 + RANDOM % 12000))
    (exec 5<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || return 0
  done
  say "no free port in $attempt attempts between 20000 and 31999"
  exit 1
}

# Ends what is left where this script itself is killed: its end of the pipe on
# stdin closes with it, whatever the signal.
guard() {
  trap '' INT TERM HUP
  local line group groups=() deadline
  while read -r line; do
    [[ $line == 'done' ]] && exit
    groups+=("$line")
  done
  for group in "${groups[@]}"; do kill -TERM -- "-$group" 2>/dev/null; done
  deadline=$((SECONDS + kill_seconds))
  for group in "${groups[@]}"; do
    while kill -0 -- "-$group" 2>/dev/null && ((SECONDS < deadline)); do
      sleep 0.2
    done
    kill -KILL -- "-$group" 2>/dev/null
  done
}

# Line by line, and the last one also where its end is missing.
prefix() {
  trap '' INT TERM
  exec 3>&-
  while IFS= read -r line || [[ -n $line ]]; do
    printf '[%s] %s\n' "$1" "$line"
  done
}

# One process and what prefixes its lines. All of it is sent each signal, as by a
# terminal; only the command is to be ended by it. The exit code is told at once,
# since a grandchild may keep the pipe open.
supervise() {
  local index=$1
  shift
  exec 4>&-
  trap : INT TERM
  (
    trap : INT TERM
    "$@" </dev/null 3>&-
    echo "$index $?" >&3
  ) 2>&1 | prefix "$index"
  echo "$index flushed" >&3
}

# Grandchildren included, also those of a process that has ended.
send() {
  local group
  for group in "${groups[@]}"; do kill "-$1" -- "-$group" 2>/dev/null; done
}

grace_seconds=30 kill_seconds=30 count=
while (($#)); do
  case $1 in
    --help | -h) usage; exit 0 ;;
    --grace_seconds=* | --kill_seconds=*)
      value=${1#*=}
      [[ $value =~ ^[0-9]+$ ]] || mistake "$1 is not a number of seconds"
      case $1 in
        --grace*) grace_seconds=$value ;;
        *) kill_seconds=$value ;;
      esac ;;
    --) break ;;
    -*) mistake "$1 is unknown; a command's flags go after --" ;;
    *)
      [[ -z $count ]] || mistake "'$1' is one word too many before --"
      [[ $1 =~ ^[1-9][0-9]{0,3}$ ]] \
        || mistake "'$1' is not a number of processes; try 2"
      count=$1 ;;
  esac
  shift
done
[[ -n $count ]] || mistake 'how many processes? try: launch/local.sh 2 -- COMMAND'
(($#)) || mistake '-- and a command are missing; try: launch/local.sh 2 -- COMMAND'
shift
(($#)) || mistake 'a command is missing after --'
for word in "$@"; do
  case $word in
    --coordinator* | --num_processes* | --process_id*)
      mistake "${word%%=*} is set by this script; leave it out" ;;
  esac
done
find_cores
find_gpus
((${#gpus[@]} == 0 || count <= ${#gpus[@]})) || mistake \
  "$count processes do not fit on ${#gpus[@]} GPUs; try ${#gpus[@]}, or JAX_PLATFORMS=cpu"
find_port

# Job control gives each process a group of its own, which a terminal's Ctrl-C
# does not reach: it comes through this script alone.
set -m
folder=$(mktemp -d) && mkfifo "$folder/reports" "$folder/life" || exit 1
exec 3<>"$folder/reports"
guard <"$folder/life" 3>&- &
disown
exec 4>"$folder/life"
rm -r "$folder"
trap 'send INT' INT
trap 'send TERM' TERM HUP

groups=() running=()
for ((i = 0; i < count; i++)); do
  command=("$@" "--coordinator=127.0.0.1:$port" "--num_processes=$count"
           "--process_id=$i")
  if ((count <= ${#cores[@]})); then
    share_of "$i" "$count" "${cores[@]}"
    command=(taskset -c "$share" "${command[@]}")
  fi
  if ((${#gpus[@]})); then
    share_of "$i" "$count" "${gpus[@]}"
    command=(env "CUDA_VISIBLE_DEVICES=$share" "${command[@]}")
  fi
  supervise "$i" "${command[@]}" &
  groups[i]=$! running[i]=yes
  echo "$!" >&4
  disown
done

code=0 left=$count unflushed=$count deadline='' report=''
while ((unflushed)); do
  # A time-out may come in the middle of a line, whose rest comes next.
  IFS= read -r -t 0.2 -u 3 part
  timed_out=$?
  report+=$part
  if ((timed_out == 0)); then
    index=${report% *} status=${report#* } report=''
    if [[ $status == flushed ]]; then
      unflushed=$((unflushed - 1))
      continue
    fi
    left=$((left - 1))
    unset "running[index]"
    if ((status && ! code)); then
      code=$status deadline=$((SECONDS + grace_seconds)) next=TERM
      ((left)) && say "process $index ended with $status; waiting" \
        "$grace_seconds s for the other $left"
    fi
    # Whoever keeps a pipe open for longer is some grandchild.
    ((left)) || deadline=$((SECONDS + 1)) next=TERM
  elif [[ -n $deadline ]] && ((SECONDS >= deadline)); then
    ((left)) && say "SIG$next to ${!running[*]}"
    send "$next"
    [[ $next == KILL ]] && break
    deadline=$((SECONDS + kill_seconds)) next=KILL
  fi
done
send KILL
echo 'done' >&4
exit "$code"
