# To be sourced by the comparisons, which have a folder $work and the project's $root.
# shellcheck shell=bash

# has PYTHON CODE: whether that python is there and can run the code
has() { [ -n "$1" ] && command -v "$1" >/dev/null && (cd "$work" && "$1" -c "$2" >/dev/null 2>&1); }
port() { echo $((20000 + RANDOM % 12000)); }

# plot SVG PYTHON TITLE BASE UNIT NOTE SUBJECTS: of "$work/medians", which goes into a .tsv beside it with what the plot says
plot() {
  local svg=$1 tsv=${1%.svg}.tsv draw
  { printf '# title: %s\n# base: %s\n# unit: %s\n# note: %s\n# subjects: %s\n' "$3" "$4" "$5" "$6" "$7"; cat "$work/medians"; } >"$tsv"
  for draw in python3 "$2" ''; do if has "$draw" ""; then break; fi; done
  if [ -n "$draw" ]; then "$draw" "$root/tests/bench/plot.py" "$tsv" "$svg"; else echo "no plot: there is no python3 to draw $tsv"; fi
}
