#!/usr/bin/env bash
# Every source file is as clang-format 14 writes it. To put it right: bash tests/format.sh --fix
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for format in clang-format-14 clang-format; do
  if command -v "$format" >/dev/null && "$format" --version | grep -q 'version 14\.'; then break; fi
  format=
done
if [ -z "$format" ]; then
  echo "SKIP: clang-format 14 is not installed (Debian and Ubuntu: apt-get install clang-format-14)"
  exit 77
fi

mode=(--dry-run -Werror)
if [ "${1:-}" = --fix ]; then mode=(-i); fi
find hvd ops torch_bindings examples tools tests \( -name '*.h' -o -name '*.cc' -o -name '*.cu' \) -print0 | xargs -0 "$format" --style=file "${mode[@]}"
