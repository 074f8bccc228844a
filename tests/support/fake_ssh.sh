#!/usr/bin/env bash
# Stands in for ssh in tests of launchers: fake_ssh.sh HOST COMMAND runs the command by a shell on this machine, as sshd would: in another
# folder, without the caller's variables of hvd, after what a login shell prints. With PRETEND_HOSTS=1 the host has that name (on_host.sh).
# Hosts of some names are ill.
host=$1
shift
case $host in
  unreachable) echo "ssh: connect to host $host port 22: No route to host" >&2 && exit 255 ;;
  locked) echo "$host: Permission denied (publickey,password)." >&2 && exit 255 ;;
  empty) echo "bash: line 1: hvdrun: command not found" >&2 && exit 127 ;;
  chatty) echo "Welcome to $host" ;;
esac
for name in $(compgen -e); do
  case $name in HVD_* | GIVEN) unset "$name" ;; esac
done
support=$(cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")" && pwd)
cd / || exit 1
export SSH_CONNECTION="127.0.0.1 40000 127.0.0.1 22"
[ -z "${PRETEND_HOSTS:-}" ] || exec bash "$support/on_host.sh" "$host" /bin/sh -c "$*"
exec /bin/sh -c "$*"
