#!/usr/bin/env bash
# Ranks of one host that nothing of MPI has started: by RANK and WORLD_SIZE, torchrun, HVD_INIT over TCP and by a file. They compute the same
# bits as under mpirun, and MPI_Init is not called; a rank that dies is noticed; jobs side by side do not meet. Ranks that share no
# memory talk UCX; where that is not to be had, they say so, all of them.
# Usage: without_mpi.sh BUILD_FOLDER
# timeout: 400
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
tests=$(cd "$1" && pwd)/tests
# shellcheck source=../../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
# shellcheck source=../../../support/shell/cases.sh
. "$root/tests/support/shell/cases.sh"
ulimit -c 0
for name in $(compgen -e); do # whoever runs this may be a launcher's rank
  case $name in
    RANK | WORLD_SIZE | LOCAL_RANK | MASTER_ADDR | MASTER_PORT | PMI* | SLURM_* | OMPI_COMM_* | TORCHELASTIC_* | HVD_INIT*) unset "$name" ;;
  esac
done
ranks=$root/tests/support/shell/ranks.sh

verdict() { # verdict NAME PROBLEM: no problem is a pass
  if [ -z "$2" ]; then
    echo "PASS  $1"
  else
    echo "FAIL  $1: $2; output:"
    sed 's/^/      /' "$work"/out*
    failures=$((failures + 1))
  fi
}
# count WORDS: lines of the output that match
count() { cat "$work"/out* | grep -acE -- "$1"; }

# same RANKS NAME COMMAND...: COMMAND starts `meets` as so many ranks; all have the bits that they have under mpirun
same() {
  local size=$1 name=$2 problem='' bits
  shift 2
  timeout --kill-after=5 60 mpirun -np "$size" "$tests/meets" >"$work/mpirun" 2>&1 </dev/null || problem="it fails under mpirun"
  bits=$(sed -n 's/^rank .*: \([0-9a-f]*\), MPI is used/\1/p' "$work/mpirun" | sort -u)
  [ "$(wc -w <<<"$bits")" = 1 ] || problem="no bits of mpirun's"
  timeout --kill-after=5 60 "$@" >"$work/out" 2>&1 </dev/null || problem=${problem:-"exit code $?"}
  [ "$(count "^rank [0-9] of $size, [0-9] of $size here: $bits, MPI is not used")" -eq $((2 * size)) ] || problem=${problem:-"not the bits of mpirun: $bits"}
  verdict "$name, $size ranks" "$problem"
}
# says NAME CODE COUNT WORDS COMMAND...: the exit code (- for any but 0), and so many lines with the words
says() {
  local name=$1 code=$2 lines=$3 words=$4 problem='' status
  shift 4
  timeout --kill-after=5 50 "$@" >"$work/out" 2>&1 </dev/null
  status=$?
  if [ "$code" = - ]; then [ "$status" -ne 0 ] && [ "$status" -ne 124 ] || problem="exit code $status"; fi
  if [ "$code" != - ]; then [ "$status" -eq "$code" ] || problem="exit code $status, not $code"; fi
  [ "$(count "$words")" -eq "$lines" ] || problem=${problem:-"not $lines lines with '$words'"}
  verdict "$name" "$problem"
}

for size in 1 2 3 4; do
  start same $size "RANK and WORLD_SIZE" "$ranks" $size "$tests/meets"
done
in_a_file() {
  mkdir "$work/a folder"
  same 3 "HVD_INIT=file" env "HVD_INIT=file://$work/a folder/meet" "$ranks" 3 "$tests/meets"
  verdict "HVD_INIT=file: nothing is left" "$(ls "$work/a folder")"
  echo "hvd-rendezvous-1 1 0123 $(hostname) left" >"$work/a folder/meet" # by a job that was killed
  same 2 "HVD_INIT=file, with an old file" env "HVD_INIT=file://$work/a folder/meet" "$ranks" 2 "$tests/meets"
}
start in_a_file
start same 3 "HVD_INIT=tcp" env HVD_INIT=tcp://127.0.0.1:$((14000 + RANDOM % 900)) HVD_INIT_TOKEN=secret "$ranks" 3 "$tests/meets"
start same 3 "the numbers of another MPI's mpiexec, and HVD_INIT" env HVD_INIT=tcp://localhost:$((13000 + RANDOM % 900)) \
  "$ranks" 3 env RANK=0 WORLD_SIZE=1 "PMI_RANK={rank}" PMI_SIZE=3 "$tests/meets" # the former as a container exports them
