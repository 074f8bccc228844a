#!/usr/bin/env bash
# hvdrun: ranks of one host without MPI compute what they compute under mpirun; output by rank, variables, exit codes, signals, what is left
# behind, the usual mistakes; and mpirun's command line for the rest.
# Usage: hvdrun.sh BUILD_FOLDER
# timeout: 300
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
build=$(cd "$1" && pwd)
run=$build/tools/hvdrun meets=$build/tests/meets
[ -x "$run" ] || { echo "SKIP: hvdrun was not built"; exit 77; }
# shellcheck source=../../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
# shellcheck source=../../../support/shell/cases.sh
. "$root/tests/support/shell/cases.sh"
ulimit -c 0
for name in $(compgen -e); do
  case $name in RANK | WORLD_SIZE | LOCAL_RANK | PMI* | SLURM_* | OMPI_COMM_* | HVD_INIT*) unset "$name" ;; esac
done

verdict() { # verdict NAME PROBLEM: no problem is a pass
  [ -z "$(find "$TMPDIR" -maxdepth 1 -name 'hvdrun-*')" ] || set -- "$1" "${2:-"something is left in TMPDIR"}"
  if [ -z "$2" ]; then
    echo "PASS  $1"
  else
    echo "FAIL  $1: $2; output:"
    sed 's/^/      /' "$work"/out "$work"/err
    failures=$((failures + 1))
  fi
}
# says NAME CODE COUNT WORDS COMMAND...: the exit code, and so many lines of either output with the words
says() {
  local name=$1 code=$2 lines=$3 words=$4 problem='' status
  shift 4
  timeout --kill-after=5 60 "$@" >"$work/out" 2>"$work/err" </dev/null
  status=$?
  [ "$status" -eq "$code" ] || problem="exit code $status, not $code"
  [ "$(cat "$work/out" "$work/err" | grep -acE -- "$words")" -eq "$lines" ] || problem=${problem:-"not $lines lines with '$words'"}
  verdict "$name" "$problem"
}

same() {
  local bits
  timeout 60 mpirun -np 3 "$meets" >"$work/mpirun" 2>&1 </dev/null
  bits=$(sed -n 's/^rank .*: \([0-9a-f]*\), MPI is used/\1/p' "$work/mpirun" | sort -u)
  says "the bits of mpirun" 0 6 "^\[[0-2]\]<stderr>:rank [0-2] of 3, [0-2] of 3 here: ${bits:-none}, MPI is not used" "$run" -np 3 "$meets"
}
start same
start says "one rank" 0 2 "^\[0\]<stderr>:rank 0 of 1, " "$run" -np 1 "$meets"
start says "as many ranks as slots" 0 8 "rank [0-3] of 4, " "$run" -H "localhost:3,127.0.0.1" "$meets"
start says "by mpirun, if wanted" 0 4 "rank [01] of 2, .*MPI is used" "$run" -np 2 --mpi "$meets"
start says "by mpirun, where ranks may not share memory" 0 4 "rank [01] of 2, .*MPI is used" env HVD_SHARED_MEMORY=off "$run" -np 2 "$meets"
for off in HVD_SHARED_MEMORY=OFF HOROVOD_SHARED_MEMORY=off; do
  start says "as the library reads it: $off" 0 4 "rank [01] of 2, .*MPI is used" env "$off" "$run" -np 2 "$meets"
  start says "also for the ranks alone: $off" 0 4 "rank [01] of 2, .*MPI is used" "$run" -np 2 -x "$off" "$meets"
done
start says "HVD_ comes before HOROVOD_" 0 4 "rank [01] of 2, .*MPI is not used" env HVD_SHARED_MEMORY=auto HOROVOD_SHARED_MEMORY=off "$run" -np 2 "$meets"
start says "a rank of horovodrun's that starts ranks" 0 2 "rank 0 of 1, " env HOROVOD_RANK=1 HOROVOD_SIZE=4 "$run" -np 1 "$meets"
start says "without prefixes" 0 4 "^rank [01] of 2, " "$run" -np 2 --no-prefix "$meets"
start says "variables, and arguments with blanks" 0 2 "^\[[01]\]<stdout>:a b, c  d, 1048576, two words$" env GIVEN="a b" \
  "$run" -np 2 -x GIVEN -x "NEW=c  d" --fusion-threshold-mb 1 bash -c 'echo "$GIVEN, $NEW, $HVD_FUSION_THRESHOLD, $1"' bash "two words"
