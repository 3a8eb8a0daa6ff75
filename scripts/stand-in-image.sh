#!/usr/bin/env bash
# Makes an image with Debian's Python 3.11 by debootstrap, for machines that reach Debian and PyPI but no image registry,
# and one to build in that also has this machine's wheels: stand-in-image.sh FOLDER IMAGE BUILD_IMAGE
# Both trust the certificates that this machine trusts, and their pip goes where this machine's does.
set -euo pipefail
folder=$1 image=$2 build_image=$3
root=$folder/root
if ! docker image inspect "$image" >/dev/null 2>&1; then
    if [ ! -e "$root/usr/bin/python3" ]; then
        rm -rf "$root"
        debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" >"$folder/debootstrap.log"
    fi
    cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
    printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\ndefault-timeout = 180\n' >"$root/etc/pip.conf"
    tar -C "$root" -c . | docker import - "$image" >/dev/null
fi
context=$(mktemp -d "$folder/build.XXXXXX")
trap 'rm -rf "$context"' EXIT
mkdir "$context/wheels"
wheels=$(python3 -m pip config list 2>/dev/null | sed -n "s/^global.find-links='\(.*\)'$/\1/p" | head -1)
if [ -d "$wheels" ]; then
    cp "$wheels"/torch-*.whl "$context/wheels/"
fi
printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\ndefault-timeout = 180\nfind-links = /opt/wheels\n' >"$context/pip.conf"
printf 'FROM %s\nCOPY wheels /opt/wheels\nCOPY pip.conf /etc/pip.conf\n' "$image" >"$context/Dockerfile"
docker build --quiet --tag "$build_image" "$context" >/dev/null
