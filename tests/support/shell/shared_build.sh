# To be sourced by tests of other builds than the one under test: shared_build BUILD_FOLDER builds, once for all of them, libhvd.so and, if
# BUILD_FOLDER has them, the tools: with CUDA where there is a toolkit, without NCCL, UCX and LibTorch. It lies beside BUILD_FOLDER and has its
# flags, so that ccache has nearly all objects. It sets $shared, the folder, and $shared_log, what configuration and compilers have said there
# since it was made; it fails if they did.
# of VARIABLE: what BUILD_FOLDER, $build, was configured with.
# shellcheck shell=bash disable=SC2154

of() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }

shared_build() {
  local root options=() targets=(hvd_shared_ops) variable value cmake
  build=$1 shared=${1%/}-shared
  shared_log=$shared/shared.log
  mkdir -p "$shared"
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
  # shellcheck source=../../../cmake/build.sh
  . "$root/cmake/build.sh"
  options+=(-DBUILD_SHARED_LIBS=ON -DHVD_NCCL=OFF -DHVD_UCX=OFF -DHVD_TORCH_BINDINGS=OFF -DHVD_BUILD_TESTS=OFF -DHVD_WARNINGS_AS_ERRORS=ON)
  case $(of CMAKE_CUDA_COMPILER) in
    '' | *NOTFOUND) options+=(-DHVD_CUDA=OFF) ;;
    *) options+=(-DHVD_CUDA=ON) ;;
  esac
  for variable in CMAKE_BUILD_TYPE HVD_CUDA_ARCHITECTURES CMAKE_MAKE_PROGRAM CMAKE_CXX_COMPILER CMAKE_CUDA_COMPILER CMAKE_CUDA_HOST_COMPILER \
    CMAKE_PREFIX_PATH CMAKE_CXX_FLAGS CMAKE_CUDA_FLAGS CUDAToolkit_ROOT MPI_HOME OPENSSL_ROOT_DIR OPENSSL_USE_STATIC_LIBS; do
    value=$(of "$variable")
    if [ -n "$value" ]; then options+=("-D$variable=$value"); fi
  done
  if [ "$(of HVD_BUILD_TOOLS)" = ON ]; then targets+=(hvd_bench hvdrun); fi
  cmake=$(of CMAKE_COMMAND)
  (
    flock 9 # another test may be at it
    [ -e "$shared/CMakeCache.txt" ] || rm -f "$shared_log"
    "$cmake" -S "$root" -B "$shared" -G "$(of CMAKE_GENERATOR)" "${options[@]}" >>"$shared_log" 2>&1 &&
      "$cmake" --build "$shared" --parallel "${HVD_JOBS:-$(hvd_jobs)}" --target "${targets[@]}" >>"$shared_log" 2>&1
  ) 9>"$shared/shared.lock" || {
    cat "$shared_log"
    echo "FAILED: the build with shared libraries"
    return 1
  }
}
