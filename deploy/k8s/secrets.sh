#!/usr/bin/env bash
# Prints the Secrets that pods with TLS mount: deploy/k8s/secrets.sh DIR SHARDS [JOBSET] | kubectl apply -f -
# DIR holds the authority, whose key stays there. JOBSET: the name of a JobSet or TrainJob, whose pods have names after it.
# A second call renews the certificates. Pods read them within minutes; shards, which have files of their own alone, when
# they are started again: kubectl rollout restart statefulset --selector app.kubernetes.io/name=torch-ps.
set -euo pipefail
[ $# = 2 ] || [ $# = 3 ] || { echo "usage: $0 DIR SHARDS [JOBSET] | kubectl apply -f -" >&2; exit 2; }
folder=$1 shards=$2 set=${3:-}

hosts=(--host coordinator --host coordinator-0.coordinators)
for ((shard = 0; shard < shards; shard++)); do hosts+=(--host "shard-$shard.shards" --host "standby-$shard.standbys"); done
if [ -n "$set" ]; then
    hosts+=(--host "$set-coordinator-0-0.$set")
    for ((shard = 0; shard < shards; shard++)); do hosts+=(--host "$set-shard-0-$shard.$set"); done
fi
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
secret torch-ps-shards ca.pem tokens
secret torch-ps-shard-keys "${own[@]}"
secret torch-ps-worker ca.pem worker.pem worker.key worker.token
secret torch-ps-viewer ca.pem viewer.pem viewer.key
# What Prometheus sends: the third field of the line alone.
printf '  viewer.secret: %s\n' "$(cut -d : -f 3 "$folder/viewer.token" | tr -d '\n' | base64 --wrap 0)"
