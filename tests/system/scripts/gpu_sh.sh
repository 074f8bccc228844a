#!/usr/bin/env bash
# tests/gpu.sh on a machine of stubs, as there is mostly no GPU to run it on: it counts the GPUs that programs see, takes what NCCL's contract
# suite has done by another way for a failure, tries nothing that the probe has found not to be possible, takes the median of three runs for
# its thresholds, and asks the sanitizer what the kernels can do wrong.
# Usage: gpu_sh.sh BUILD_FOLDER
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
mkdir -p "$place/tree/tests/support/shell" "$place/tree/cmake" "$place/tree/build-gpu/tests" "$place/bin"
cp "$root/tests/gpu.sh" "$root/tests/gpu_limits.py" "$place/tree/tests/"
cp "$root/tests/support/shell/ranks.sh" "$place/tree/tests/support/shell/"
cp "$root/cmake/mpi_env.sh" "$place/tree/cmake/"
touch "$place/tree/build-gpu/build.ninja"

# stub NAME: a program of this machine, its text from the standard input.
stub() {
  { echo '#!/usr/bin/env bash'; cat; } >"$place/bin/$1"
  chmod +x "$place/bin/$1"
}
for name in nvcc cmake ninja nvidia-cuda-mps-control; do stub "$name" <<<'exit 0'; done
stub nvidia-smi <<<'case $* in *memory.total*) echo "stub" ;; *) printf "Stub GPU\nStub GPU\n" ;; esac'
stub compute-sanitizer <<<'echo "sanitizer: $*"'
# Says what stands in the file, as a program would at init(): on its standard error. Those of the runs 1 to 3 that $STUB_SLOW has are slow.
stub mpirun <<'STUB'
echo "mpirun: $*"
cat "$STUB_SAYS" >&2
while [ $# -gt 0 ] && [ "$1" != --json ]; do shift; done
if [ $# -eq 0 ]; then exit 0; fi
digit=0
if [[ " ${STUB_SLOW:-} " == *" $(expr "$2" : '.*_\([1-3]\).json') "* ]]; then digit=9; fi
case $2 in
  *allreduce_1_*) echo '{"ranks": 1, "rows": [{"bytes": 1, "memcpy": {"time_us": 100}}]}' ;;
  *allreduce_4_*) echo "{\"ranks\": 4, \"rows\": [{\"bytes\": 1, \"memory\": \"arena\", \"in_place\": true, \"time_us\": $((digit * 1000 + 500))}]}" ;;
  *) echo "{\"rows\": [{\"subject\": \"hvd\", \"ratio\": 1.$digit}]}" ;;
esac >"$2"
STUB
mkdir -p "$place/tree/build-gpu/tests"
printf '#!/usr/bin/env bash\ncat "$STUB_PROBE"\n' >"$place/tree/build-gpu/tests/probe_gpu"
chmod +x "$place/tree/build-gpu/tests/probe_gpu"
export STUB_SAYS=$place/says STUB_PROBE=$place/probe
export PATH="$place/bin:$PATH"
: >"$STUB_PROBE"
: >"$STUB_SAYS"

failures=0
# expect WHAT PATTERN, or expect WHAT ! PATTERN: of what gpu.sh has said.
expect() {
  local what=$1 inverse=
  shift
  if [ "$1" = '!' ]; then
    inverse=1
    shift
  fi
  if grep -q -- "$1" "$place/out"; then found=1; else found=; fi
  if [ "$found" = "$inverse" ]; then
    failures=$((failures + 1))
    echo "FAILED: $what"
    sed 's/^/    /' "$place/out" | tail -n 40
  fi
}
run() { (cd "$place/tree" && bash tests/gpu.sh "$@") >"$place/out" 2>&1; }

echo "hvd: 2 ranks, NCCL 2.28.9, CUDA 13.0, one rank per GPU, NCCL" >"$STUB_SAYS"
run contract
expect "NCCL that has been used passes" "== contract, nccl, 2 ranks, registration none: passed"
expect "a way that nothing was said of fails" "== contract, staged, 2 ranks: failed (1)"
expect "no more ranks than GPUs" ! "contract, nccl, 4 ranks"

echo "hvd: 2 ranks, NCCL 2.28.9, CUDA 13.0, staged through host memory" >"$STUB_SAYS"
run contract
expect "NCCL that was not used fails" "== contract, nccl, 2 ranks, registration none: failed (1)"
expect "it is said why" "FAILED: no line 'hvd: ... one rank per GPU, NCCL' has been said"

echo "hvd: 2 ranks, NCCL 2.28.9, CUDA 13.0, 2 ranks share a GPU, through CUDA IPC" >"$STUB_SAYS"
run contract
expect "a shared GPU that was used passes" "== contract, shared, 2 ranks: passed"
echo "hvd: warning: ranks cannot share a GPU here, as cudaIpcOpenMemHandle says no (rank 1): their tensors go through the host" >>"$STUB_SAYS"
run contract
expect "a shared GPU that was given up fails" "== contract, shared, 2 ranks: failed (1)"
echo "hvd: 2 ranks, NCCL 2.28.9, CUDA 13.0, staged through host memory" >"$STUB_SAYS"

CUDA_VISIBLE_DEVICES=1 run contract
expect "one visible GPU is one" ! "contract, nccl, 2 ranks"
expect "there NCCL takes two ranks of it, which must be said" "FAILED: no line 'hvd: ... ranks share a GPU, NCCL' has been said"
CUDA_VISIBLE_DEVICES=0,7,1 run contract
expect "what follows a GPU that there is not is not seen" ! "contract, nccl, 2 ranks"
CUDA_VISIBLE_DEVICES=-1 run contract
expect "none is a skip" "SKIP: CUDA_VISIBLE_DEVICES=-1 leaves no GPU"

printf 'probe: sharing no cudaIpcGetMemHandle is refused\nprobe: managed yes\n' >"$STUB_PROBE"
run probe contract ranks
expect "what needs sharing is not tried" "== contract, shared, 4 ranks: not possible here (cudaIpcGetMemHandle is refused)"
expect "nor are small batches" "== 10,000 small batches: not possible here"
expect "the rest is" "== contract, staged, 2 ranks: passed"
printf 'probe: several no NCCL 22809, too old\n' >"$STUB_PROBE"
CUDA_VISIBLE_DEVICES=1 run probe contract
expect "where it can" "== contract, 2 ranks of NCCL's on one GPU: not possible here (NCCL 22809, too old)"
printf 'probe: managed no host and device at the same time\n' >"$STUB_PROBE"
run probe contract
expect "the suite needs managed memory" "== contract, staged, 2 ranks: not possible here"

STUB_SLOW=2 run bench
expect "one slow step of three is none" "== step, 1 rank, shared: at most 1.01 of a plain one: passed"
expect "nor is one slow allreduce" "== allreduce of 4 ranks in place: 50 % of a copy: passed"
STUB_SLOW="1 3" run bench
expect "two slow steps fail" "== step, 1 rank, nccl, bf16: at most 1.01 of a plain one: failed (1)"
expect "so do two slow allreduces" "== allreduce of 4 ranks in place, MPS: 70 % of a copy: failed (1)"

run sanitizer
expect "uninitialised memory is looked for" "sanitizer: --tool initcheck"
expect "races in shared memory are not" ! racecheck

echo "gpu.sh over stubs: $failures of 22 expectations failed"
[ "$failures" -eq 0 ]
