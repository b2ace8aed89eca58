#!/usr/bin/env bash
# Makes the development environment and checks everything: lint, types, scripts, all tests, and the built wheel without
# torch. Stops at the first step that fails and names it.
#
#   bash tests/run.sh                   everything
#   bash tests/run.sh -k health -x      only pytest, with these arguments
#
# Leaves .venv-dev behind, so that the next run starts at once.
#
#   PYTHON       the interpreter, 3.11 or later with venv (default: python3)
#   TORCH_INDEX  a package index with CPU builds of torch; without it pip takes torch from where it is set up to look,
#                which on Linux usually means a CUDA build of several gigabytes
set -euo pipefail
unset PYTHONPATH # the environments alone decide what is imported
export ORT_DISABLE_TELEMETRY=1 # tests speak to this machine alone
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step=
started=$SECONDS
begin() {
  step=$1
  echo "== $step ($((SECONDS - started)) s)"
}
finish() {
  local status=$?
  if [ "$status" -ne 0 ]; then
    echo "tests/run.sh: step '$step' failed (exit status $status)" >&2
  fi
  [ -z "${work-}" ] || rm -rf "$work"
}
trap finish EXIT

begin environment
bash deploy/environment.sh .venv-dev cpu,train,export,dev
bin=$PWD/.venv-dev/bin
started=$SECONDS # installing does not count

if [ $# -gt 0 ]; then
  begin tests
  "$bin/pytest" "$@"
  exit
fi

begin lint
"$bin/ruff" check .
"$bin/ruff" format --check .

begin types
"$bin/mypy" service/dragoman export/dragoman_export training/dragoman_training tests

begin scripts
mapfile -t scripts < <(find . -path './.venv*' -prune -o -name .git -prune -o -name '*.sh' -print)
"$bin/shellcheck" -x "${scripts[@]}" .ci/run

work=$(mktemp -d)
begin generated
PYTHON=$bin/python bash proto/generate.sh "$work/generated"
diff -r --exclude=__pycache__ "$work/generated/dragoman/v1" service/dragoman/v1 || {
  echo "service/dragoman/v1 is not what proto/ generates: run 'PYTHON=.venv-dev/bin/python bash proto/generate.sh'" >&2
  exit 1
}

# Two processes, each file in one of them, the slow ones first, which xdist's own order would leave to the end; a process
# computes in one thread, as the other needs the second core.
begin tests
OMP_NUM_THREADS=1 "$bin/pytest" -n 2 --dist loadfile --no-loadscope-reorder tests/system tests/integration tests/unit

# What users install: the wheel, in an environment that has no torch and no source tree.
begin wheel
"$bin/python" -m build --wheel --no-isolation --outdir "$work" . >"$work/build.log" 2>&1 || {
  cat "$work/build.log" >&2
  exit 1
}
wheel=$(echo "$work"/dragoman-*.whl)
"$bin/python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check -c deploy/constraints.txt \
  "${wheel}[cpu]" pytest pytest-asyncio pytest-xdist hypothesis
"$work/venv/bin/python" - <<'PY'
import importlib.util
from pathlib import Path

import dragoman

assert Path.cwd() not in Path(dragoman.__file__).parents, dragoman.__file__
for name in ("torch", "onnx"):
    assert importlib.util.find_spec(name) is None, f"{name} is installed beside the wheel"
PY
"$work/venv/bin/pytest" -n 2 --dist loadfile --ignore=tests/unit/training \
  tests/unit tests/integration/server tests/system/test_quickstart.py

begin finished
