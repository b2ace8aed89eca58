#!/usr/bin/env bash
# From a fresh clone to a served model: makes .venv, starts the server on the embedded model, asks it a few words.
#
#   bash deploy/quickstart.sh          keeps serving until Ctrl-C
#   bash deploy/quickstart.sh --once   stops after the answers, exit status 0
#
# Needs Python 3.11 or later with venv, and a package index for the first run. Picks free ports. Leaves .venv behind,
# so that the next run takes seconds; nothing else, and no process.
#
#   PYTHON  the interpreter to make .venv with (default: python3)
#   VENV    an environment that has dragoman[cpu] already: it is used as it is, and nothing is installed
set -euo pipefail

words=(attention transformer queue giraffe language)
step=arguments advice="usage: bash deploy/quickstart.sh [--once]"
interrupted=false

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/local_server.sh
. deploy/local_server.sh

finish() {
  local status=$?
  trap '' HUP INT TERM # one is enough
  if [ "$status" -ne 0 ] && ! $interrupted; then
    echo "deploy/quickstart.sh: step '$step' failed (exit status $status): $advice" >&2
  fi
  stop_server
  exit "$status"
}
trap finish EXIT
trap 'interrupted=true; exit 129' HUP
trap 'interrupted=true; exit 130' INT
trap 'interrupted=true; exit 143' TERM

[ $# -le 1 ] || exit 2
case "${1-}" in
  "") once=false ;;
  --once) once=true ;;
  *) exit 2 ;;
esac

step=environment
if [ -n "${VENV-}" ]; then
  venv=$VENV advice="VENV must name an environment with dragoman[cpu]; there is no $VENV/bin/dragoman"
  [ -x "$venv/bin/dragoman" ]
else
  venv=.venv advice="what to do stands above; then run this again"
  bash deploy/environment.sh "$venv" cpu
fi

step=start advice="the server did not start; its log is above"
start_server "$venv"

step=generate advice="the server did not answer, see above"
printf '%s\n' "${words[@]}" | "$venv/bin/dragoman" generate --target "$server_target" >"$server_work/answers" || {
  show_server_log
  exit 1
}
echo
paste -d '\t' <(printf '%s\n' "${words[@]}") "$server_work/answers" | while IFS=$'\t' read -r word answer; do
  echo "$word -> $answer"
done
echo
echo "metrics      $server_metrics"
if $once; then
  exit 0
fi
cat <<TEXT
ask it       echo giraffe | $venv/bin/dragoman generate --target $server_target
in process   echo giraffe | $venv/bin/dragoman generate
load test    $venv/bin/dragoman loadtest $server_target --rate 50 --duration 10
TEXT

step=serve advice="the server ended by itself; its log is above"
trap 'exit 0' INT # from here on Ctrl-C is the way to end it
echo
echo "serving on $server_target until Ctrl-C"
wait "$server" || {
  status=$?
  show_server_log
  exit "$status"
}
