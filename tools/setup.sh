#!/bin/sh
# `make setup`: makes .venv from the pinned lists of requirements/ for ACCELERATOR, cpu or cuda.
# A second call compares one key and returns. A changed list installs what changed. An environment whose installation
# was cut short, or that belongs to another Python, place or accelerator, is made anew; where .venv is a link to that of
# another folder, which would lose it, nothing is.
set -eu
cd "$(dirname "$0")/.."
unset PYTHONPATH # pip would take what lies there for installed

accelerator=${ACCELERATOR:-cpu}
lists="requirements/$accelerator.txt requirements/dev.txt"
stamp=.venv/.setup # "unfinished" and for what, or the base and then what was installed on it
log=.venv/setup.log

fail() {
    echo "setup: $1" >&2
    exit 1
}

usable() { # PYTHON: is it one that the lists are made for?
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null
}

version() { # PYTHON
    "$1" -ISc 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo none
}

compare() { # Sets base, key and found, what the stamp holds.
    base="$accelerator $(version "${PYTHON:-.venv/bin/python}") $PWD"
    key="$base $(cat $lists pyproject.toml tools/setup.sh | sha256sum | cut -c1-16)"
    found=
    if [ -e $stamp ]; then found=$(cat $stamp); fi
}

find_python() { # Sets python.
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if usable "$python"; then return; fi
    done
    if [ -n "${PYTHON:-}" ]; then fail "PYTHON=$PYTHON is no Python 3.11, 3.12 or 3.13: name one that is"; fi
    fail "no Python 3.11, 3.12 or 3.13 found: install one, or name it, as in 'make setup PYTHON=/path/to/python3.12'"
}

check_python() {
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module: install it (Debian and Ubuntu: python3-venv), or name another with PYTHON=..."
}

whole() { # pip writes RECORD last: did it leave no package half done?
    for package in .venv/lib/python*/site-packages/*.dist-info; do
        [ -e "$package/RECORD" ] || return 1
    done
}

step() { # WORDS COMMAND ...: says what happens and how long it took; what the command says goes to the log.
    printf 'setup: %s ... ' "$1"
    words=$1 began=$(date +%s)
    shift
    if "$@" >>$log 2>&1 </dev/null; then
        echo "$(($(date +%s) - began)) s"
    else
        status=$?
        echo "failed"
        if [ $status -lt 128 ] && whole; then echo "$base lists" >$stamp; fi
        grep -i error $log | tail -n 2 >&2 || true
        fail "'$words' failed: $log says more; the same command tries again"
    fi
}

refuse_link() { # A link to an empty folder or to an environment of this folder is fine: on another disk, say.
    case "$found " in " " | *" $PWD "*) return ;; esac
    [ ! -L .venv ] || fail ".venv is a link to the environment of another folder: remove the link, or link to a new folder"
}

case $accelerator in cpu | cuda) ;; *) fail "ACCELERATOR=$accelerator: say cpu or cuda" ;; esac
compare
if [ "$found" = "$key" ]; then exit; fi
refuse_link

if command -v flock >/dev/null; then # another make may be at it
    exec 9>.setup.lock
    flock 9
    compare
    if [ "$found" = "$key" ]; then exit; fi
fi

started=$(date +%s)
case $found in
    "$base "*) python=.venv/bin/python ;;
    *)
        find_python
        # An environment that was made by hand, of a Python that will do, is filled rather than replaced.
        if [ -z "$found" ] && [ -z "${PYTHON:-}" ] && usable .venv/bin/python; then python=.venv/bin/python; fi
        ;;
esac
if [ "$python" != .venv/bin/python ]; then
    check_python
    mkdir -p .venv
    echo "unfinished $accelerator $PWD" >$stamp
    find .venv -mindepth 1 -maxdepth 1 ! -path $stamp -exec rm -rf {} +
    step "environment .venv with Python $(version "$python")" "$python" -m venv .venv
fi

pip() { .venv/bin/python -m pip -q --no-input --disable-pip-version-check "$@"; }
compile() { # On all cores; pip has but one. Some packages have templates with the name of a source file.
    # An eighth is tests, a quarter what nothing imports, or models, of which a run imports few.
    unused='/(tests|anthropic|databricks|debugpy|mypy|nltk|numba|pip|sklearn)/|/(transformers|vllm|model_executor)/models/'
    .venv/bin/python -m compileall -qq -j 0 -x "$unused" .venv/lib rloo_pipeline snakemake_*_plugin_rloo* || true
}
link_cuda() { # where nvcc and FlashInfer look for the libraries of CUDA's wheels: names without a version, and lib64
    for cuda in .venv/lib/python*/site-packages/nvidia/cu[0-9]*; do
        [ -d "$cuda/lib" ] || continue
        for library in "$cuda"/lib/lib*.so.*; do ln -sf "$(basename "$library")" "${library%%.so.*}.so"; done
        ln -sfn lib "$cuda/lib64"
        # FlashInfer links kernels with -lcuda and looks here, too; many nodes have libcuda.so.1 only, and a login node none
        driver=$(PATH=$PATH:/usr/sbin:/sbin ldconfig -p | sed -n 's/.*libcuda\.so\.1 .*64.*=> //p' | head -n 1)
        for folder in "/usr/lib/$(uname -m)-linux-gnu" /usr/lib64; do
            [ ! -d "$folder" ] || driver=${driver:-$folder/libcuda.so.1}
        done
        mkdir -p "$cuda/lib/stubs"
        ln -sf "$driver" "$cuda/lib/stubs/libcuda.so"
    done
}
echo "unfinished $accelerator $PWD" >$stamp
: >$log
list=.venv/packages.txt
# PyPI's builds of torch are for CUDA; == would also take those for CPUs, where PIP_FIND_LINKS or the like names them.
if [ "$accelerator" = cuda ]; then sed 's/^\(torch[a-z]*\)==/\1===/' requirements/cuda.txt; else cat requirements/cpu.txt; fi >$list
step "pip" pip install --no-deps "$(grep '^pip==' requirements/dev.txt)" # Python's own takes three times as long
step "packages of requirements/$accelerator.txt and dev.txt, some minutes" \
    pip install --no-deps --no-compile -r $list -r requirements/dev.txt
[ "$accelerator" = cpu ] || link_cuda
compare
echo "$base lists" >$stamp
step "byte code" compile
if ! .venv/bin/python -c 'import torch' >>$log 2>&1; then
    pip uninstall -y torch >>$log 2>&1
    [ "$accelerator" = cpu ] || fail "torch cannot be imported, and was removed: $log says why"
    fail "torch cannot be imported: pip took a build for CUDA; point PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL to PyTorch's CPU builds and try again"
fi
step "rloo_pipeline itself" pip install --no-deps --no-build-isolation -e .
echo "$key" >$stamp
echo "setup: done in $(($(date +%s) - started)) s"
if [ "$accelerator" = cpu ] && { [ -e /dev/nvidiactl ] || [ -e /usr/lib/wsl/lib/libcuda.so.1 ]; }; then
    echo "setup: all will run on CPUs; for this machine's GPUs, make setup ACCELERATOR=cuda"
fi
