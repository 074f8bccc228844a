#!/usr/bin/env bash
# Milliseconds from the start of a launcher to the end of the first allreduce, the median of 5: mpirun and hvdrun; and what of it is the
# store's, for threads that meet in it.
# Usage: cmake --build build --target first_allreduce hvdrun && bash tests/bench/start_times.sh build
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=$(cd "$1" && pwd)
# shellcheck source=../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
program=$build/tests/first_allreduce run=$build/tools/hvdrun
median() { # COMMAND...: of what it prints
  for _ in 1 2 3 4 5; do BEGAN=$(date +%s%N) HVD_LOG_LEVEL=error "$@" 2>/dev/null | grep -oE '[0-9]+$'; done | sort -n | sed -n 3p
}
echo "ranks mpirun hvdrun"
for n in 2 4 8 16 32 64; do
  echo "$n $(median mpirun -np $n "$program") $(median "$run" -np $n "$program")"
done
echo "threads store"
for n in 8 16 32 64; do echo "$n $(median "$program" --threads $n)"; done
