#!/bin/sh
# new-secrets.sh [NAMESPACE] | kubectl apply --server-side -f -
#
# Prints new Secrets, and shows the API key of the tenant "default" on stderr, once. Nothing is written to disk. Needs
# openssl, and the command `tandem` for the keys. Run it again only to change everything: all services must start again.
set -eu
namespace=${1:-tandem}
mesh_key=$(openssl rand -hex 32)
router_password=$(openssl rand -hex 32)
worker_password=$(openssl rand -hex 32)
keys=$(tandem keys new default)
operator=$(tandem keys new prometheus --operator 2>&1)
operator_key=$(printf '%s\n' "$operator" | sed -n 's/.*stored nowhere: //p')
operator_line=$(printf '%s\n' "$operator" | sed -n '/^[0-9a-f]\{64\} = /p')
for made in "$mesh_key" "$router_password" "$worker_password" "$keys" "$operator_key" "$operator_line"; do
  test -n "$made"
done
echo "the key of prometheus is in the Secret tandem-operator-key" >&2

cat <<YAML
apiVersion: v1
kind: Secret
metadata: {name: tandem-router, namespace: $namespace}
stringData:
  TANDEM_MESH_KEY: $mesh_key
  TANDEM_REGISTRY_URL: redis://tandem-router:$router_password@redis:6379/0
---
apiVersion: v1
kind: Secret
metadata: {name: tandem-worker, namespace: $namespace}
stringData:
  TANDEM_MESH_KEY: $mesh_key
  TANDEM_REGISTRY_URL: redis://tandem-worker:$worker_password@redis:6379/0
---
# A router looks at the file once a second: add lines of "tandem keys new", or take some out, at any time.
apiVersion: v1
kind: Secret
metadata: {name: tandem-api-keys, namespace: $namespace}
stringData:
  keys.toml: |
    $keys
    $operator_line
---
apiVersion: v1
kind: Secret
metadata: {name: tandem-operator-key, namespace: $namespace}
stringData:
  key: $operator_key
---
apiVersion: v1
kind: Secret
metadata: {name: tandem-redis, namespace: $namespace}
stringData:
  users.acl: |
    user tandem-router on >$router_password resetchannels ~tandem:* &tandem:* -@all +ping +select +subscribe +publish +set +mget +zrange +zrem +eval +time +exists +pttl +pexpire +sadd +scard +zadd +zcard +zscore +zremrangebyscore
    user tandem-worker on >$worker_password resetchannels ~tandem:workers ~tandem:worker:* &tandem:beats &tandem:asks:* -@all +ping +select +subscribe +publish +set +del +zadd +zrem
    user probe on nopass resetchannels -@all +ping
    user default off
YAML
