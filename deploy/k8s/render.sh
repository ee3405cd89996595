#!/usr/bin/env bash
# Writes rendered/ from the sources beside it, with kubectl's Kustomize: make manifests. The first line of each file says
# what it was made of, so that a test notices where it is old without kubectl.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
command -v kubectl > /dev/null || { echo "kubectl is not installed" >&2; exit 1; }
sources=$(find . -name '*.yaml' -not -path './rendered/*' | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -d ' ' -f 1)
rm -rf rendered
mkdir rendered
for folder in base overlays/* jobset jobset-tls kubeflow kubeflow-tls; do
    { echo "# make manifests: $folder, sources $sources"; kubectl kustomize "$folder"; } > "rendered/${folder##*/}.yaml"
done
