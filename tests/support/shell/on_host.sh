#!/usr/bin/env bash
# Runs a command on a host that this machine pretends to be: in a UTS namespace in which the host has that name, and with process ids of its
# own. By the name ranks that meet in a store, and Open MPI, tell hosts apart, so ranks of two of them share no memory, nor do they see one
# another die. Exits with 77 where the system has no such namespaces.
# Usage: on_host.sh NAME COMMAND...
set -u

apart=(unshare --uts --pid --fork --kill-child --mount-proc)
"${apart[@]}" true 2>/dev/null || apart=(unshare --map-root-user "${apart[@]:1}") # who is not root needs a user namespace besides
# shellcheck disable=SC2016  # for the other shell
"${apart[@]}" bash -c 'hostname "$1"' bash "$1" 2>/dev/null || { echo "SKIP: this system lets nobody pretend to be another host (unshare --uts --pid)"; exit 77; }
# shellcheck disable=SC2016
exec "${apart[@]}" bash -c 'hostname "$1" && exec "${@:2}"' bash "$@"
