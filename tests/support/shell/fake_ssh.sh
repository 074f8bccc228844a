#!/usr/bin/env bash
# Stands in for ssh, by which mpirun reaches other hosts: fake_ssh.sh HOST COMMAND runs the command by a shell on this machine, as sshd would:
# in another folder, without the caller's variables of hvd, with temporary files of the host's own: the daemons of two mpirun hosts that make
# one folder at once end with "mkdir: File exists". With PRETEND_HOSTS=1 the host has that name (on_host.sh).
host=$1
shift
for name in $(compgen -e); do
  case $name in HVD_* | GIVEN) unset "$name" ;; esac
done
support=$(cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")" && pwd)
TMPDIR=${TMPDIR:-/tmp}/$host
mkdir -p "$TMPDIR"
export TMPDIR
cd / || exit 1
[ -z "${PRETEND_HOSTS:-}" ] || exec bash "$support/on_host.sh" "$host" /bin/sh -c "$*"
exec /bin/sh -c "$*"
