#!/usr/bin/env bash
# No function is longer than a screen (tests/function_length.py), and the check notices one that is. Skipped (77) where python3 is missing.
#   bash tests/function_length.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
if ! command -v python3 >/dev/null; then
  echo "SKIP: python3 is missing (Debian and Ubuntu: apt-get install python3)"
  exit 77
fi
python3 function_length.py --notices

# The whole way, with a function planted in a folder.
work=$(mktemp -d "${TMPDIR:-/tmp}/hvd.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/hvd/base"
{
  echo 'int planted(int x) {'
  for _ in {1..60}; do echo '  ++x;'; done
  echo '}'
} >"$work/hvd/base/a.cc"
if python3 function_length.py "$work" >"$work/said" || ! grep -q 'hvd/base/a.cc:1: 62 lines: int planted' "$work/said"; then
  echo "not noticed: a function of 62 lines"
  cat "$work/said"
  exit 1
fi
python3 function_length.py
