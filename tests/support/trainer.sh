# To be sourced by scripts that run the trainer: a folder of their own, and what its records say.
# shellcheck shell=bash

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# fail WORDS: with what programs said, where that is in $work/out or $work/NAME.out
fail() {
  echo "FAILED: $*"
  cat "$work"/out "$work"/*.out 2>/dev/null || true
  exit 1
}
# last FILE FIELD: the field of the last record
last() { awk -F'[:,] *' -v field="\"$2\"" '$1 ~ field { value = $2 } END { print value }' "$1"; }
