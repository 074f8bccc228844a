#!/usr/bin/env bash
# One of four ranks dies, leaves or gets stuck in the middle of allreduces: the job ends soon, with an exit code that is not 0 and a message
# that names the rank, and leaves no process, no file in /dev/shm, no System V segment or semaphore behind.
# Usage: rank_dies.sh BUILD_FOLDER
# timeout: 300
set -uo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
# shellcheck source=../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
ulimit -c 0

shared_things() {
  find /dev/shm -mindepth 1 -user "$(id -u)" 2>/dev/null
  ipcs -m 2>/dev/null | awk '$2 ~ /^[0-9]+$/ && $6 == 0 { print "segment " $2 }'
  ipcs -s 2>/dev/null | awk '$2 ~ /^[0-9]+$/ { print "semaphore " $2 }'
}
# What is there now, was not before, and belongs to no living process nor to another job of Open MPI's (other jobs may run, and be killed, on
# this machine).
left_over() {
  local thing job
  shared_things | sort >"$work/after"
  job=$(sed -n 's/^job \([0-9]*\)$/\1/p' "$work/out" | head -n 1)
  comm -13 "$work/before" "$work/after" | while read -r thing; do
    case $thing in /dev/shm/*) grep -qsF "$thing" /proc/[0-9]*/maps && continue ;; esac
    case $thing in /dev/shm/vader_segment.*) [[ -z $job || $thing == *.$(printf '%x' "$job").* ]] || continue ;; esac
    echo "$thing"
  done
}

# job WHAT... : runs the victim; sets status, seconds
job() {
  shared_things | sort >"$work/before"
  local start=$EPOCHREALTIME
  # shellcheck disable=SC2016
  timeout --kill-after=5 60 mpirun -np 4 bash -c 'echo "job ${OMPI_MCA_ess_base_jobid:-}"; exec "$@"' bash "$build/tests/victim" "$@" \
    >"$work/out" 2>&1 </dev/null
  status=$?
  seconds=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
}

problem=
expect() { # expect CONDITION_RESULT WORDS: remembers the first thing that is wrong
  [ "$1" -eq 0 ] || problem=${problem:-$2}
}
matches() {
  grep -aqE "$1" "$work/out"
  echo $?
}
below() {
  awk -v a="$1" -v b="$2" 'BEGIN { exit !(a < b) }'
  echo $?
}
# Neither gone nor a zombie that only its parent has still to read.
lives() {
  local state
  state=$(sed -n 's/^State:[[:space:]]*\([A-Z]\).*/\1/p' "/proc/$1/status" 2>/dev/null)
  [ -n "$state" ] && [ "$state" != Z ] && [ "$state" != X ]
}
nothing_left() {
  local pid living leftover end=$((SECONDS + 10))
  while :; do # the kernel takes a moment to clear away a killed process
    living=
    for pid in $(sed -n 's/^pid \([0-9]*\)$/\1/p' "$work/out"); do lives "$pid" && living="$living $pid"; done
    leftover=$(left_over)
    [ -z "$living$leftover" ] && return
    [ "$SECONDS" -ge "$end" ] && break
    sleep 0.2
  done
  for pid in $living; do # where it is
    sed -n 's/^\(Pid\|PPid\|State\|SigBlk\|SigIgn\|SigCgt\|Threads\):/\1/p' "/proc/$pid/status" 2>/dev/null | tr '\n' ' '
    cat "/proc/$pid"/task/*/wchan 2>/dev/null
    echo
  done >>"$work/out"
  [ -z "$living" ] || problem=${problem:-"processes left:$living"}
  [ -z "$leftover" ] || problem=${problem:-"left behind: $leftover"}
}
verdict() { # verdict NAME
  expect "$([ "$(grep -ac '^pid ' "$work/out")" -eq 4 ]; echo $?)" "not four ranks were started"
  nothing_left
  if [ -z "$problem" ]; then
    echo "PASS  $1 ($seconds s, exit code $status): $(grep -aE '^rank [013]: |^hvd: warning' "$work/out" | head -1)"
  else
    echo "FAIL  $1 ($seconds s, exit code $status): $problem; output:"
    grep -av '^pid ' "$work/out" | sed 's/^/      /'
    failures=$((failures + 1))
  fi
  problem=
}

# dies NAME EXIT_CODES ERRORS WHAT...: at least one survivor says why, and names rank 2
dies() {
  local name=$1 codes=$2 errors=$3
  shift 3
  job "$@"
  expect "$([ "$status" -ne 124 ] && [ "$status" -ne 137 -o "$1" = kill ]; echo $?)" "the job hangs"
  expect "$([ "$status" -ne 0 ]; echo $?)" "exit code 0"
  expect "$([[ " $codes " == *" $status "* ]]; echo $?)" "exit code $status, not one of $codes"
  expect "$(below "$seconds" 30)" "it took $seconds s"
  expect "$(matches "^rank [013]: ($errors): .*rank 2")" "no survivor names rank 2"
  verdict "$name"
}

echo "A rank of four dies in the middle of allreduces:"
dies "SIGKILL" "137 3" RankFailed kill 60
dies "SIGKILL, another moment" "137 3" RankFailed kill 137
dies "SIGKILL, at once" "137 3" RankFailed kill 0
dies "SIGSEGV" "139 3" RankFailed segv 85
dies "an exception leaves main" "134 3" RankFailed throw
dies "_exit(7)" "7 3" RankFailed _exit
dies "exit(0) before the others" "1 3" "RankFailed|Shutdown" exit0

echo "A rank of four is stuck:"
export HVD_STALL_CHECK_TIME_SECONDS=1
job late 2600
expect "$([ "$status" -eq 0 ]; echo $?)" "exit code $status"
expect "$(matches "warning: rank [013]: allreduce 'small' has waited [0-9]+ s: rank 2 has not submitted it")" "no warning names the tensor and the rank"
expect "$(matches '^all steps done$')" "the steps were not done in the end"
verdict "late by 2.6 s, HVD_STALL_CHECK_TIME_SECONDS=1: a warning, and all is well in the end"

export HVD_STALL_SHUTDOWN_TIME_SECONDS=3
job late 60000
expect "$([ "$status" -eq 3 ]; echo $?)" "exit code $status"
expect "$(below "$seconds" 40)" "it took $seconds s"
expect "$(matches "^rank [013]: StallTimeout: allreduce 'small' has waited [0-9]+ s: rank 2 has not submitted it")" "no StallTimeout names the tensor and the rank"
verdict "late by a minute, HVD_STALL_SHUTDOWN_TIME_SECONDS=3: the job ends"
unset HVD_STALL_CHECK_TIME_SECONDS HVD_STALL_SHUTDOWN_TIME_SECONDS

echo "And where nobody dies:"
job fine
expect "$([ "$status" -eq 0 ]; echo $?)" "exit code $status"
expect "$(matches '^all steps done$')" "the steps were not done"
verdict "nothing happens"

echo "$failures failed"
[ "$failures" -eq 0 ]
