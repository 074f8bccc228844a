#!/usr/bin/env bash
# Runs a program on virtual GPUs: with schedules ("late,random"; all: each), and so many seeds of each (HVD_TEST_GPU_SEEDS; 1).
# HVD_TEST_GPU_SCHEDULE (late:17) asks for one of them. Says which one failed.
# Usage: run.sh FOLDER RANKS GPUS BACKEND SCHEDULES PROGRAM...
set -u

folder=$1 ranks=$2 gpus=$3 backend=$4 kinds=$5
shift 5
if [ "$kinds" = all ]; then kinds=late,random,eager,starved; fi
place=/dev/shm # the memory of the GPUs is a file
if [ "$(df --output=avail -k "$place" 2>/dev/null | tail -1)" -lt 4000000 ] 2>/dev/null; then place=${TMPDIR:-/tmp}; fi
world=$(mktemp "$place/hvd_gpus.XXXXXX") || exit 1
trap 'rm -f "$world"' EXIT
# whichever thread of a process does what lies on a stream: the same bits as the program's own
export OMP_NUM_THREADS=1
schedules=()
if [ -n "${HVD_TEST_GPU_SCHEDULE:-}" ]; then
  schedules=("$HVD_TEST_GPU_SCHEDULE")
else
  for ((seed = 1; seed <= ${HVD_TEST_GPU_SEEDS:-1}; seed++)); do
    for kind in ${kinds//,/ }; do schedules+=("$kind:$seed"); done
  done
fi
for schedule in "${schedules[@]}"; do
  : >"$world"
  start=()
  if [ "$ranks" -gt 1 ]; then start=(mpirun -np "$ranks"); fi
  "${start[@]}" env LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" HVD_TEST_GPU_WORLD="$world" HVD_TEST_GPUS="$gpus" \
    HVD_GPU_BACKEND="$backend" HVD_TEST_GPU_SCHEDULE="$schedule" "$@"
  code=$?
  if [ "$code" -ne 0 ]; then
    echo "FAILED ($code): HVD_TEST_GPU_SCHEDULE=$schedule, $ranks ranks, $gpus GPUs, $backend"
    exit "$code"
  fi
done
