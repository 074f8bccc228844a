#!/usr/bin/env bash
# Builds and runs everything that needs a GPU, and keeps what came out in tests/gpu-results/: <date>_<GPU>.log, .json (verdicts and rates).
# Exit code 0: all passed; 1: something failed, was skipped or was too slow; 77: there is no GPU here, and nothing was run.
#   bash tests/gpu.sh [SECTION...]     default: all, in this order, the most valuable first
#     build         CUDA and NCCL required, in build-gpu/; warnings are no errors, as compilers differ
#     probe         half a minute: driver, libraries, kernels for this GPU, compute mode, memory and an event of another process, managed memory,
#                   MPS, NCCL. What is not possible here is not tried later: its verdict is "not possible here", which is no failure and no pass
#     torch         LibTorch tensors in the order of streams alone, a kernel that sleeps before each collective: with 1 rank, with 4 that
#                   share the GPU, and with one for each GPU
#     communicator  NCCL communicators of one rank: made, registered with, used, aborted; the memory is back afterwards; what NCCL rounds
#                   memory and windows up to, what a call costs the host, and NCCL's own arithmetic against the host's; calls that are
#                   refused leave no error for the user's next check
#     ranks         ranks that share the GPU: 10,000 small batches; the death of one of 4 in the middle of its work
#     kernels       the copy, the reduction and the abort's kernels against the host's, and their rates; host memory that is registered with CUDA; the
#                   control flow over the host table
#     contract      the contract suite on GPU tensors: shared GPU with 1, 2 and 4 ranks, staged with 2, NCCL with one rank per GPU, or with 2
#                   ranks where there is but one (NCCL 2.30)
#     bench         what a training step costs: ResNet-50, in fp32 and in mixed precision, by NCCL and by the way of a shared GPU; and
#                   allreduces of GPU memory by 4 ranks that share the GPU, with and without MPS, against a copy within the GPU
#     train         the example trainer on the CPU and on the GPU: the same losses, with 1 rank and with 4
#     sanitizer     compute-sanitizer memcheck and initcheck over the kernels (racecheck looks at shared memory, which they have none of),
#                   memcheck over a part of the contract suite
#   bash tests/gpu.sh first | second | third     the same in three calls that end within ten minutes each, where a machine is lent so long:
#     build (without the trainer and the benchmarks), probe, torch, communicator, ranks | probe, kernels, contract | probe, bench, train
#     What they need is built anew where the machine is another one.
# Fast enough (tests/gpu_limits.py), by the median of three runs: kernels at 85 % of a copy; an allreduce of 256 MiB in place by ranks that share
# the GPU at 50 %, with MPS 70 %; a step of one rank in 1.01 times a plain one.
# It needs nvcc, cmake, ninja and LibTorch (the python3's torch). What such a machine often lacks (Open MPI, header-only libraries) comes from
# the folder .gpu-kit, made on another machine by 'bash cmake/gpu_kit.sh' and carried along.
# No section takes longer than ten minutes; what there is no time left for in it has failed. Each can be asked for alone, once there is a
# build.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1

if ! command -v nvidia-smi >/dev/null || ! gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) || [ -z "$gpu" ]; then
  echo "SKIP: there is no GPU here: nothing of tests/gpu.sh was run"
  exit 77
fi
gpu=${gpu%%$'\n'*} # the first
# Those that a program sees: CUDA takes CUDA_VISIBLE_DEVICES up to the first that there is not.
gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
  all=$gpus gpus=0
  IFS=, read -ra listed <<<"$CUDA_VISIBLE_DEVICES"
  for device in "${listed[@]}"; do
    case $device in
      GPU-* | MIG-*) ;;
      *[!0-9]* | "") break ;;
      *) if [ "$device" -ge "$all" ]; then break; fi ;;
    esac
    gpus=$((gpus + 1))
  done
fi
if [ "$gpus" -eq 0 ]; then
  echo "SKIP: CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES leaves no GPU: nothing of tests/gpu.sh was run"
  exit 77
fi

if [ -e .gpu-kit/env.sh ]; then
  # shellcheck source=/dev/null
  . .gpu-kit/env.sh
fi
if ! command -v nvcc >/dev/null; then PATH=$PATH:/usr/local/cuda/bin; fi
# shellcheck source=../cmake/mpi_env.sh
. cmake/mpi_env.sh
for tool in nvcc cmake ninja mpirun python3; do
  if ! command -v "$tool" >/dev/null; then
    echo "FAILED: $tool is missing; see the head of tests/gpu.sh about .gpu-kit"
    exit 1
  fi
