#!/usr/bin/env bash
# Functions to start and stop a server on free ports of this machine; deploy/quickstart.sh and deploy/loadtest/smoke.sh
# source this file. The caller calls stop_server on every way out.
#
#   . deploy/local_server.sh; start_server .venv; echo "$server_target $server_metrics"; stop_server
set -euo pipefail

export ORT_DISABLE_TELEMETRY=1 # ONNX Runtime would report its use over the network

server=         # its process id, empty when none runs
server_work=    # a folder of its own: ready.json, server.log
server_target=  # HOST:PORT of gRPC
server_metrics= # URL of the metrics
server_models=  # the names of what it serves, with blanks between them

# start_server VENV: returns when the server answers SERVING; 1 with its log on stderr when it does not.
start_server() {
  local venv=$1 ready_seconds=60 i
  server_work=$(mktemp -d)
  # In a process group of its own: Ctrl-C reaches the script alone, which then asks the server to stop, once.
  set -m
  "$venv/bin/dragoman" serve --host 127.0.0.1 --port 0 --metrics-port 0 \
    </dev/null >"$server_work/ready.json" 2>"$server_work/server.log" &
  server=$!
  set +m
  for ((i = 0; i < ready_seconds * 10; i++)); do
    [ ! -s "$server_work/ready.json" ] || break # one line, written when the ports are open and the model is loaded
    kill -0 "$server" 2>/dev/null || break
    sleep 0.1
  done
  if ! [ -s "$server_work/ready.json" ]; then
    show_server_log
    return 1
  fi
  # shellcheck disable=SC2034 # the scripts that source this file read them
  read -r server_target server_metrics server_models < <("$venv/bin/python" - "$server_work/ready.json" <<'PY'
import json
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

with open(sys.argv[1], encoding="utf-8") as file:
    ready = json.load(file)
target = f"127.0.0.1:{ready['port']}"
with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
if health.status != health_pb2.HealthCheckResponse.SERVING:
    sys.exit(f"the server is {health_pb2.HealthCheckResponse.ServingStatus.Name(health.status)}, not SERVING")
print(target, f"http://127.0.0.1:{ready['metrics_port']}/metrics", *ready["models"])
PY
  ) || {
    show_server_log
    return 1
  }
}

show_server_log() {
  echo "--- the server's log" >&2
  tail -n 50 "$server_work/server.log" >&2
  echo "---" >&2
}

# stop_server: lets it drain, and ends it if it does not; quiet when none runs.
stop_server() {
  local stop_seconds=40 i # the server's own limit for a drain is 30
  if [ -n "$server" ]; then
    kill -TERM "$server" 2>/dev/null || true
    for ((i = 0; i < stop_seconds * 10; i++)); do
      kill -0 "$server" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
    server=
  fi
  if [ -n "$server_work" ]; then
    rm -rf "$server_work"
    server_work=
  fi
}
