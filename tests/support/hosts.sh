#!/usr/bin/env bash
# Starts ranks without MPI, as ranks.sh does, on hosts that this machine pretends to be: hosts.sh 2,2 COMMAND... has two ranks on each of two.
# Each host is a UTS namespace with a name of its own; by that ranks that meet in a store tell hosts apart, so ranks of two of them share no
# memory. Exits with 77 where the system has no such namespaces, otherwise as ranks.sh does.
# Usage: hosts.sh RANKS[,RANKS...] COMMAND...
set -u

if [ "$1" = --host ]; then # one host: its number, its first rank, how many
  number=$2 first=$3 LOCAL_WORLD_SIZE=$4
  shift 4
  hostname "pretended-$number" || exit 77
  export LOCAL_WORLD_SIZE
  started=()
  trap 'kill "${started[@]}" 2>/dev/null' TERM INT
  for ((place = 0; place < LOCAL_WORLD_SIZE; place++)); do
    RANK=$((first + place)) LOCAL_RANK=$place "$@" &
    started+=($!)
  done
  code=0
  for process in "${started[@]}"; do
    wait "$process"
    ended=$?
    [ "$code" -ne 0 ] || code=$ended
  done
  exit "$code"
fi

IFS=, read -ra hosts <<<"$1"
shift
apart=(unshare --uts)
"${apart[@]}" true 2>/dev/null || apart=(unshare --map-root-user --uts) # who is not root needs a user namespace besides
"${apart[@]}" hostname pretended 2>/dev/null || { echo "SKIP: this system lets nobody pretend to be several hosts (unshare --uts)"; exit 77; }
WORLD_SIZE=0
for ranks in "${hosts[@]}"; do WORLD_SIZE=$((WORLD_SIZE + ranks)); done
: "${MASTER_ADDR:=127.0.0.1}" "${MASTER_PORT:=$((15000 + (BASHPID * 61 + RANDOM) % 14000))}"
export WORLD_SIZE MASTER_ADDR MASTER_PORT
started=()
trap 'kill "${started[@]}" 2>/dev/null' TERM INT
first=0
for number in "${!hosts[@]}"; do
  "${apart[@]}" bash "${BASH_SOURCE[0]}" --host "$number" "$first" "${hosts[$number]}" "$@" &
  started+=($!)
  first=$((first + hosts[number]))
done
code=0
for process in "${started[@]}"; do
  wait "$process"
  ended=$?
  [ "$code" -ne 0 ] || code=$ended
done
exit "$code"