done

results=tests/gpu-results
mkdir -p "$results"
stamp=$(date -u +%Y-%m-%dT%H%M%SZ)
name=$results/${stamp}_$(printf '%s' "$gpu" | tr -c 'A-Za-z0-9' '_')
log=$name.log
verdicts=$name.verdicts
: >"$verdicts"
{
  echo "date: $stamp"
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
  nvcc --version | tail -n 2
  git rev-parse HEAD 2>/dev/null || true
} | tee "$log"

call_end=$((SECONDS + 100000))

# step NAME SECONDS COMMAND...: runs it with a limit, and that of its section; output to the log too. A skip (77) is a failure: there is a GPU.
step() {
  local what=$1 limit=$2 code copier waited started=$SECONDS
  shift 2
  if [ $((section_end - SECONDS)) -lt "$limit" ]; then limit=$((section_end - SECONDS)); fi
  if [ "$limit" -lt 5 ]; then
    printf '%s\t%s\t%s\n' "$what" "failed (no time left)" 0 >>"$verdicts"
    echo "== $what: failed, there is no time left for it" | tee -a "$log"
    return 1
  fi
  printf '\n== %s\n' "$what" | tee -a "$log"
  # Not a pipe: a process that is stuck in the driver would keep it open, and whoever reads it waiting.
  exec 5> >(exec tee -a "$log")
  copier=$!
  timeout --kill-after=10 "$limit" "$@" </dev/null >&5 2>&1 5>&-
  code=$?
  exec 5>&-
  waited=0
  while kill -0 "$copier" 2>/dev/null && [ "$waited" -lt 50 ]; do
    sleep 0.1
    waited=$((waited + 1))
  done
  if kill "$copier" 2>/dev/null; then echo "(something that it has started is still there)" | tee -a "$log"; fi
  case $code in
    0) verdict=passed ;;
    77) verdict="failed (skipped itself)" ;;
    *) verdict="failed ($code)" ;;
  esac
  printf '%s\t%s\t%s\n' "$what" "$verdict" $((SECONDS - started)) >>"$verdicts"
  echo "== $what: $verdict" | tee -a "$log"
  [ "$code" -eq 0 ]
}

# What the probe has found not to be possible, with its reasons.
declare -A impossible=()
# possible WHAT STEP...: otherwise the steps' verdict is that it is not possible here.
possible() {
  local what=$1 name
  shift
  if [ -z "${impossible[$what]+set}" ]; then return 0; fi
  for name in "$@"; do
    printf '%s\t%s\t%s\n' "$name" "not possible here (${impossible[$what]})" 0 >>"$verdicts"
    echo "== $name: not possible here (${impossible[$what]})" | tee -a "$log"
  done
  return 1
}

# described PHRASE COMMAND...: what the program says at init() of how GPU tensors travel (on its standard error) must be what was asked for,
# and ranks that are to share a GPU must not find out later that they cannot; else the test of one way passes by another.
described() {
  local phrase=$1 said code
  shift
  said=$(mktemp)
  "$@" 2>&1 | tee "$said"
  code=${PIPESTATUS[0]}
  if [ "$code" -eq 0 ] && ! grep -q "^hvd: .*$phrase" "$said"; then
    echo "FAILED: no line 'hvd: ... $phrase' has been said: the tensors have travelled another way"
    code=1
  fi
  if [ "$code" -eq 0 ] && [[ $phrase == *IPC* ]] && grep -q "ranks cannot share a GPU here" "$said"; then
    echo "FAILED: ranks cannot share a GPU here: the tensors have travelled another way"
    code=1
  fi
  rm -f "$said"
  return "$code"
}

section_probe() {
  local word what answer why out=build-gpu/probe.txt
  section_configure || return
  step "build the probe" 400 cmake --build build-gpu --target probe_gpu || return
  step "probe" 30 bash -c "set -o pipefail; build-gpu/tests/probe_gpu | tee $out" || return
  while read -r word what answer why; do
    if [ "$word" = probe: ] && [ "$answer" = no ]; then impossible[$what]=$why; fi
  done <"$out"
}

configure() {
  local options=(-S . -B build-gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DHVD_CUDA=ON -DHVD_NCCL=ON -DHVD_INSTALL=OFF)
  cmake "${options[@]}" -DHVD_TORCH_BINDINGS=AUTO -DHVD_TORCH_CUDA_EXAMPLES=ON "$@"
}

