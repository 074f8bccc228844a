#!/usr/bin/env bash
# A host that falls silent, as one without power or network does, ends the world of the others with its name after HVD_HOST_TIMEOUT_SECONDS, 30 by
# default, whether they wait for it or not, and they can end. So does its leader alone, for its own host too. Hosts whose ranks compute, with more
# threads than cores, are not silent.
# Usage: silent_host.sh BUILD_FOLDER
# timeout: 300
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
build=$(cd "$1" && pwd)
# shellcheck source=../../support/shell/cases.sh
. "$root/tests/support/shell/cases.sh"
"$build/tools/hvdrun" --check-build | grep -q '\[X\] UCX' || { echo "SKIP: this build has no UCX"; exit 77; }
bash "$root/tests/support/shell/on_host.sh" pretended true || exit 77
export UCX_TLS=tcp,self

# hosts NAME SECONDS RANKS_OF_HOSTS COUNT WORDS ARGUMENTS...: with that host timeout (empty: the default) so many lines must match the words, and as
# many ranks must end
hosts() {
  local name=$1 seconds=$2 ranks=$3 count=$4 words=$5 found ended job looks
  shift 5
  : >"$work/out" # it is looked at before the job may have made it
  HVD_HOST_TIMEOUT_SECONDS=$seconds bash "$root/tests/support/shell/hosts.sh" "$ranks" "$build/tests/silent_host" "$@" "$work/over" >>"$work/out" 2>&1 </dev/null &
  job=$!
  for ((looks = 0; looks < 1000; looks++)); do
    ended=$(grep -acE '^rank [0-9]+ has ended' "$work/out")
    [ "$ended" -lt "$count" ] || break
    sleep 0.1
  done
  touch "$work/over"
  wait "$job"
  found=$(grep -acE -- "$words" "$work/out")
  if [ "$found" -eq "$count" ] && [ "$ended" -eq "$count" ]; then
    echo "PASS  $name: $(grep -aE -m 1 -- "$words" "$work/out")"
  else
    echo "FAIL  $name: $found lines and $ended ends instead of $count; output:"
    sed 's/^/      /' "$work/out"
    failures=$((failures + 1))
  fi
}

silence() { echo "^rank [0-9]: RankFailed after [0-9]+ s: nothing has come from $1 for ($2) s: .*HVD_HOST_TIMEOUT_SECONDS=$3"; }
# The words say how long the silence was when it was found: in idle ranks long before they look.
start hosts "by default, while the others wait" "" 2,1 2 "$(silence "rank 2" "3[0-9]" 30)" flight 0
start hosts "by default, while they are idle" "" 1,2 1 "$(silence "ranks 1-2" "3[0-9]" 30)" idle 45
start hosts "after 3 s, while the others wait" 3 2,2 2 "$(silence "ranks 2-3" "[3-9]" 3)" flight 0
start hosts "after 4 s, also to its own host, where its leader alone is silent" 4 2,2 3 "$(silence "ranks? 2(-3|, .*)?" "[4-9]" 4)" leader 0
start hosts "after 5 s, while they are idle, on three hosts" 5 1,1,1 2 "$(silence "rank 2" "[5-9]" 5)" idle 20
start hosts "hosts whose ranks compute" 8 2,2 4 "^rank [0-3] has ended" computes 20
finish_cases