own_path() { # the program is looked for where the ranks look
  mkdir "$work/bin"
  printf '#!/bin/sh\necho "mine $RANK"\n' >"$work/bin/mine"
  chmod +x "$work/bin/mine"
  says "a PATH of the ranks'" 0 2 "^\[[01]\]<stdout>:mine [01]$" "$run" -np 2 -x "PATH=$work/bin:$PATH" mine
  says "a PATH of the ranks' that lacks the program" 2 1 "^hvdrun: mine: no such program in PATH" env PATH="$work/bin:$PATH" "$run" -np 2 -x "PATH=$PATH" mine
  says "this folder, by an empty word of PATH" 0 2 "^\[[01]\]<stdout>:mine [01]$" bash -c 'cd "$1" && PATH=$PATH: exec "$0" -np 2 mine' "$run" "$work/bin"
}
start own_path
start says "a TMPDIR that is no whole path" 0 4 "rank [01] of 2, " bash -c 'cd "${TMPDIR%/*}" && TMPDIR=${TMPDIR##*/} exec "$0" -np 2 "$1"' "$run" "$meets"
start says "the program's own options are its own" 0 1 "^\[0\]<stdout>:-np 7 --help -x$" "$run" -np 1 echo -np 7 --help -x
start says "also where hvdrun itself needs none" 0 1 "^\[0\]<stdout>:-np 7$" "$run" -n 1 echo -np 7
start says "and where there are none" 2 1 "how many ranks" "$run" echo -np 7
start says "where SIGCHLD is ignored" 7 1 "ended with exit code 7" env --ignore-signal=CHLD "$run" -np 2 bash -c 'exit 7'
# shellcheck disable=SC2016  # $0 is the inner shell's
start says "closed streams" 7 0 . bash -c '"$0" -np 2 bash -c "echo said; exit 7" <&- >&- 2>&-' "$run"
start says "a line without an end" 0 2 "^\[[01]\]<stdout>:half$" "$run" -np 2 printf half
# What a rank prints is shown by whole lines as it comes, however the rank ends; and it does not believe to be on a terminal.
for how in ends abort throw; do
  [ $how = ends ] && code=0 || code=134
  start says "two lines without a flush, then: $how" $code 4 "^\[[01]\]<stdout>:said (before|after) init\(\)$" "$run" -np 2 "$meets" prints $how
done
start says "also of one rank alone" 134 2 "^\[0\]<stdout>:said (before|after) init\(\)$" "$run" -np 1 "$meets" prints abort
start says "also straight into a file" 134 4 "^said (before|after) init\(\)$" "$run" -np 2 --no-prefix "$meets" prints abort
start says "a rank is on no terminal" 0 2 "^\[[01]\]<stdout>:none$" "$run" -np 2 bash -c '[ -t 1 ] || [ -t 2 ] || echo none'
start says "much output, line by line" 0 60000 '^\[[0-2]\]<stdout>:[0-9]+ 0123456789012345678901234567890123456789$' \
  "$run" -np 3 bash -c 'for ((i = 0; i < 20000; i++)); do echo "$i 0123456789012345678901234567890123456789"; done'
files() {
  says "output by rank" 0 2 "^\[[01]\]<stdout>:out [01]$" "$run" -np 2 --output-filename "$work/logs/all" bash -c 'echo "out $RANK"; echo "err $RANK" >&2'
  local found
  found=$(cd "$work/logs/all" && grep -r . . | sort | tr '\n' ' ')
  verdict "files by rank" "$([ "$found" = "./rank.0/stderr:err 0 ./rank.0/stdout:out 0 ./rank.1/stderr:err 1 ./rank.1/stdout:out 1 " ] || echo "not: $found")"
}
start files
start says "rank 0 reads standard input" 0 1 "^\[0\]<stdout>:told$" bash -c 'echo told | "$0" -np 3 cat' "$run"

start says "the exit code of the first to fail" 7 1 "^hvdrun: rank 1 .* ended with exit code 7, the first to fail; its last words:" \
  "$run" -np 3 bash -c '[ "$RANK" = 1 ] || exec sleep 60; echo "the reason" >&2; exit 7'