start same 2 "rank 0 comes late" "$ranks" 2 "$tests/meets" late
torchrun=$(command -v torchrun || echo "${HVD_DEPS_DIR:-$root/.deps}/venv/bin/torchrun")
if "$torchrun" --help >/dev/null 2>&1; then
  start same 4 "torchrun" "$torchrun" --nproc-per-node 4 --master-port $((12000 + RANDOM % 900)) --no-python "$tests/meets"
  start same 2 "torchrun --standalone" "$torchrun" --standalone --nproc-per-node 2 --no-python "$tests/meets"
  start says "torchrun: a rank that ends before init() ends the job" - 0 "^rank [0-9] of" \
    "$torchrun" --nproc-per-node 3 --master-port $((11000 + RANDOM % 900)) --no-python "$tests/meets" leaves
else
  echo "torchrun itself is not there: its variables are"
fi
as_torchrun() { # its agent's store has MASTER_PORT
  local port=$((16000 + RANDOM % 900))
  python3 -c 'import socket, sys, time; s = socket.create_server(("127.0.0.1", int(sys.argv[1]))); time.sleep(40)' $port 2>/dev/null &
  local holder=$!
  same 4 "torchrun's variables" env MASTER_PORT=$port TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True \
    SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 "$ranks" 4 "$tests/meets"
  kill $holder
}
start as_torchrun

side_by_side() { # jobs with neighbouring ports, and one that has the port of which another would take the first
  local port=$((21000 + RANDOM % 900)) job jobs=() problem=''
  for job in 0 1 2 3; do
    MASTER_PORT=$((port + job)) timeout --kill-after=5 60 "$ranks" 2 "$tests/meets" >"$work/out$job" 2>&1 </dev/null &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || problem="exit code $?"; done
  [ "$(count '^rank [01] of 2, ')" -eq 16 ] || problem=${problem:-"not 4 jobs of 2 ranks, twice each"}
  verdict "four jobs side by side" "$problem"
}
start side_by_side

# As srun --mpi=none does it: MPI would end the process, and the ranks know where to meet.
start same 3 "srun without PMIx, with RANK and MASTER_ADDR" "$ranks" 3 env SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_NODELIST=localhost \
  SLURM_JOB_ID=5 SLURM_JOBID=5 SLURM_TASKS_PER_NODE=3 "SLURM_PROCID={rank}" SLURM_STEP_NUM_TASKS=3 "$tests/meets"

start says "a rank that dies is noticed" 3 2 "^rank [02]: RankFailed: .*rank 1" "$ranks" 3 "$tests/meets" dies
for lost in 0 1 2; do
  start says "rank $lost dies, and the others make another world, by a file" 0 4 "^rank [0-2] of 3 goes on as rank [01] of 2: " \
    env "HVD_INIT=file://$cases_folder/fewer.$lost" "$ranks" 3 "$tests/meets" fewer $lost
  start says "rank $lost dies, and the others make another world" 0 4 "^rank [0-2] of 3 goes on as rank [01] of 2: " \
    "$ranks" 3 "$tests/meets" fewer $lost
done
start says "a rank that is killed in the middle of allreduces" - 3 "^rank [013]: RankFailed: .*rank 2" "$ranks" 4 "$tests/victim" kill 60
start says "a rank that leaves main by an exception" - 3 "^rank [013]: RankFailed: .*rank 2" "$ranks" 4 "$tests/victim" throw
start says "a rank that ends with another status than 0" 3 2 "^rank [01]: RankFailed: rank 2 (died|ended with exit status 5)" \
  "$ranks" 3 "$tests/process_exits" status 5
