#!/usr/bin/env bash
# Makes, or brings up to date, a Python environment that holds this project (editable) with some of its extras, at the
# versions of deploy/constraints.txt. Used by deploy/quickstart.sh and tests/run.sh.
#
#   bash deploy/environment.sh FOLDER EXTRAS           bash deploy/environment.sh .venv cpu
#
# Does nothing when FOLDER was made from the same interpreter, pyproject.toml, constraints and extras; otherwise it makes
# FOLDER anew, so that nothing stale stays in it.
#
#   PYTHON       the interpreter, 3.11 or later (default: python3)
#   TORCH_INDEX  one more package index for pip, to take a CPU build of torch from; matters to the extras that hold torch
set -euo pipefail

fail() {
  echo "deploy/environment.sh: $1" >&2
  exit 1
}

[ $# -eq 2 ] || fail "takes two arguments: bash deploy/environment.sh FOLDER EXTRAS"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$1 extras=$2
python=${PYTHON:-python3}
command -v "$python" >/dev/null ||
  fail "there is no interpreter '$python': install Python 3.11 or later, or name one with PYTHON=…"

# No syntax newer than Python 3.0, so that an old interpreter gets to the message that says so.
stamp=$("$python" - "$extras" <<'PY'
import hashlib
import os
import sys

if sys.version_info < (3, 11):
    sys.exit(
        "deploy/environment.sh: %s is Python %d.%d; 3.11 or later is needed: name another one with PYTHON=..."
        % (sys.executable, sys.version_info[0], sys.version_info[1])
    )
try:
    import ensurepip
    import venv
except ImportError:
    sys.exit(
        "deploy/environment.sh: %s lacks the venv module: install it (Debian and Ubuntu: apt-get install python3-venv)"
        % sys.executable
    )
parts = [sys.executable, sys.version, os.getcwd(), sys.argv[1], os.environ.get("TORCH_INDEX", "")]
for name in ("pyproject.toml", "deploy/constraints.txt"):
    with open(name, encoding="utf-8") as file:
        parts.append(file.read())
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PY
) || exit 1

# Written last, so that a half-made environment never looks whole; the interpreter is run because the one that it links
# to may be gone since.
if [ "$(cat "$folder/.stamp" 2>/dev/null)" = "$stamp" ] && "$folder/bin/python" -c 'import dragoman' 2>/dev/null; then
  exit 0
fi

[ ! -e "$folder" ] || [ -f "$folder/pyvenv.cfg" ] || fail "$folder exists and is no Python environment: move it away"
echo "making $folder: dragoman[$extras] (a minute or two, mostly downloads)"
rm -rf "$folder"
"$python" -m venv "$folder" || fail "'$python -m venv $folder' failed: its message is above"
# The build backend comes from the constraints too: pip's isolated builds would take whatever is newest.
if ! {
  "$folder/bin/pip" install --disable-pip-version-check -c deploy/constraints.txt hatchling editables &&
    "$folder/bin/pip" install --disable-pip-version-check -c deploy/constraints.txt --no-build-isolation --no-compile \
      ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --editable ".[$extras]"
} >"$folder/install.log" 2>&1; then
  tail -n 30 "$folder/install.log" >&2
  fail "pip could not install dragoman[$extras]; its last lines are above, all of them in $folder/install.log. Check that \
this machine reaches a package index (PIP_INDEX_URL, PIP_FIND_LINKS) and has disk space, then run this again"
fi
echo "$stamp" >"$folder/.stamp"
