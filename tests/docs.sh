#!/usr/bin/env bash
# The documents are true and complete. Skipped (77) where the tool is missing.
#   bash tests/docs.sh links [BUILD_FOLDER]     links, paths, commands, options and knobs in README, CONTRIBUTING, CHANGELOG and docs/
#   bash tests/docs.sh tutorial [BUILD_FOLDER]  code in docs/tutorial.md is that of examples/tutorial, whose files fit a screen or two; names
#                                               hvd::... in the documents are those of public headers; the Chinese pages have the same code
#   bash tests/docs.sh routes [BUILD_FOLDER]    the tables of docs/routes.md are what hvd_bench --routes prints
#   bash tests/docs.sh api [BUILD_FOLDER]       the API reference, by Doxygen, without a warning: into BUILD_FOLDER/api/html
#   bash tests/docs.sh exercise [BUILD_FOLDER]  the new backend of CONTRIBUTING.md compiles
#   bash tests/docs.sh notices [BUILD_FOLDER]   the checks above find what they must
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=${2:-$root/build}
need() {
  if ! command -v "$1" >/dev/null; then
    echo "SKIP: $1 is missing (Debian and Ubuntu: apt-get install $1)"
    exit 77
  fi
}

# api SOURCES OUT: makes the reference of the headers in SOURCES; says what is wrong with them, and fails, if anything is.
api() {
  local sources=$1 out=$2 code=0
  mkdir -p "$out"
  (cd "$sources" && HVD_API_FOLDER=$out HVD_VERSION=$version doxygen "$root/docs/Doxyfile" >"$out/log" 2>"$out/warnings") || code=$?
  sed "s|^$sources/||" "$out/warnings"
  [ "$code" = 0 ] && [ ! -s "$out/warnings" ]
}
version=$(sed -n 's/^project(hvd VERSION \([0-9.]*\).*/\1/p' "$root/CMakeLists.txt")

case ${1:-} in
  links)
    need python3
    exec python3 "$root/tests/docs_check.py" "$build"
    ;;
  tutorial)
    need python3
    exec python3 "$root/tests/docs_tutorial.py"
    ;;
  routes)
    need python3
    exec python3 "$root/tests/routes.py" --page "$build"
    ;;
  api)
    need doxygen
    api "$root" "$build/api"
    echo "$(find "$build/api/html" -name '*.html' | wc -l) pages in $build/api/html"
    ;;
  exercise)
    need python3
    exec python3 "$root/tests/docs_exercise.py" "$build"
    ;;
  notices)
    need python3
    python3 "$root/tests/docs_check.py" --notices "$build"
    python3 "$root/tests/docs_tutorial.py" --notices
    need doxygen
    work=$(mktemp -d "${TMPDIR:-/tmp}/hvd.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    mkdir -p "$work/docs" "$work/hvd"
    (cd "$root" && find torch_bindings -type d -print0) | (cd "$work" && xargs -0 mkdir -p)
    touch "$work/docs/api.dox"
    printf '/// File.\n#pragma once\nnamespace hvd {\n/// Returns one.\nint known();\nint planted(int x);\n}\n' >"$work/hvd/hvd.h"
    if api "$work" "$work/api" >"$work/said" || ! grep -q 'hvd/hvd.h:6.*planted' "$work/said"; then
      echo "not noticed: a function without a comment"
      cat "$work/said"
      exit 1
    fi
    sed -i 's|^int planted|/// Returns two. @param y no such one\nint planted|' "$work/hvd/hvd.h"
    if api "$work" "$work/api" >"$work/said" || ! grep -q "'y'" "$work/said"; then
      echo "not noticed: a parameter that is not there"
      cat "$work/said"
      exit 1
    fi
    sed -i 's| @param y no such one||' "$work/hvd/hvd.h"
    if ! api "$work" "$work/api"; then
      echo "wrongly refused: a header that is documented"
      exit 1
    fi
    ;;
  *)
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
