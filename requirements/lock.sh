#!/bin/sh
# `make lock`: writes the pinned lists NAME.txt from NAME.in, for Linux on x86-64 and Python 3.11 to 3.13.
# What is pinned already stays; `sh requirements/lock.sh --upgrade` takes the newest of everything.
set -eu
cd "$(dirname "$0")"

lock() { # NAME OPTION ...
    name=$1; shift
    "${UV:-../.venv/bin/uv}" pip compile --quiet --no-annotate --custom-compile-command 'make lock' \
        --python-version 3.11 --python-platform x86_64-manylinux_2_28 "$@" "$name.in" -o "$name.txt"
}

lock controller "$@"
lock cpu --override overrides.txt --override overrides-cpu.txt --excludes excludes-cpu.txt "$@"
lock cuda --override overrides.txt "$@"
lock dev --excludes excludes-dev.txt "$@"
