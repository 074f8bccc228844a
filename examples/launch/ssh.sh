#!/usr/bin/env bash
# Starts ranks on several hosts by ssh, without MPI; arguments are the program and its own. From any host that reaches the others:
#   HOSTS=first:4,second:4 bash examples/launch/ssh.sh build/examples/train --model resnet18
#   HVDRUN_ARGS      more for hvdrun, such as "--network-interfaces eth1 --ssh-port 2222"
# hvdrun, the program and this folder must be at the same place on all hosts, and 'ssh HOST true' work without a question.
set -euo pipefail
: "${HOSTS:?which hosts? HOSTS=first:4,second:4}"
[ $# -gt 0 ] || { echo "ssh.sh: which program? ssh.sh PROGRAM [arguments]" >&2; exit 2; }
# shellcheck disable=SC2086  # several words
exec "${HVDRUN:-hvdrun}" --launcher ssh -H "$HOSTS" ${HVDRUN_ARGS:-} "$@"
