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
# Slurm sends this signal to the processes of the run. srun must not get it: after
# SIGTERM, srun kills its tasks at once, before they have saved a checkpoint.
#SBATCH --signal=TERM@120
set -u

usage() {
  cat <<'TEXT'
sbatch [OPTIONS] launch/slurm.sh [--dry-run] COMMAND ...

Runs COMMAND as one process on each node, for example

  sbatch --nodes=4 --gpus-per-node=8 launch/slurm.sh \
      python experiments/sebulba_pong.py --variant=cleanba

The script adds --resume. If you give no --workdir, it also adds
--workdir=runs/NAME-ID, with the name and number of the job. All nodes must have
access to this directory. The run saves a checkpoint two minutes before the time
limit of the job, and when the job is preempted. The job is then queued again. After
a failure, it is queued again too, unless the command has a mistake or the job was
requeued 10 times already, for any reason. The lines of this script that begin with
#SBATCH set defaults; options of sbatch override them. --dry-run prints the command,
with or without sbatch, and runs none.
TEXT
}

mistake() {
  echo "slurm.sh: $1" >&2
  exit 2
}

dry_run=''
case ${1-} in
  --help | -h) usage; exit 0 ;;
  --dry-run) dry_run=yes; shift ;;
esac
(($#)) || mistake \
  'a command is missing; try: sbatch launch/slurm.sh python experiments/NAME.py'
[[ $dry_run || -n ${SLURM_JOB_ID-} ]] \
  || mistake 'this is not a job of Slurm; start it with: sbatch launch/slurm.sh ...'

# By default, JAX gives each Slurm task one GPU. Here, a task uses all GPUs of its
# node.
[[ ${SLURM_GPUS_ON_NODE-} =~ ^[1-9][0-9]*$ ]] \
  && export JAX_LOCAL_DEVICE_IDS=${JAX_LOCAL_DEVICE_IDS-$(
    seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))}
# --wait: after a failure, the other processes get time to report it.
# --cpu-bind=none: one process uses all cores of its node.
command=(srun --kill-on-bad-exit=0 --wait=300 --cpu-bind=none "$@")
# A job that is queued again keeps its number, so the run keeps its directory.
[[ " $* " =~ \ --workdir[\ =] ]] \
  || command+=("--workdir=runs/${SLURM_JOB_NAME:-podrl}-${SLURM_JOB_ID:-ID}")
[[ " $* " =~ \ --resume[\ =] ]] || command+=(--resume)
if [[ $dry_run ]]; then
  printf '%q ' "${command[@]}"
  echo
  exit
fi

# SIGTERM must not end this shell, because it waits for srun's exit code.
trap : TERM
"${command[@]}"
code=$? what='the run failed'
case $code in
  75) what='the run saved a checkpoint' again=yes ;;
  0 | 2 | 126 | 127 | 130) again='' ;; # Done, a mistake, no such program, Ctrl-C.
  *) again=$((${SLURM_RESTART_COUNT:-0} < 10)) again=${again#0} ;;
esac
if [[ $again ]]; then
  # A cancelled job saves a checkpoint too, but must not be queued again.
  state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T 2>/dev/null)
  if [[ -z $state || $state == RUNNING ]]; then
    echo "slurm.sh: $what, so the job must be queued again"
    scontrol requeue "$SLURM_JOB_ID" \
      || echo 'slurm.sh: the job could not be queued again; submit it again'
  else
    echo "slurm.sh: the job is not queued again, because its state is $state"
  fi
fi
exit "$code"
