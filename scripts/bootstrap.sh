#!/bin/sh
# From a bare machine to a working .venv: python3 (3.11 to 3.13) with venv, and a package index, are
# all it needs. Safe to run again; a run with nothing to do takes some hundredths of a second.
#
# The index, certificates and proxy that pip or uv are configured with are used for everything.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
tools=$root/.tools
stamp=$root/.venv/.kernelpool-bootstrap

say() { printf '%s\n' "bootstrap: $*" >&2; }
fail() { say "$*"; exit 1; }

fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}
has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }
can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; }
apt_install() {
    say "installing $* with apt-get"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends "$@"; } >&2 </dev/null
}

# Sets `python` to the newest interpreter that fits, one with venv before one without.
find_python() {
    python='' bare=''
    for name in python3.13 python3.12 python3.11 python3 /usr/bin/python3; do
        path=$(command -v "$name" 2>/dev/null) || continue
        fits "$path" || continue
        if has_venv "$path"; then python=$path; return 0; fi
        bare=${bare:-$path}
    done
    return 1
}

require_python() {
    find_python && return
    if [ -z "$bare" ]; then
        found=$(python3 --version 2>/dev/null || echo none)
        can_install || fail "Python 3.11, 3.12 or 3.13 is needed (found: $found). Debian 12 and 13 have it: apt-get install python3 python3-venv"
        apt_install python3 python3-venv || fail "apt-get could not install python3 and python3-venv"
    else
        can_install || fail "Python's venv module is missing. Install it with: sudo apt-get install python3-venv"
        apt_install python3-venv || fail "apt-get could not install python3-venv"
    fi
    find_python || fail "no Python 3.11 to 3.13 with the venv module was found after installing it"
}

require_make() {
    command -v make >/dev/null 2>&1 && return
    can_install || fail "make is missing. Install it with: sudo apt-get install make"
    apt_install make || fail "apt-get could not install make"
}

inputs() {
    {
        cat uv.lock pyproject.toml scripts/uv.txt scripts/bootstrap.sh
        printf '%s\n' "$root"
    } | sha256sum | cut -d ' ' -f 1
}

wanted=$(inputs)
if [ -x .venv/bin/kernelpool ] && [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

require_make
require_python
say "using $python ($("$python" -c 'import platform; print(platform.python_version())'))"

# pip in the tool environment only ever installs uv, at the version and hashes of scripts/uv.txt.
if ! cmp -s scripts/uv.txt "$tools/uv.txt" || ! "$tools/bin/uv" --version >/dev/null 2>&1; then
    say "installing uv into .tools"
    rm -rf "$tools"
    "$python" -m venv "$tools" >&2
    PIP_CONSTRAINT=/dev/null "$tools/bin/python" -m pip install --quiet --disable-pip-version-check \
        --require-hashes --only-binary :all: -r scripts/uv.txt >&2 \
        || fail "pip could not install uv; its message above says why (is a package index reachable?)"
    cp scripts/uv.txt "$tools/uv.txt"
fi

# uv does not read pip's configuration; this repeats in its words what pip was told.
eval "$("$tools/bin/python" kernelpool/package_index.py)"
export UV_PYTHON_DOWNLOADS=never UV_NO_PROGRESS=1
uv=$tools/bin/uv

if ! [ -x .venv/bin/python ] || ! fits .venv/bin/python; then
    say "making .venv"
    "$uv" venv --quiet --clear --python "$python" .venv >&2
fi

# Not `uv sync`: that fetches from the addresses written in uv.lock, which a configured mirror is there
# to replace. The same versions and hashes, taken from whatever index is configured:
say "installing the locked packages into .venv"
locked=$tools/locked.txt
"$uv" export --quiet --frozen --no-emit-project --output-file "$locked" >/dev/null
VIRTUAL_ENV=$root/.venv "$uv" pip sync --quiet --require-hashes "$locked" >&2 \
    || fail "uv could not install the locked packages; its message above says why"
VIRTUAL_ENV=$root/.venv "$uv" pip install --quiet --no-deps --editable . >&2 \
    || fail "uv could not install kernelpool itself; its message above says why"

printf '%s\n' "$wanted" > "$stamp"
say "ready"
