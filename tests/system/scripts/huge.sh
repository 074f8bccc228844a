#!/usr/bin/env bash
# Tensors of more than 2^31 - 1 elements, through shared memory and through MPI, where the machine has the memory for them.
# Usage: huge.sh BUILD_FOLDER
# timeout: 400
# processors: 2
set -uo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
# shellcheck source=../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
result=0 skipped=0
for shared in auto off; do
  echo "HVD_SHARED_MEMORY=$shared:"
  output=$(HVD_SHARED_MEMORY=$shared mpirun -np 2 "$build/tests/huge" 2>&1 </dev/null)
  status=$?
  echo "$output" | grep -v "^---\|^Primary\|^mpirun\|^$\|Process name\|Exit code"
  case $status in
    0) ;;
    77) skipped=1 ;;
    *) if echo "$output" | grep -q "^SKIP" && ! echo "$output" | grep -q "^rank .*wrong"; then skipped=1; else result=1; fi ;;
  esac
done
if [ "$result" -eq 0 ] && [ "$skipped" -eq 1 ]; then exit 77; fi
exit $result
