# To be sourced by scripts that run the trainer: cases that run side by side (cases.sh), and what its records say.
# shellcheck shell=bash

# shellcheck source=cases.sh
. "$(dirname "${BASH_SOURCE[0]}")/cases.sh"

# fail WORDS: ends the case with what programs said, where that is in $work/out or $work/NAME.out
fail() {
  echo "FAILED: $*"
  cat "$work"/out "$work"/*.out 2>/dev/null || true
  exit 1
}
# last FILE FIELD: the field of the last record; where there is none, words that equal no other's
last() { awk -F'[:,] *' -v field="\"$2\"" '$1 ~ field { value = $2 } END { print value == "" ? "no " field " in " FILENAME : value }' "$1"; }
