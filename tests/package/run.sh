#!/usr/bin/env bash
# Installs the build into a folder, moves it, looks at the headers, and configures, builds and runs consumers of it there; then the same
# with shared libraries of the core (tests/support/shell/shared_build.sh).
#   run.sh BUILD_FOLDER CMAKE GENERATOR
set -euo pipefail

build=$1 cmake=$2 generator=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
scratch=$build/tests/package
# shellcheck source=installation.sh
. "$here/installation.sh"

# headers_of STAGE: as they are included. Fails for one that no front door and no port needs, and for one that is missing.
headers_of() (
  cd "$scratch/$1/include/hvd"
  needed=(hvd/hvd.h hvd/spawn.h hvd/backend.h hvd/fast_path_memory.h hvd/exposed_memory.h hvd/transport.h hvd/topology.h hvd/routes.h)
  if [ -e hvd/torch.h ]; then needed+=(hvd/torch.h); fi
  for ((i = 0; i < ${#needed[@]}; i++)); do
    [ -e "${needed[i]}" ] || failed "${needed[i]} is not installed" >&2
    while read -r included; do
      case " ${needed[*]} " in *" $included "*) ;; *) needed+=("$included") ;; esac
    done < <(sed -nE 's/^#include [<"]((hvd|ops|torch_bindings)\/[^">]*)[>"].*/\1/p' "${needed[i]}")
  done
  comm -13 <(printf '%s\n' "${needed[@]}" | sort) <(find . -type f | sed 's|^\./||' | sort) >"$scratch/superfluous"
  if [ -s "$scratch/superfluous" ]; then
    cat "$scratch/superfluous" >&2
    failed "the headers above are installed, but no public one needs them" >&2
  fi
  printf '%s\n' "${needed[@]}"
)

# look_at STAGE: what lies in include/ is one folder, whose headers are public and include no fmt and no MPI.
look_at() {
  local include=$scratch/$1/include
  [ "$(ls "$include")" = hvd ] || failed "include/ has more than hvd/: $(ls "$include")"
  if grep -rnE '#include [<"](fmt/|mpi\.h|ops/)' "$include"; then failed "the lines above are in public headers"; fi
  headers_of "$1" >"$scratch/headers" || exit 1
}

# try STAGE FOLDER PATTERN OPTION... : consumers of STAGE, and the headers that match PATTERN
try() {
  local stage=$scratch/$1 folder=$scratch/$2 headers
  headers=$(grep -P "$3" "$scratch/headers" | paste -sd';')
  shift 3
  rm -rf "$folder"
  quietly "$cmake" -S "$here" -B "$folder" -G "$generator" -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$stage" -DHEADERS="$headers" "$@"
  quietly "$cmake" --build "$folder"
}

# configures PARTS SAYS OPTION...: a project that demands an old CMake is configured without a developer's warning, and one line says SAYS
configures() {
  local parts=$1 says=$2
  shift 2
  quietly env -u HVD_TORCH "$cmake" -S "$here/old" -B "$scratch/old" -G "$generator" -DCMAKE_PREFIX_PATH="$scratch/stage" -DPARTS="$parts" \
    -UHVD_TORCH -UTorch_DIR -UTorch_ROOT "$@"
  if grep -A 6 'CMake Warning' "$scratch/log"; then failed "find_package(hvd) warns, see above"; fi
  grep -qF -- "$says" "$scratch/log" || {
    cat "$scratch/log"
    failed "find_package(hvd) does not say '$says'"
  }
}
# A project's own LibTorch comes before the one that hvd was built with; which one is taken is said. It is the same one under another name.
configures_with_torch() {
  local torch own=$scratch/own_torch part
  torch=$(sed -n 's/^set(_hvd_torch_of_build "\(.*\)")$/\1/p' "$(find "$scratch/stage" -name hvd-config.cmake)")
  configures torch " in $torch, which hvd was built with"
  rm -rf "$own"
  mkdir -p "$own"
  for part in include lib share; do ln -s "$torch/$part" "$own/$part"; done
  configures torch " in $own" -DTorch_DIR="$own/share/cmake/Torch"
  configures torch " in $own" -DTorch_ROOT="$own"
  configures torch " in $own" -DHVD_TORCH="$own"
}

mkdir -p "$scratch"
install_to stage "$build"
look_at stage
try stage core '^hvd/(?!torch\.h)' -DWITH_TORCH=OFF
"$scratch/core/values"
mpirun -np 1 "$scratch/core/core_only"
mpirun -np 2 "$scratch/core/core_only"
rm -rf "$scratch/old"
configures "" "-- Found Threads"
if [ -n "$(find "$scratch/stage" -name hvd-torch-targets.cmake)" ]; then
  configures_with_torch
  try stage torch '^(torch_bindings/|hvd/torch\.h)' -DWITH_TORCH=ON
  mpirun -np 2 "$scratch/torch/with_torch"
else
  echo "hvd::torch is not part of this build: its consumer was left out"
fi

# ---- Shared libraries
# shellcheck source=../support/shell/shared_build.sh
. "$root/tests/support/shell/shared_build.sh"
shared=
shared_build "$build" || exit 1
install_to shared_stage "$shared"
look_at shared_stage
library=$(find "$scratch/shared_stage" -name libhvd.so)
[ -n "$library" ] || failed "there is no libhvd.so"
nm -DC --defined-only "$library" >"$scratch/symbols"
for public in 'hvd::init()' 'hvd::allreduce(' 'typeinfo for hvd::Mismatch' 'hvd::Config::from_environment()'; do
  grep -qF "$public" "$scratch/symbols" || failed "$public is hidden"
done
# What hvd::torch calls is visible. (To build it once more as a shared library would take minutes.)
torch=$(find "$scratch/stage" -name libhvd_torch.a)
if [ -n "$torch" ]; then
  nm -C "$torch" 2>/dev/null | sed -nE 's/^[0-9a-f]+ [A-TV-Za-z] //p' | sort -u >"$scratch/own"
  nm -uC "$torch" 2>/dev/null | sed -nE 's/^ +U (((vtable|typeinfo|typeinfo name) for )?hvd::.*)/\1/p' | sort -u | comm -23 - "$scratch/own" >"$scratch/needed"
  [ -s "$scratch/needed" ] || failed "hvd::torch needs nothing of the core"
  sed -E 's/^[0-9a-f]+ [A-Za-z] //' "$scratch/symbols" | sort -u | comm -23 "$scratch/needed" - >"$scratch/hidden"
  if [ -s "$scratch/hidden" ]; then
    cat "$scratch/hidden"
    failed "hvd::torch calls the functions above, which libhvd.so hides (HVD_BETWEEN_LIBRARIES shows them)"
  fi
fi
# Of the engine, only what hvd::torch calls; of GPUs how it gives memory back, and what types of functions are for an enumeration, which GCC
# does not hide.
if grep -E 'hvd::(Cutter|Ledger|Negotiator|Board|Timeline|formatted_by|install_world|make_bootstrap|shm|mpi|gpu|kernels)\b|fmt::' "$scratch/symbols" |
  grep -vE 'hvd::gpu::(set_memory_relief|relieve_memory)\(|typeinfo (name )?for hvd::gpu::CudaCode \(' ||
  grep -E 'hvd::(Engine|SmallCalls)::' "$scratch/symbols" | grep -vE '::(submit|check|persistent_name|try_run|wait|allocate)(\[abi:cxx11\])?\('; then
  failed "the symbols above are internal, but visible"
fi
try shared_stage shared_core '^hvd/(?!torch\.h)' -DWITH_TORCH=OFF
"$scratch/shared_core/values"
mpirun -np 2 "$scratch/shared_core/core_only"
ldd "$scratch/shared_core/core_only" >"$scratch/libraries"
grep -q libhvd.so "$scratch/libraries" || failed "the consumer is not linked with libhvd.so"
for program in "$scratch/stage/bin/hvd_bench" "$scratch/shared_stage/bin/hvd_bench"; do
  if [ -x "$program" ]; then quietly mpirun -np 2 "$program" -b 4 -e 4K --check --iterations 2; fi
done
for stage in "$scratch/stage" "$scratch/shared_stage"; do
  [ -x "$stage/bin/hvdrun" ] || continue
  quietly "$stage/bin/hvdrun" -np 2 "$scratch/shared_core/core_only"
  for file in share/man/man1/hvdrun.1 share/bash-completion/completions/hvdrun; do
    [ -s "$stage/$file" ] || failed "hvdrun is installed without $file"
  done
done
