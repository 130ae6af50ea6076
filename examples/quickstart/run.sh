#!/usr/bin/env bash
# A whole self-improvement loop on a real small model, from a fresh clone, with nothing but Python 3.11 or newer:
# makes .venv, installs strop, fetches the model, then lets the Makefile beside this file run the pipes.
# MODEL=FOLDER|HUB_ID|FILE.gguf takes another model; ITERATIONS=, TASKS=, SAMPLES= change the size; OUT= the place.
set -euo pipefail
cd "$(dirname "$0")/../.."
bash .pkg/venv.sh model,plot
PATH=${STROP_VENV:-$PWD/.venv}/bin:$PATH
export PATH
if [ -z "${MODEL:-}" ]; then
  MODEL=$(PYTHON=python bash examples/quickstart/get_model.sh)
fi
export MODEL
exec make --no-print-directory --file examples/quickstart/Makefile "$@"
