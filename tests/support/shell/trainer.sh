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
# few_images FOLDER TRAIN TEST: a data set for `--dataset mnist` of so many images, of noise. A ResNet in 16 bits takes seconds for ten
# images, and of the embedded ones a thousand are evaluated.
few_images() {
  local folder=$1 part number i
  mkdir "$folder"
  seq 400000 | gzip -n >"$folder/noise"
  for part in "train $2" "t10k $3"; do
    read -r part number <<<"$part"
    {
      printf '\0\0\10\1\0\0%b' "$(printf '\\0%o' $((number / 256)) $((number % 256)))"
      for ((i = 0; i < number; ++i)); do printf '%b' "\\0$((i % 8))"; done
    } >"$folder/$part-labels-idx1-ubyte"
    {
      printf '\0\0\10\3\0\0%b\0\0\0\34\0\0\0\34' "$(printf '\\0%o' $((number / 256)) $((number % 256)))"
      tail -c $((number * 28 * 28)) "$folder/noise"
    } >"$folder/$part-images-idx3-ubyte"
  done
}
