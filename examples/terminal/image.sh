#!/usr/bin/env bash
# The image `strop-terminal` of the tasks: a small Debian with python3, git and make. Made once, without a registry; needs
# root, debootstrap and a Docker engine (DOCKER_HOST, or the machine's own). Says what is missing and exits 1 without.
set -uo pipefail
name=strop-terminal
docker version >/dev/null 2>&1 || { echo "no Docker engine answers"; exit 1; }
docker image inspect "$name" >/dev/null 2>&1 && exit 0
command -v debootstrap >/dev/null || { echo "debootstrap is missing, and with it the image $name"; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
echo "making the image $name (once, about a minute)"
debootstrap --variant=minbase --include=python3-minimal,git,make stable "$folder/system" >"$folder/log" 2>&1 \
  || { tail -3 "$folder/log"; exit 1; }
tar -C "$folder/system" -c . | docker import - "$name" >/dev/null
