#!/usr/bin/env bash
# Tensors of more than 2^31 - 1 elements, through shared memory and through MPI, where the machine has the memory for them.
# Usage: huge.sh BUILD_FOLDER
# timeout: 400
# processors: 2
set -uo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
result=0
for shared in auto off; do
  echo "HVD_SHARED_MEMORY=$shared:"
  output=$(HVD_SHARED_MEMORY=$shared mpirun -np 2 "$build/tests/huge" 2>&1 </dev/null)
  status=$?
  echo "$output" | grep -v "^---\|^Primary\|^mpirun\|^$\|Process name\|Exit code"
  case $status in
    0) ;;
    77) exit 77 ;;
    *) echo "$output" | grep -q "^SKIP" && exit 77; result=1 ;;
  esac
done
exit $result
