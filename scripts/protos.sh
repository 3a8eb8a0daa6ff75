#!/usr/bin/env bash
# Writes the code generated from protos/ below the folder given (default: this repository).
# The versions of the generators are pinned in constraints.txt, so the same protos give the same files.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}
python=${PYTHON:-.venv/bin/python}
PATH=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH # where protoc-gen-mypy is
export PATH
mkdir -p "$out"
"$python" -m grpc_tools.protoc -I protos --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
    --mypy_grpc_out="$out" protos/outrider/v1/*.proto
