#!/usr/bin/env bash
# Builds one fuzz target with clang++ and libFuzzer and runs it.
#   bash tests/fuzz/run.sh <folder for what is built> <name> [seconds, default 5]
# <name> is that of tests/fuzz/<name>_fuzz.cc. An input that fails is left in the folder; to repeat it: <folder>/<name>_fuzz <input>
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$1 name=$2 seconds=${3:-5}

skip() {
  echo "SKIP: $*"
  exit 77
}
for clang in clang++-14 clang++ ''; do
  if [ -n "$clang" ] && command -v "$clang" >/dev/null; then break; fi
done
[ -n "$clang" ] || skip "clang++ is not installed (Debian and Ubuntu: apt-get install clang-14 libclang-rt-14-dev)"
mkdir -p "$folder"
# -O0: what the targets share compiles in half the time of -O1, and they run for a few seconds only.
flags=(-std=c++20 -O0 -gline-tables-only -DFMT_HEADER_ONLY=1 "-I$root" -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all)
echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' >"$folder/$name.probe.cc"
"$clang" "${flags[@]}" -o "$folder/$name.probe" "$folder/$name.probe.cc" >/dev/null 2>&1 ||
  skip "$clang has no libFuzzer (Debian and Ubuntu: apt-get install libclang-rt-14-dev)"

# fresh <made> : nothing that it could depend on is newer
fresh() { [ -e "$1" ] && ! [ "${1%.o}.cc" -nt "$1" ] && [ -z "$(find "$root/hvd" "$root/ops/rendezvous" "$root/tests/fuzz" "$root/tests/support/random.h" -newer "$1" -print -quit)" ]; }
# compile <object> <source> <flag>...
compile() {
  local object=$1 source=$2
  shift 2
  fresh "$object" || "$clang" "$@" -c -o "$object" "$source"
}
objects=() compilers=()
# start <object> <source> <flag>... : compiles, two at a time
start() {
  if [ ${#compilers[@]} -ge 2 ]; then
    wait "${compilers[0]}"
    compilers=("${compilers[@]:1}")
  fi
  compile "$@" &
  compilers+=($!)
}
start "$folder/${name}_fuzz.o" "$root/tests/fuzz/${name}_fuzz.cc" "${flags[@]}"
# The library's files together, half of them for each compiler: most of the time goes into what all of them include.
mapfile -t sources < <(cd "$root" && ls -S hvd/negotiation/*/*.cc hvd/base/*.cc hvd/{errors,types}.cc ops/rendezvous/{frames,store}.cc)
for ((unit = 0; unit < 2; ++unit)); do
  file=$folder/unit_$unit.cc
  for ((i = unit; i < ${#sources[@]}; i += 2)); do printf '#include "%s"\n' "${sources[i]}"; done >"$file.new"
  if cmp -s "$file.new" "$file"; then rm "$file.new"; else mv "$file.new" "$file"; fi
  start "${file%.cc}.o" "$file" "${flags[@]/fuzzer/fuzzer-no-link}"
  objects+=("${file%.cc}.o")
done
for compiler in "${compilers[@]}"; do wait "$compiler"; done
library=$folder/library.a
fresh "$library" || { rm -f "$library" && ar rcs "$library" "${objects[@]}"; }
target=$folder/${name}_fuzz
fresh "$target" || "$clang" "${flags[@]}" -o "$target" "$folder/${name}_fuzz.o" "$library" -lcrypto
cd "$folder"
"$target" -max_total_time="$seconds" -max_len=4096 -malloc_limit_mb=64 -rss_limit_mb=2048 -timeout=10 -print_final_stats=0 -verbosity=1 2>"$name.log" || {
  tail -n 60 "$name.log"
  exit 1
}
tail -n 3 "$name.log"
