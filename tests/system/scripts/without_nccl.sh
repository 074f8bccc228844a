#!/usr/bin/env bash
# With CUDA, without NCCL and UCX: the library compiles without a warning and links, says so, and works on host memory. (With both is the build
# that the other tests run on; without either, that of the sanitizers.) It is the shared library, which the test package installs.
# Usage: without_nccl.sh BUILD_FOLDER
# timeout: 600
# processors: 2
set -uo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
# shellcheck source=../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
# shellcheck source=../../support/shell/shared_build.sh
. "$root/tests/support/shell/shared_build.sh"
case $(of CMAKE_CUDA_COMPILER) in
  '' | *NOTFOUND)
    echo "SKIP: there is no CUDA toolkit here"
    exit 77
    ;;
esac
[ -x "$build/tools/hvd_bench" ] || { echo "SKIP: hvd_bench was not built"; exit 77; }

failed() {
  echo "FAILED: $1"
  exit 1
}
shared= shared_log=
shared_build "$build" || exit 1
if grep -i 'warning' "$shared_log"; then failed "it compiles with warnings"; fi
log=$build/tests/without_nccl.log
bench=$shared/tools/hvd_bench
libraries=$(ldd "$bench") || failed "ldd"
if grep -i 'nccl' <<<"$libraries"; then failed "it is linked with NCCL"; fi
grep -q 'libcudart' <<<"$libraries" || failed "it is not linked with CUDA"

export HVD_LOG_LEVEL=info
if ! timeout --kill-after=5 60 mpirun -np 2 "$bench" -b 4 -e 4K --check --iterations 2 >"$log.run" 2>&1 </dev/null; then
  cat "$log.run"
  failed "hvd_bench fails"
fi
grep -q 'built without NCCL, CUDA' "$log.run" || { cat "$log.run"; failed "init() does not say what the build lacks"; }
HVD_SHARED_MEMORY=off timeout --kill-after=5 60 "$root/tests/support/shell/ranks.sh" 2 "$bench" -e 4 >"$log.run" 2>&1 </dev/null
[ "$(grep -c 'hvd then needs UCX, but hvd was built without UCX' "$log.run")" -ge 2 ] || { cat "$log.run"; failed "it does not say that UCX is missing"; }
echo "PASS  with CUDA, without NCCL and UCX"
