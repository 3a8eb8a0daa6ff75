#!/usr/bin/env bash
# Builds the images, brings docker-compose.yml up, tests it (tests/deploy/compose.py), takes all down; the same with TLS.
# Needs root, Debian's docker.io and docker-compose, and debootstrap where python:3.11-slim cannot be pulled. Starts a
# daemon of its own, with its data in $OUTRIDER_DOCKER_DIR, unless DOCKER_HOST names one; KEEP=1 leaves the data there.
set -euo pipefail
cd "$(dirname "$0")/.."
export COMPOSE_PROJECT_NAME=outrider-test OUTRIDER_TAG=test # neither the containers nor the images of who serves here
work=${OUTRIDER_DOCKER_DIR:-/var/tmp/outrider-docker}
python=${PYTHON:-.venv/bin/python}
for tool in docker docker-compose; do
    command -v "$tool" >/dev/null || { echo "test-compose: there is no $tool (Debian: docker.io docker-compose)" >&2; exit 2; }
done
mkdir -p "$work"

daemon=
finish() {
    docker-compose --profile cpu --profile monitoring down --volumes --timeout 10 >/dev/null 2>&1 || true
    [ -z "$daemon" ] || { kill "$daemon"; wait "$daemon" || true; [ -n "${KEEP:-}" ] || rm -rf "$work"; }
}
trap finish EXIT

if [ -z "${DOCKER_HOST:-}" ]; then
    export DOCKER_HOST=unix://$work/docker.sock
    dockerd --data-root "$work/data" --exec-root "$work/exec" --pidfile "$work/pid" --host "$DOCKER_HOST" \
        >"$work/dockerd.log" 2>&1 &
    daemon=$!
    until docker version >/dev/null 2>&1; do
        kill -0 "$daemon" || { tail "$work/dockerd.log" >&2; exit 2; }
        sleep 0.5
    done
fi

# What images are made of: the official image, or a stand-in where no registry can be reached.
export OUTRIDER_BASE_IMAGE=python:3.11-slim OUTRIDER_BUILD_IMAGE=python:3.11-slim
if ! docker image inspect "$OUTRIDER_BASE_IMAGE" >/dev/null 2>&1 && ! timeout 60 docker pull --quiet "$OUTRIDER_BASE_IMAGE" 2>/dev/null; then
    export OUTRIDER_BASE_IMAGE=outrider-stand-in OUTRIDER_BUILD_IMAGE=outrider-stand-in-build
    scripts/stand-in-image.sh "$work" "$OUTRIDER_BASE_IMAGE" "$OUTRIDER_BUILD_IMAGE"
    export OUTRIDER_TORCH_INDEX="" # its torch comes from where this machine's pip has it
fi

# Prometheus too: the official image, or Debian's on the stand-in.
if ! docker image inspect prom/prometheus:v3.5.0 >/dev/null 2>&1 && ! timeout 60 docker pull --quiet prom/prometheus:v3.5.0 2>/dev/null; then
    export OUTRIDER_PROMETHEUS_IMAGE=outrider-stand-in-prometheus
    docker build --quiet --tag "$OUTRIDER_PROMETHEUS_IMAGE" - >/dev/null <<END
FROM $OUTRIDER_BASE_IMAGE
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus && install -d -o nobody -g nogroup /prometheus
ENTRYPOINT ["prometheus"]
END
fi

docker-compose build
docker images --format '{{.Repository}} {{.Size}}' | grep '^outrider-' | sort
"$python" -m pytest -q -p no:cacheprovider tests/deploy/compose.py "$@"

# And once more with TLS.
docker-compose down --volumes --timeout 10 >/dev/null 2>&1
export COMPOSE_FILE=docker-compose.yml:docker-compose.tls.yml OUTRIDER_TLS_DIR=$work/tls OUTRIDER_FRONT_TLS_DIR=$work/tls/front
deploy/certificates.sh "$OUTRIDER_TLS_DIR"
"$python" -m pytest -q -p no:cacheprovider tests/deploy/compose_tls.py "$@"
