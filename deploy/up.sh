#!/usr/bin/env bash
# Trains once in containers: builds the image, runs compose.yaml until the workers have ended, and takes it down again.
#   MODE, STALENESS, DURABILITY  see compose.yaml; STALENESS is 4 where MODE=ssp leaves it open
#   TLS=1            with certificates and tokens that are made for it: compose.tls.yaml
#   WHEELS           folder of wheels to prefer over the package index, such as a CPU-only torch
# The servers' state stays in a volume until a training has ended well: after any other end the next call goes on there.
# Exit code: 0 when every worker ended with 0, else that of the first program that failed and is not started again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

say() { echo "cluster | $*"; }
fail() {
    say "$*" >&2
    exit 1
}

check_engine() {
    command -v docker > /dev/null || fail "docker is not installed; 'make train' runs the same job without containers"
    docker compose version > /dev/null 2>&1 || fail "docker has no compose plugin (docker compose version fails)"
    docker info > /dev/null 2>&1 || fail "the Docker engine does not answer: start it, or see 'docker info'"
    [ -z "$(docker compose ps --all --quiet)" ] ||
        fail "there are containers of this project already; remove them: docker compose -f deploy/compose.yaml down"
}

take_wheels() {
    mkdir -p ../wheels
    # With their times: the engine is sent only what changed.
    cp -p "$1"/*.whl ../wheels/
}

# 0 when every worker has ended with 0; else the exit code of the first program that failed and is not started again.
await_workers() {
    local services states state code service running
    services=$(docker compose config --services)
    while sleep 1; do
        states=$(docker compose ps --all --format '{{.State}} {{.ExitCode}} {{.Service}}')
        [ "$(wc -l <<< "$states")" = "$(wc -l <<< "$services")" ] || fail "a container is gone; there are: $states"
        running=0
        while read -r state code service; do
            case $state:$code:$service in
                exited:0:worker* | exited:0:certs) ;;
                exited:0:*) fail "$service ended before the workers" ;;
                exited:*)
                    say "$service failed with exit code $code"
                    return "$code"
                    ;;
                *:worker*) running=1 ;;
            esac
        done <<< "$states"
        [ $running = 1 ] || return 0
    done
}

has_state() { docker volume inspect "$state" > /dev/null 2>&1; }

take_down() {
    trap '' INT TERM HUP
    say "taking the containers down"
    # Stopped containers end their logs: nothing of the output is lost.
    if docker compose --progress quiet stop; then wait; fi
    docker compose --progress quiet down ||
        say "not everything could be removed; see above, then: docker compose -f deploy/compose.yaml down" >&2
    if [ $done_with_state = 1 ]; then
        docker volume rm --force "$state" > /dev/null
    elif has_state; then
        say "the state stays in the volume '$state': the next start goes on from there"
    fi
}

[ "${TLS:-0}" != 1 ] || export COMPOSE_FILE=compose.yaml:compose.tls.yaml
check_engine
[ -z "${WHEELS:-}" ] || take_wheels "$WHEELS"
[ "${MODE:-}" != ssp ] || export STALENESS="${STALENESS:-4}"
state="${COMPOSE_PROJECT_NAME:-torch-ps}_state"
done_with_state=0
if [ "${DURABILITY:-durable}" = memory ]; then
    export STATE='' RESTART_SERVERS=no
    # Compose makes the volume all the same.
    has_state || done_with_state=1
elif has_state; then
    say "continuing from the state of an earlier training; 'docker volume rm $state' removes it"
fi

trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP
trap take_down EXIT
say "building the image; the first time takes minutes"
docker compose --progress plain build --quiet
say "starting coordinator, shards and workers (MODE=${MODE:-async} DURABILITY=${DURABILITY:-durable} TLS=${TLS:-0})"
if ! docker compose --progress quiet up --detach; then
    docker compose logs
    fail "the containers did not come up"
fi
docker compose logs --follow &
docker compose exec -T coordinator psctl status --watch 2> /dev/null | while read -r line; do say "$line"; done &
code=0
await_workers || code=$?
if [ "$code" = 0 ]; then
    [ "${DURABILITY:-durable}" = memory ] || done_with_state=1
    say "trained; the model stays in the volume 'models'"
fi
exit "$code"
