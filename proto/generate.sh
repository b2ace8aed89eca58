#!/usr/bin/env bash
# Regenerates service/dragoman/v1 and service/dragoman/oip from proto/dragoman. The result is committed; a test fails when
# the two differ. Needs the pinned grpcio-tools of the dev extra: other versions write other code, and newer ones code
# that does not run beside protobuf 6.
#
#   bash proto/generate.sh [OUT]      OUT: the source root to write under; default: service
#
# PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-service}"
python="${PYTHON:-python3}"

mkdir -p "$out"
# google/rpc/status.proto comes with googleapis-common-protos, google/protobuf with grpcio-tools.
site="$("$python" -c 'import google.rpc.status_pb2 as m, pathlib; print(pathlib.Path(m.__file__).parents[2])')"
"$python" -m grpc_tools.protoc -I proto -I "$site" \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  proto/dragoman/v1/generation.proto
# The servicers alone need no stubs of a client: calls are routed by name.
"$python" -m grpc_tools.protoc -I proto \
  --python_out="$out" --pyi_out="$out" \
  proto/dragoman/oip/inference.proto
describe() {
  [ -e "$out/dragoman/$1/__init__.py" ] || echo "\"\"\"$2\"\"\"" >"$out/dragoman/$1/__init__.py"
}
describe v1 "Generated from proto/dragoman/v1 by proto/generate.sh; the Python form of the wire contract."
describe oip "Generated from proto/dragoman/oip by proto/generate.sh. Not for processes that import tritonclient: same names."
if [ "$out" = service ]; then # not where CI makes it a second time, to compare
  PYTHONPATH=service "$python" proto/landed.py
fi
