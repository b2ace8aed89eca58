#!/usr/bin/env bash
# A short load test against a server of its own, on free ports of this machine: fails on any error, and when the server
# does not end cleanly.
#
#   bash deploy/loadtest/smoke.sh [RATE [SECONDS]]     default: 20 requests a second for 5 seconds
#
#   VENV  an environment that has dragoman[cpu] (default: .venv, which deploy/quickstart.sh makes)
set -euo pipefail

rate=${1:-20} seconds=${2:-5}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=${VENV:-.venv}
# shellcheck source=deploy/local_server.sh
. deploy/local_server.sh

step=environment
finish() {
  local status=$?
  trap '' HUP INT TERM
  if [ "$status" -ne 0 ]; then
    echo "deploy/loadtest/smoke.sh: step '$step' failed (exit status $status)" >&2
  fi
  stop_server
  exit "$status"
}
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

[ -x "$venv/bin/dragoman" ] || {
  echo "there is no $venv/bin/dragoman: run 'bash deploy/quickstart.sh --once' first, or name an environment with VENV=…" >&2
  exit 1
}

step=start
start_server "$venv"

step=load
"$venv/bin/dragoman" loadtest "$server_target" --scenario deploy/loadtest/smoke.toml --rate "$rate" --duration "$seconds" || {
  show_server_log
  exit 1
}

step=stop
kill -TERM "$server"
wait "$server" || {
  show_server_log
  exit 1
}
server=
echo "no errors, and the server ended cleanly"