late_checkpoint() { # the others wait for rank 0 at their end
  says "rank 0 ends last" 0 0 "died|has ended" "$ranks" 3 "$tests/process_exits" late_checkpoint "$work/checkpoint" 3
  verdict "and has written its checkpoint" "$([ -s "$work/checkpoint" ] || echo "there is none")"
}
start late_checkpoint
for way in exit0 _exit kill exec system lives; do
  start says "a child that is forked: $way" 0 3 "^rank [0-2]: all is well" "$ranks" 3 "$tests/process_forks" $way
done

# ---- Between ranks that share no memory: UCX
start says "HVD_WIRE=mpi without MPI" 3 3 "^rank [0-2]: BackendError: .*HVD_WIRE=mpi: .*HVD_SHARED_MEMORY=off: start them by mpirun" \
  env HVD_SHARED_MEMORY=off HVD_WIRE=mpi "$ranks" 3 "$tests/meets"
if HVD_SHARED_MEMORY=off "$ranks" 2 "$tests/meets" 2>&1 | grep -qE 'UCX cannot be opened|built without UCX'; then
  echo "UCX is not there: nothing of it is tried"
  finish_cases
  exit
fi
broken_library() {
  mkdir "$work/lib"
  echo none >"$work/lib/libucp.so.0"
  says "a UCX that cannot be opened" 3 2 "^rank [01]: BackendError: .*HVD_SHARED_MEMORY=off: .*UCX cannot be opened: .*start the ranks by mpirun" \
    env HVD_SHARED_MEMORY=off LD_LIBRARY_PATH="$work/lib" "$ranks" 2 "$tests/meets"
}
start broken_library
over_ucx() {
  export HVD_SHARED_MEMORY=off # for mpirun too
  same "$1" "over UCX" "$ranks" "$1" "$tests/meets"
}
start over_ucx 2
start over_ucx 4
start says "over UCX under mpirun" 0 6 "^rank [0-2] of 3, .*MPI is used" mpirun -np 3 -x HVD_WIRE=ucx -x HVD_SHARED_MEMORY=off "$tests/meets"
# Each rank is a domain: nobody but UCX sees one die.
start says "over UCX, a rank that dies is noticed" 3 2 "^rank [02]: RankFailed: .*rank 1" env HVD_SHARED_MEMORY=off "$ranks" 3 "$tests/meets" dies
for end in "kill 60" "kill 0" throw _exit; do
  # shellcheck disable=SC2086  # two words
  start says "over UCX, in the middle of allreduces: $end" - 3 "^rank [013]: RankFailed: .*rank 2" \
    env HVD_SHARED_MEMORY=off "$ranks" 4 "$tests/victim" $end
done
start says "over UCX, a child that is forked" 0 3 "^rank [0-2]: all is well" env HVD_SHARED_MEMORY=off "$ranks" 3 "$tests/process_forks" exit0
start says "over UCX, a stuck rank" 3 3 "^rank [013]: StallTimeout: allreduce 'small' .*ranks 2-3, on other hosts, have not submitted it" env HVD_SHARED_MEMORY=off \
  HVD_STALL_CHECK_TIME_SECONDS=1 HVD_STALL_SHUTDOWN_TIME_SECONDS=3 "$ranks" 4 "$tests/victim" late 8000
# Containers have 64 MiB of /dev/shm, for any number of ranks. Here it has less than UCX would take for one rank's shared memory.
with_little_shm=(unshare --mount bash -c 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"' bash)
"${with_little_shm[@]}" true 2>/dev/null || with_little_shm=(unshare --map-root-user "${with_little_shm[@]:1}")
if "${with_little_shm[@]}" true 2>/dev/null; then
  start says "over UCX, with little /dev/shm" 0 4 "^rank [01] of 2, " "${with_little_shm[@]}" env HVD_SHARED_MEMORY=off "$ranks" 2 "$tests/meets"
  start says "over UCX, and UCX_TLS asks for shared memory that is not there" 3 2 "^rank [01]: BackendError: ucp_worker_create on rank [01]" \
    "${with_little_shm[@]}" env HVD_SHARED_MEMORY=off UCX_TLS=sm,tcp,self "$ranks" 2 "$tests/meets"
else
  echo "little /dev/shm is left out: no unshare --mount"
fi
if unshare --uts true 2>/dev/null; then
  # on_hosts FIRST COMMAND...: ranks from FIRST on are on another host
  cat >"$cases_folder/on_hosts" <<'END'
first=$1
shift
[ "$RANK" -lt "$first" ] && exec "$@"
exec unshare --uts bash -c 'hostname other; exec "$@"' bash "$@"
END
  hosts() { echo bash "$cases_folder/on_hosts" "$1"; }
  # A rank ends instead of sending something to the others for the N-th time, in init() or after it: before it leaves the store, while UCX
  # connects, ...
  compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "${tests%/tests}/CMakeCache.txt")
  cat >"$cases_folder/ends.cc" <<'END'
