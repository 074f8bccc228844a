#!/usr/bin/env bash
# The timeline of real processes: all ranks in one file, which is valid also when a rank is killed in the middle, and copied whole; a file that cannot be
# written, or a limit that is reached, is told.
# Usage: timeline.sh BUILD_FOLDER
# timeout: 600
set -uo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
# shellcheck source=../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
victim=$build/tests/victim
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
file=$work/timeline.json
failures=0
problem=
ulimit -c 0

job() { # job COMMAND...: sets status
  rm -f "$file"
  timeout --kill-after=5 150 "$@" >"$work/out" 2>&1 </dev/null
  status=$?
}
expect() { # expect CONDITION_RESULT WORDS: remembers the first thing that is wrong
  [ "$1" -eq 0 ] || problem=${problem:-$2}
}
check() { # check RANKS: the file is valid and has events of these ranks
  "$build/tests/timeline_check" "$file" >"$work/check" 2>&1
  expect $? "the file is $(head -1 "$work/check")"
  expect "$(grep -q "^valid: ranks $1;" "$work/check"; echo $?)" "not ranks $1: $(head -1 "$work/check")"
}
at_least() { # at_least NUMBER NAME: so many events
  expect "$(awk -v n="$1" -v name="$2" '$0 ~ "^" name " [0-9]+$" { found = $NF >= n } END { exit !found }' "$work/check"; echo $?)" "fewer than $1 $2"
}
verdict() { # verdict NAME
  if [ -z "$problem" ]; then
    echo "PASS  $1 (exit code $status): $(head -1 "$work/check")"
  else
    echo "FAIL  $1 (exit code $status): $problem; output:"
    grep -av '^pid ' "$work/out" | sed 's/^/      /'
    sed 's/^/      /' "$work/check"
    failures=$((failures + 1))
  fi
  problem=
  : >"$work/check"
}

job mpirun -np 3 env HVD_TIMELINE="$file" HVD_TIMELINE_MARK_CYCLES=1 "$victim" fine
expect "$status" "exit code $status"
check "0 1 2"
for name in NEGOTIATE_ALLREDUCE ALLREDUCE SHM_ALLREDUCE MEMCPY_IN_FUSION_BUFFER MEMCPY_OUT_FUSION_BUFFER WAIT_FOR_DATA CYCLE_START; do
  at_least 90 "$name"
done
at_least 3 NEGOTIATE_BARRIER
at_least 3 "bytes in flight"
expect "$(grep -q '; .* 0 open$' "$work/check"; echo $?)" "slices without an end"
verdict "three ranks, one file"

job mpirun -np 2 env HOROVOD_TIMELINE="$file" HVD_SHARED_MEMORY=off "$victim" fine
expect "$status" "exit code $status"
check "0 1"
for name in MPI_ALLREDUCE MEMCPY_IN_FUSION_BUFFER MEMCPY_OUT_FUSION_BUFFER; do at_least 60 "$name"; done
expect "$(grep -q '^CYCLE_START 0$' "$work/check"; echo $?)" "cycles that nobody asked for"
verdict "through MPI, under Horovod's name"

copied=0
mpirun -np 3 env HVD_TIMELINE="$file" "$victim" late 1500 >"$work/out" 2>&1 </dev/null &
while kill -0 $! 2>/dev/null; do
  [ -s "$file" ] && flock -s "$file" cp "$file" "$work/copy" || continue
  copied=$((copied + 1))
  "$build/tests/timeline_check" "$work/copy" >"$work/check" 2>&1 || problem=${problem:-"copy $copied is $(head -1 "$work/check")"}
done
wait $!
status=$?
expect "$status" "exit code $status"
expect "$((copied == 0))" "no copy was made"
verdict "copied while three ranks write"

for after in 0 150 400; do
  job mpirun -np 4 env HVD_TIMELINE="$file" "$victim" kill "$after"
  expect "$([ "$status" -ne 0 ] && [ "$status" -ne 124 ]; echo $?)" "exit code $status"
  check "0 1 2 3"
  verdict "a rank is killed after $after ms"
done

job mpirun -np 3 env HVD_TIMELINE="$file" HVD_TIMELINE_MAX_BYTES=65536 "$victim" fine
expect "$status" "exit code $status"
check "0 1 2"
expect "$(grep -q 'HVD_TIMELINE_MAX_BYTES' "$file"; echo $?)" "the limit is not told"
expect "$([ "$(wc -c <"$file")" -le 65536 ]; echo $?)" "$(wc -c <"$file") bytes"
verdict "64 KiB at most"

refused() { # refused NAME PATH: every rank names the variable and the path
  job mpirun -np 3 env HVD_TIMELINE="$2" "$victim"
  expect "$([ "$status" -ne 0 ] && [ "$status" -ne 124 ]; echo $?)" "exit code $status"
  expect "$([ "$(grep -aE "^rank [012]: InvalidArgument: HVD_TIMELINE: '$2' is not allowed; it must be a file that can be written: " \
    "$work/out" | sort -u | wc -l)" -eq 3 ]; echo $?)" "not three ranks name the variable and the path"
  grep -am1 '^rank 0: ' "$work/out" >"$work/check"
  verdict "$1"
}
refused "a folder that is not there" "$work/no/such/folder/file"
refused "a folder" "$work"
refused "a device" /dev/null

echo "$failures failed"
[ "$failures" -eq 0 ]