section_configure() {
  if [ -e build-gpu/build.ninja ]; then return; fi # by an earlier call on this machine
  if ! step "configure" 120 bash -c "$(declare -f configure); configure"; then
    # zlib's headers, of the trainer, are what is missing most often
    step "configure without the examples" 120 bash -c "$(declare -f configure); configure -DHVD_BUILD_EXAMPLES=OFF"
  fi
}

section_build() {
  rm -f build-gpu/build.ninja
  section_configure || return
  # In the order in which the sections use it, so that a build that is cut short is of use.
  step "build the tests" 600 cmake --build build-gpu --target torch_streams_gpu nccl_gpu_test errors_gpu_test ranks_gpu_test || return
  if [ "$parts" != first ]; then step "build" 600 cmake --build build-gpu; fi
}

section_torch() {
  local program=build-gpu/tests/torch_streams_gpu
  step "streams, 1 rank" 120 mpirun -np 1 $program
  step "streams, 1 rank, shared GPU" 120 env HVD_GPU_BACKEND=shared mpirun -np 1 $program
  if possible processes "streams, 4 ranks"; then step "streams, 4 ranks" 240 mpirun -np 4 $program; fi
  if [ "$gpus" -gt 1 ]; then step "streams, a rank for each GPU" 240 mpirun -np "$gpus" $program; fi
}

section_communicator() {
  step "communicators of one rank" 300 build-gpu/tests/nccl_gpu_test
  step "errors that calls leave behind" 60 build-gpu/tests/errors_gpu_test
}

# The last rank is killed (137), and the others are content.
killed() {
  bash tests/support/shell/ranks.sh 4 build-gpu/tests/ranks_gpu_test kill
  local code=$?
  echo "exit code $code; 137: the others have passed"
  [ "$code" -eq 137 ]
}

section_ranks() {
  local ranks
  possible sharing "10,000 small batches" "a kernel that fails" "kill -9 of one of 4 ranks" || return
  for ranks in 1 2 4; do step "10,000 small batches, $ranks ranks" 240 mpirun -np "$ranks" build-gpu/tests/ranks_gpu_test many; done
  step "a kernel that fails" 120 mpirun -np 2 build-gpu/tests/ranks_gpu_test fault
  step "kill -9 of one of 4 ranks" 120 bash -c "$(declare -f killed); killed"
}

section_kernels() {
  step "build the kernels' tests" 400 cmake --build build-gpu --target batched_copy_gpu_test shared_reduce_gpu_test poison_gpu_test staged_gpu_test unit_tests || return
  step "copy kernels" 300 build-gpu/tests/batched_copy_gpu_test
  step "reduction kernel" 300 build-gpu/tests/shared_reduce_gpu_test
  step "results of an abort" 60 build-gpu/tests/poison_gpu_test
  step "host memory registered with CUDA" 120 build-gpu/tests/staged_gpu_test
  step "control flow over the host table" 300 build-gpu/tests/unit_tests "--source-file=*tests/ops/gpu/*_test.cc"
}

# contract BACKEND RANKS [FILTER...]
contract() {
  local backend=$1 ranks=$2 name phrase
  shift 2
  name="contract, $backend, $ranks ranks${HVD_NCCL_REGISTRATION:+, registration $HVD_NCCL_REGISTRATION}"
  if [ -n "${one_gpu:-}" ]; then name="contract, $ranks ranks of NCCL's on one GPU"; fi
  case $backend in
    nccl) phrase=${one_gpu:+ranks share a GPU, NCCL} phrase=${phrase:-one rank per GPU, NCCL} ;;
    shared) phrase="through CUDA IPC" ;;
    *) phrase="staged through host memory" ;;
  esac
  possible managed "$name" || return
  if [ "$backend" = shared ]; then possible sharing "$name" || return; fi
  step "$name" 280 bash -c "$(declare -f described); described \"\$@\"" - "$phrase" env HVD_GPU_BACKEND="$backend" \
    ${one_gpu:+NCCL_MULTI_RANK_GPU_ENABLE=1} mpirun -np "$ranks" build-gpu/tests/contract_gpu_tests --mpi --gpu "$@"
}

