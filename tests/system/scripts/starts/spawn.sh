#!/usr/bin/env bash
# spawn(): a program without a launcher starts its own ranks, tells how they failed, and does its work as a rank where a launcher has
# started it.
# Usage: spawn.sh BUILD_FOLDER
# timeout: 120
set -uo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
program=$build/tests/spawns
[ -x "$program" ] || { echo "SKIP: spawns was not built"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

# expect NAME CODE COUNT WORDS COMMAND...: the exit code, and so many lines with the words
expect() {
  local name=$1 code=$2 count=$3 words=$4
  shift 4
  timeout --kill-after=5 50 "$@" >"$work/out" 2>"$work/err" </dev/null
  status=$?
  if [ "$status" -eq "$code" ] && [ "$(grep -acF -- "$words" "$work/out")" -eq "$count" ]; then
    echo "PASS  $name"
  else
    echo "FAIL  $name: exit code $status instead of $code, or not $count lines with '$words'; output:"
    sed 's/^/      /' "$work/out" "$work/err"
    failures=$((failures + 1))
  fi
}
# What spawn() keeps while the ranks run lies in TMPDIR, or in /tmp, and is gone afterwards.
mkdir "$work/temporary"
export TMPDIR=$work/temporary
# No launcher's variables here, and none of cmake/mpi_env.sh: spawn() must do without.
bare=(env -u OMPI_ALLOW_RUN_AS_ROOT -u OMPI_ALLOW_RUN_AS_ROOT_CONFIRM -u OMPI_MCA_rmaps_base_oversubscribe)
expect "three ranks, arguments with spaces" 0 3 "of 3: sum 6, argument 'a  b'" "${bare[@]}" "$program" 3 "a  b"
expect "each rank goes on after it, and so does the one who started them" 0 4 "end" "${bare[@]}" "$program" 3 x
expect "one rank is the process itself" 0 1 "rank 0 of 1: sum 1" "${bare[@]}" "$program" 1 x
expect "a rank that fails is named" 3 1 "rank 1: the user's" "${bare[@]}" "$program" 2 fail 1
expect "and so is the exit code" 3 1 "mpirun ended with exit code 3" "${bare[@]}" "$program" 2 fail 1
expect "no ranks" 3 1 "spawn: 0 ranks" "${bare[@]}" "$program" 0
expect "its files are in TMPDIR" 3 1 "rank 0: $TMPDIR/hvd-spawn-" "${bare[@]}" "$program" 2 where
expect "or else in /tmp" 3 1 "rank 0: /tmp/hvd-spawn-" "${bare[@]}" -u TMPDIR -u TMP -u TEMP -u TEMPDIR "$program" 2 where
expect "a TMPDIR that is no folder" 3 1 "no folder for temporary files (TMPDIR): No such file" "${bare[@]}" TMPDIR="$work/none" "$program" 2 x
expect "no mpirun" 3 1 "must be in PATH" env PATH=/nonexistent "$program" 2
# shellcheck source=../../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
expect "under mpirun the number is the launcher's" 0 2 "of 2: sum 3" mpirun -np 2 "$program" 5 x
expect "where SIGCHLD is ignored" 0 2 "of 2: sum 3" env --ignore-signal=CHLD "${bare[@]}" "$program" 2 x
expect "under mpirun -np 1 there is no world of two" 3 1 "spawn: 2 ranks are wanted, but this process was started as a world of one" \
  mpirun -np 1 "$program" 2 x
expect "nor with HVD_INIT=alone" 3 1 "spawn: 2 ranks are wanted" env HVD_INIT=alone "$program" 2 x
expect "in a step of Slurm's of one task" 0 2 "of 2: sum 3" \
  env SLURM_STEP_ID=0 SLURM_STEPID=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 "$program" 2 x
# expect_none_left SIGNAL: no rank goes on where the program that has started them is ended by it
expect_none_left() {
  local mark="sleep $work $1" i
  "${bare[@]}" "$program" 2 sleep "$work $1" >"$work/out" 2>"$work/err" </dev/null &
  local starter=$!
  for ((i = 0; i < 300; i++)); do
    grep -q "all have met" "$work/out" && break
    sleep 0.1
  done
  kill "-$1" "$starter"
  wait "$starter" 2>/dev/null
  for ((i = 0; i < 150; i++)); do
    pgrep -f "$mark" >/dev/null || break
    sleep 0.1
  done
  if grep -q "all have met" "$work/out" && ! pgrep -f "$mark" >/dev/null; then
    echo "PASS  no rank is left after $1"
  else
    echo "FAIL  ranks are left after $1, or did not meet:"
    pgrep -af "$mark"
    pkill -KILL -f "$mark"
    failures=$((failures + 1))
  fi
  rm -rf "$TMPDIR"/hvd-spawn-*   # nobody was left to do it
}
expect_none_left KILL
expect_none_left TERM
if [ -n "$(find "$TMPDIR" -maxdepth 1 -name 'hvd-spawn-*')" ]; then
  echo "FAIL  something is left in $TMPDIR"
  failures=$((failures + 1))
fi
echo "$failures failed"
[ "$failures" -eq 0 ]
