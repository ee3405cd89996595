#!/usr/bin/env bash
# Builds the source archive and from it the wheel, and tries the wheel away from the source tree, in an empty environment
# for each Python that the metadata promises and this machine has: commands, imports, types, an example.
#
#   tests/installed.sh [--suite [pytest arguments]]
#
# With --suite each Python then runs `make train` and `make test`, or of the test suite the part that the arguments
# choose. PYTHONS="python3.12 /opt/3.13/bin/python" chooses interpreters. The last lines say
# what was done and what was skipped; the exit code is 1 when anything failed. Needs a package index.
set -euo pipefail

PROMISED=(3.11 3.12 3.13)

root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$root/build"
work=$(mktemp -d "$root/build/installed.XXXXXX")
trap 'rm -rf "$work"' EXIT
suite=no
[ "${1:-}" = --suite ] && { suite=yes; shift; }
summary=()
failed=0

pip() { "$1" -m pip --disable-pip-version-check --quiet "${@:2}"; }

# The first of the names a Python of this version may have that runs; pyenv has names for versions that do not.
find_python() {
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1"*/bin/python; do
        [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ] && echo "$candidate" && return
    done
    return 1
}

build() {
    "$1" -m venv "$work/tools"
    pip "$work/tools/bin/python" install build
    # A copy of what git has: nothing that happens to lie in the folder gets into an archive.
    mkdir "$work/tree"
    git -C "$root" ls-files -z | (cd "$root" && xargs -0 cp --parents -t "$work/tree")
    "$work/tools/bin/python" -m build --outdir "$work/dist" "$work/tree" >"$work/build.log" 2>&1 || { tail -20 "$work/build.log"; return 1; }
    "$1" "$root/tests/installed/archives.py" "$work"/dist/*
    mkdir "$work/sources" && tar -xzf "$work"/dist/*.tar.gz -C "$work/sources" --strip-components 1
}

# In an empty folder, without the variables of the caller.
outside() { (cd "$1/empty" && env -i HOME="$HOME" PATH="$1/env/bin:/usr/bin:/bin" "${@:2}"); }

try_wheel() {
    local place=$1 python=$2
    "$python" -m venv "$place/env"
    pip "$place/env/bin/python" install --constraint "$root/constraints.txt" "$(echo "$work"/dist/*.whl)[server,worker,examples]" mypy
    mkdir "$place/empty" && cp "$root"/tests/installed/typed_*.py "$place/empty"
    for command in ps-coordinator ps-server ps-run psctl; do
        outside "$place" "$command" --help >/dev/null || { echo "$command --help failed"; return 1; }
    done
    outside "$place" python -I -c 'import ps_protocol, ps_server, ps_worker, sys
for package in ps_protocol, ps_server, ps_worker:
    assert package.__file__.startswith(sys.prefix), package.__file__'
    outside "$place" mypy --strict typed_well.py || return 1
    if outside "$place" mypy --strict typed_badly.py >"$place/mypy.log"; then echo "types are not seen"; return 1; fi
    grep -q 'arg-type' "$place/mypy.log" || { cat "$place/mypy.log"; return 1; }
    outside "$place" ps-run --no-progress --shards 2 --workers 2 --mode sync "$work/sources/examples/digits.py" --epochs 8 --expect-accuracy 0.97
}

# Without extras there is no torch: the commands say what is missing, and what needs no torch runs.
try_light() {
    local place=$1 python=$2
    "$python" -m venv "$place/env"
    pip "$place/env/bin/python" install --constraint "$root/constraints.txt" "$(echo "$work"/dist/*.whl)"
    mkdir "$place/empty"
    if outside "$place" python -I -c 'import torch' 2>/dev/null; then echo "torch was installed"; return 1; fi
    for command in ps-coordinator ps-server ps-run psctl; do
        outside "$place" "$command" --help >/dev/null || { echo "$command --help failed"; return 1; }
    done
    outside "$place" ps-server --shard 0 --coordinator 127.0.0.1:1 2>&1 | grep -q 'torch-ps\[server\]'
    outside "$place" python -I -c 'import ps_worker' 2>&1 | grep -q 'torch-ps\[worker\]'
}

# The two commands of the README, in a copy of the tree; with arguments the second runs that part of the suite.
try_suite() {
    local place=$1 python=$2
    (
        cd "$work/tree"
        make VENV="$place/env" PYTHON="$python" train
        [ $# -gt 2 ] || exec make VENV="$place/env" PYTHON="$python" test
        PATH="$place/env/bin:$PATH" exec "$place/env/bin/python" -m pytest "${@:3}"
    )
}

# Does "$@" and makes its end a line of the summary; "$ok" says how it went. Never called in a condition: there a
# function goes on behind its own errors.
step() {
    local name=$1
    echo "== $name"
    set +e
    (set -e; "${@:2}")
    [ $? = 0 ] && ok=yes || ok=no
    set -e
    if [ $ok = yes ]; then summary+=("done     $name"); else summary+=("FAILED   $name"); failed=1; fi
}

pythons=()
if [ -n "${PYTHONS:-}" ]; then
    read -r -a pythons <<<"$PYTHONS"
else
    for version in "${PROMISED[@]}"; do
        if found=$(find_python "$version"); then pythons+=("$found"); else summary+=("SKIPPED  Python $version: not on this machine"); fi
    done
fi

step "source archive and wheel: built, contents" build "${pythons[0]}"
[ $ok = yes ] || { printf '%s\n' "" "${summary[@]}"; exit 1; }
for python in "${pythons[@]}"; do
    version=$("$python" -c 'import platform; print(platform.python_version())')
    place="$work/$version" && mkdir -p "$place"
    step "Python $version: the wheel in an empty environment" try_wheel "$place" "$python"
    wheel_ok=$ok
    mkdir -p "$place/light"
    step "Python $version: the wheel without extras" try_light "$place/light" "$python"
    if [ $wheel_ok = no ]; then
        summary+=("SKIPPED  Python $version: make train, make test")
    elif [ $suite = no ]; then
        summary+=("SKIPPED  Python $version: make train, make test (--suite runs them)")
    else
        step "Python $version: make train, make test${*:+, of it: $*}" try_suite "$place" "$python" "$@"
    fi
    rm -rf "$place"
done
printf '%s\n' "" "${summary[@]}"
exit $failed
