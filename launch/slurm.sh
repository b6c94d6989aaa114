#!/usr/bin/env bash
# A run on the nodes of a Slurm cluster, one process a node; --help says how.
#SBATCH --job-name=podrl
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
# To the processes themselves. srun must not be sent it: it answers SIGTERM by
# killing its tasks at once, before they have saved.
#SBATCH --signal=TERM@120
set -u

usage() {
  cat <<'TEXT'
sbatch [OPTIONS] launch/slurm.sh COMMAND ...

Runs COMMAND as one process on each node, for example

  sbatch --nodes=4 --gpus-per-node=8 launch/slurm.sh \
      python experiments/sebulba_pong.py --variant=cleanba

with --workdir=runs/NAME-ID (the job's name and number; unless you give one, on a
file system that the nodes share) and --resume. Preempted, or two minutes before
its time is over, it saves a checkpoint and is queued again. The lines that begin
with #SBATCH are defaults; sbatch's options come before them.
TEXT
}

mistake() {
  echo "slurm.sh: $1" >&2
  exit 2
}

case ${1-} in --help | -h) usage; exit 0 ;; esac
(($#)) || mistake \
  'a command is missing; try: sbatch launch/slurm.sh python experiments/NAME.py'
[[ -n ${SLURM_JOB_ID-} ]] || mistake 'this is no job; try: sbatch launch/slurm.sh ...'

has_workdir='' has_resume=''
for word in "$@"; do
  case $word in
    --workdir | --workdir=*) has_workdir=yes ;;
    --resume | --resume=*) has_resume=yes ;;
  esac
done
# JAX gives each of Slurm's tasks one GPU; here a task has all of its node's.
[[ ${SLURM_GPUS_ON_NODE-} =~ ^[1-9][0-9]*$ ]] \
  && export JAX_LOCAL_DEVICE_IDS=${JAX_LOCAL_DEVICE_IDS-$(
    seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))}
command=("$@")
# A job that is queued again keeps its number, so the run keeps its directory.
[[ $has_workdir ]] \
  || command+=("--workdir=runs/${SLURM_JOB_NAME:-podrl}-$SLURM_JOB_ID")
[[ $has_resume ]] || command+=(--resume)

# A signal to this shell is not the run's end: it waits for srun, and asks.
trap : TERM
# Survivors of a failure have a word to say before they are killed; one process
# uses all cores of its node.
srun --kill-on-bad-exit=0 --wait=300 --cpu-bind=none "${command[@]}"
code=$?
if ((code == 75)); then
  # A job that its owner has cancelled saves as well, and is not to come back.
  state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T 2>/dev/null)
  if [[ -z $state || $state == RUNNING ]]; then
    echo "slurm.sh: preempted with a checkpoint saved; queued again"
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "slurm.sh: a checkpoint is saved; not queued again, the job is $state"
  fi
fi
exit "$code"