start says "and its last words" 7 1 "^  the reason$" "$run" -np 2 bash -c '[ "$RANK" = 1 ] || exec sleep 60; echo "the reason" >&2; exit 7'
uncaught() { # as LibTorch ends a rank: what it says is not pushed out by the stack
  says "last words without the stack" 134 1 "^    what\(\):  The size of tensor a \(3\) must match$" "$run" -np 2 bash -c 'ulimit -c 0
    [ "$RANK" = 1 ] || exec sleep 60
    printf "%s\n" "an old line" "terminate called after throwing an instance of '"'c10::Error'"'" "  what():  The size of tensor a (3) must match" \
      "Exception raised from infer_size_impl at here.cpp:24 (most recent call first):" >&2
    for ((i = 0; i < 40; i++)); do echo "frame #$i: c10::Error::Error() + 0x1 (0x2 in libc10.so)" >&2; done
    kill -ABRT $$'
  verdict "all of it, and nothing else" "$(sed '1,/its last words:$/d' "$work/err" | tr '\n' '|' |
    sed 's/^    what():  The size of tensor a (3) must match|  Exception raised from infer_size_impl at here.cpp:24 (most recent call first):|$//')"
}
start uncaught
start says "a rank that is killed" 137 3 "^\[[013]\]<stderr>:rank [013]: RankFailed: .*rank 2" "$run" -np 4 "$build/tests/victim" kill 60
start says "a rank that ends before init()" 7 1 "ended with exit code 7, the first to fail" "$run" -np 2 "$meets" leaves
# Ranks with different numbers of steps, which end one after the other by what the first to end has done: nobody else is blamed.
uneven() { # WHAT ENDED WAITING LINES COMMAND...: the ranks that have ended, and those that wait for them
  local what=$1 ended=$2 waiting=$3 lines=$4
  shift 4
  says "ranks with other numbers of steps: $what, $(basename "$1")" 3 "$lines" \
    "^(\\[$waiting\\]<stderr>:)?rank $waiting: (Shutdown|RankFailed): .*rank $ended has ended, or called hvd::shutdown\(\), .*ElasticSampler.*join\(\).*hvd::any\(\)" \
    "$@" "$build/tests/victim" "$what" 600
  verdict "only who has ended is blamed: $what, $(basename "$1")" \
    "$(cat "$work/out" "$work/err" | grep -v "rank $ended has ended, or" | grep -E "died|without hvd::shutdown|shut down after")"
}
ways=("$run -np 4")
if "$run" --check-build | grep -q '\[X\] UCX' && bash "$root/tests/support/shell/on_host.sh" pretended true; then ways+=("bash $root/tests/support/shell/hosts.sh 2,2"); fi
for way in "${ways[@]}"; do
  # shellcheck disable=SC2086  # words
  start uneven fewer 2 '[013]' 3 $way
  # shellcheck disable=SC2086
  start uneven more '[013]' 2 1 $way
done
start says "a program that is not there" 2 1 "^hvdrun: nothere: no such program in PATH" "$run" -np 2 nothere
start says "a program that cannot be run" 2 1 "README.md: cannot be run" "$run" -np 2 "$root/README.md"
start says "too few slots" 2 1 "^hvdrun: -np 4: there are only 3 slots" "$run" -np 4 -H localhost:3 "$meets"
start says "a host without a number of slots" 2 1 "'many' is no number of slots" "$run" -H localhost:many "$meets"
start says "a host file that is not there" 2 1 "--hostfile /nonexistent: cannot be read" "$run" --hostfile /nonexistent "$meets"
start says "no number of ranks" 2 1 "how many ranks\? -np RANKS" "$run" "$meets"
start says "no program" 2 1 "no program is named" "$run" -np 2
start says "an option that is none" 2 1 "^hvdrun: --nope: no such option" "$run" -np 2 --nope "$meets"
start says "an option that is none, before others" 2 1 "^hvdrun: --gloo: no such option" "$run" --gloo -np 2 "$meets"
start says "a knob that is wrong" 3 2 "^\[[01]\]<stderr>:.*HVD_LOG_LEVEL: 'loud' is not allowed" "$run" -np 2 --log-level loud bash -c '"$0"; code=$?; sleep 1; exit $code' "$meets"

start says "what is planned" 0 2 "^A='b c' RANK=[01] WORLD_SIZE=2 LOCAL_RANK=[01] LOCAL_WORLD_SIZE=2 ./meets --lr 0.1$" \
  bash -c 'cd "$(dirname "$1")" && "$0" -np 2 --dry-run -x "A=b c" ./meets --lr 0.1' "$run" "$meets"
