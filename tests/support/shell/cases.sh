# To be sourced by scripts of many cases that mostly wait: for launchers, for ranks that end. They run side by side, each in a folder of its
# own, $work, with a $failures of its own; their output comes in the order in which they were started. Temporary files of each lie apart, too:
# where two mpirun begin and end in one folder, one may remove what the other has just found there.
#   start COMMAND...   runs COMMAND, as a rule a function that ends by `exit` where it fails, beside at most HVD_CASES (4) - 1 others
#   finish_cases       waits for all, prints what they said, and fails if any counted a failure or ended with another code than 0
# shellcheck shell=bash

cases_folder=$(mktemp -d)
trap 'rm -rf "$cases_folder"' EXIT
cases=()

start() {
  local n=${#cases[@]}
  while [ "$(jobs -rp | wc -l)" -ge "${HVD_CASES:-4}" ]; do wait -n || :; done
  mkdir "$cases_folder/$n"
  (
    trap - EXIT
    work=$cases_folder/$n failures=0
    export TMPDIR=$work/temporary
    mkdir "$TMPDIR"
    "$@" # not behind || or if: set -e of the script must hold in it
    exit $((failures > 0))
  ) >"$cases_folder/$n.out" 2>&1 &
  cases+=($!)
}

finish_cases() {
  local n failed=0
  for n in "${!cases[@]}"; do
    wait "${cases[$n]}" || failed=$((failed + 1))
    cat "$cases_folder/$n.out"
  done
  echo "$failed of ${#cases[@]} failed"
  [ "${#cases[@]}" -gt 0 ] && [ "$failed" -eq 0 ]
}
