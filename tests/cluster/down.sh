#!/bin/bash
# `make cluster-down`: ends all jobs and what up.sh started, by its pid files; `--wipe` forgets all jobs too. SLURM's
# configuration goes as well: where there is one, Snakemake asks SLURM and waits for an answer.
set -euo pipefail
. "$(cd "$(dirname "$0")" && pwd)/common.sh"

stop() { # PIDFILE
    alive "$1" || return 0
    local process; process=$(cat "$1")
    kill "$process"
    for _ in $(seq 40); do
        kill -0 "$process" 2>/dev/null || return 0
        sleep .25
    done
    kill -9 "$process"
}

[ -e /etc/slurm/slurm.conf ] || exit 0
grep -qF "$MARK" /etc/slurm/slurm.conf || fail "the SLURM of this machine is not that of tests/cluster/up.sh"
if alive $RUN/slurmctld.pid; then squeue -h -o %A | xargs -r scancel; fi
for file in $RUN/slurmd.*.pid $RUN/slurmctld.pid /run/munge/munged.pid; do stop "$file"; done
rm -f /etc/slurm/slurm.conf /etc/slurm/gres.conf
if [ "${1:-}" = --wipe ]; then rm -rf /var/spool/slurmctld/* /var/spool/slurmd/* /var/log/slurm/*; fi