section_contract() {
  local ranks registration
  step "build the contract suite" 400 cmake --build build-gpu --target contract_gpu_tests || return
  for ranks in 1 2 4; do contract shared "$ranks"; done
  contract staged 2
  for ranks in 1 2 4; do
    if [ "$ranks" -gt "$gpus" ]; then continue; fi
    for registration in none buffer window; do HVD_NCCL_REGISTRATION=$registration contract nccl "$ranks"; done
  done
  # else NCCL would never run with more than one rank here
  if [ "$gpus" -eq 1 ] && possible several "contract, 2 ranks of NCCL's on one GPU"; then one_gpu=yes contract nccl 2; fi
}

# The losses of two records agree to a thousandth.
equal_losses() {
  python3 - "$1" "$2" <<'PY'
import json
import sys

def losses(file):
    text = open(file).read().strip()
    try:
        records = json.loads(text)
    except ValueError:
        records = [json.loads(line) for line in text.splitlines()]
    records = records if isinstance(records, list) else records.get("epochs", [records])
    return [record["loss"] for record in records if "loss" in record]

mine, other = losses(sys.argv[1]), losses(sys.argv[2])
print("losses", mine, other)
equal = len(mine) == len(other) and mine and all(abs(a - b) <= 1e-3 * max(1, abs(a)) for a, b in zip(mine, other))
sys.exit(0 if equal else 1)
PY
}

section_train() {
  local ranks device
  step "build the trainer" 400 cmake --build build-gpu --target train || return
  for ranks in 1 4; do
    for device in cpu cuda; do
      step "train mlp, $ranks ranks, $device" 280 mpirun -np "$ranks" build-gpu/examples/train --model mlp --epochs 2 --optimizer sgd --lr 0.01 \
        --seed 1 --device "$device" --json "build-gpu/train_${ranks}_$device.json"
    done
    step "CPU and GPU learn the same, $ranks ranks" 30 bash -c "$(declare -f equal_losses); equal_losses build-gpu/train_${ranks}_cpu.json build-gpu/train_${ranks}_cuda.json"
  done
}

# thrice NAME SECONDS RECORD COMMAND...: three runs, with the records RECORD_1.json to RECORD_3.json, for a threshold.
thrice() {
  local what=$1 limit=$2 record=$3 run
  shift 3
  for run in 1 2 3; do step "$what, run $run of 3" "$limit" "$@" --json "${record}_$run.json" || return; done
}

# shared_rate NAME RECORD PERCENT
shared_rate() {
  local run pairs=()
  for run in 1 2 3; do pairs+=("${name}_allreduce_1_$run.json" "$2_$run.json"); done
  step "$1" 30 python3 tests/gpu_limits.py shared "${pairs[@]}" "$3"
}

# The tables are kept as JSON, too.
section_bench() {
  local way amp options=(--device cuda --model resnet50 --image-size 224 --classes 1000 --batch-size 64 --warmup 10 --rounds 30)
  step "build hvd_bench" 200 cmake --build build-gpu --target hvd_bench || return
  step "build step_bench" 300 cmake --build build-gpu --target step_bench &&
  for way in nccl shared; do
    for amp in "" bf16; do
      local record=${name}_step_1_$way${amp:+_$amp} what="step, 1 rank, $way${amp:+, $amp}"
      thrice "$what" 120 "$record" env HVD_GPU_BACKEND=$way mpirun -np 1 build-gpu/tests/step_bench "${options[@]}" ${amp:+--amp "$amp"} &&
        step "$what: at most 1.01 of a plain one" 30 python3 tests/gpu_limits.py step "$record"_{1,2,3}.json 1.01
    done
  done
  local sizes=(--device cuda --versus memcpy --check --min-bytes 1K --max-bytes 256M)
  thrice "hvd_bench, 1 rank" 100 "${name}_allreduce_1" mpirun -np 1 build-gpu/tools/hvd_bench "${sizes[@]}" --memory ordinary
  possible sharing "hvd_bench, 4 ranks" "allreduce of 4 ranks in place: 50 % of a copy" "hvd_bench, ResNet-50's gradients, 4 ranks" || return
  thrice "hvd_bench, 4 ranks" 150 "${name}_allreduce_4" mpirun -np 4 build-gpu/tools/hvd_bench "${sizes[@]}" --memory ordinary,arena &&
    shared_rate "allreduce of 4 ranks in place: 50 % of a copy" "${name}_allreduce_4" 50
  if command -v nvidia-cuda-mps-control >/dev/null && nvidia-cuda-mps-control -d </dev/null >>"$log" 2>&1; then
    thrice "hvd_bench, 4 ranks, MPS" 150 "${name}_allreduce_4_mps" mpirun -np 4 build-gpu/tools/hvd_bench "${sizes[@]}" --memory arena &&
      shared_rate "allreduce of 4 ranks in place, MPS: 70 % of a copy" "${name}_allreduce_4_mps" 70
    echo quit | timeout 30 nvidia-cuda-mps-control >>"$log" 2>&1
  else
    echo "MPS cannot be started here: the rate with it was not measured" | tee -a "$log"
    printf '%s\t%s\t%s\n' "allreduce of 4 ranks in place, MPS: 70 % of a copy" "not measured (MPS cannot be started here)" 0 >>"$verdicts"
  fi
  step "hvd_bench, ResNet-50's gradients, 4 ranks" 100 mpirun -np 4 build-gpu/tools/hvd_bench --device cuda --model resnet50 \
    --memory ordinary,arena --versus memcpy --check --json "${name}_gradients_4.json"
  step "step, 4 ranks that share the GPU" 120 mpirun -np 4 build-gpu/tests/step_bench --device cuda --model resnet50 --image-size 224 \
    --classes 1000 --batch-size 16 --rounds 10 --warmup 5 --amp bf16 --json "${name}_step_4.json"
}

