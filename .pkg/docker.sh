#!/usr/bin/env bash
# A Docker engine of our own for the tests, with an image that needs no registry. Debian or Ubuntu, as root.
#
#   eval "$(bash .pkg/docker.sh start [FOLDER])"     installs what is missing, starts dockerd, makes the image, and prints
#                                                    export DOCKER_HOST=... and export STROP_TEST_IMAGE=...
#   bash .pkg/docker.sh stop [FOLDER]                stops it; the image stays in FOLDER for the next start
#
# FOLDER (default: strop-docker in $TMPDIR or /tmp) holds the data, the socket, the pid file and the log. Where an engine
# cannot be had (no root, no network, no kernel support), start says why on stderr, prints nothing and exits 0, so that
# the tests that need no engine run all the same; with --must it exits 69.
set -uo pipefail

image=strop-test:minbase
must=""
words=()
for word in "$@"; do
  if [ "$word" = --must ]; then must=yes; else words+=("$word"); fi
done
what=${words[0]:-}
folder=${words[1]:-${TMPDIR:-/tmp}/strop-docker}
socket=$folder/docker.sock
pidfile=$folder/docker.pid

say() { echo "docker.sh: $*" >&2; }

give_up() {
  say "no engine: $*"
  [ -z "$must" ] || exit 69
  exit 0
}

answers() { docker -H "unix://$socket" version >"$folder/version.log" 2>&1; }

# pid_of FILE: the pid in a pid file, if it still is a process of ours and not another one with its number.
pid_of() {
  local pid
  pid=$(cat "$1" 2>/dev/null) || return 1
  [ -n "$pid" ] && tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF -- "$folder/" && echo "$pid"
}

running_pid() { pid_of "$pidfile"; }

install_missing() {
  local missing=() recommended=() package program
  for package in docker.io:dockerd debootstrap:debootstrap; do
    program=${package#*:}
    command -v "$program" >/dev/null || missing+=("${package%%:*}")
  done
  command -v docker-init >/dev/null || command -v tini >/dev/null || missing+=(tini)
  # The sandbox without Docker uses it; its tests run without it too.
  command -v bwrap >/dev/null || recommended+=(bubblewrap)
  [ "${#missing[@]}${#recommended[@]}" = 00 ] && return 0
  command -v apt-get >/dev/null || { [ ${#missing[@]} = 0 ]; return; }
  say "installing ${missing[*]-} ${recommended[*]-}"
  export DEBIAN_FRONTEND=noninteractive
  # The services that a package brings are not started: ours runs beside the machine's own.
  local policy=/usr/sbin/policy-rc.d made=""
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy" && made=yes
  fi
  # An engine needs neither a build tool nor the recommended extras.
  apt-get install -qq -y --no-install-recommends "${missing[@]}" "${recommended[@]}" >"$folder/apt.log" 2>&1 ||
    { apt-get update -qq >>"$folder/apt.log" 2>&1 &&
      apt-get install -qq -y --no-install-recommends "${missing[@]}" "${recommended[@]}" >>"$folder/apt.log" 2>&1; }
  local status=$?
  [ -z "$made" ] || rm -f "$policy"
  return $status
}

start_engine() {
  local init pid waited
  init=$(command -v docker-init || command -v tini)
  # What a killed engine left would be taken for a running one, if its number is another process's by now.
  local left
  for left in "$pidfile" "$folder/exec/containerd/containerd.pid"; do
    pid_of "$left" >/dev/null 2>&1 || rm -f "$left"
  done
  # No bridge and no packet filter: the tests' containers have no network, and the machine's is left as it is.
  setsid nohup dockerd --data-root "$folder/data" --exec-root "$folder/exec" --pidfile "$pidfile" \
    -H "unix://$socket" --bridge=none --iptables=false --ip6tables=false ${init:+--init-path "$init"} \
    </dev/null >"$folder/dockerd.log" 2>&1 9>&- &
  pid=$!
  for waited in $(seq 300); do
    answers && return 0
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
  kill "$pid" 2>/dev/null
  return 1
}

make_image() {
  docker -H "unix://$socket" image inspect "$image" >/dev/null 2>&1 && return 0
  say "making the image $image (a minute)"
  local root status
  root=$(mktemp -d "$folder/rootfs.XXXXXX") || return 1
  debootstrap --variant=minbase --include=python3-minimal stable "$root" >"$folder/debootstrap.log" 2>&1 &&
    tar -C "$root" --exclude=./var/cache/apt --exclude=./var/lib/apt/lists -c . |
    docker -H "unix://$socket" import --change 'CMD ["sh"]' - "$image" >>"$folder/debootstrap.log" 2>&1
  status=$?
  rm -rf "$root"
  return $status
}

start() {
  [ "$(uname -s)" = Linux ] || give_up "this script starts one on Linux only"
  [ "$(id -u)" = 0 ] || give_up "starting one needs root"
  mkdir -p "$folder" || give_up "cannot make $folder"
  [ ${#socket} -lt 100 ] || give_up "$folder is too long a name for a socket in it"
  # Two starts at once would make the image twice.
  exec 9>"$folder/lock"
  flock 9
  install_missing || give_up "apt-get could not install it; see $folder/apt.log"
  command -v dockerd >/dev/null || give_up "dockerd is not installed"
  if ! { running_pid >/dev/null && answers; }; then
    start_engine || give_up "dockerd did not start; the end of $folder/dockerd.log: $(tail -n 1 "$folder/dockerd.log")"
  fi
  make_image || give_up "the image could not be made; see $folder/debootstrap.log"
  echo "export DOCKER_HOST=unix://$socket"
  echo "export STROP_TEST_IMAGE=$image"
}

stop() {
  local pid
  if ! pid=$(running_pid); then
    say "nothing runs in $folder"
    return 0
  fi
  kill "$pid"
  for _ in $(seq 200); do
    kill -0 "$pid" 2>/dev/null || return 0
    sleep 0.1
  done
  say "dockerd did not stop within 20 s and is killed"
  kill -9 "$pid" 2>/dev/null
}

case $what in
  start) start ;;
  stop) stop ;;
  *)
    echo "usage: docker.sh start|stop [FOLDER] [--must]" >&2
    exit 2
    ;;
esac
