#!/usr/bin/env bash
# Wrong knobs end the program on every rank with a message that names the variable, its value and what is allowed; HOROVOD_* counts where
# HVD_* is unset; ranks that differ, and a launcher of another MPI, are refused. (What each knob takes and refuses: unit.config.)
# Usage: config_errors.sh BUILD_FOLDER
# timeout: 300
set -uo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
# shellcheck source=../../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
# shellcheck source=../../../support/shell/cases.sh
. "$root/tests/support/shell/cases.sh"
victim=$build/tests/victim
core=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*\([0-9]*\).*/\1/p' /proc/self/status)

run() {
  timeout --kill-after=5 30 "$@" >"$work/out" 2>&1 </dev/null
  status=$?
}
verdict() { # verdict NAME PROBLEM
  if [ -z "$2" ]; then
    echo "PASS  $1: $(grep -aE '^rank [0-9]+: |^fusion' "$work/out" | head -1)"
  else
    echo "FAIL  $1: $2; output:"
    grep -av '^pid ' "$work/out" | sed 's/^/      /'
    failures=$((failures + 1))
  fi
}
# refused NAME RANKS REGEX COMMAND...: exit code not 0, no hang, and each of RANKS ranks says a line with REGEX
refused() {
  local name=$1 ranks=$2 regex=$3 problem=
  shift 3
  run "$@"
  if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then problem="it hangs"; fi
  if [ -z "$problem" ] && [ "$status" -eq 0 ]; then problem="exit code 0"; fi
  if [ -z "$problem" ] && [ "$(grep -aE "^rank [0-9]+: .*$regex" "$work/out" | sort -u | wc -l)" -ne "$ranks" ]; then problem="not $ranks ranks say '$regex'"; fi
  verdict "$name" "$problem"
}
# knob NAME VALUE ALLOWED
knob() { refused "$1='$2'" 2 "InvalidArgument: $1: '$2' is not allowed; it must be $3" mpirun -np 2 env "$1=$2" "$victim"; }
# taken NAME EXPECTED COMMAND...
taken() {
  local name=$1 expected=$2 problem=
  shift 2
  run "$@"
  if [ "$status" -ne 0 ]; then problem="exit code $status"; fi
  if [ -z "$problem" ] && ! grep -aqx "$expected" "$work/out"; then problem="not '$expected'"; fi
  verdict "$name" "$problem"
}

# A knob with a wrong value, two ranks
start knob HVD_FUSION_THRESHOLD abc "a whole number of bytes"
start knob HVD_STALL_SHUTDOWN_TIME_SECONDS soon "a whole number of seconds"
start knob HVD_TIMELINE_MAX_BYTES 1GB "a whole number of bytes, 65536 to "
start knob HVD_THREAD_AFFINITY 0 "a core for each of the 2 ranks of the host"
start knob HVD_THREAD_AFFINITY 1023,1022 "of the cores that the process may use: "
start refused "without mpirun" 1 "InvalidArgument: HVD_FUSION_THRESHOLD: 'abc'" env HVD_FUSION_THRESHOLD=abc "$victim"
start refused "wrong on one of two ranks" 1 "InvalidArgument: HVD_FUSION_THRESHOLD: 'abc'" mpirun -np 1 env HVD_FUSION_THRESHOLD=abc "$victim" : -np 1 "$victim"

# Horovod's names
start knob HOROVOD_FUSION_THRESHOLD abc "a whole number of bytes"
start taken "HOROVOD_FUSION_THRESHOLD counts" "fusion threshold 12345" mpirun -np 2 env HOROVOD_FUSION_THRESHOLD=12345 "$victim"
start taken "HVD_ comes before HOROVOD_" "fusion threshold 777" mpirun -np 2 env HOROVOD_FUSION_THRESHOLD=abc HVD_FUSION_THRESHOLD=777 "$victim"
start taken "an empty HVD_ is an unset one" "fusion threshold 12345" mpirun -np 2 env HOROVOD_FUSION_THRESHOLD=12345 HVD_FUSION_THRESHOLD= "$victim"
nothing_here() {
  taken "knobs that do nothing here" "fusion threshold 12345" mpirun -np 2 env HOROVOD_FUSION_THRESHOLD=12345 HOROVOD_CYCLE_TIME=3.5 \
    HOROVOD_AUTOTUNE=1 HOROVOD_AUTOTUNE_LOG=log HOROVOD_HIERARCHICAL_ALLREDUCE=1 HOROVOD_ELASTIC=0 HOROVOD_TIMELINE=DYNAMIC "$victim"
  verdict "HOROVOD_AUTOTUNE=1: one warning" \
    "$([ "$(grep -ac 'warning: .*HVD_AUTOTUNE does nothing' "$work/out")" -eq 1 ] || echo "not one warning")"
}
start nothing_here
start taken "HOROVOD_THREAD_AFFINITY counts" "fusion threshold 134217728" \
  mpirun -np 2 env "HOROVOD_THREAD_AFFINITY=$core,$core" HVD_DISABLE_GROUP_FUSION=1 "$victim"

# Ranks that do not fit together
start refused "different knobs" 3 "Mismatch: hvd::init\(\): the configuration must be equal on all ranks: HVD_FUSION_THRESHOLD \(rank 0: 1; ranks 1-2: 2\)$" \
  mpirun -np 1 env HVD_FUSION_THRESHOLD=1 "$victim" : -np 2 env HVD_FUSION_THRESHOLD=2 "$victim"
start refused "different shared memory" 2 "Mismatch: hvd::init\(\): the configuration .*: HVD_SHARED_MEMORY \(rank 0: off; rank 1: auto\)$" \
  mpirun -np 1 env HVD_SHARED_MEMORY=off "$victim" : -np 1 "$victim"
start refused "different wires" 2 "Mismatch: hvd::init\(\): the configuration .*: HVD_WIRE \(rank 0: ucx; rank 1: auto\)$" \
  mpirun -np 1 env HVD_WIRE=ucx "$victim" : -np 1 "$victim"
start refused "a timeline on one rank only" 2 "Mismatch: hvd::init\(\): the configuration .*: HVD_TIMELINE \(rank 0: '.*'; rank 1: ''\)$" \
  mpirun -np 1 env HVD_TIMELINE="$cases_folder/timeline" "$victim" : -np 1 "$victim"
start refused "different group fusion" 2 "Mismatch: hvd::init\(\): the configuration .*: HVD_DISABLE_GROUP_FUSION \(rank 0: 1; rank 1: 0\)$" \
  mpirun -np 1 env HVD_DISABLE_GROUP_FUSION=1 "$victim" : -np 1 "$victim"
start refused "the launcher of another MPI" 2 "BackendError: the launcher started 4 ranks, but MPI sees 2" mpirun -np 2 env OMPI_COMM_WORLD_SIZE=4 "$victim"
start refused "the launcher of another MPI, worlds of one" 1 "BackendError: the launcher started 4 ranks, but MPI sees 1" \
  env OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=0 "$victim"

finish_cases
