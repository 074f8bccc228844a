#!/usr/bin/env bash
# Every line of the control flow of the GPU backends (ops/gpu: *.cc and what they include from there) runs in the tests that need no GPU,
# and all of it: what stands behind an if on the same line, too. A line that cannot is marked on itself: "// not covered: why".
# Builds coverage_tests, runs what is about these backends, asks gcov.
# Usage: coverage.sh BUILD_FOLDER
# timeout: 600
# processors: 2
set -uo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
# shellcheck source=../../../cmake/build.sh
. "$root/cmake/build.sh"

gcov=$(sed -n 's/^HVD_GCOV:FILEPATH=//p' "$build/CMakeCache.txt")
[ -n "$gcov" ] || { echo "SKIP: coverage is measured with GCC only"; exit 77; }
[ -x "$gcov" ] || { echo "SKIP: gcov is missing"; exit 77; }
compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$build/CMakeCache.txt")
major=$("$compiler" -dumpversion | cut -d. -f1)
if ! "$gcov" --version | head -n 1 | grep -q " $major\(\.[0-9.]*\)\?$"; then
  echo "SKIP: $gcov is not of GCC $major, which compiles here"
  exit 77
fi
command -v python3 >/dev/null || { echo "SKIP: python3 is missing"; exit 77; }

objects=$build/tests/CMakeFiles/coverage_tests.dir
find "$objects" -name '*.gcda' -delete 2>/dev/null # the counts of an earlier run
start=$SECONDS
log=$build/coverage.log
cmake --build "$build" --parallel "$(hvd_jobs)" --target coverage_tests >"$log" 2>&1 || {
  cat "$log"
  exit 1
}
echo "built in $((SECONDS - start)) s"
start=$SECONDS
files='*tests/ops/gpu/*_test.cc'
timeout --kill-after=5 400 "$build/tests/coverage_tests" --source-file="$files" >"$log" 2>&1 || {
  cat "$log"
  exit 1
}
echo "$(tail -n 3 "$log" | head -n 1), in $((SECONDS - start)) s"

python3 - "$gcov" "$objects" "$root" "$major" <<'PY'
import json, pathlib, re, subprocess, sys

gcov, objects, root, major = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]), int(sys.argv[4])
ours = root / "ops" / "gpu"
ran = {}     # (file, line): how often, summed over everything that was compiled of it
partly = {}  # (file, line): whether some of it never ran, as far as that can be without an exception
for counts in sorted(objects.rglob("*.gcda")):  # of this run: notes of objects that are no part of the program any more may lie here, too
    done = subprocess.run([gcov, "--json-format", "--stdout", str(counts)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{gcov} failed for {counts}: {done.stderr}")
    for source in json.loads(done.stdout)["files"]:
        path = pathlib.Path(source["file"])
        if ours not in path.parents:
            continue
        for line in source["lines"]:
            key = (path, line["line_number"])
            ran[key] = ran.get(key, 0) + line["count"]
            if line["count"] != 0:
                partly[key] = partly.get(key, True) and line["unexecuted_block"]

texts = {path: path.read_text().splitlines() for path, _ in ran}
text = {key: texts[key[0]][key[1] - 1].strip() for key in ran}
# A brace alone has no code but destructors. Where no other way leads there, they are those that an exception runs.
lines = sorted(key for key in ran if ran[key] != 0 or not re.fullmatch(r"[})\];]+", text[key]))
bad = [key for key in lines if ran[key] == 0 or partly[key]]
marked = [key for key in bad if "// not covered: " in text[key]]
missing = [path for path in sorted(ours.rglob("*.cc")) if path not in texts and not path.stem.startswith("linked_")]
full, some = len(lines) - len(bad), sum(ran[key] != 0 for key in bad)
print(f"ops/gpu: {full} of {len(lines)} lines ran ({100 * full / max(len(lines), 1):.1f} %) in {len(texts)} files; "
      f"{some} in part, {len(bad) - some} not at all; of these {len(marked)} cannot")
for path, number in bad:
    verdict = "cannot" if (path, number) in marked else "IN PART" if ran[path, number] != 0 else "NOT AT ALL"
    print(f"{verdict}: {path.relative_to(root)}:{number}: {text[path, number]}")
for path in missing:
    print("NOT MEASURED:", path.relative_to(root))
# What is a block of a line differs from one GCC to the next; it was made to hold for 12, and is a remark for others.
wrong = [key for key in bad if key not in marked and (ran[key] == 0 or major == 12)]
sys.exit(bool(wrong or missing or not lines))
PY