section_sanitizer() {
  local tool test
  for tool in memcheck initcheck; do
    for test in batched_copy_gpu_test shared_reduce_gpu_test poison_gpu_test; do
      step "compute-sanitizer $tool, $test" 280 compute-sanitizer --tool "$tool" --error-exitcode 1 build-gpu/tests/$test
    done
  done
  possible sharing "compute-sanitizer memcheck, allreduce of ranks that share the GPU" || return
  step "compute-sanitizer memcheck, allreduce of ranks that share the GPU" 280 env HVD_GPU_BACKEND=shared mpirun -np 2 compute-sanitizer \
    --tool memcheck --error-exitcode 1 build-gpu/tests/contract_gpu_tests --mpi --gpu --filter "allreduce/float32 sum"
}

parts=${1:-all}
case $parts in
  all) sections=(build probe torch communicator ranks kernels contract bench train sanitizer) ;;
  first) sections=(build probe torch communicator ranks) ;;
  second) sections=(configure probe kernels contract) ;;
  third) sections=(configure probe bench train) ;;
  *) sections=("$@") ;;
esac
case $parts in
  first | second | third) call_end=$((SECONDS + 570)) ;; # so that the results are written before the call is cut off
esac
for section in "${sections[@]}"; do
  if ! declare -F "section_$section" >/dev/null; then
    echo "FAILED: no section is called $section"
    exit 1
  fi
  section_end=$((SECONDS + 600))
  if [ "$call_end" -lt "$section_end" ]; then section_end=$call_end; fi
  "section_$section"
done

# Verdicts, and every rate that a program printed ("... 12.3 us 456 GB/s 78.9 % of copy"), as JSON.
python3 - "$gpu" "$gpus" "$stamp" "$verdicts" "$log" "$name.json" <<'PY'
import json
import re
import sys

gpu, gpus, stamp, verdicts, log, out = sys.argv[1:]
rows = [line.rstrip("\n").split("\t") for line in open(verdicts)]
rate = re.compile(r"^\s+(.*\S)\s+([\d.]+) us\s+([\d.]+) GB/s\s+([\d.]+) % of copy")
rates, step = [], ""
for line in open(log, errors="replace"):
    if line.startswith("== ") and line.count(":") == 0:
        step = line[3:].strip()
    found = rate.match(line)
    if found and "sanitizer" not in step:
        rates.append({"what": found[1], "us": float(found[2]), "gb_per_s": float(found[3]), "percent_of_copy": float(found[4])})
if not rows:
    sys.exit("FAILED: nothing was run")
record = {"gpu": gpu, "gpus": int(gpus), "date": stamp,
          "steps": [{"step": r[0], "verdict": r[1], "seconds": int(r[2])} for r in rows], "rates": rates}
json.dump(record, open(out, "w"), indent=1)
PY
written=$?
passed=$(awk -F'\t' '$2 == "passed"' "$verdicts" | wc -l)
failed=$(awk -F'\t' '$2 ~ /^failed/' "$verdicts" | wc -l)
rm -f "$verdicts"
echo "$passed passed, $failed failed on $gpu; kept in $log" | tee -a "$log"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ] && [ "$written" -eq 0 ]
