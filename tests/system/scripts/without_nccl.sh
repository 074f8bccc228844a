#!/usr/bin/env bash
# With CUDA, without NCCL and UCX: the library compiles without a warning and links, says so, and works on host memory. (With both is the build
# that the other tests run on; without either, that of the sanitizers.)
# Usage: without_nccl.sh BUILD_FOLDER
# timeout: 600
# processors: 2
set -uo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
# shellcheck source=../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
# shellcheck source=../../../cmake/build.sh
. "$root/cmake/build.sh"
cache=$build/CMakeCache.txt
# of VARIABLE: what the build was configured with
of() { sed -n "s/^$1:[A-Z]*=//p" "$cache"; }
nvcc=$(of CMAKE_CUDA_COMPILER)
case $nvcc in
  '' | *NOTFOUND)
    echo "SKIP: there is no CUDA toolkit here"
    exit 77
    ;;
esac

[ -x "$build/tools/hvd_bench" ] || { echo "SKIP: hvd_bench was not built"; exit 77; }

own=$build/tests/without_nccl
log=$build/tests/without_nccl.log
failed() {
  echo "FAILED: $1"
  exit 1
}
cmake=$(of CMAKE_COMMAND)
options=(-G "$(of CMAKE_GENERATOR)" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 -DHVD_CUDA=ON -DHVD_NCCL=OFF -DHVD_UCX=OFF -DHVD_TORCH_BINDINGS=OFF)
options+=(-DHVD_WARNINGS_AS_ERRORS=ON -DHVD_INSTALL=OFF -DHVD_BUILD_TESTS=OFF)
architectures=$(of HVD_CUDA_ARCHITECTURES)
options+=(-DHVD_CUDA_ARCHITECTURES="${architectures%%;*}") # one is enough here
for variable in CMAKE_MAKE_PROGRAM CMAKE_CXX_COMPILER CMAKE_CUDA_COMPILER CMAKE_CUDA_HOST_COMPILER CMAKE_PREFIX_PATH CMAKE_CXX_FLAGS \
  CMAKE_CUDA_FLAGS CUDAToolkit_ROOT MPI_HOME OPENSSL_ROOT_DIR OPENSSL_USE_STATIC_LIBS; do
  value=$(of "$variable")
  if [ -n "$value" ]; then options+=("-D$variable=$value"); fi
done
if ! "$cmake" -S "$root" -B "$own" "${options[@]}" >"$log" 2>&1; then
  cat "$log"
  failed "it cannot be configured"
fi
if ! "$cmake" --build "$own" --parallel "${HVD_JOBS:-$(hvd_jobs)}" --target hvd_bench >"$log" 2>&1; then
  cat "$log"
  failed "it does not compile"
fi
if grep -i 'warning' "$log"; then failed "it compiles with warnings"; fi
bench=$own/tools/hvd_bench
libraries=$(ldd "$bench") || failed "ldd"
if grep -i 'nccl' <<<"$libraries"; then failed "it is linked with NCCL"; fi
grep -q 'libcudart' <<<"$libraries" || failed "it is not linked with CUDA"

export HVD_LOG_LEVEL=info
if ! timeout --kill-after=5 60 mpirun -np 2 "$bench" -b 4 -e 4K --check --iterations 2 >"$log.run" 2>&1 </dev/null; then
  cat "$log.run"
  failed "hvd_bench fails"
fi
grep -q 'built without NCCL, CUDA' "$log.run" || { cat "$log.run"; failed "init() does not say what the build lacks"; }
HVD_SHARED_MEMORY=off timeout --kill-after=5 60 "$root/tests/support/ranks.sh" 2 "$bench" -e 4 >"$log.run" 2>&1 </dev/null
[ "$(grep -c 'hvd then needs UCX, but hvd was built without UCX' "$log.run")" -ge 2 ] || { cat "$log.run"; failed "it does not say that UCX is missing"; }
echo "PASS  with CUDA, without NCCL and UCX"
