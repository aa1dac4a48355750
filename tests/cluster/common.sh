# What up.sh and down.sh share.
NODES=4 # the last two are for tests that kill them
RUN=/run/slurm
MARK="# written by rloo_pipeline's tests/cluster/up.sh"

alive() { # PIDFILE: does the process that wrote it live?
    [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null
}

fail() {
    echo "cluster: $1" >&2
    exit 1
}