#include <sys/syscall.h>
#include <unistd.h>
#include <atomic>
#include <cstdlib>
#include <cstring>
static std::atomic<int> sent{0};
extern "C" ssize_t send(int to, const void* bytes, size_t size, int flags) {
  const char* const rank = std::getenv("RANK");
  if (rank != nullptr && std::strcmp(rank, "2") == 0 && ++sent == std::atoi(std::getenv("ENDS_AT"))) _exit(9);
  return syscall(SYS_sendto, to, bytes, size, flags, nullptr, 0);
}
END
  if "$compiler" -shared -fPIC -o "$cases_folder/ends.so" "$cases_folder/ends.cc" && bash "$root/tests/support/shell/on_host.sh" other true; then
    for sends in 4 10 12 13 14 15 16 18 24; do
      start says "two hosts, a rank ends at its message $sends" - 2 "^rank [01]: RankFailed: .*rank 2" \
        env UCX_TLS=tcp LD_PRELOAD="$cases_folder/ends.so" ENDS_AT=$sends bash "$root/tests/support/shell/hosts.sh" 2,1 "$tests/meets"
    done
    start says "two hosts, and nothing that UCX may use between them" 3 2 "^rank [01]: BackendError: UCX finds no way from rank 0 to rank 1: " \
      env UCX_TLS=self bash "$root/tests/support/shell/hosts.sh" 1,1 "$tests/meets"
  fi
  # The first host calls itself 127.0.1.1, as Debian's installer has it; the other one knows another address of it.
  cat >"$cases_folder/named" <<'END'
[ "$RANK" = 0 ] && address=127.0.1.1 || address=127.0.0.1
printf '127.0.0.1 localhost\n%s first\n' "$address" >"$0.$RANK"
mount --bind "$0.$RANK" /etc/hosts && exec "$@"
END
  if bash "$root/tests/support/shell/on_host.sh" other env RANK=1 bash "$cases_folder/named" true; then
    for place in MASTER_ADDR=first HVD_INIT=tcp://first:$((22000 + RANDOM % 900)); do
      start says "a first host whose own name is loopback: ${place%%=*}" 0 4 "^rank [01] of 2, 0 of 1 here: [0-9a-f]+, MPI is not used" \
        env "$place" HVD_START_TIMEOUT=20 bash "$root/tests/support/shell/hosts.sh" 1,1 bash "$cases_folder/named" "$tests/meets"
    done
  fi
  # shellcheck disable=SC2046  # several words
  {
    start says "two hosts of two ranks" 0 8 "^rank [0-3] of 4, [01] of 2 here: [0-9a-f]+, MPI is not used" "$ranks" 4 $(hosts 2) "$tests/meets"
    start says "hosts of three ranks and of one" 0 8 "^rank [0-3] of 4, [0-2] of [13] here: " "$ranks" 4 $(hosts 3) "$tests/meets"
    start says "two hosts, a rank is killed" - 3 "^rank [013]: RankFailed: .*rank 2" "$ranks" 4 $(hosts 2) "$tests/victim" kill 60
    start says "two hosts, one of which is lost" - 2 "^rank [01]: RankFailed: .*rank 2" "$ranks" 3 $(hosts 2) "$tests/victim" kill 60
    start says "HVD_INIT=file on two hosts" 3 1 "^rank 1: BackendError: .*meet by HVD_INIT=tcp" \
      env HVD_INIT=file://"$cases_folder/meet" HVD_START_TIMEOUT=8 "$ranks" 2 $(hosts 1) "$tests/meets"
  }
else
  echo "two hosts are left out: no unshare --uts"
fi
finish_cases
