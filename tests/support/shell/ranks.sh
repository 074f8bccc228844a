#!/usr/bin/env bash
# Starts so many ranks on this host without MPI, as torchrun and the like do: with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR
# and MASTER_PORT. {rank} in the command becomes the rank's number. Ends when all have ended, with the exit code of the lowest rank that
# failed.
# Usage: ranks.sh N COMMAND...
set -u

size=$1
shift
export WORLD_SIZE=$size LOCAL_WORLD_SIZE=$size
: "${MASTER_ADDR:=127.0.0.1}" "${MASTER_PORT:=$((15000 + (BASHPID * 61 + RANDOM) % 14000))}"
export MASTER_ADDR MASTER_PORT
started=()
trap 'kill "${started[@]}" 2>/dev/null' TERM INT
for ((rank = 0; rank < size; rank++)); do
  command=()
  for word in "$@"; do command+=("${word//\{rank\}/$rank}"); done
  RANK=$rank LOCAL_RANK=$rank "${command[@]}" &
  started+=($!)
done
code=0
for process in "${started[@]}"; do
  wait "$process"
  ended=$?
  [ "$code" -ne 0 ] || code=$ended
done
exit "$code"
