#!/bin/bash
# A Docker Engine for the tests, beside whatever else runs on the machine.
#
#   engine.sh up     find an engine that answers, or start a private one; prints `export` lines
#   engine.sh down   stop the private engine, and only that one
#   engine.sh env    print the `export` lines of what is running, start nothing
#
# Where an engine answers at DOCKER_HOST, at the docker command's own context or at the default
# socket, that one is used and never stopped. Otherwise, on Debian or Ubuntu as root, docker.io is
# installed and a dockerd with its own data, sockets and pid file below KERNELPOOL_TEST_ENGINE_DIR
# is started. It has no bridge and writes no firewall rule: kernels have no network. Exit status 3
# means that no engine could be had; the reason is on standard error.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
dir=${KERNELPOOL_TEST_ENGINE_DIR:-/var/lib/kernelpool-test-engine}
socket=$dir/docker.sock
pidfile=$dir/docker.pid
python=$root/.venv/bin/python

STARTUP_SECONDS=60
STOP_SECONDS=30

say() { printf 'engine: %s\n' "$*" >&2; }

# Asks through the same library as kernelpool, so that an answer here is an answer there.
answers() {
    DOCKER_HOST=$1 "$python" -c 'import docker; docker.from_env(timeout=5).ping()' 2>/dev/null
}

# The pid of our dockerd, if the recorded process still is that: a pid may have been used again.
private_pid() {
    local pid
    pid=$(cat "$pidfile" 2>/dev/null) || return 1
    tr '\0' ' ' 2>/dev/null < "/proc/$pid/cmdline" | grep -qF -- "dockerd --data-root $dir/data " \
        || return 1
    printf '%s\n' "$pid"
}

private_answers() { private_pid >/dev/null && answers "unix://$socket"; }

existing_host() {
    local candidate
    for candidate in \
        "${DOCKER_HOST:-}" \
        "$(command -v docker >/dev/null && docker context inspect -f '{{.Endpoints.docker.Host}}' 2>/dev/null)" \
        unix:///var/run/docker.sock
    do
        if [ -n "$candidate" ] && answers "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
        # What the user named is what is meant: nothing else is tried in its place.
        if [ -n "${DOCKER_HOST:-}" ]; then break; fi
    done
    return 1
}

print_env() {
    printf 'export DOCKER_HOST=%q\n' "$1"
    printf 'export KERNELPOOL_ENGINE=%q\n' "$2"
}

is_debian() { grep -qsE '^ID(_LIKE)?=.*(debian|ubuntu)' /etc/os-release; }

no_engine() {
    cat >&2 <<END
engine: No Docker Engine answers (DOCKER_HOST=${DOCKER_HOST:-unset}, default socket), and a private one
engine: could not be started: $1
engine: What was therefore NOT tested: the Docker runtime, the kernel image and everything marked
engine: 'docker'. To test it, start a Docker Engine that your user may reach, or run this as root on
engine: Debian or Ubuntu.
END
    exit 3
}

install_packages() {
    local missing=() pair
    for pair in dockerd:docker.io iptables:iptables debootstrap:debootstrap mkfs.ext4:e2fsprogs; do
        command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
    done
    [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing+=(debian-archive-keyring)
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing ${missing[*]} with apt-get"
    # The package starts a system-wide engine when it is installed; only the private one is wanted.
    local policy=/usr/sbin/policy-rc.d made_policy=''
    if ! [ -e $policy ]; then
        printf '#!/bin/sh\nexit 101\n' > $policy
        chmod 755 $policy
        made_policy=1
    fi
    local status=0
    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
        apt-get -qq install -y --no-install-recommends "${missing[@]}"; } >&2 </dev/null || status=$?
    if [ -n "$made_policy" ]; then rm -f $policy; fi
    [ $status = 0 ] || no_engine "apt-get could not install ${missing[*]} (its message is above)."
}

# A machine without an init system may have no control groups mounted.
mount_cgroups() {
    if grep -qE ' (cgroup|cgroup2) ' /proc/mounts; then return; fi
    say "mounting control groups"
    if [ ! -d /sys/fs/cgroup ] || ! mount -t cgroup2 none /sys/fs/cgroup 2>/dev/null; then
        no_engine "control groups are not mounted and could not be."
    fi
}

start_private() {
    if [ ${#socket} -gt 90 ]; then
        no_engine "KERNELPOOL_TEST_ENGINE_DIR is too long for sockets below it: $dir"
    fi
    chmod 711 "$dir"
    rm -f "$socket" "$pidfile"
    say "starting dockerd below $dir"
    setsid dockerd --data-root "$dir/data" --exec-root "$dir/exec" -H "unix://$socket" \
        -p "$pidfile" --bridge=none --iptables=false --ip6tables=false \
        >"$dir/log" 2>&1 </dev/null 8>&- &
    local dockerd=$! deadline=$((SECONDS + STARTUP_SECONDS))
    until private_answers; do
        if ! kill -0 "$dockerd" 2>/dev/null; then
            tail -n 5 "$dir/log" >&2
            no_engine "dockerd ended at once; the end of $dir/log is above."
        fi
        if [ $SECONDS -ge $deadline ]; then
            stop_private
            no_engine "dockerd did not answer within $STARTUP_SECONDS s; see $dir/log."
        fi
        sleep 0.2
    done
    local driver
    driver=$(DOCKER_HOST=unix://$socket "$python" -c \
        'import docker; print(docker.from_env().info()["Driver"])')
    case $driver in
        overlay2) say "ready (storage driver overlay2)" ;;
        *) say "ready (storage driver $driver: $dir cannot carry overlay2, so images take longer and more room)" ;;
    esac
}

stop_private() {
    local pid deadline=$((SECONDS + STOP_SECONDS))
    if pid=$(private_pid); then
        say "stopping dockerd below $dir"
        kill -TERM "$pid" 2>/dev/null || true
        while kill -0 "$pid" 2>/dev/null; do
            if [ $SECONDS -ge $deadline ]; then kill -KILL "$pid" 2>/dev/null || true; break; fi
            sleep 0.1
        done
    fi
    # containerd is a child of dockerd and ends with it, unless dockerd was killed.
    pid=$(cat "$dir/exec/containerd/containerd.pid" 2>/dev/null) || pid=''
    if [ -n "$pid" ] && tr '\0' ' ' 2>/dev/null < "/proc/$pid/cmdline" | grep -qF "$dir/exec"; then
        kill -TERM "$pid" 2>/dev/null || true
    fi
    rm -f "$socket" "$pidfile"
}

# What the user named with DOCKER_HOST comes before the private engine, everything else after it.
running() {
    local host
    if [ -z "${DOCKER_HOST:-}" ] && private_answers; then
        print_env "unix://$socket" private
    elif host=$(existing_host); then
        say "using the Docker Engine at $host"
        print_env "$host" existing
    else
        return 1
    fi
}

up() {
    if running; then return; fi
    [ -z "${DOCKER_HOST:-}" ] || no_engine "DOCKER_HOST is set, and nothing else is tried then."
    is_debian || no_engine "installing one is only known here for Debian and Ubuntu."
    [ "$(id -u)" = 0 ] || no_engine "that takes root."
    mkdir -p "$dir"
    exec 8>"$dir/lock"
    flock 8
    if private_answers; then print_env "unix://$socket" private; return; fi
    install_packages
    mount_cgroups
    start_private
    print_env "unix://$socket" private
}

case ${1:-} in
    up) up ;;
    down) stop_private ;;
    env) running 2>/dev/null || exit 3 ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed '$d' >&2; exit 2 ;;
esac
