#!/usr/bin/env bash
# Ways to start ranks wrongly: each process ends within 10 s, with an exit code that is not 0 and a sentence that names the mistake; none runs
# as a world of its own. And starts that look wrong and are not.
# Usage: start_wrong.sh BUILD_FOLDER
# timeout: 300
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
program=$(cd "$1" && pwd)/tests/meets
# shellcheck source=../../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
# shellcheck source=../../../support/shell/cases.sh
. "$root/tests/support/shell/cases.sh"
ulimit -c 0
# Whoever runs this may be a launcher's rank.
for name in $(compgen -e); do
  case $name in
    RANK | WORLD_SIZE | LOCAL_RANK | MASTER_ADDR | MASTER_PORT | PMI* | MV2_* | FLUX_* | JSM_* | PALS_* | HOROVOD_RANK | HOROVOD_SIZE | SLURM_* | OMPI_COMM_* | TORCHELASTIC_* | HVD_INIT*) unset "$name" ;;
  esac
done

# wrong NAME WORDS VARIABLES...: one process with these variables; VARIABLES may hold several, with blanks between them
wrong() {
  local name=$1 words=$2 status start=$EPOCHREALTIME seconds problem=''
  shift 2
  timeout --kill-after=2 20 env "$@" "$program" >"$work/out" 2>&1 </dev/null
  status=$?
  seconds=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
  [ "$status" -eq 3 ] || problem="exit code $status"
  grep -qE -- "^rank .*: (BackendError|InvalidArgument): .*$words" "$work/out" || problem=${problem:-"no line says '$words'"}
  grep -q '^rank [0-9]* of ' "$work/out" && problem="it came up as a world of its own"
  awk -v s="$seconds" 'BEGIN { exit !(s < 10) }' || problem=${problem:-"it took $seconds s"}
  if [ -z "$problem" ]; then
    echo "PASS  $name ($seconds s)"
  else
    echo "FAIL  $name: $problem; output:"
    sed 's/^/      /' "$work/out"
    failures=$((failures + 1))
  fi
}

# wrong_ranks NAME RANKS COUNT WORDS COMMAND...: COMMAND starts `meets` as so many ranks without MPI: none comes up, COUNT of them say the words
wrong_ranks() {
  local name=$1 size=$2 count=$3 words=$4 status start=$EPOCHREALTIME seconds problem='' said
  shift 4
  timeout --kill-after=2 30 "$root/tests/support/shell/ranks.sh" "$size" "$@" >"$work/out" 2>&1 </dev/null
  status=$?
  seconds=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
  [ "$status" -ne 0 ] && [ "$status" -ne 124 ] || problem="exit code $status"
  said=$(grep -cE -- "^rank .*: (BackendError|InvalidArgument|RankFailed|Mismatch): .*($words)" "$work/out")
  [ "$said" -eq "$count" ] || problem=${problem:-"$said lines instead of $count say '$words'"}
  grep -q '^rank [0-9]* of ' "$work/out" && problem="it came up"
  awk -v s="$seconds" 'BEGIN { exit !(s < 10) }' || problem=${problem:-"it took $seconds s"}
  if [ -z "$problem" ]; then
    echo "PASS  $name ($seconds s)"
  else
    echo "FAIL  $name: $problem; output:"
    sed 's/^/      /' "$work/out"
    failures=$((failures + 1))
  fi
}

# right NAME VARIABLES... [COMMAND...]: one process that is a world of one
right() {
  local name=$1
  shift
  if timeout --kill-after=2 30 env "$@" "$program" >"$work/out" 2>&1 </dev/null && [ "$(grep -c '^rank 0 of 1,' "$work/out")" = 2 ]; then
    echo "PASS  $name"
  else
    echo "FAIL  $name; output:"
    sed 's/^/      /' "$work/out"
    failures=$((failures + 1))
  fi
}

# By the first of these Open MPI takes a process for one that srun has started directly.
step=(SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_NODELIST=localhost SLURM_JOB_NODELIST=localhost SLURM_JOB_ID=5 SLURM_JOBID=5 SLURM_NTASKS=4
  SLURM_TASKS_PER_NODE=4 SLURM_JOB_NUM_NODES=1 SLURM_NNODES=1 SLURM_NODEID=0)
