#!/usr/bin/env bash
# Prints the Secrets that the component tls mounts: deploy/k8s/secrets.sh DIR SHARDS | kubectl apply -f -
# DIR holds the authority, whose key stays there. A second call renews the certificates; pods read them within minutes.
set -euo pipefail
[ $# = 2 ] || { echo "usage: $0 DIR SHARDS | kubectl apply -f -" >&2; exit 2; }
folder=$1 shards=$2

hosts=(--host coordinator --host coordinator-0.coordinators)
for ((shard = 0; shard < shards; shard++)); do hosts+=(--host "shard-$shard.shards" --host "standby-$shard.standbys"); done
renew=()
[ ! -e "$folder/ca.pem" ] || renew=(--renew)
psctl certs init "$folder" --shards "$shards" "${hosts[@]}" "${renew[@]}" >&2

# NAME FILE...
secret() {
    printf -- '---\napiVersion: v1\nkind: Secret\ntype: Opaque\nmetadata:\n  name: %s\n' "$1"
    printf '  labels: {app.kubernetes.io/name: torch-ps}\ndata:\n'
    shift
    for file; do printf '  %s: %s\n' "$file" "$(base64 --wrap 0 "$folder/$file")"; done
}

own=()
for ((shard = 0; shard < shards; shard++)); do own+=("shard-$shard.pem" "shard-$shard.key"); done
secret torch-ps-coordinator ca.pem coordinator.pem coordinator.key tokens
secret torch-ps-shards ca.pem "${own[@]}" tokens
secret torch-ps-worker ca.pem worker.pem worker.key worker.token