hosts() {
  printf 'first slots=2 # the first\n\nsecond slots=2\n' >"$work/hosts"
  says "several hosts" 0 1 "^HVD_TIMELINE=t.json mpirun -np 4 --hostfile $work/hosts .*-x HVD_CACHE_CAPACITY .*-x HVD_TIMELINE .*--report-bindings ./train" \
    env HVD_CACHE_CAPACITY=64 HVD_INIT=alone "$run" --hostfile "$work/hosts" --dry-run --timeline-filename t.json --mpi-args="--report-bindings" ./train
}
start hosts
start says "arguments of mpirun's in quotes" 0 1 "^mpirun .* --mca plm_rsh_agent 'ssh -p 2222' -x 'A=b  c' ls$" \
  "$run" -np 2 --dry-run --mpi-args "--mca plm_rsh_agent 'ssh -p 2222' -x A=\"b  c\"" ls
start says "arguments of mpirun's without an end" 2 1 "^hvdrun: --mpi-args: a shell does not read '-x \"A' as words" "$run" -np 2 --dry-run --mpi-args '-x "A' ls
start says "time to end, by mpirun" 0 1 "^mpirun .*--mca odls_base_sigkill_timeout 30 .*ls$" "$run" -np 2 --mpi --time-to-end 30 --dry-run ls
start says "mpirun's own time to end" 0 0 "sigkill_timeout" "$run" -np 2 --mpi --dry-run ls
start says "an allocation of several nodes" 0 1 "mpirun -np 8 " env SLURM_JOB_ID=1 SLURM_NTASKS=8 SLURM_JOB_NUM_NODES=2 "$run" --dry-run ls
start says "an allocation of one node" 0 4 "^RANK=[0-3] WORLD_SIZE=4 " env SLURM_JOB_ID=1 SLURM_NTASKS=4 SLURM_JOB_NUM_NODES=1 "$run" --dry-run ls
start says "what is built" 0 1 "\[X\] Open MPI|\[X\] MPICH|\[X\] Intel" "$run" --check-build
start says "whether with UCX" 0 1 "\[[X ]\] UCX$" "$run" --check-build

# ---- Ranks of other hosts are mpirun's, which reaches them by a stand-in for ssh; where there is none it is said what else starts them
other_hosts() {
  printf '#!/bin/sh\nexec bash "%s" "$@"\n' "$root/tests/support/shell/fake_ssh.sh" >"$work/agent"
  chmod +x "$work/agent"
  says "other hosts by mpirun, variables with them" 0 2 "^\[.*\]<stdout>:a b, c  d, 1048576, two words$" env GIVEN="a b" "$run" -H "first:1,second:1" -x GIVEN \
    -x "NEW=c  d" --fusion-threshold-mb 1 --mpi-args "--mca plm_rsh_agent $work/agent" bash -c 'echo "$GIVEN, $NEW, $HVD_FUSION_THRESHOLD, $1"' bash "two words"
}
start other_hosts
start says "other hosts without mpirun" 2 1 "^hvdrun: mpirun, which starts ranks of other hosts, is not found in PATH; .*srun, torchrun, pdsh.*Kubernetes" \
  env PATH=/nonexistent "$run" -H "localhost:1,second:1" /bin/ls
start says "nodes of Slurm without mpirun" 2 1 "^hvdrun: mpirun, which starts ranks of other hosts, is not found in PATH" \
  env PATH=/nonexistent SLURM_JOB_ID=1 SLURM_NTASKS=8 SLURM_JOB_NUM_NODES=2 "$run" /bin/ls
start says "this host without shared memory and mpirun" 2 1 "^hvdrun: mpirun, which starts the ranks here, is not found in PATH$" \
  env PATH=/nonexistent HVD_SHARED_MEMORY=off "$run" -np 2 /bin/ls
start says "a port and a key for mpirun's ssh" 0 1 "^UCX_NET_DEVICES=eth1 NCCL_SOCKET_IFNAME==eth1 mpirun -np 2 -H first,second .*btl_tcp_if_include eth1 .*plm_rsh_agent 'ssh -p 2222 -i my.key' " \
  "$run" -H first,second -p 2222 -i my.key --network-interfaces eth1 --dry-run ls
start says "no way of its own over ssh" 2 1 "^hvdrun: --launcher: no such option" "$run" --launcher ssh -H first:2 ls

