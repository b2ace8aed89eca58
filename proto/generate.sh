#!/usr/bin/env bash
# Regenerates service/dragoman/v1 from proto/dragoman/v1. The result is committed; a test fails when the two differ.
# Needs the pinned grpcio-tools of the dev extra: other versions write other code.
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
if [ ! -e "$out/dragoman/v1/__init__.py" ]; then
  echo '"""Generated from proto/dragoman/v1 by proto/generate.sh; the Python form of the wire contract."""' > "$out/dragoman/v1/__init__.py"
fi
