# To be sourced by tests of the installed package. Needs $scratch, a folder that is theirs, $root and $cmake.
# shellcheck shell=bash disable=SC2154

failed() {
  echo "FAILED: $1"
  exit 1
}
# quietly COMMAND...: its output only where it fails
quietly() {
  "$@" >"$scratch/log" 2>&1 || {
    cat "$scratch/log"
    failed "$*"
  }
}

# install_to STAGE BUILD_FOLDER: into another folder first, so that nothing may depend on where it was.
install_to() {
  local stage=$scratch/$1 first=$scratch/first
  rm -rf "$first" "$stage"
  quietly "$cmake" --install "$2" --prefix "$first"
  mv "$first" "$stage"
  if grep -rlF -e "$first" -e "$root/hvd" "$stage" --include='*.cmake'; then
    failed "the files above name the source tree or the first place of the installation"
  fi
}
