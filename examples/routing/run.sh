#!/usr/bin/env bash
# A router that knows what agents can do: pairs out of BFCL, labels by debate (rules; the small model), then the router in
# six variants, one of them also by GRPO. MODEL= another model; OUT= the place; SEEDS= of the rules; TRAIN=, TEST= pairs of
# the router, SPOKEN= of the model's debate, TASKS=, SAMPLES=, UPDATES= of GRPO; JOBS= stages side by side (here 2).
set -euo pipefail
cd "$(dirname "$0")/../.."
bash .pkg/venv.sh model
PATH=${STROP_VENV:-$PWD/.venv}/bin:$PATH
export PATH
if ! python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("bfcl_eval") is None)'; then
  echo "the package bfcl-eval is missing; install it with: pip install --no-deps bfcl-eval==2026.3.23 && pip install mpmath" >&2
  exit 69
fi
if [ -z "${MODEL:-}" ]; then
  MODEL=$(PYTHON=python bash examples/quickstart/get_model.sh)
fi
export MODEL
exec make --jobs "${JOBS:-2}" --no-print-directory --file examples/routing/Makefile "$@"
