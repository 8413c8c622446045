#!/usr/bin/env bash
# Adds extras of setup.cfg to .venv: scripts/add_extras.sh spark ray. Quick when they are there.
# Fails when a package that was there before would change: all else is tested with what is pinned.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH

# As setup.cfg pins them; pip itself would install this folder's package again.
wanted() {
    python - "$@" <<'PYTHON'
import configparser, sys
parser = configparser.ConfigParser()
parser.read("setup.cfg")
extras = parser["options.extras_require"]
print("\n".join(line for name in sys.argv[1:] for line in extras[name].split("\n") if line))
PYTHON
}

mapfile -t packages < <(wanted "$@")
before=$(python -m pip freeze --disable-pip-version-check)
missing=()
for package in "${packages[@]}"; do
    if ! grep -qixF "$package" <<< "$before"; then missing+=("$package"); fi
done
if ((${#missing[@]} == 0)); then exit 0; fi
echo "[extras] installing ${missing[*]}; the first time this takes some minutes"
# What is there is a constraint, save what is no release.
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
grep -E '^[A-Za-z0-9._-]+==' <<< "$before" > "$constraints"
python -m pip install --disable-pip-version-check --quiet --constraint "$constraints" "${missing[@]}"
