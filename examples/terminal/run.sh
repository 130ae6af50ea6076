#!/usr/bin/env bash
# Agents in a terminal: six tasks, a scripted policy and a small model, each attempt in a sandbox of its own; then credit,
# one update of critic and policy, and the horizon before and after. A second part compares schedules of caps.
# SANDBOX=docker|process chooses; MODEL= another model; OUT= the place.
set -euo pipefail
cd "$(dirname "$0")/../.."
bash .pkg/venv.sh model,sandbox
PATH=${STROP_VENV:-$PWD/.venv}/bin:$PATH
export PATH
if [ -z "${MODEL:-}" ]; then
  MODEL=$(PYTHON=python bash examples/quickstart/get_model.sh)
fi
if [ -z "${SANDBOX:-}" ]; then
  SANDBOX=process
  if bash examples/terminal/image.sh; then SANDBOX=docker; fi
fi
echo "== sandboxes: $SANDBOX"
export MODEL SANDBOX
exec make --no-print-directory --file examples/terminal/Makefile "$@"
