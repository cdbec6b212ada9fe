#!/usr/bin/env bash
# Protocol checks: the committed stubs are what protos/ generates, and buf's lint rules hold (where npx can bring buf).
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"${BIN:-.venv/bin}"/python -m grpc_tools.protoc -Iprotos \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" protos/tandem/v1/*.proto
diff -r -x __init__.py -x __pycache__ "$out/tandem/v1" tandem/v1 || {
  echo "tandem/v1 is not what protos/ generates: run make protos" >&2
  exit 1
}
if command -v npx >/dev/null; then
  (cd protos && npx --yes @bufbuild/buf@1.75.0 lint)
else
  echo "npx not found: buf lint skipped" >&2
fi
