#!/usr/bin/env bash
# Generates the stubs of protos/ into FOLDER (the repository by default): tandem/v1, which clients install, into its
# folder client/, and mesh/v1, which only the services import, at its top.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.}
mkdir -p "$folder/client"
for package in tandem mesh; do
  out=$folder
  if [ $package = tandem ]; then out=$folder/client; fi
  "${BIN:-.venv/bin}"/python -m grpc_tools.protoc -Iprotos \
    --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" protos/$package/v1/*.proto
done
