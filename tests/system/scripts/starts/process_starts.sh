#!/usr/bin/env bash
# MPI that the program has started itself: thread levels, and its end without shutdown(); and ranks on which init() fails, or which die in it:
# an error on all ranks, after which init() works again where that can be.
# Usage: process_starts.sh BUILD_FOLDER
# timeout: 600
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
build=$(cd "$1" && pwd)
program=$build/tests/process_starts
# shellcheck source=../../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
# shellcheck source=../../../support/shell/cases.sh
. "$root/tests/support/shell/cases.sh"
# shellcheck source=../../../support/shell/jobs.sh
. "$root/tests/support/shell/jobs.sh"
ulimit -c 0

well() { # NAME RANKS ARGUMENT: all ranks come to their end
  job "$1" "$2" 0 "$2" "^rank [0-9]: all is well" "$program" "$3"
}
for ranks in 1 2 3 4; do
  for shared in auto off; do
    export HVD_SHARED_MEMORY=$shared
    start well "MPI_THREAD_MULTIPLE" "$ranks" multiple
    start well "MPI_THREAD_SERIALIZED" "$ranks" serialized
    start well "MPI_Finalize without shutdown()" "$ranks" finalize
    start well "MPI_Finalize, here with and there without shutdown()" "$ranks" mixed
    start well "a rank that can start no thread" "$ranks" no_threads
    start well "a rank that can map no memory" "$ranks" no_memory
    start job "init() after MPI_Finalize" "$ranks" 0 "$ranks" "^rank [0-9]: BackendError: .*MPI has been finalized" "$program" finalize
    [ "$ranks" -gt 1 ] || continue
    others=$((ranks - 1))
    start job "all learn that a rank can start no thread, twice" "$ranks" 0 $((2 * others)) \
      "^rank [0-9]: BackendError: hvd::init\(\) failed on rank $others: the coordination thread cannot be started" "$program" no_threads
    start job "all learn that a rank can map no memory, twice" "$ranks" 0 $((2 * others)) \
      "^rank [0-9]: BackendError: hvd::init\(\) failed on rank $others: shared memory: mmap" "$program" no_memory
    mpirun_options=--enable-recovery start job "all learn that a rank has died" "$ranks" 0 "$others" \
      "^rank [0-9]: RankFailed: rank $others has ended while" "$program" dies
  done
  export HVD_SHARED_MEMORY=auto
  start well "MPI_THREAD_SINGLE on one host" "$ranks" single
  export HVD_SHARED_MEMORY=off
  [ "$ranks" -gt 1 ] || continue
  start job "MPI_THREAD_SINGLE is refused by all" "$ranks" 0 "$ranks" "^rank [0-9]: BackendError: .*call MPI_Init_thread" "$program" single
  start job "MPI_THREAD_SERIALIZED comes with a warning" "$ranks" 0 2 "^hvd: warning: rank 0: MPI was started with" "$program" serialized
done

# ---- UCX carries what hvd says between the ranks, so MPI may be as the program likes, but for the ids that NCCL's communicators need. What stands
# for CUDA has a GPU for each rank.
has() { "$build/tools/hvdrun" --check-build 2>/dev/null | grep -qF "[X] $1" || { echo "$1 is not built: not tried with MPI_THREAD_SINGLE" && false; }; }
export HVD_SHARED_MEMORY=off HVD_WIRE=ucx
if has UCX; then
  start well "UCX and MPI_THREAD_SINGLE" 2 single
fi
if has UCX && has NCCL && ldd "$program" | grep -q libcudart; then
  cat >"$cases_folder/gpus.cc" <<'END'
#include <cstdlib>
#include <cstring>
extern "C" {
int cudaGetDeviceCount(int* count) { return *count = 1, 0; }
int cudaGetDevice(int* device) { return *device = 0; }
int cudaDeviceGetAttribute(int* value, int which, int) { return *value = which == 75 ? 9 : which != 76, 0; } // capability 9.0
int cudaGetDeviceProperties(char* properties, int) { // the name, and then the UUID
  std::memcpy(properties + 256, std::getenv("OMPI_COMM_WORLD_RANK"), 1);
  return 0;
}
int cudaGetDeviceProperties_v2(char* properties, int device) { return cudaGetDeviceProperties(properties, device); }
}
END
  compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$build/CMakeCache.txt")
  "$compiler" -shared -fPIC -o "$cases_folder/gpus.so" "$cases_folder/gpus.cc" || { echo "FAIL  what stands for CUDA does not compile"; exit 1; }
  start job "NCCL over UCX and MPI_THREAD_SINGLE is refused by all" 2 0 2 "^rank [01]: BackendError: GPU tensors that NCCL .*call MPI_Init_thread" \
    env LD_PRELOAD="$cases_folder/gpus.so" "$program" single
fi
finish_cases
