#!/bin/bash
# Runs a command with the project installed, a Docker Engine reachable and the kernel image built:
#
#   with-engine.sh COMMAND [ARGUMENT...]
#
# The command finds DOCKER_HOST and KERNELPOOL_IMAGE in its environment. Where no engine can be had
# it runs all the same, with the reason in KERNELPOOL_DOCKER_ABSENT; with KERNELPOOL_REQUIRE_DOCKER=1
# what needs Docker then fails instead of being skipped. An engine started for this command is
# stopped after it, by whichever of several such commands ends last.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
dir=${KERNELPOOL_TEST_ENGINE_DIR:-/var/lib/kernelpool-test-engine}

scripts/bootstrap.sh

started='' held=''
finish() {
    local status=$?
    trap - EXIT
    if [ -n "$held" ]; then
        # Everyone who uses the private engine shares this lock; alone with it, one is the last.
        if flock -n -x 9 && [ -e "$dir/started" ]; then
            rm -f "$dir/started"
            scripts/engine.sh down 2>/dev/null
        fi
    fi
    exit $status
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

hold() {
    mkdir -p "$dir" 2>/dev/null && [ -w "$dir" ] || return 0
    exec 9>"$dir/users"
    flock -s 9
    held=1
}

hold
before=$(scripts/engine.sh env 9>&-) || before=''
if lines=$(scripts/engine.sh up 9>&-); then
    eval "$lines"
    if [ -z "$before" ]; then : > "$dir/started"; fi
    .venv/bin/kernelpool image build --from debian 9>&-
    KERNELPOOL_IMAGE=$(.venv/bin/python -c 'from kernelpool import image; print(image.reference("debian"))')
    export KERNELPOOL_IMAGE
else
    status=$?
    [ $status = 3 ] || exit $status
    export KERNELPOOL_DOCKER_ABSENT="no Docker Engine answers and none could be started"
fi

status=0
"$@" 9>&- || status=$?
exit $status