manual() { # it has every option
  local option problem=''
  for option in $("$run" --help | grep -oE '^ +-[^ ]+' | tr ',' ' '); do
    grep -qF -- "\\fB${option//-/\\-}\\fR" "$root/tools/hvdrun/hvdrun.1" || problem="$problem $option"
  done
  : >"$work/out"
  : >"$work/err"
  verdict "the manual has all options" "${problem:+"it lacks$problem"}"
}
start manual
complete_words() { # WORD...: what bash offers for the last one
  bash -c '. "$0"; PATH=$(dirname "$1"):$PATH; shift; COMP_WORDS=(hvdrun "$@"); COMP_CWORD=$#; _hvdrun; printf "%s\n" "${COMPREPLY[@]}"' \
    "$root/tools/hvdrun/completion.bash" "$run" "$@"
}
# says() runs its command by timeout(1)
export -f complete_words
export root run
completion_cases() {
  says "completion of options" 0 1 "^--timeline-filename$" bash -c 'complete_words --timeline-f'
  says "completion of values" 0 1 "^warning$" bash -c 'complete_words --log-level w'
}
start completion_cases
if [ -x "$build/examples/train" ]; then
  trains() {
    local launcher options="--model mlp --epochs 1 --max-steps 10 --threads 1 --seed 3"
    for launcher in mpirun "$run"; do
      # shellcheck disable=SC2086  # options
      timeout 100 "$launcher" -np 3 "$build/examples/train" $options --json "$work/${launcher##*/}.json" >"$work/out" 2>"$work/err" </dev/null
    done
    numbers() { grep -E '"(loss|top1|train_loss|world_size)"' "$work/$1.json"; }
    verdict "it trains as under mpirun" "$([ -n "$(numbers hvdrun)" ] && [ "$(numbers hvdrun)" = "$(numbers mpirun)" ] || echo "other numbers")"
  }
  start trains
fi

