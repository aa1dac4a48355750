#!/bin/sh
# `make lock`: writes the pinned lists NAME.txt from NAME.in, for Linux on x86-64 and on aarch64 (Grace) and Python 3.11
# to 3.13. What only x86-64 needs, or has, is marked. What is pinned already stays; `sh requirements/lock.sh --upgrade`
# takes the newest of everything.
set -eu
cd "$(dirname "$0")"

compile() { # MACHINE NAME OUTPUT OPTION ...
    machine=$1 name=$2 output=$3; shift 3
    "${UV:-../.venv/bin/uv}" pip compile --quiet --no-annotate --custom-compile-command 'make lock' \
        --python-version 3.11 --python-platform "$machine-manylinux_2_28" "$@" "$name.in" -o "$output"
}

lock() { # NAME OPTION ...
    name=$1; shift
    compile x86_64 "$name" "$name.txt" "$@"
    cp "$name.txt" "$name.aarch64"
    compile aarch64 "$name" "$name.aarch64" "$@" --excludes excludes-aarch64.txt
    if grep -vxFf "$name.txt" "$name.aarch64"; then
        echo "lock: aarch64 needs these besides what $name.txt has; give lock.sh a way to say so" >&2
        exit 1
    fi
    awk 'NR == FNR {there[$0]; next} {print $0 ($0 in there ? "" : " ; platform_machine == \"x86_64\"")}' \
        "$name.aarch64" "$name.txt" >"$name.marked"
    rm "$name.aarch64"
    mv "$name.marked" "$name.txt"
}

lock controller "$@"
lock cpu --override overrides.txt --override overrides-cpu.txt --excludes excludes-cpu.txt "$@"
lock cuda --override overrides.txt "$@"
lock dev --excludes excludes-dev.txt "$@"
for name in openenv verifiers; do # with hashes, for any machine
    "${UV:-../.venv/bin/uv}" pip compile --quiet --no-annotate --custom-compile-command 'make lock' --universal \
        --python-version 3.11 --generate-hashes --excludes excludes-$name.txt "$@" "$name.in" -o "$name.txt"
done
cd ../rloo_pipeline/runtime # the releases that runtime/guard.py accepts
cut -d, -f1 used_internals.csv | uniq | while read -r name; do
    sed -n "s/^\($name\)==\([^ ;]*\).*/\1,\2/p" ../../requirements/cuda.txt
done >pinned.csv
