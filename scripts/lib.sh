# Common to the scripts, which source it: the repository's root, a suitable Python, the virtual environment of a lock file.
#
#   PYTHON         interpreter to build the environment with   (default: the newest of python3.13 .. python3.10 that runs)
#   MVCOMPILE_VENV directory of the environment                (default: .venv in the repository)

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=${MVCOMPILE_VENV:-$ROOT/.venv}
LOCKS=(runtime compile dev bench) # each holds the ones before it
MARKER=.made-by-mvcompile-scripts
cd "$ROOT"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 3; }

# usable_python COMMAND: succeeds if it runs, is CPython 3.10 to 3.14 and can make virtual environments; else REASON says why not.
usable_python() {
  local command=$1 version
  version=$("$command" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || { REASON="$command does not run"; return 1; }
  case $version in
    3.1[0-4]) ;;
    *) REASON="$command is Python $version, and 3.10 to 3.14 is needed"; return 1 ;;
  esac
  "$command" -c 'import ensurepip, venv' 2>/dev/null ||
    { REASON="$command (Python $version) lacks the venv module: on Debian or Ubuntu, apt-get install python$version-venv"; return 1; }
}

# find_python: prints the interpreter to use.
find_python() {
  local candidate reasons=""
  for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3.10 python3}; do
    command -v "$candidate" >/dev/null || { [ -z "${PYTHON:-}" ] || reasons="there is no $candidate"; continue; }
    if usable_python "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
    reasons="${reasons:+$reasons; }$REASON"
  done
  die "no suitable Python: ${reasons:-no python3 on the PATH}. Install Python 3.10 to 3.14 with its venv module" \
    "(Debian, Ubuntu: apt-get install python3 python3-venv; Fedora: dnf install python3), or name one: PYTHON=/path/to/python3"
}

# digest FILE: changes with the file, and when the repository moves.
digest() { { cat "$1"; printf '%s' "$ROOT"; } | sha256sum | cut -d' ' -f1; }

# state_of NAME: prints current, stale or absent.
state_of() {
  local stamp=$VENV/.lock-$1
  [ -f "$stamp" ] || { echo absent; return; }
  if [ "$(cat "$stamp")" = "$(digest "locks/$1.txt")" ] && "$VENV/bin/python" -c '' >/dev/null 2>&1; then echo current; else echo stale; fi
}

# use_environment NAME: makes $VENV hold what locks/NAME.txt lists and this repository (editable), and puts it first on the PATH.
use_environment() {
  [ "$(uname -s)" = Linux ] || die "only Linux is supported (TVM's wheels), this is $(uname -s)"
  if [ "$(state_of "$1")" != current ]; then make_environment "$1"; fi
  if [ "$1" != runtime ]; then install_project; fi
  export VIRTUAL_ENV=$VENV PATH=$VENV/bin:$PATH
  unset PYTHONHOME
}

make_environment() {
  local name=$1 state lock python
  for lock in "${LOCKS[@]}"; do
    state=$(state_of "$lock")
    if [ "$state" = stale ]; then break; fi
  done
  if [ -d "$VENV" ] && [ -n "$(ls -A "$VENV")" ]; then
    [ -f "$VENV/$MARKER" ] || die "$VENV was not made by these scripts and is left alone: remove it, or set MVCOMPILE_VENV to another directory"
    if [ "$state" = stale ] || [ ! -f "$VENV/.lock-runtime" ]; then rm -rf "$VENV"; fi
  fi
  if [ ! -d "$VENV/bin" ]; then
    python=$(find_python)
    say "Making $VENV with $("$python" --version 2>&1)"
    mkdir -p "$VENV"
    touch "$VENV/$MARKER"
    "$python" -m venv "$VENV" || die "$python -m venv failed (see above)"
  fi
  say "Installing locks/$name.txt (once; takes a minute or two and 0.8 GB)"
  "$VENV/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --require-hashes -r "locks/$name.txt" ||
    die "pip could not install locks/$name.txt (see above): is a package index reachable, and this an x86-64 or arm64 Linux with glibc 2.28 or newer?"
  for lock in "${LOCKS[@]}"; do
    digest "locks/$lock.txt" >"$VENV/.lock-$lock"
    if [ "$lock" = "$name" ]; then break; fi
  done
}

# install_project: the `mvcompile` command and the package's metadata; the code itself is used from where it is.
install_project() {
  local stamp=$VENV/.project
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(digest pyproject.toml)" ]; then return; fi
  "$VENV/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . ||
    die "pip could not install this repository (see above)"
  digest pyproject.toml >"$stamp"
}
