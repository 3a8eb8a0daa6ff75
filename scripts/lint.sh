#!/usr/bin/env bash
# Style, types, and the wire contract. buf needs node: without it, or without its package, that part is left out by name.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${BIN:-.venv/bin}
buf_version=1.75.0

"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/pyright"

buf() { npx --yes "@bufbuild/buf@$buf_version" "$@"; }
if ! buf --version >/dev/null 2>&1; then
    echo "lint: buf is not at hand (it comes with node, by npx); protos are not checked"
    exit
fi
buf lint
released=$(git tag --list 'v*' --sort=-version:refname | head -n 1)
if [ -n "$released" ]; then
    buf breaking --against ".git#tag=$released"
else
    echo "lint: no release yet to compare the protos with"
fi
