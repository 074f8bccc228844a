# To be sourced: hvd_build <preset> [target...] configures the preset and builds it. Build folders are those of CMakePresets.json.
# HVD_JOBS: compilers at once; default as many as there are cores, but no more than one per 2.5 GB of free memory (files that include
# LibTorch need that much). HVD_CMAKE_ARGS: more arguments for the configuration.
# shellcheck shell=bash

hvd_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
hvd_deps=${HVD_DEPS_DIR:-$hvd_root/.deps}

# A CMake that setup.sh had to install.
if [ -x "$hvd_deps/venv/bin/cmake" ]; then PATH="$hvd_deps/venv/bin:$PATH"; fi
# ccache needs a place even where there is no home.
if [ -z "${CCACHE_DIR:-}" ] && ! [ -w "${HOME:-/nonexistent}" ]; then export CCACHE_DIR="$hvd_deps/ccache"; fi

hvd_jobs() {
  local cores free
  cores=$(nproc)
  free=$(awk '/^MemAvailable:/ {print int($2 / 2500000)}' /proc/meminfo)
  if [ "${free:-1}" -lt 1 ]; then free=1; fi
  echo $((cores < free ? cores : free))
}

hvd_build() {
  local preset=$1 folder generator=() targets=() log
  shift
  case $preset in
    release) folder=$hvd_root/build ;;
    *) folder=$hvd_root/build-$preset ;;
  esac
  if [ ! -e "$folder/CMakeCache.txt" ] && [ -z "${CMAKE_GENERATOR:-}" ] && command -v ninja >/dev/null; then generator=(-G Ninja); fi
  mkdir -p "$folder"
  log=$folder/configure.log
  # shellcheck disable=SC2086
  if ! (cd "$hvd_root" && cmake --preset "$preset" "${generator[@]}" ${HVD_CMAKE_ARGS:-}) >"$log" 2>&1; then
    cat "$log" >&2
    return 1
  fi
  if [ $# -gt 0 ]; then targets=(--target "$@"); fi
  # The summary once, with the first build.
  if [ ! -e "$folder/.hvd_built" ]; then sed -n '/^-- hvd /,/^-- Configuring done/{/Configuring done/!p}' "$log"; fi
  cmake --build "$folder" --parallel "${HVD_JOBS:-$(hvd_jobs)}" "${targets[@]}" || return 1
  touch "$folder/.hvd_built"
}