alone="the launcher started 4 ranks, but MPI sees 1"
for rank in 0 1; do
  start wrong "mpiexec of MPICH or Intel MPI, rank $rank" "$alone: PMI_RANK=$rank, PMI_SIZE=4" PMI_RANK=$rank PMI_SIZE=4 MPI_LOCALRANKID=$rank PMI_FD=77
  start wrong "MVAPICH's launcher, rank $rank" "$alone: MV2_COMM_WORLD_RANK=$rank" MV2_COMM_WORLD_RANK=$rank MV2_COMM_WORLD_SIZE=4
  start wrong "flux run, rank $rank" "$alone: FLUX_TASK_RANK=$rank" FLUX_TASK_RANK=$rank FLUX_JOB_SIZE=4
  start wrong "jsrun, rank $rank" "$alone: JSM_NAMESPACE_RANK=$rank" JSM_NAMESPACE_RANK=$rank JSM_NAMESPACE_SIZE=4
  start wrong "horovodrun, rank $rank" "$alone: HOROVOD_RANK=$rank, HOROVOD_SIZE=4 say that horovodrun, or the like, started" \
    HOROVOD_RANK=$rank HOROVOD_SIZE=4 HOROVOD_LOCAL_RANK=$rank HOROVOD_LOCAL_SIZE=4
  start wrong "PALS, rank $rank" "the launcher started several ranks, but MPI sees 1: PALS_RANKID=$rank" PALS_RANKID=$rank
  start wrong "a launcher that speaks PMIx, rank $rank" "the launcher started several ranks, but MPI sees 1: PMIX_RANK=$rank" PMIX_RANK=$rank PMIX_NAMESPACE=job
  start wrong "srun without PMIx, rank $rank" "the launcher started 4 ranks, but MPI sees none of them: SLURM_PROCID=$rank, .*--mpi=pmix" \
    "${step[@]}" SLURM_PROCID=$rank SLURM_STEP_NUM_TASKS=4
  start wrong "mpirun of another Open MPI, rank $rank" "$alone" OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=4
  start wrong "RANK and WORLD_SIZE without a place to meet, rank $rank" "WORLD_SIZE=2 says .*MASTER_ADDR, MASTER_PORT are missing" RANK=$rank WORLD_SIZE=2
done
start wrong "a PMIx server that does not answer" "PMIX_RANK=1" PMIX_RANK=1 PMIX_NAMESPACE=job "PMIX_SERVER_URI2=job.0;tcp4://127.0.0.1:9"
start wrong "WORLD_SIZE alone" "RANK, MASTER_ADDR, MASTER_PORT are missing" WORLD_SIZE=2
start wrong "RANK alone" "WORLD_SIZE, MASTER_ADDR, MASTER_PORT are missing" RANK=1
start wrong "no MASTER_PORT" "MASTER_PORT is missing" RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1
start wrong "ranks counted from 1" "RANK='2', WORLD_SIZE='2': not allowed" RANK=2 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
start wrong "a RANK that is no number" "RANK='first'" RANK=first WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
start wrong "a MASTER_PORT that is none" "MASTER_PORT: 'http'" RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=http
start wrong "HVD_INIT that is no address" "HVD_INIT: 'localhost:29500' is not allowed" HVD_INIT=localhost:29500 RANK=0 WORLD_SIZE=2
start wrong "HVD_INIT without a port" "HVD_INIT: 'tcp://localhost' is not allowed" HVD_INIT=tcp://localhost RANK=0 WORLD_SIZE=2
start wrong "HVD_INIT without ranks" "RANK and WORLD_SIZE are missing" HVD_INIT=tcp://localhost:29500
start wrong "HVD_INIT=mpi without a launcher of this MPI" "$alone" HVD_INIT=mpi PMI_RANK=1 PMI_SIZE=4

# Ranks that look for each other
start wrong_ranks "a rank that was not started" 3 2 "rank 1 of 3 did not come to 127.0.0.1:[0-9]* within 2 s \(HVD_START_TIMEOUT\)" \
  env HVD_START_TIMEOUT=2 bash -c '[ "$RANK" = 1 ] || exec "$0"' "$program"
start wrong_ranks "rank 0 was not started" 3 2 "rank 0 did not come to 127.0.0.1:[0-9]*-[0-9]* within 2 s \(HVD_START_TIMEOUT\)" \
  env HVD_START_TIMEOUT=2 bash -c '[ "$RANK" = 0 ] || exec "$0"' "$program"
start wrong_ranks "a rank that ended before init()" 3 2 "rank 1 of 3 did not come" env HVD_START_TIMEOUT=2 "$program" leaves
start wrong_ranks "all of one RANK" 3 3 "rank 0" env RANK=0 "$program"
start wrong_ranks "two of one RANK" 3 3 "two processes say that they are rank 1 of 3: process [0-9]+ on .*, and process [0-9]+ on" \
  bash -c '[ "$RANK" = 2 ] && RANK=1; exec "$0"' "$program"
