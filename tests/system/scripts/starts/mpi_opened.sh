#!/usr/bin/env bash
# MPI is opened when ranks meet through it: what is built here is not linked with it, and runs where there is none. MPI that is missing where a
# launcher of it has started the ranks, and another MPI than the right one, is a sentence on every rank.
# Usage: mpi_opened.sh BUILD_FOLDER
# timeout: 300
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
build=$(cd "$1" && pwd)
meets=$build/tests/meets
# shellcheck source=../../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
# shellcheck source=../../../support/shell/cases.sh
. "$root/tests/support/shell/cases.sh"
# shellcheck source=../../../support/shell/jobs.sh
. "$root/tests/support/shell/jobs.sh"
ulimit -c 0
for name in $(compgen -e); do # whoever runs this may be a launcher's rank
  case $name in RANK | WORLD_SIZE | LOCAL_RANK | MASTER_ADDR | MASTER_PORT | PMI* | SLURM_* | OMPI_COMM_* | TORCHELASTIC_* | HVD_INIT*) unset "$name" ;; esac
done
ranks=$root/tests/support/shell/ranks.sh
command -v readelf >/dev/null || { echo "SKIP: there is no readelf"; exit 77; }
command -v nm >/dev/null || { echo "SKIP: there is no nm"; exit 77; }

verdict() { # verdict NAME PROBLEM: no problem is a pass
  if [ -z "$2" ]; then
    echo "PASS  $1"
  else
    echo "FAIL  $1: $2"
    [ ! -s "$work/out" ] || sed 's/^/      /' "$work/out"
    failures=$((failures + 1))
  fi
}
# says NAME CODE COUNT WORDS COMMAND...: the exit code (- for any but 0 and 124), and so many lines with the words
says() {
  local name=$1 code=$2 lines=$3 words=$4 problem='' status
  shift 4
  timeout --kill-after=5 60 "$@" >"$work/out" 2>&1 </dev/null
  status=$?
  if [ "$code" = - ]; then [ "$status" -ne 0 ] && [ "$status" -ne 124 ] || problem="exit code $status"; fi
  if [ "$code" != - ]; then [ "$status" -eq "$code" ] || problem="exit code $status, not $code"; fi
  [ "$(grep -acE -- "$words" "$work/out")" -eq "$lines" ] || problem=${problem:-"not $lines lines with '$words'"}
  verdict "$name" "$problem"
}

# ---- Who is linked with it
needs_mpi() { readelf -d "$1" | grep -E 'NEEDED.*lib(mpi|open-(rte|pal))'; }
not_linked() {
  local file found=''
  for file in "$meets" "$build"/tests/{unit_tests,torch_tests,victim,process_exits} "$build"/examples/{hvdrun,train,wrap_existing}; do
    if [ -x "$file" ] && needs_mpi "$file" >"$work/out"; then found+=" $file"; fi
  done
  verdict "programs are not linked with MPI" "$found"
  found=''
  for file in "$build"/hvd/libhvd_core.a "$build"/ops/libhvd_ops.a "$build"/torch_bindings/libhvd_torch.a; do
    if [ -e "$file" ] && nm -u "$file" 2>/dev/null | grep -E ' (P?MPI_|ompi_)' >"$work/out"; then found+=" $file"; fi
  done
  verdict "libraries call MPI through the table alone" "$found"
  verdict "a program that calls MPI itself is linked with it" "$(needs_mpi "$build/tests/process_starts" >"$work/out" || echo "it is not")"
}
start not_linked

# ---- A machine without it: the name leads to a file that is no library.
library=$(sed -n 's/^HVD_MPI_NAME:INTERNAL=//p' "$build/CMakeCache.txt")
no_mpi=$cases_folder/no_mpi
mkdir "$no_mpi"
echo none >"$no_mpi/${library:?}"
without=(env "LD_LIBRARY_PATH=$no_mpi:${LD_LIBRARY_PATH:-}")
started="BackendError: hvd::init\(\): .*OMPI_COMM_WORLD_RANK=.* so the ranks should meet through MPI, but .* cannot be opened: .*$library.*HVD_INIT=tcp://HOST:PORT"
start says "alone, without MPI" 0 2 "^rank 0 of 1, .*MPI is not used" "${without[@]}" "$meets"
for size in 2 4; do
  start says "RANK and WORLD_SIZE, without MPI, $size ranks" 0 $((2 * size)) "^rank [0-3] of $size, .*MPI is not used" "${without[@]}" "$ranks" $size "$meets"
done
start says "the numbers of another MPI's mpiexec, and HVD_INIT" 0 6 "^rank [0-2] of 3, .*MPI is not used" "${without[@]}" \
  HVD_INIT=tcp://127.0.0.1:$((23000 + RANDOM % 900)) "$ranks" 3 env -u RANK -u WORLD_SIZE "PMI_RANK={rank}" PMI_SIZE=3 "$meets"
