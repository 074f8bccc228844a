#!/usr/bin/env bash
# The recipes of examples/launch: each starts the ranks that it should, and they have the bits that they have under mpirun, also when they
# train, on one host and on three that this one pretends to be. What is not here is stood in for: the kubelet and srun by
# their variables, ssh by fake_ssh.sh. The files for Kubernetes are checked.
# Usage: launch_recipes.sh BUILD_FOLDER
# timeout: 600
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
build=$(cd "$1" && pwd)
recipes=$root/examples/launch meets=$build/tests/meets
[ -x "$build/tools/hvdrun" ] || { echo "SKIP: hvdrun was not built"; exit 77; }
# shellcheck source=../../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
# shellcheck source=../../../support/shell/cases.sh
. "$root/tests/support/shell/cases.sh"
ulimit -c 0
for name in $(compgen -e); do # whoever runs this may be a launcher's rank
  case $name in
    RANK | WORLD_SIZE | LOCAL_RANK | MASTER_ADDR | MASTER_PORT | PMI* | SLURM_* | OMPI_COMM_* | TORCHELASTIC_* | HVD_INIT* | JOB_COMPLETION_INDEX) unset "$name" ;;
  esac
done
torchrun=$(command -v torchrun || echo "${HVD_DEPS_DIR:-$root/.deps}/venv/bin/torchrun")

