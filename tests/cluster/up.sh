#!/bin/bash
# `make cluster-up`: a real SLURM of four nodes on this machine, and a real Apptainer. Debian 12 on x86-64, as root.
# A second call starts what is not running and returns at once otherwise; with `--install` nothing is started. CPUS,
# MEMORY (MB) and GPUS of a node (null devices that SLURM counts) may be given.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
cd / # the daemons' working folder
. "$HERE/common.sh"
CPUS=${CPUS:-8} MEMORY=${MEMORY:-256000} GPUS=${GPUS:-2}
APPTAINER_ROOT=/opt/apptainer # its own C library and what it links, apart from the machine's
LOG=/var/log/rloo-cluster-up.log

check_machine() {
    [ "$(id -u)" = 0 ] || fail "needs root: daemons of several users and devices are started"
    command -v apt-get >/dev/null || fail "needs Debian 12: no apt-get here"
    if [ -e /etc/slurm/slurm.conf ] && ! grep -qF "$MARK" /etc/slurm/slurm.conf; then
        fail "/etc/slurm/slurm.conf belongs to another SLURM: use a machine that has none"
    fi
}

install_packages() {
    local wanted="munge slurmctld slurmd slurm-client squashfs-tools squashfuse fuse3 fuse-overlayfs fakeroot uidmap
        patchelf debootstrap ca-certificates"
    if dpkg-query -W $wanted >/dev/null 2>&1; then return; fi
    local policy=/usr/sbin/policy-rc.d # no package shall start its daemon
    local had=; if [ -e $policy ]; then had=1; fi
    [ "$had" ] || printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update && apt-get install -y --no-install-recommends $wanted; } >>$LOG 2>&1 ||
        fail "apt-get could not install SLURM: $LOG says why"
    [ "$had" ] || rm -f $policy
}

mirror() { # the one that apt is configured for
    awk '/^URIs:/ {print $2; exit} /^deb / {for (i = 2; i <= NF; i++) if ($i ~ /^(https?|file):/) {print $i; exit}}' \
        /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null
}