if [ -x "$build/tools/hvdrun" ]; then
  start says "hvdrun, without MPI" 0 6 "rank [0-2] of 3, .*MPI is not used" "${without[@]}" "$build/tools/hvdrun" -np 3 "$meets"
  start says "hvdrun says that it is missing" 0 1 "^  \[ \] .*cannot be opened" "${without[@]}" "$build/tools/hvdrun" --check-build
  start says "hvdrun says which it is" 0 1 "^  \[X\] .*MPI" "$build/tools/hvdrun" --check-build
fi
start says "mpirun, without MPI" - 2 "^rank [01]: $started" mpirun -np 2 "${without[@]}" "$meets"
start says "mpirun -np 1, without MPI" 0 2 "^rank 0 of 1, .*MPI is not used" mpirun -np 1 "${without[@]}" "$meets"
start says "mpirun, without MPI, with a place to meet" 0 6 "^rank [0-2] of 3, .*MPI is not used" "${without[@]}" \
  "$ranks" 3 env "OMPI_COMM_WORLD_RANK={rank}" OMPI_COMM_WORLD_SIZE=3 "$meets"
start says "mpiexec of MPICH or Intel MPI, without MPI" 3 1 "^rank 1: .*PMI_RANK=1, PMI_SIZE=4 say .*cannot be opened" "${without[@]}" PMI_RANK=1 PMI_SIZE=4 "$meets"
start says "mpiexec of another MPI with one rank, without MPI" 0 2 "^rank 0 of 1, " "${without[@]}" PMI_RANK=0 PMI_SIZE=1 "$meets"
start says "HVD_INIT=mpi, without MPI" 3 1 "^rank .*HVD_INIT=mpi is set, .*cannot be opened" "${without[@]}" HVD_INIT=mpi "$meets"

# ---- Another MPI: what stands for it knows its name and whether it has been started.
compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$build/CMakeCache.txt")
cat >"$cases_folder/other.cc" <<'END'
#include <cstring>
extern "C" int PMPI_Initialized(int* flag) { return *flag = STARTED, 0; }
extern "C" int PMPI_Get_library_version(char* text, int* length) {
  return *length = static_cast<int>(std::strlen(std::strcpy(text, "MPICH Version:\t9.9\nMPICH Release date:\tnever"))), 0;
}
END
mkdir "$cases_folder/other"
"$compiler" -shared -fPIC -DSTARTED=0 -o "$cases_folder/other/$library" "$cases_folder/other.cc" &&
  "$compiler" -shared -fPIC -DSTARTED=1 -o "$cases_folder/other/started.so" "$cases_folder/other.cc" || { echo "FAIL  the other MPI does not compile"; exit 1; }
other="MPICH Version: 9\.9"
if grep -q 'Open MPI' <(mpirun --version); then
  start says "another MPI by the right name" - 2 "^rank [01]: .*$library is not .*, with which hvd was built, but $other" \
    mpirun -np 2 env LD_LIBRARY_PATH="$cases_folder/other" "$meets"
  start says "a program with another MPI, under mpirun" - 2 "^rank [01]: .*the program is linked with another MPI \($other\) than hvd was built with" \
    mpirun -np 2 env LD_PRELOAD="$cases_folder/other/$library" "$meets"
  start says "a program that has started another MPI" 3 1 "^rank .*the program has started MPI itself, .*another MPI \($other\)" \
    env LD_PRELOAD="$cases_folder/other/started.so" "$meets"
  start says "the same, and HVD_INIT=alone" 0 2 "^rank 0 of 1, " env HVD_INIT=alone LD_PRELOAD="$cases_folder/other/started.so" "$meets"
  start says "the same, with RANK and WORLD_SIZE" 0 6 "^rank [0-2] of 3, " env LD_PRELOAD="$cases_folder/other/started.so" "$ranks" 3 "$meets"
fi

# ---- A tool that stands in front of MPI sees hvd's calls, as if hvd were linked.
cat >"$cases_folder/tool.cc" <<'END'
#include <cstdio>
extern "C" int PMPI_Init_thread(int* argc, char*** argv, int wanted, int* provided);
extern "C" int MPI_Init_thread(int* argc, char*** argv, int wanted, int* provided) {
  std::fputs("the tool sees MPI_Init_thread\n", stderr);
  return PMPI_Init_thread(argc, argv, wanted, provided);
}
END
"$compiler" -shared -fPIC -o "$cases_folder/tool.so" "$cases_folder/tool.cc" || { echo "FAIL  the tool does not compile"; exit 1; }
start says "a tool in front of MPI" 0 2 "^the tool sees" mpirun -np 2 env LD_PRELOAD="$cases_folder/tool.so" "$meets"

# ---- With it, over each of its ways between ranks
for ways in self,vader self,tcp; do
  mpirun_options="--mca btl $ways --mca pml ob1"
  start job "MPI's plugins, $ways" 3 0 6 "^rank [0-2] of 3, .*MPI is used" env HVD_SHARED_MEMORY=off "$meets"
done
finish_cases
