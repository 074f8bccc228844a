#!/usr/bin/env bash
# Installs the build into a folder, moves it, and configures, builds and runs a consumer of it there.
#   run.sh BUILD_FOLDER CMAKE GENERATOR
set -euo pipefail

build=$1 cmake=$2 generator=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
scratch=$build/tests/package
rm -rf "$scratch"
mkdir -p "$scratch"

"$cmake" --install "$build" --prefix "$scratch/first" >"$scratch/install.log" || {
  cat "$scratch/install.log"
  exit 1
}
mv "$scratch/first" "$scratch/stage"
if grep -rlF -e "$scratch/first" -e "$(cd "$here/../.." && pwd)/hvd" "$scratch/stage" --include='*.cmake'; then
  echo "the files above name the source tree or the first place of the installation"
  exit 1
fi

# try <folder> <program> <ranks> <arguments of cmake>...
try() {
  local folder=$scratch/$1 program=$2 ranks=$3
  shift 3
  "$cmake" -S "$here" -B "$folder" -G "$generator" -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$scratch/stage" "$@"
  "$cmake" --build "$folder"
  mpirun -np "$ranks" "$folder/$program"
}

try core core_only 1 -DWITH_TORCH=OFF
if [ -n "$(find "$scratch/stage" -name hvd-torch-targets.cmake)" ]; then
  try torch with_torch 2 -DWITH_TORCH=ON
else
  echo "hvd::torch is not part of this build: its consumer was left out"
fi
