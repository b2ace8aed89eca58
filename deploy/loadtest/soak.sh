#!/usr/bin/env bash
# The soak scenario against a server of its own, on free ports of this machine: fails when the service level is missed,
# when the server's memory at the end is more than a tenth above that after a fifth of the time, and when it does not end
# cleanly.
#
#   bash deploy/loadtest/soak.sh [SECONDS]     default: 600
#
#   VENV  an environment that has dragoman[cpu] (default: .venv, which deploy/quickstart.sh makes)
set -euo pipefail

seconds=${1:-600}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=${VENV:-.venv}
# shellcheck source=deploy/local_server.sh
. deploy/local_server.sh

step=start
finish() {
  local status=$?
  trap '' HUP INT TERM
  if [ "$status" -ne 0 ]; then
    echo "deploy/loadtest/soak.sh: step '$step' failed (exit status $status)" >&2
  fi
  [ -z "${watcher-}" ] || kill "$watcher" 2>/dev/null || true
  stop_server
  exit "$status"
}
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

start_server "$venv"
memory=$server_work/memory
: >"$memory"
while sleep 1; do
  awk '/^VmRSS:/ {print $2}' "/proc/$server/status" >>"$memory" 2>/dev/null || break
done &
watcher=$!

step=load
"$venv/bin/dragoman" loadtest "$server_target" --scenario deploy/loadtest/soak.toml --duration "$seconds" || {
  show_server_log
  exit 1
}

step=memory
awk '
  {kb[NR] = $1}
  END {
    early = int(NR / 5) + 1
    for (i = NR - int(NR / 5); i <= NR; i++) if (kb[i] > last) last = kb[i]
    printf "memory    %.1f MB after %d s, %.1f MB at most in the last fifth (%+.1f%%)\n", kb[early] / 1024, early,
      last / 1024, (last / kb[early] - 1) * 100
    exit last > kb[early] * 1.1
  }' "$memory"

step=stop
kill -TERM "$server"
wait "$server" || {
  show_server_log
  exit 1
}
server=
echo "no errors, flat memory, and the server ended cleanly"
