#!/bin/sh
# Generates the Go code of kvhost/v1, and the Python code of kvhost.proto: hosts alone speak peers.proto. Needs protoc (3.21 made
# what is committed); the Go plugins are those of .ci/tools.
set -eu
cd "$(dirname "$0")"
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
GOBIN=$bin go -C ../../../.ci/tools install -mod=readonly google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
protoc -I . --plugin="$bin/protoc-gen-go" --plugin="$bin/protoc-gen-go-grpc" \
  --go_out=. --go_opt=module=github.com/kvhost/kvhost/host/internal/proto \
  --go-grpc_out=. --go-grpc_opt=module=github.com/kvhost/kvhost/host/internal/proto \
  kvhost/v1/kvhost.proto kvhost/v1/peers.proto
python=../../client/python
protoc -I . --python_out="$python" --pyi_out="$python" kvhost/v1/kvhost.proto
