# To be sourced by scripts whose cases are jobs of several ranks, with cases.sh and cmake/mpi_env.sh.
#   job NAME RANKS CODES COUNT WORDS COMMAND...   runs COMMAND under mpirun: it must end within a minute, with one of CODES (a list; "failure":
#                                                 any but 0), and print COUNT lines that match the extended regular expression WORDS (COUNT
#                                                 may be "some"). $mpirun_options are mpirun's.
# shellcheck shell=bash

job() {
  local name=$1 ranks=$2 codes=$3 count=$4 words=$5 problem='' status found
  shift 5
  # shellcheck disable=SC2086  # options
  timeout --kill-after=5 60 mpirun ${mpirun_options:-} -np "$ranks" "$@" >"$work/out" 2>&1 </dev/null
  status=$?
  found=$(grep -acE -- "$words" "$work/out")
  case $status in
    124 | 137) [[ " $codes " == *" $status "* ]] || problem="it hangs" ;;
    0) [[ " $codes " == *" 0 "* ]] || problem="exit code 0" ;;
    *) [[ $codes == failure || " $codes " == *" $status "* ]] || problem="exit code $status, not one of $codes" ;;
  esac
  if [ -z "$problem" ] && [ "$count" = some ] && [ "$found" -eq 0 ]; then problem="no line says '$words'"; fi
  if [ -z "$problem" ] && [ "$count" != some ] && [ "$found" -ne "$count" ]; then problem="$found lines instead of $count say '$words'"; fi
  if [ -z "$problem" ]; then
    echo "PASS  $name ($ranks ranks, shared memory ${HVD_SHARED_MEMORY:-auto})"
  else
    echo "FAIL  $name ($ranks ranks, shared memory ${HVD_SHARED_MEMORY:-auto}): $problem; exit code $status, output:"
    sed 's/^/      /' "$work/out"
    failures=$((failures + 1))
  fi
}
