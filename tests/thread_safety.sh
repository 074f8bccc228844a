#!/usr/bin/env bash
# Clang's thread-safety analysis finds nothing to say about the core's locks (hvd/negotiation/values/capabilities.h), and does notice a
# planted mistake.
#   bash tests/thread_safety.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for clang in clang++ clang++-14 clang++-15 clang++-16 clang++-17 clang++-18 clang++-19; do
  if command -v "$clang" >/dev/null; then break; fi
  clang=
done
if [ -z "$clang" ]; then
  echo "SKIP: clang is not installed (Debian and Ubuntu: apt-get install clang)"
  exit 77
fi

check() {  # FILE...
  printf '%s\0' "$@" | xargs -0 -n 1 -P "$(nproc)" "$clang" -std=c++20 -fsyntax-only -I. -DFMT_HEADER_ONLY=1 -Wno-everything -Wthread-safety -Werror=thread-safety
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mapfile -d '' files < <(find hvd/engine hvd/negotiation hvd/api -name '*.cc' -print0 | sort -z)
# Many at once, as in a unity build: most of the time goes into what all of them include.
for ((i = 0; i < ${#files[@]}; ++i)); do printf '#include "%s"\n' "${files[i]}" >>"$work/unity_$((4 * i / ${#files[@]})).cc"; done
check "$work"/unity_*.cc

# An analysis that finds nothing may also be one that looks at nothing.
planted() {  # NAME CODE
  printf '#include "hvd/engine/core/engine_lock.h"\n#include "hvd/negotiation/board/negotiation_log.h"\nnamespace hvd {\n%s\n}\n' "$2" >"$work/$1.cc"
  if check "$work/$1.cc" 2>"$work/said"; then
    echo "not noticed: $1" >&2
    exit 1
  fi
  grep -q 'thread-safety' "$work/said" || { cat "$work/said" >&2; exit 1; }
}
planted call_without_lock 'void f(EngineMutex& mutex) { mutex.wake_worker(); }'
planted append_without_transaction 'void f(EngineMutex& m, Transaction& log) { EngineLock lock(m); log.append({}); }'
planted read_without_lock 'void f(NegotiationLog& log) { log.read(); }'
echo "thread safety: ${#files[@]} files, no finding"
