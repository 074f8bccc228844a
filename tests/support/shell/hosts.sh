#!/usr/bin/env bash
# Starts ranks without MPI, as ranks.sh does, on hosts that this machine pretends to be (on_host.sh): hosts.sh 2,2 COMMAND... has two ranks on
# each of two. Exits with 77 where it cannot, otherwise as ranks.sh does.
# Usage: hosts.sh RANKS[,RANKS...] COMMAND...
set -u

support=$(dirname "${BASH_SOURCE[0]}")
started=()
trap 'kill "${started[@]}" 2>/dev/null' TERM INT
finish() { # ends with the exit code of the first that failed
  local process ended code=0
  for process in "${started[@]}"; do
    wait "$process"
    ended=$?
    [ "$code" -ne 0 ] || code=$ended
  done
  exit "$code"
}

if [ "$1" = --host ]; then # on one of them: its first rank, how many
  first=$2
  export LOCAL_WORLD_SIZE=$3
  shift 3
  for ((place = 0; place < LOCAL_WORLD_SIZE; place++)); do
    command=()
    for word in "$@"; do command+=("${word//\{rank\}/$((first + place))}"); done
    RANK=$((first + place)) LOCAL_RANK=$place "${command[@]}" &
    started+=($!)
  done
  finish
fi

IFS=, read -ra hosts <<<"$1"
shift
bash "$support/on_host.sh" pretended true || exit 77
WORLD_SIZE=0
for ranks in "${hosts[@]}"; do WORLD_SIZE=$((WORLD_SIZE + ranks)); done
: "${MASTER_ADDR:=127.0.0.1}" "${MASTER_PORT:=$((15000 + (BASHPID * 61 + RANDOM) % 14000))}"
export WORLD_SIZE MASTER_ADDR MASTER_PORT
first=0
for number in "${!hosts[@]}"; do
  bash "$support/on_host.sh" "pretended-$number" bash "${BASH_SOURCE[0]}" --host "$first" "${hosts[$number]}" "$@" &
  started+=($!)
  first=$((first + hosts[number]))
done
finish
