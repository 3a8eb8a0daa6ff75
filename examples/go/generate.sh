#!/usr/bin/env bash
# Writes the Go stubs into outriderv1/, by protoc with protoc-gen-go and protoc-gen-go-grpc (Debian packages of these names).
set -euo pipefail
cd "$(dirname "$0")"
protos=${PROTOS:-../../protos} package=example.com/outrider/outriderv1
flags=()
for file in common verify draft; do
    flags+=("--go_opt=Moutrider/v1/$file.proto=$package" "--go-grpc_opt=Moutrider/v1/$file.proto=$package")
done
mkdir -p outriderv1
protoc -I "$protos" "${flags[@]}" --go_out=. --go_opt=module=example.com/outrider \
    --go-grpc_out=. --go-grpc_opt=module=example.com/outrider \
    outrider/v1/common.proto outrider/v1/verify.proto outrider/v1/draft.proto
