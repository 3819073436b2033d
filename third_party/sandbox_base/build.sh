#!/usr/bin/env bash
# Makes the Docker image `reterm-sandbox-base`: Debian bookworm with the programs that the task families use, the user
# `agent` and the directories that a sandbox has. It is made by debootstrap, so no image has to be pulled.
#
#   bash third_party/sandbox_base/build.sh          # as root, with debootstrap and a Docker daemon; about a minute
#
# DEBIAN_MIRROR chooses another mirror than the one this machine's apt uses.
set -euo pipefail

TAG=reterm-sandbox-base
SUITE=bookworm
# What bubblewrap sandboxes find on an ordinary Debian host, and minbase lacks; nftables sets allowlists of networks.
INCLUDE=bzip2,file,git,less,nftables,patch,procps,python3-minimal,unzip,xz-utils,zip

need() { command -v "$1" >/dev/null || { echo "error: $1 is missing; as root run: apt-get install -y $2" >&2; exit 1; }; }
need debootstrap debootstrap
need docker docker.io
docker version >/dev/null 2>&1 || { echo "error: no Docker daemon answers; start one: systemctl start docker, or dockerd" >&2; exit 1; }

# The mirror of this machine's apt where it is of that release, else debootstrap's own default.
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(SITE)' "Codename: $SUITE" 2>/dev/null | head -n 1 || true)}

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include="$INCLUDE" "$SUITE" "$root/image" ${mirror:+"$mirror"}

image=$root/image
rm -rf "$image"/var/cache/apt/archives/*.deb "$image"/var/lib/apt/lists/* "$image"/var/log/*.log
echo "agent:x:1000:1000:agent:/home/agent:/bin/bash" >> "$image/etc/passwd"
echo "agent:x:1000:" >> "$image/etc/group"
mkdir -p "$image"/app "$image"/home/agent "$image"/logs/{agent,verifier,artifacts}
rm -f "$image/etc/hostname" "$image/etc/resolv.conf"

tar -C "$image" -c . | docker import \
  --change "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
  --change "ENV HOME=/home/agent" --change "ENV LANG=C.UTF-8" \
  --change "WORKDIR /app" --change 'CMD ["bash"]' - "$TAG"
docker image inspect --format 'built {{.RepoTags}}: {{.Size}} bytes' "$TAG"
