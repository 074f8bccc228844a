#!/usr/bin/env bash
# Takes examples/tutorial/ out of the repository, builds it against the installed package and runs its programs with 1, 2 and 4 ranks. Those
# that are equal by design print the same bits, or losses that differ by 1e-6 at most (docs/tutorial.md says which). A program may use 20 s
# of processors, all its ranks together; how long it takes by the clock depends on what else runs.
# Four programs are built as a user builds them. The others are compiled together, each in a namespace with the tutorial's headers that it
# includes: what every file that includes LibTorch costs would be most of this test.
#   tutorial.sh BUILD_FOLDER CMAKE GENERATOR
set -euo pipefail

build=$1 cmake=$2 generator=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
scratch=$build/tests/tutorial
# shellcheck source=installation.sh
. "$here/installation.sh"
if ! grep -q '^HVD_BUILD_TOOLS:BOOL=ON' "$build/CMakeCache.txt"; then
  echo "SKIP: hvdrun is not part of this build"
  exit 77
fi

mkdir -p "$scratch"
install_to stage "$build"
if [ -z "$(find "$scratch/stage" -name hvd-torch-targets.cmake)" ]; then
  echo "SKIP: hvd::torch is not part of this build"
  exit 77
fi
PATH=$scratch/stage/bin:$PATH
folder=$(mktemp -d "${TMPDIR:-/tmp}/tutorial.XXXXXX") # nothing of the repository is above it
trap 'rm -rf "$folder"' EXIT
cp "$root"/examples/tutorial/* "$folder"

alone=(single distributed_data_parallel spawn raw_buffers)
mapfile -t others < <(cd "$folder" && printf '%s\n' *.cc | sed 's/\.cc$//' | grep -vxF "$(printf '%s\n' "${alone[@]}")")
# inlined FILE: with the files of the tutorial that it includes, each once; system headers come before
inlined() {
  local line number=0
  printf '#line 1 "%s"\n' "$1"
  while IFS= read -r line; do
    number=$((number + 1))
    case $line in
      '#include "'*)
        line=${line#*\"} line=${line%%\"*}
        case " ${included[*]} " in
          *" $line "*) ;;
          *) included+=("$line") && inlined "$folder/$line" ;;
        esac
        printf '#line %d "%s"\n' $((number + 1)) "$1"
        ;;
      '#include <'* | '#pragma once') echo ;;
      *) printf '%s\n' "$line" ;;
    esac
  done <"$1"
}
together() {
  local name included
  (cd "$folder" && sed -n '/^#include </p' ./*.h "${others[@]/%/.cc}" | sort -u)
  for name in "${others[@]}"; do
    included=()
    echo "namespace $name {"
    inlined "$folder/$name.cc" | sed '$ s/^}$/  return 0;\n}/' # of main() alone it goes without saying
    echo "}"
  done
  cat <<'END'
#line 1 "the program of that name"
template <class Main>
int call(const Main& of_program, int argc, char** argv) {
  if constexpr (std::is_invocable_v<Main>) return of_program();
  else return of_program(argc, argv);
}
int main(int argc, char** argv) {
  const std::string path = argv[0], name = path.substr(path.rfind('/') + 1);
END
  for name in "${others[@]}"; do echo "  if (name == \"$name\") return call($name::main, argc, argv);"; done
  echo '  return 127;'
  echo '}'
}
together >"$folder/others.cc"
cat >>"$folder/CMakeLists.txt" <<'END'
add_executable(others others.cc)
target_link_libraries(others PRIVATE hvd::torch)
target_precompile_headers(others REUSE_FROM single)
END
quietly "$cmake" -S "$folder" -B "$folder/build" -G "$generator" -DCMAKE_PREFIX_PATH="$scratch/stage" -DCMAKE_EXPORT_COMPILE_COMMANDS=ON \
  -DCMAKE_CXX_FLAGS="-Wall -Wextra -Werror" -DCMAKE_CXX_FLAGS_RELEASE=-O0
SECONDS=0
quietly "$cmake" --build "$folder/build" --parallel "${HVD_JOBS:-2}" --target "${alone[@]}" others
for name in "${others[@]}"; do ln "$folder/build/others" "$folder/build/$name"; done
echo "built in $SECONDS s"
# The C++ lines of the tables in the documents are those of the real headers.
if command -v python3 >/dev/null; then
  quietly python3 "$root/tests/docs_tutorial.py" --compile "$folder/build/compile_commands.json"
fi

for name in $(compgen -e); do
  case $name in RANK | WORLD_SIZE | LOCAL_RANK | PMI* | SLURM_* | OMPI_COMM_* | HVD_INIT*) unset "$name" ;; esac
done
export OMP_NUM_THREADS=1 # other numbers of threads round differently
# run NAME COMMAND...: its output in $folder/NAME
run() {
  local name=$1 used
  shift
  TIMEFORMAT='%R %U %S'
  { time timeout --kill-after=10 120 "$@" >"$folder/$name" 2>"$folder/error" </dev/null; } 2>"$folder/time" || {
    cat "$folder/$name" "$folder/error"
    failed "$*"
  }
  used=$(tail -n 1 "$folder/time")
  echo "$name: $used s"
  awk '{ exit $2 + $3 > 20 }' <<<"$used" || failed "$name takes more than 20 s of processors"
}
# ranks N PROGRAM ARGUMENT...: the program on so many ranks; its output in PROGRAM.N
ranks() {
  local n=$1 program=$2
  shift 2
  run "$program.$n" hvdrun -np "$n" --no-prefix "$folder/build/$program" "$@"
}
# losses NAME...: the epochs' lines
losses() { (cd "$folder" && sed -n '/^epoch/p' "$@"); }
# same_bits NAME OTHER: the same epochs with the same losses
same_bits() {
  [ -n "$(losses "$1")" ] && [ "$(losses "$1")" = "$(losses "$2")" ] || {
    losses "$1" "$2"
    failed "$1 and $2 are not equal bit for bit"
  }
}
# close_to TOLERANCE NAME OTHER: every number of the epochs' and tests' lines, as it is printed
close_to() {
  # shellcheck disable=SC2086
  paste <(grep -E '^(epoch|test)' "$folder/$2" | sed 's/(.*)//') <(grep -E '^(epoch|test)' "$folder/$3" | sed 's/(.*)//') |
    awk -v tolerance="$1" '{ if (NF % 2) bad = 1
                             for (i = 1; i <= NF / 2; ++i) { d = $i - $(i + NF / 2); if (d < 0) d = -d; if (d > tolerance * 1.001) bad = 1 } }
                           END { exit bad || NR < 3 }' || {
    cat "$folder/$2" "$folder/$3"
    failed "$2 and $3 differ by more than $1"
  }
}

# What a rank holds, and a share of the data, has to be right with 4 ranks too; to go on, to stop and other types of gradients with 2.
run single.1 "$folder/build/single"
for n in 1 2 4; do
  run "data_parallel.$n" env OMP_NUM_THREADS="$n" "$folder/build/data_parallel"
  run "spawn.$n" "$folder/build/spawn" "$n"
  for program in distributed_data_parallel accumulate_and_clip sync_batch_norm evaluate sharded process_sets raw_buffers; do
    ranks "$n" "$program"
  done
  mkdir "$folder/files.$n"
  ranks "$n" checkpoint "$folder/files.$n" 2 # interrupted after two epochs
  mv "$folder/checkpoint.$n" "$folder/interrupted.$n"
  ranks "$n" stop_and_resume "$folder/files.$n" 41 # in the second epoch
  mv "$folder/stop_and_resume.$n" "$folder/stopped.$n"
done
ranks 3 distributed_data_parallel # shares of 22, 21 and 21
# By another number of ranks
cp -r "$folder/files.4" "$folder/files.of4"
ranks 2 checkpoint "$folder/files.of4"
cat "$folder/interrupted.4" "$folder/checkpoint.2" >"$folder/moved.2"
ranks 2 stop_and_resume "$folder/files.of4"
cat "$folder/stopped.4" "$folder/stop_and_resume.2" >"$folder/stopped_moved.2"
for n in 1 2; do
  ranks "$n" mixed_precision
  ranks "$n" distributed_optimizer
  ranks "$n" checkpoint "$folder/files.$n"
  cat "$folder/interrupted.$n" "$folder/checkpoint.$n" >"$folder/resumed.$n"
  ranks "$n" stop_and_resume "$folder/files.$n"
  cat "$folder/stopped.$n" "$folder/stop_and_resume.$n" >"$folder/stopped_resumed.$n"
  mkdir "$folder/own.$n"
  ranks "$n" stop_and_resume "$folder/own.$n"
  mv "$folder/stop_and_resume.$n" "$folder/whole.$n"
  ranks "$n" early_stopping "$folder/own.$n"
done

same_bits distributed_data_parallel.1 single.1
same_bits process_sets.2 single.1
same_bits process_sets.4 distributed_data_parallel.2
for n in 1 2 4; do
  close_to 1e-6 data_parallel.$n single.1
  close_to 1e-6 distributed_data_parallel.$n single.1
  for program in spawn sharded evaluate; do same_bits $program.$n distributed_data_parallel.$n; done
  for program in accumulate_and_clip sync_batch_norm raw_buffers evaluate; do close_to 1e-6 $program.$n $program.1; done
done
for n in 1 2; do
  same_bits resumed.$n distributed_data_parallel.$n
  same_bits stopped_resumed.$n whole.$n
  close_to 1e-6 early_stopping.$n early_stopping.1
  close_to 2e-2 mixed_precision.$n single.1
  close_to 2e-2 distributed_optimizer.$n single.1
done
close_to 2e-2 distributed_data_parallel.3 single.1
close_to 1e-6 moved.2 single.1
close_to 1e-6 stopped_moved.2 whole.1
losses stopped.2 | awk 'END { exit NR != 1 }' || failed "stop_and_resume has not stopped in its second epoch"
for name in single.1 accumulate_and_clip.4 sync_batch_norm.4; do # they learn
  losses $name | awk '{ loss = $4 } END { exit !(loss < 0.3) }' || failed "$name does not learn: $(losses $name | tail -n 1)"
done
tail -n 1 "$folder/evaluate.4" | awk '{ exit !($2 == 1003 && $7 + 0 > 0.95) }' || failed "evaluate: $(tail -n 1 "$folder/evaluate.4")"
# early_stopping ends after three epochs that were no better than the best, whose loss the model has that it has loaded
awk '$1 == "epoch" { sub(":", "", $2); last = $2; loss[last] = $4 }
     $1 == "test:" { sub(",", "", $7); exit !(last < 40 && $4 == last - 3 && $7 == loss[$4] && $7 < 0.3) }' "$folder/early_stopping.2" ||
  failed "early_stopping: $(tail -n 5 "$folder/early_stopping.2")"
tail -n 1 "$folder/sharded.4" | awk '{ exit !($NF > 0 && $NF < $2 / 3) }' || failed "sharded: $(tail -n 1 "$folder/sharded.4")"

# slurm.sbatch, with the variables that Slurm sets for it; mpirun counts ranks by it alone
# shellcheck source=../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
run slurm.2 env SLURM_NTASKS=2 SLURM_CPUS_PER_TASK=1 bash "$folder/slurm.sbatch" "$folder/build/distributed_data_parallel"
same_bits slurm.2 distributed_data_parallel.2