# ended NAME SIGNAL CODE SECONDS COMMAND...: hvdrun is sent SIGNAL when two ranks run; nothing of them is left
ended() {
  local name=$1 signal=$2 code=$3 most=$4 problem='' status process start pid
  shift 4
  : >"$work/out"
  : >"$work/err"
  env --default-signal=INT,TERM "$run" -np 2 "$@" >"$work/out" 2>"$work/err" </dev/null & # bash lets what runs in the background ignore SIGINT
  process=$!
  for ((i = 0; i < 200; i++)); do
    [ "$(cat "$work/out" "$work/err" | grep -cE 'waits|said after')" = 2 ] && break
    sleep 0.05
  done
  [ $i -lt 200 ] || problem="its lines are not seen while it runs"
  pid=$(pgrep -P "$process" | tr '\n' ' ')
  start=$SECONDS
  kill -"$signal" "$process"
  wait "$process" 2>/dev/null
  status=$?
  [ "$status" -eq "$code" ] || problem="exit code $status, not $code"
  [ $((SECONDS - start)) -le "$most" ] || problem=${problem:-"it took $((SECONDS - start)) s"}
  [ "$(wc -w <<<"$pid")" = 2 ] || problem=${problem:-"not two ranks: $pid"}
  sleep 0.3
  for one in $pid; do
    case "$(sed -n 's/^State:[[:space:]]*\(.\).*/\1/p' "/proc/$one/status" 2>/dev/null)" in '' | Z | X) ;; *) problem=${problem:-"process $one is left"} ;; esac
  done
  [ "$signal" != KILL ] || rm -rf "$TMPDIR"/hvdrun-* # nobody is there to do it
  verdict "$name" "$problem"
}
start ended "SIGTERM ends the ranks" TERM 143 4 "$meets" waits
start ended "SIGINT ends the ranks" INT 130 4 "$meets" waits
ignores() { # as nohup does
  env --ignore-signal=HUP "$run" -np 1 bash -c 'echo waits; sleep 2' >"$work/out" 2>"$work/err" </dev/null &
  local process=$!
  sleep 0.7
  kill -HUP $process
  local problem=''
  wait $process || problem="exit code $?"
  verdict "a signal that is ignored stays so" "$problem"
}
start ignores
start ended "SIGINT loses no line" INT 130 4 "$meets" prints waits
start ended "ranks that do not heed SIGTERM" TERM 143 9 bash -c 'trap "" TERM; echo waits; while :; do sleep 1; done'
start ended "ranks do not outlive hvdrun" KILL 137 4 "$meets" waits
twice() { # as a terminal and a wrapper that passes signals on send them: the ranks' own handlers have their time
  local process problem=''
  : >"$work/out"
  : >"$work/err"
  "$run" -np 2 --time-to-end 20 bash -c 'trap "sleep 0.3; echo saved; exit 0" TERM; echo waits; while :; do sleep 0.1; done' \
    >"$work/out" 2>"$work/err" </dev/null &
  process=$!
  for ((i = 0; i < 200; i++)); do
    [ "$(grep -c waits "$work/out")" = 2 ] && break
    sleep 0.05
  done
  kill -TERM $process
  sleep 0.05
  kill -TERM $process
  wait $process 2>/dev/null
  [ $? = 143 ] || problem="not exit code 143"
  [ "$(grep -c saved "$work/out")" = 2 ] || problem=${problem:-"the ranks were killed"}
  verdict "SIGTERM twice at once is one SIGTERM" "$problem"
}
start twice
# stops NAME COMMAND...: SIGTSTP stops the ranks and hvdrun, SIGCONT lets them go on
stops() {
  local name=$1 problem='' process one
  shift
  : >"$work/out"
  : >"$work/err"
  "$@" bash -c 'echo "waits $$"; until [ -e "$0" ]; do sleep 0.1; done' "$work/go on" >"$work/out" 2>"$work/err" </dev/null &
  process=$!
  is_in() { # PROCESS STATE: waits until it is
    for ((i = 0; i < 400; i++)); do
      case "$(sed -n 's/^State:[[:space:]]*\(.\).*/\1/p' "/proc/$1/status" 2>/dev/null)" in [$2]) return ;; esac
      sleep 0.05
    done
    problem=${problem:-"process $1 does not come into state $2"}
  }
  for ((i = 0; i < 400; i++)); do
    [ "$(grep -c waits "$work/out")" = 2 ] && break
    sleep 0.05
  done
  kill -TSTP $process
  for one in $process $(sed -n 's/.*waits //p' "$work/out"); do is_in "$one" T; done
  kill -CONT $process
  for one in $process $(sed -n 's/.*waits //p' "$work/out"); do is_in "$one" RSD; done
  : >"$work/go on"
  wait $process || problem=${problem:-"exit code $?"}
  verdict "$name" "$problem"
}
start stops "Ctrl-Z stops the ranks" "$run" -np 2
floods() { # what a rank says is not read to its end before anything else, nor waited for where nobody reads on
  local way process reader problem=''
  : >"$work/out"
  : >"$work/err"
  mkfifo "$work/stalled"
  for way in /dev/null "$work/stalled"; do
    sleep 20 <"$way" & # opens it, and reads nothing
    reader=$!
    "$run" -np 2 bash -c 'printf "%s\n" begun >>"$0"; exec yes' "$work/begun" >"$way" 2>"$work/err" </dev/null &
    process=$!
    for ((i = 0; i < 200; i++)); do
      [ "$(wc -l 2>/dev/null <"$work/begun")" = 2 ] && break
      sleep 0.05
    done
    sleep 0.3
    kill -TERM $process
    for ((i = 0; i < 80; i++)); do
      kill -0 $process 2>/dev/null || break
      sleep 0.05
    done
    ! kill -KILL $process 2>/dev/null || problem="it did not end, to $way"
    wait $process 2>/dev/null
    kill $reader
    rm -f "$work/begun"
  done
  verdict "ranks that write without end can be ended" "$problem"
}
start floods
slow_reader() { # gets all of it
  says "a slow reader" 0 1 "^300000$" bash -c '"$0" -np 3 seq 100000 | { sleep 0.5; wc -l; }' "$run"
  head -c 3000000 /dev/zero >"$work/zeros"
  says "a line of 3 MB" 0 1 "^3000000$" bash -c '"$0" -np 1 cat "$1" | tr -dc "\\0" | wc -c' "$run" "$work/zeros"
}
start slow_reader
gone_reader() { # the ranks and what they have started end, as by SIGTERM
  local one problem=''
  says "a reader that has gone" 141 1 "^hvdrun: ended by signal 13 " env --default-signal=PIPE bash -c \
    '"$0" -np 2 bash -c "sleep 100 & echo \$! >>\"\$0\"; exec yes" "$1" | head -1 >&2; exit "${PIPESTATUS[0]}"' "$run" "$work/started"
  [ -s "$work/started" ] || problem="nothing was started"
  while read -r one; do
    for ((i = 0; i < 100; i++)); do
      case "$(sed -n 's/^State:[[:space:]]*\(.\).*/\1/p' "/proc/$one/status" 2>/dev/null)" in '' | Z | X) continue 2 ;; esac
      sleep 0.05
    done
    problem="process $one is left"
  done <"$work/started"
  verdict "and what its ranks have started" "$problem"
}
start gone_reader
finish_cases
