#!/usr/bin/env bash
# Installs what the project needs and this machine lacks; says nothing where nothing is missing. examples/train.sh and tests/run.sh call it.
#   bash cmake/setup.sh [--tests]     --tests: also what the tests need
# System packages come through apt on Debian and Ubuntu, as root or with sudo; elsewhere it says what to install and fails.
# LibTorch: HVD_TORCH (a LibTorch folder, or the folder torch of a Python installation), one on CMAKE_PREFIX_PATH, or the one that
# python3 imports is used. Where there is none, the wheel torch goes into a virtual environment in HVD_DEPS_DIR (.deps in this project).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
deps=${HVD_DEPS_DIR:-$root/.deps}
torch_version=2.11.0
torchvision_version=0.26.0 # goes with that torch; for the tests only
tensorboard_version=2.20.0 # reads what the trainer writes; for the tests only
cuda_runtime_version=13.0.96 # what libtorch_cpu of that wheel loads at start, even without a GPU
cuda_cupti_version=13.0.85

with_tests=0
case ${1:-} in
  '') ;;
  --tests) with_tests=1 ;;
  *)
    sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac

say() { printf 'setup: %s\n' "$*"; }
have() { command -v "$1" >/dev/null 2>&1; }

# Runs a command with its output in a log, which is shown only if it fails.
logged() {
  mkdir -p "$deps"
  if ! "$@" >>"$deps/setup.log" 2>&1 </dev/null; then
    say "failed: $*; the last lines of $deps/setup.log:" >&2
    tail -n 20 "$deps/setup.log" >&2
    exit 1
  fi
}

# Can <header> be included? Looks where the compiler and CMake look.
have_header() {
  local flags=() prefix prefixes
  IFS=: read -ra prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  for prefix in "${prefixes[@]}"; do flags+=("-I$prefix/include"); done
  printf '#if !__has_include(<%s>)\n#error missing\n#endif\n' "$1" | "${CXX:-c++}" "${flags[@]}" -E -x c++ -o /dev/null - 2>/dev/null
}

# $1 >= $2, as version numbers
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }
cmake_version() { cmake --version 2>/dev/null | sed -n '1s/.* //p'; }
have_cmake() { have cmake && at_least "$(cmake_version)" 3.25; }

find_nvcc() {
  local folder
  for folder in "${CUDACXX:+$(dirname "$CUDACXX")}" "${CUDA_HOME:+$CUDA_HOME/bin}" "${CUDAToolkit_ROOT:+$CUDAToolkit_ROOT/bin}" /usr/local/cuda/bin; do
    if [ -n "$folder" ] && [ -x "$folder/nvcc" ]; then return 0; fi
  done
  have nvcc
}

# ---- System packages: one line per thing that may be missing.
missing_packages() {
  have "${CXX:-c++}" || echo g++
  have cmake || [ -x "$deps/venv/bin/cmake" ] || echo cmake
  have ninja || have make || echo ninja-build
  have mpicxx || echo libopenmpi-dev
  have mpirun || echo openmpi-bin
  have_header fmt/core.h || echo libfmt-dev
  have_header CLI/CLI.hpp || echo libcli11-dev
  have_header nlohmann/json.hpp || echo nlohmann-json3-dev
  have_header openssl/hmac.h || echo libssl-dev
  have_header zlib.h || echo zlib1g-dev
  have_header jpeglib.h || echo libjpeg-dev
  have_header png.h || echo libpng-dev
  if [ "$with_tests" = 1 ]; then
    have_header doctest/doctest.h || echo doctest-dev
    have ps || echo procps
  fi
}

# Things that only help: taken along where apt works, never demanded.
helpful_packages() {
  have ccache || echo ccache
  have_header ucp/api/ucp.h || echo libucx-dev # the wire between hosts without MPI; its library comes with it
  if [ "$with_tests" = 1 ]; then
    have clang-format-14 || { have clang-format && clang-format --version | grep -q 'version 14\.'; } || echo clang-format-14
    have clang++-14 || have clang++ || printf '%s\n' clang-14 libclang-rt-14-dev # for tests/fuzz
    have doxygen || echo doxygen
  fi
}

python_packages() {
  have python3 || echo python3
  python3 -c 'import venv, ensurepip' 2>/dev/null || echo python3-venv
}

is_debian() { [ -r /etc/os-release ] && grep -Eq '^ID(_LIKE)?=.*(debian|ubuntu)' /etc/os-release && have apt-get; }

as_root() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  else
    sudo "$@"
  fi
}

# all_tried <helpful>...: whether an earlier run has tried to install each of them
all_tried() {
  local package
  for package in "$@"; do grep -qxs -- "$package" "$deps/helpful-tried" || return 1; done
}

