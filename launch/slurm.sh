#!/usr/bin/env bash
# Runs a command on the nodes of a Slurm cluster; --help explains how.
#SBATCH --job-name=podrl
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
# The processes get this signal themselves, but srun must not get it: after SIGTERM,
# srun kills its tasks at once, before they have saved.
#SBATCH --signal=TERM@120
set -u

usage() {
  cat <<'TEXT'
sbatch [OPTIONS] launch/slurm.sh COMMAND ...

Runs COMMAND as one process on each node, for example

  sbatch --nodes=4 --gpus-per-node=8 launch/slurm.sh \
      python experiments/sebulba_pong.py --variant=cleanba

The script adds --resume and, unless you give a --workdir, --workdir=runs/NAME-ID
with the job's name and number. All nodes must share the file system of the
workdir. When the job is preempted, and two minutes before its time limit, the run
saves a checkpoint and the job is queued again. The lines that begin with #SBATCH
are defaults; options of sbatch have precedence.
TEXT
}

mistake() {
  echo "slurm.sh: $1" >&2
  exit 2
}

case ${1-} in --help | -h) usage; exit 0 ;; esac
(($#)) || mistake \
  'a command is missing; try: sbatch launch/slurm.sh python experiments/NAME.py'
[[ -n ${SLURM_JOB_ID-} ]] || mistake 'this is no job of Slurm; try: sbatch launch/slurm.sh ...'

has_workdir='' has_resume=''
for word in "$@"; do
  case $word in
    --workdir | --workdir=*) has_workdir=yes ;;
    --resume | --resume=*) has_resume=yes ;;
  esac
done
# JAX gives each task of Slurm one GPU, but here a task has all GPUs of its node.
[[ ${SLURM_GPUS_ON_NODE-} =~ ^[1-9][0-9]*$ ]] \
  && export JAX_LOCAL_DEVICE_IDS=${JAX_LOCAL_DEVICE_IDS-$(
    seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))}
command=("$@")
# A job that is queued again keeps its number, and so the run keeps its directory.
[[ $has_workdir ]] \
  || command+=("--workdir=runs/${SLURM_JOB_NAME:-podrl}-$SLURM_JOB_ID")
[[ $has_resume ]] || command+=(--resume)

# SIGTERM does not end this shell: it waits for srun's exit code.
trap : TERM
# After a failure the other processes get time to report it. One process uses all
# cores of its node.
srun --kill-on-bad-exit=0 --wait=300 --cpu-bind=none "${command[@]}"
code=$?
if ((code == 75)); then
  # A cancelled job saves a checkpoint too, but must not be queued again.
  state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T 2>/dev/null)
  if [[ -z $state || $state == RUNNING ]]; then
    echo "slurm.sh: preempted after saving a checkpoint; queued again"
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "slurm.sh: a checkpoint is saved; not queued again, because the job is $state"
  fi
fi
exit "$code"
