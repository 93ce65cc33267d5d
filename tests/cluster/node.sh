#!/bin/sh
# Start a compute node, or one that was killed again, as root in the machine. usage: node.sh n1|n2|n3
# Each has a host name and a /tmp of its own; everything else they share, as with a home directory on a file server.
set -eu
exec unshare --mount --uts sh -c '
  hostname "$1"
  mount -t tmpfs -o mode=1777 tmpfs /tmp
  # With cgroup v2, slurmd moves everything that is in its own cgroup, and fails where one of those just ended.
  group=$(readlink --canonicalize /run/init.cgroup)/../$1.$$
  mkdir -p "$group"
  echo $$ >"$group/cgroup.procs"
  exec slurmd -D -N "$1"
' sh "$1" >/dev/null 2>&1 </dev/null &
