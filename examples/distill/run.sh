#!/usr/bin/env bash
# Distillation that says where its signal comes from: CompassOPD between two families of tokenizers, and NSD without labels,
# each beside its ablations. MODEL= another model; OUT= the place; SEEDS=, TASKS=, NSD_TASKS=, HELDOUT= the size.
set -euo pipefail
cd "$(dirname "$0")/../.."
bash .pkg/venv.sh model
PATH=${STROP_VENV:-$PWD/.venv}/bin:$PATH
if [ -z "${MODEL:-}" ]; then
  MODEL=$(PYTHON=python bash examples/quickstart/get_model.sh)
fi
export PATH MODEL HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# A thread a process and two stages side by side: for models this small two threads bring little.
export OMP_NUM_THREADS=1
exec make --jobs "${JOBS:-2}" --no-print-directory --file examples/distill/Makefile "$@"
