#!/usr/bin/env bash
# tests/gpu_limits.py, which says what is fast enough on a GPU: records that are, that are not, and that lack what they are asked for; of several
# the median.
# Usage: gpu_limits.sh BUILD_FOLDER
# timeout: 60
set -u

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
command -v python3 >/dev/null || { echo "SKIP: python3 is missing"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0

# expect CODE ARGUMENTS...
expect() {
  local wanted=$1 code
  shift
  python3 "$root/tests/gpu_limits.py" "$@" >"$folder/said" 2>&1
  code=$?
  if [ "$code" -ne "$wanted" ]; then
    echo "FAILED: exit code $code instead of $wanted: gpu_limits.py $*"
    cat "$folder/said"
    failed=1
  fi
}

# A copy of 256 MiB takes 100 us; 4 ranks' bytes are read and written in 800 us at half of its rate.
cat >"$folder/alone.json" <<'JSON'
{"ranks": 1, "rows": [{"bytes": 1024, "memory": "ordinary", "in_place": true, "time_us": 5, "memcpy": {"time_us": 4}},
                      {"bytes": 268435456, "memory": "ordinary", "in_place": true, "time_us": 110, "memcpy": {"time_us": 100}}]}
JSON
cat >"$folder/together.json" <<'JSON'
{"ranks": 4, "rows": [{"bytes": 268435456, "memory": "ordinary", "in_place": true, "time_us": 9999},
                      {"bytes": 268435456, "memory": "arena", "in_place": false, "time_us": 9999},
                      {"bytes": 268435456, "memory": "arena", "in_place": true, "time_us": 800}]}
JSON
expect 0 shared "$folder/alone.json" "$folder/together.json" 50
expect 1 shared "$folder/alone.json" "$folder/together.json" 51
expect 1 shared "$folder/alone.json" "$folder/alone.json" 1  # no row of lent memory
sed 's/800}/1600}/' "$folder/together.json" >"$folder/slow.json"
sed 's/800}/400}/' "$folder/together.json" >"$folder/fast.json"
pairs=("$folder/alone.json" "$folder/slow.json" "$folder/alone.json" "$folder/fast.json" "$folder/alone.json")
expect 0 shared "${pairs[@]}" "$folder/together.json" 50
expect 1 shared "${pairs[@]}" "$folder/together.json" 51
expect 1 shared "${pairs[@]}" 1 # one is missing
sed -i 's/268435456, "memory": "arena", "in_place": true/1024, "memory": "arena", "in_place": true/' "$folder/together.json"
expect 1 shared "$folder/alone.json" "$folder/together.json" 1  # another size

echo '{"rows": [{"subject": "none", "ratio": 1.0}, {"subject": "hvd", "ratio": 1.008}, {"subject": "hvd-bf16", "ratio": 1.01}]}' >"$folder/step.json"
expect 0 step "$folder/step.json" 1.01
expect 1 step "$folder/step.json" 1.009
sed 's/1\.01}/1.05}/' "$folder/step.json" >"$folder/slow.json"
expect 0 step "$folder/step.json" "$folder/slow.json" "$folder/step.json" 1.01
expect 1 step "$folder/slow.json" "$folder/step.json" "$folder/slow.json" 1.01
echo '{"rows": [{"subject": "none", "ratio": 1.0}]}' >"$folder/step.json"
expect 1 step "$folder/step.json" 1.01  # nothing of hvd's was measured
expect 1
expect 1 unknown "$folder/step.json" 1
exit "$failed"