# install_packages <needed>... -- <helpful>...
install_packages() {
  local needed=() helpful=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    needed+=("$1")
    shift
  done
  shift
  helpful=("$@")
  if [ ${#needed[@]} -eq 0 ] && { [ ${#helpful[@]} -eq 0 ] || ! is_debian || [ "$(id -u)" != 0 ] || all_tried "${helpful[@]}"; }; then return; fi
  if ! is_debian || { [ "$(id -u)" != 0 ] && ! have sudo; }; then
    say "please install these (names of Debian's packages): ${needed[*]}" >&2
    if is_debian; then
      say "as root: apt-get install ${needed[*]}" >&2
    else
      say "that is: a C++20 compiler, CMake >= 3.25, Ninja or make, Open MPI with its headers, and the headers of fmt, OpenSSL, CLI11, nlohmann-json, zlib, libjpeg-turbo, libpng, for the tests doctest; found through PATH, CPATH and CMAKE_PREFIX_PATH" >&2
    fi
    exit 1
  fi
  local all=("${needed[@]}" "${helpful[@]}")
  say "apt-get install ${all[*]}"
  mkdir -p "$deps"
  if [ -z "${apt_updated:-}" ]; then logged as_root env DEBIAN_FRONTEND=noninteractive apt-get update; fi
  apt_updated=1
  if [ ${#needed[@]} -gt 0 ]; then
    logged as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${needed[@]}"
  fi
  for package in "${helpful[@]}"; do
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$package" >>"$deps/setup.log" 2>&1 </dev/null ||
      say "$package could not be installed; going on without it"
  done
  printf '%s\n' "${helpful[@]}" >>"$deps/helpful-tried"
}

# ---- A virtual environment for what comes from the Python package index.
make_venv() {
  if [ -x "$deps/venv/bin/pip" ]; then return; fi
  local packages
  mapfile -t packages < <(python_packages)
  if [ ${#packages[@]} -gt 0 ]; then install_packages "${packages[@]}" --; fi
  logged python3 -m venv "$deps/venv"
}
pip_install() { logged "$deps/venv/bin/pip" install --disable-pip-version-check "$@"; }

# pip writes RECORD last: a wheel whose installation was cut short has none.
own_torch_complete() { compgen -G "$deps/venv/lib/python3*/site-packages/torch-$torch_version*.dist-info/RECORD" >/dev/null; }
own_torch_has_cuda() { compgen -G "$deps/venv/lib/python3*/site-packages/nvidia/cudnn" >/dev/null; }
own_torch_usable() { own_torch_complete && { own_torch_has_cuda || ! find_nvcc; }; }

# A LibTorch that this machine has, other than ours; prints its folder.
foreign_torch() { cmake -P "$root/cmake/HvdFindTorch.cmake"; }

install_torch() {
  local start=$SECONDS
  make_venv
  if find_nvcc; then
    say "LibTorch from the wheel torch==$torch_version with its CUDA libraries into $deps/venv (4.6 GB, some minutes)"
    pip_install "torch==$torch_version"
  else
    say "no CUDA toolkit (nvcc) found: this is a CPU build"
    say "LibTorch from the wheel torch==$torch_version into $deps/venv (1.3 GB)"
    pip_install --no-deps "nvidia-cuda-runtime==$cuda_runtime_version" "nvidia-cuda-cupti==$cuda_cupti_version"
    pip_install --no-deps "torch==$torch_version"
  fi
  say "LibTorch is there after $((SECONDS - start)) s"
}

mapfile -t needed < <(missing_packages)
mapfile -t helpful < <(helpful_packages)
install_packages "${needed[@]}" -- "${helpful[@]}"

if ! have_cmake && ! [ -x "$deps/venv/bin/cmake" ]; then
  say "CMake $(cmake_version) is older than 3.25: a newer one into $deps/venv"
  make_venv
  pip_install 'cmake>=3.25,<4'
fi
if ! have_cmake; then PATH="$deps/venv/bin:$PATH"; fi

if ! own_torch_usable; then
  foreign=$(foreign_torch) # fails where HVD_TORCH is no LibTorch, and says so
  if [ -z "$foreign" ]; then install_torch; fi
fi

# For the tests that compare with Python: taken along where its torch can be imported, never demanded (the tests say that they are skipped).
if [ "$with_tests" = 1 ] && own_torch_complete && [ ! -e "$deps/torchvision-tried" ]; then
  "$deps/venv/bin/pip" install --disable-pip-version-check typing-extensions sympy >>"$deps/setup.log" 2>&1 || true # torch imports them
  if (cd "$deps" && "$deps/venv/bin/python" -c 'import torch') >>"$deps/setup.log" 2>&1; then
    say "torchvision==$torchvision_version, for the tests"
    "$deps/venv/bin/pip" install --disable-pip-version-check numpy pillow >>"$deps/setup.log" 2>&1 &&
      "$deps/venv/bin/pip" install --disable-pip-version-check --no-deps "torchvision==$torchvision_version" >>"$deps/setup.log" 2>&1 ||
      say "torchvision could not be installed; going on without it"
  fi
  touch "$deps/torchvision-tried"
fi
if [ "$with_tests" = 1 ] && [ -e "$deps/torchvision-tried" ] && [ ! -e "$deps/tensorboard-tried" ]; then
  say "tensorboard==$tensorboard_version, for the tests"
  "$deps/venv/bin/pip" install --disable-pip-version-check --no-deps "tensorboard==$tensorboard_version" absl-py protobuf packaging >>"$deps/setup.log" 2>&1 ||
    say "tensorboard could not be installed; going on without it"
  touch "$deps/tensorboard-tried"
fi
