#!/usr/bin/env bash
# Regenerates the worker RPC stubs from worker.proto.
#
# The generator runs in an environment of its own at a pinned version: generated code needs runtimes at least as new
# as its generator's, so generating with 1.76 (protobuf 6.31) keeps protobuf 6 and 7 installations both working.
set -euo pipefail
cd "$(dirname "$0")/../protocol/src"
uv="$(../../tools/find-uv)"
"$uv" run --no-project --isolated --python 3.11 --with 'grpcio-tools==1.76.0' \
  python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. taktline_protocol/worker.proto