install_apptainer() { # Debian 12 has none: Debian unstable's, with unstable's C library beside it
    if apptainer --version >/dev/null 2>&1; then return; fi
    local work; work=$(mktemp -d)
    mkdir -p "$work"/{lists/partial,cache/archives/partial,debs,unpacked} $APPTAINER_ROOT/lib
    touch "$work/status"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(mirror) ${APPTAINER_SUITE:-sid} main" \
        >"$work/sources.list"
    local apt="apt-get -q -o Dir::Etc::sourcelist=$work/sources.list -o Dir::Etc::sourceparts=/dev/null
        -o Dir::Etc::preferencesparts=/dev/null -o Dir::State::lists=$work/lists -o Dir::Cache=$work/cache
        -o Dir::State::status=$work/status -o Acquire::Languages=none -o APT::Sandbox::User=root
        -o Acquire::Check-Valid-Until=false"
    { $apt update && cd "$work/debs" && $apt download apptainer libc6 libseccomp2 libsqlite3-0; } >>$LOG 2>&1 ||
        fail "apt-get could not fetch Apptainer: $LOG says why"
    local package
    for package in libc6 libseccomp2 libsqlite3-0; do
        dpkg-deb --fsys-tarfile "$work/debs/${package}"_*.deb | tar -x -C "$work/unpacked"
    done
    cp -a "$work"/unpacked/usr/lib/x86_64-linux-gnu/*.so* $APPTAINER_ROOT/lib/
    dpkg-deb --fsys-tarfile "$work"/debs/apptainer_*.deb | tar -x -C / --keep-directory-symlink ./etc ./usr ./var
    local program
    for program in /usr/bin/apptainer /usr/lib/x86_64-linux-gnu/apptainer/bin/starter; do
        patchelf --set-interpreter $APPTAINER_ROOT/lib/ld-linux-x86-64.so.2 \
            --force-rpath --set-rpath $APPTAINER_ROOT/lib $program
    done
    rm -rf "$work"
    apptainer --version >>$LOG 2>&1 || fail "Apptainer does not start: 'apptainer --version' says why"
}

configure_apptainer() { # this machine's root may lack rights that Apptainer asks for: run without, build by fakeroot
    apptainer config global --set "root default capabilities" no
    apptainer config global --set "shared loop devices" yes # jobs share what they have read of an image
    local file
    for file in /etc/subuid /etc/subgid; do
        grep -qs ^root: $file || echo root:200000:65536 >>$file
    done
}

configure() {
    local host; host=$(hostname -s)
    mkdir -p /etc/slurm /var/log/slurm /var/spool/slurmctld /var/spool/slurmd /run/munge /var/log/munge $RUN
    chown slurm: /var/log/slurm /var/spool/slurmctld $RUN
    chown munge: /run/munge /var/log/munge
    chmod 755 /run/munge
    if [ -e /dev/fuse ]; then chmod 666 /dev/fuse; fi # squashfuse of ordinary users needs it
    local gpu number
    for gpu in $(seq 0 $((GPUS - 1))); do
        [ -e "/dev/fakegpu$gpu" ] || mknod -m 666 "/dev/fakegpu$gpu" c 1 3
    done
    for number in $(seq "$NODES"); do # ranks on several nodes call each other by their names
        grep -qw "node$number" /etc/hosts || echo "127.0.0.1 node$number" >>/etc/hosts
    done
    {
        echo "$MARK"
        sed "s/@HOST@/$host/" "$HERE/slurm.conf"
        for number in $(seq "$NODES"); do
            echo "NodeName=node$number NodeHostname=$host NodeAddr=127.0.0.1 Port=$((17000 + number)) CPUs=$CPUS" \
                "RealMemory=$MEMORY Gres=gpu:$GPUS State=UNKNOWN"
        done
        local whole="MaxTime=INFINITE State=UP PriorityTier=10" steady="node[1-$((NODES - 2))]"
        echo "PartitionName=cpu Nodes=$steady Default=YES $whole"
        echo "PartitionName=gpu Nodes=$steady $whole"
        echo "PartitionName=fragile Nodes=node[$((NODES - 1))-$NODES] $whole"
        echo "PartitionName=requeued Nodes=$steady MaxTime=INFINITE State=UP PreemptMode=REQUEUE"
        echo "PartitionName=warned Nodes=$steady MaxTime=INFINITE State=UP PreemptMode=REQUEUE GraceTime=60"
        echo "PartitionName=cancelled Nodes=$steady MaxTime=INFINITE State=UP PreemptMode=CANCEL"
    } >/etc/slurm/slurm.conf
    echo "NodeName=node[1-$NODES] Name=gpu File=/dev/fakegpu[0-$((GPUS - 1))]" >/etc/slurm/gres.conf
}

start() {
    local number
    alive /run/munge/munged.pid || setpriv --reuid munge --regid munge --init-groups munged --pid-file=/run/munge/munged.pid
    alive $RUN/slurmctld.pid || slurmctld
    for number in $(seq "$NODES"); do
        alive "$RUN/slurmd.node$number.pid" || slurmd -N "node$number"
    done
}

wait_for_nodes() {
    local ready
    for _ in $(seq 120); do
        ready=$(sinfo -h -N -t idle,mix,alloc -o %N 2>/dev/null | sort -u | wc -l)
        if [ "$ready" = "$NODES" ]; then return; fi
        sleep .5
    done
    sinfo -N -l >&2 || true
    fail "the nodes are not ready after a minute: /var/log/slurm says why"
}

check_machine
install_packages
install_apptainer
configure_apptainer
if [ "${1:-}" = --install ]; then exit; fi
if ! alive $RUN/slurmctld.pid; then configure; fi
start
wait_for_nodes
sinfo -N -o '%N %P %c CPUs %m MB %G %T'
