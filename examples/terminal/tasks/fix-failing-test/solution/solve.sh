#!/bin/bash
set -e
python3 - <<'PY'
from pathlib import Path
file = Path("stats.py")
text = file.read_text()
text = text.replace("    return sum(values) / len(values)", "    return sum(values) / len(values) if values else 0")
text = text.replace(
    "    return ordered[len(ordered) // 2]",
    "    middle = len(ordered) // 2\n"
    "    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2",
)
file.write_text(text)
PY
