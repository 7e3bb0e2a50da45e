#!/bin/bash
# Build the cpu target without Docker and without a registry: buildah, on a Debian that debootstrap makes. As root.
#   apt-get install buildah podman crun debootstrap
#   docker/build-cpu.sh [tag] [arguments of buildah build, such as --volume or --build-arg]
# The Debian stays in $ROOTFS (default /var/tmp/nf4-base) for the next build.
set -euo pipefail
cd "$(dirname "$0")/.."
tag=${1:-nf4-server:cpu}
shift || true
rootfs=${ROOTFS:-/var/tmp/nf4-base}
store=(--storage-driver "${STORAGE_DRIVER:-vfs}")
if [ ! -x "$rootfs/usr/bin/python3" ]; then
  debootstrap --variant=minbase --include=python3,python3-dev,python3-venv,ca-certificates,g++ bookworm "$rootfs"
fi
if ! buildah "${store[@]}" inspect localhost/nf4-base > /dev/null 2>&1; then
  container=$(buildah "${store[@]}" from scratch)
  buildah "${store[@]}" add --quiet "$container" "$rootfs" / > /dev/null
  buildah "${store[@]}" config --cmd /bin/bash "$container"
  buildah "${store[@]}" commit --quiet "$container" localhost/nf4-base
  buildah "${store[@]}" rm "$container" > /dev/null
fi
# chroot, because inside a container there may be no namespaces; one layer, because vfs copies everything for each layer.
buildah "${store[@]}" build --isolation chroot --layers=false --format docker --target cpu \
  --build-arg BASE=localhost/nf4-base "$@" --tag "$tag" .
