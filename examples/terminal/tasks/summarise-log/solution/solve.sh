#!/bin/bash
set -e
python3 - <<'PY'
import json
from collections import Counter
rows = [line.split() for line in open("access.log")]
summary = {
    "requests": len(rows),
    "errors": sum(int(row[8]) >= 500 for row in rows),
    "addresses": len({row[0] for row in rows}),
    "top_path": Counter(row[6] for row in rows).most_common(1)[0][0],
}
json.dump(summary, open("summary.json", "w"))
PY
