#!/usr/bin/env bash
# Proves the CUDA half of the service on one GPU in a few minutes, and measures it. Installs nothing.
#
#   bash tests/gpu/run.sh                    graphs of a model of base size with random weights, made here (needs torch)
#   bash tests/gpu/run.sh --bundle DIR       the graphs of a bundle exported with --precision fp32,fp16
#   bash tests/gpu/run.sh --provider cuda-dry --size toy
#
# Without a GPU, runs what a CPU can check, through cuda-dry at toy size, and names what was skipped. Prints a table, and
# writes all figures as JSON (--json FILE; default runs/gpu-check.json). Exit status 1 when a check fails.
#
#   PYTHON  the interpreter of an environment with onnxruntime-gpu[cuda,cudnn] (default: .venv-dev's, else python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  [ ! -x .venv-dev/bin/python ] || python=.venv-dev/bin/python
fi
# The packages need not be installed: what lies here is what is checked.
export PYTHONPATH=$PWD/service:$PWD/export:$PWD/training${PYTHONPATH:+:$PYTHONPATH}
export ORT_DISABLE_TELEMETRY=1 PYTHONUNBUFFERED=1
exec "$python" tests/gpu/check.py "$@"
