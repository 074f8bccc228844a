# Completes the options of hvdrun, as its --help lists them, then the program and its files. Installed for bash-completion.
# shellcheck shell=bash
_hvdrun() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} options
  COMPREPLY=()
  case $before in
    -np | -n | --np | --num-proc | -H | --hosts | -x | --mpi-args | -p | --ssh-port) return ;;
    --network-interfaces | --nics) mapfile -t COMPREPLY < <(compgen -W "$(ls /sys/class/net 2>/dev/null)" -- "$word") && return ;;
    --log-level) mapfile -t COMPREPLY < <(compgen -W "trace debug info warning error fatal off" -- "$word") && return ;;
  esac
  if [[ $word == -* ]]; then
    options=$("${COMP_WORDS[0]}" --help 2>/dev/null | grep -oE '^ +-[^ ]+' | tr ', ' '\n')
    mapfile -t COMPREPLY < <(compgen -W "$options -np" -- "$word")
    return
  fi
  mapfile -t COMPREPLY < <(compgen -c -- "$word"; compgen -f -- "$word")
}
complete -o filenames -F _hvdrun hvdrun
