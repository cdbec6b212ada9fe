#!/usr/bin/env bash
# Protocol checks: the committed stubs are what protos/ generates, and buf's lint rules hold (where npx can bring buf).
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
protos/generate.sh "$out"
for stubs in client/tandem/v1 mesh/v1; do
  diff -r -x __init__.py -x __pycache__ "$out/$stubs" $stubs || {
    echo "$stubs is not what protos/ generates: run make protos" >&2
    exit 1
  }
done
if command -v npx >/dev/null; then
  (cd protos && npx --yes @bufbuild/buf@1.75.0 lint)
else
  echo "npx not found: buf lint skipped" >&2
fi