start wrong_ranks "different WORLD_SIZE" 3 3 "WORLD_SIZE is 5 for rank 2 .*, and 3 for rank 0" bash -c '[ "$RANK" = 2 ] && WORLD_SIZE=5; exec "$0"' "$program"
start wrong_ranks "different MASTER_PORT" 2 2 "rank 1 of 2 did not come|rank 0 did not come" \
  env HVD_START_TIMEOUT=2 bash -c 'MASTER_PORT=$((9000 + RANK * 100)); exec "$0"' "$program"
start wrong_ranks "different HVD_INIT_TOKEN" 2 2 "rank 1 of 2 did not come|is of another job, or has another HVD_INIT_TOKEN" \
  env HVD_INIT=tcp://127.0.0.1:$((9400 + RANDOM % 500)) HVD_START_TIMEOUT=5 HVD_INIT_TOKEN={rank} "$program"
start wrong_ranks "a MASTER_ADDR of another host" 2 1 "the address must be one of the host that rank 0 runs on" \
  env HVD_START_TIMEOUT=2 MASTER_ADDR=192.0.2.7 "$program"
start wrong_ranks "a MASTER_ADDR that nobody knows" 2 2 "the host 'no-such-host.invalid', at which the ranks are to meet, is not found" \
  env HVD_START_TIMEOUT=5 MASTER_ADDR=no-such-host.invalid "$program"
port_is_taken() {
  local port holder
  coproc HOLDER { exec python3 -uc 'import socket, time; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1]); time.sleep(60)'; }
  holder=$HOLDER_PID
  read -r port <&"${HOLDER[0]}"
  wrong_ranks "a port that another program has" 2 2 "another program has it|who answers there is no rank 0 of hvd" env HVD_INIT=tcp://127.0.0.1:$port "$program"
  kill $holder
}
if command -v python3 >/dev/null; then start port_is_taken; fi
start wrong_ranks "mpirun within torchrun's worker" 2 2 "HVD_INIT=mpi if the latter's count" \
  env TORCHELASTIC_RUN_ID=none RANK=0 "OMPI_COMM_WORLD_RANK={rank}" OMPI_COMM_WORLD_SIZE=2 "$program"
start wrong_ranks "port 0" 2 2 "tcp://127.0.0.1:0' is not allowed" env HVD_INIT=tcp://127.0.0.1:0 "$program"
start wrong_ranks "a file in a folder that is not there" 2 2 "HVD_INIT=file:///no/such/folder/file.*: No such file" env HVD_INIT=file:///no/such/folder/file "$program"
start wrong_ranks "no shared memory, and no MPI" 2 2 "HVD_WIRE=mpi: .*HVD_SHARED_MEMORY=off: start them by mpirun" \
  env HVD_SHARED_MEMORY=off HVD_WIRE=mpi "$program"
start wrong_ranks "different knobs" 2 2 "the configuration must be equal on all ranks: HVD_FUSION_THRESHOLD" env HVD_FUSION_THRESHOLD=1{rank} "$program"
start wrong_ranks "a wrong HVD_START_TIMEOUT" 2 2 "HVD_START_TIMEOUT: 'soon' is not allowed" env HVD_START_TIMEOUT=soon "$program"

start right "nobody has started it" A=b
start right "a batch script of Slurm's" SLURM_JOB_ID=5 SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_PROCID=0 SLURM_LOCALID=0
start right "srun -n 1, and the shell of salloc" "${step[@]}" SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1
start right "a RANK that is nobody's number" RANK=sergeant
start right "frameworks' way to say that nothing is distributed" RANK=-1 WORLD_SIZE=1
start right "mpirun -np 1" mpirun -np 1
start right "a process that a rank of mpirun -np 1 has started" mpirun -np 1 bash -c '"$0" "$@"; exit $?' env
start right "mpiexec -n 1 of another MPI" PMI_RANK=0 PMI_SIZE=1 MPI_LOCALRANKID=0
start right "mpirun -np 1 within a job of another launcher" PMI_RANK=2 PMI_SIZE=4 mpirun -np 1
start right "torchrun with one process" RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=none
start right "HVD_INIT=alone, whatever else is said" HVD_INIT=alone PMI_RANK=2 PMI_SIZE=4 RANK=1 WORLD_SIZE=3
finish_cases