# Each of these starts COMMAND as N ranks of one host: WAY N COMMAND...
by_mpirun() { mpirun -np "$@"; }
by_hvdrun() { "$build/tools/hvdrun" -np "$@"; }
by_torchrun() {
  local n=$1
  shift
  PATH=${torchrun%/*}:$PATH NPROC_PER_NODE=$n MASTER_PORT=$((12000 + RANDOM % 9000)) bash "$recipes/torchrun.sh" "$@"
}
by_sbatch() { # srun --mpi=none gives the ranks their numbers, and nothing of MPI
  local n=$1 starter=${HOSTS_OF_STEP:+hosts}
  starter=${starter:-ranks}
  shift
  mkdir -p "$work/bin"
  printf '#!/bin/sh\necho localhost\n' >"$work/bin/scontrol"
  cat >"$work/bin/srun" <<END
#!/usr/bin/env bash
[ "\$1" = --mpi=none ] || exit 9
exec bash "$root/tests/support/shell/$starter.sh" ${HOSTS_OF_STEP:-$n} env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u MASTER_ADDR -u MASTER_PORT SLURM_STEP_ID=0 SLURM_PROCID={rank} SLURM_STEP_NUM_TASKS=$n "\${@:2}"
END
  chmod +x "$work/bin/srun" "$work/bin/scontrol"
  PATH=$work/bin:$PATH HVD_LAUNCHER=store SLURM_JOB_ID=$RANDOM SLURM_NTASKS=$n SLURM_JOB_NODELIST=localhost bash "$recipes/slurm.sbatch" "$@"
}
by_indexed_job() { # with the variables of the file, but for the number of ranks and the names that only a cluster knows
  local n=$1 index code=0 variables=() pods=() port=$((21000 + RANDOM % 9000))
  shift
  mapfile -t variables < <(awk '/- name: [A-Z_]+/ { name = $3 } /^ +value: / { print name "=" $2 }' "$recipes/indexed-job.yaml" | tr -d '"')
  [ "${#variables[@]}" -eq 4 ] || return 9
  for ((index = 0; index < n; index++)); do
    ${ON_HOST:+$ON_HOST-$index} env "${variables[@]}" WORLD_SIZE="$n" MASTER_ADDR=localhost MASTER_PORT=$port HVD_START_TIMEOUT=60 HVD_INIT_TOKEN=secret \
      JOB_COMPLETION_INDEX=$index HOSTNAME=train-$index KUBERNETES_SERVICE_HOST=10.96.0.1 KUBERNETES_SERVICE_PORT=443 "$@" &
    pods+=($!)
  done
  for index in "${pods[@]}"; do wait "$index" || code=$?; done
  return $code
}
# Each of these starts COMMAND as three ranks of three hosts.
on_host() { bash "$root/tests/support/shell/on_host.sh" "$@"; }
by_mpirun_on_hosts() { PRETEND_HOSTS=1 mpirun --mca plm_rsh_agent "$agent" -H first:1,second:1,third:1 -np 3 "$@"; }
by_hvdrun_on_hosts() { PRETEND_HOSTS=1 "$build/tools/hvdrun" -H first:1,second:1,third:1 --mpi-args "--mca plm_rsh_agent $agent" "$@"; }
by_sbatch_on_hosts() { HOSTS_OF_STEP=1,1,1 by_sbatch 3 "$@"; }
by_indexed_job_on_hosts() { ON_HOST="on_host pod" by_indexed_job 3 "$@"; }
by_torchrun_on_hosts() {
  local node code=0 nodes=() port=$((12000 + RANDOM % 9000))
  for node in 0 1 2; do
    PATH=${torchrun%/*}:$PATH NNODES=3 NODE_RANK=$node NPROC_PER_NODE=1 MASTER_PORT=$port on_host "node-$node" bash "$recipes/torchrun.sh" "$@" &
    nodes+=($!)
  done
  for node in "${nodes[@]}"; do wait "$node" || code=$?; done
  return $code
}
agent=$cases_folder/agent # mpirun's way to other hosts, in one word; to one that is called ssh it gives options of ssh's
ln -s "$root/tests/support/shell/fake_ssh.sh" "$agent"
chmod +x "$root/tests/support/shell/fake_ssh.sh" 2>/dev/null

ways=(hvdrun sbatch indexed_job)
if "$torchrun" --help >/dev/null 2>&1; then ways+=(torchrun); else echo "torchrun is not there: its recipe is not run"; fi

verdict() { # verdict NAME PROBLEM: no problem is a pass
  if [ -z "$2" ]; then
    echo "PASS  $1"
  else
    echo "FAIL  $1: $2; output:"
    sed 's/^/      /' "$work"/out
    failures=$((failures + 1))
  fi
}
# run WAY N COMMAND...: with a watchdog
run() {
  local watch
  "by_$@" >"$work/out" 2>&1 </dev/null &
  watch=$!
  for ((i = 0; i < 1200; i++)); do
    kill -0 $watch 2>/dev/null || break
    sleep 0.1
  done
  kill $watch 2>/dev/null
  wait $watch
}
bits() { sed -n 's/.*rank [0-9] of [0-9], .*: \([0-9a-f]*\), MPI is.*/\1/p' "$work/out" | sort | uniq -c; }
same_sums() {
  local way expected
  run mpirun 3 "$meets"
  expected=$(bits)
  [ "$(wc -l <<<"$expected")" = 1 ] && [ -n "$expected" ] || verdict "sums under mpirun" "no bits"
  for way in "${ways[@]}"; do
    run "$way" 3 "$meets" || verdict "sums by $way" "exit code $?"
    verdict "sums by $way" "$([ "$(bits)" = "$expected" ] || echo "not the bits of mpirun:$expected")"
  done
}
start same_sums
if [ -x "$build/examples/train" ]; then
  trained() { # trained WAY [N]: what it has learnt, to the last digit
    run "$@" "$build/examples/train" --model mlp --epochs 1 --max-steps 5 --threads 1 --seed 3 --json "$work/$1.json" ||
      verdict "training by $1" "exit code $?"
    grep -E '"(loss|top1|train_loss|world_size)"' "$work/$1.json" 2>/dev/null
  }
  same_training() {
    local way expected
    expected=$(trained mpirun 2)
    for way in "${ways[@]}"; do
      verdict "training by $way" "$([ -n "$expected" ] && [ "$(trained "$way" 2)" = "$expected" ] || echo "not what mpirun gives: $expected")"
    done
  }
  start same_training
  same_training_on_hosts() {
    local way expected
    expected=$(trained mpirun 3)
    for way in mpirun "${ways[@]}"; do
      verdict "training by $way on three hosts" "$([ -n "$expected" ] && [ "$(trained "${way}_on_hosts")" = "$expected" ] || echo "not what mpirun gives on one: $expected")"
      grep -q "3 ranks on 3 hosts" "$work/out" || verdict "hosts by $way" "they are not three"
    done
  }
  if bash "$root/tests/support/shell/on_host.sh" pretended true; then start same_training_on_hosts; fi
fi
files() {
  python3 "$root/tests/launch_recipes.py" "$recipes" >"$work/out" 2>&1
  local code=$?
  if [ $code = 77 ]; then echo "the files for Kubernetes are not checked: $(cat "$work/out")"; else verdict "the files for Kubernetes" "$([ $code = 0 ] || echo "exit code $code")"; fi
  cat "$work/out"
  [ $code = 77 ] && return
  python3 "$root/tests/launch_recipes.py" "$recipes" --notices >"$work/out" 2>&1
  verdict "errors in the files for Kubernetes are noticed" "$([ $? = 0 ] || echo "not all")"
}
if command -v python3 >/dev/null; then start files; fi
container() { # it installs what cmake/setup.sh would ask for
  local package problem=''
  : >"$work/out"
  for package in $(sed -n '/^missing_packages()/,/with_tests/s/.*|| echo //p' "$root/cmake/setup.sh"); do
    grep -qE "(^| )(g\+\+|$package)( |$)" "$recipes/Containerfile" && grep -qF " $package" "$recipes/Containerfile" || problem="$problem $package"
  done
  verdict "the container has what a build needs" "${problem:+"it lacks$problem"}"
}
start container
finish_cases
