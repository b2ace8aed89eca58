#!/usr/bin/env bash
# From a fresh clone to served models: makes .venv, starts the server on the embedded models, asks each a few things.
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
sentences=(
  "The children are playing in front of the school."
  "My brother sold his car because he needed the money."
  "Could you tell me when the next train to Berlin leaves?"
)
streamed="The old man sat on the bench and read his newspaper."
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

# ask MODEL TEXT...: each text with its answer.
ask() {
  local model=$1
  shift
  printf '%s\n' "$@" | generate --model "$model" >"$server_work/answers"
  paste -d '\t' <(printf '%s\n' "$@") "$server_work/answers" | while IFS=$'\t' read -r text answer; do
    echo "$text -> $answer"
  done
}

# generate OPTION...: through the server; its log is shown where that fails.
generate() {
  "$venv/bin/dragoman" generate --target "$server_target" "$@" || {
    show_server_log
    exit 1
  }
}

step=generate advice="the server did not answer, see above" example=
for model in $server_models; do
  echo
  case $model in
    en-de)
      echo "English to German ($model), the last one token by token:"
      ask "$model" "${sentences[@]}"
      printf '%s -> ' "$streamed"
      generate --model "$model" --stream "$streamed"
      example=${example:-"${sentences[0]}"}
      ;;
    g2p-en)
      echo "English words to their pronunciation ($model):"
      ask "$model" "${words[@]}"
      example=${example:-"${words[3]}"}
      ;;
  esac
done
echo
echo "metrics      $server_metrics"
if $once; then
  exit 0
fi
cat <<TEXT
ask it       $venv/bin/dragoman generate --target $server_target "$example"
in process   $venv/bin/dragoman generate "$example"
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
