#!/bin/sh
# A compute node, as root in the machine. usage: node.sh n1|n2|n3 start|kill
# Each has a host name and a /tmp of its own; everything else they share, as with a home directory on a file server.
set -eu
node=$1
case $2 in
  start)
    unshare --mount --uts sh -c '
      hostname "$1"
      mount -t tmpfs -o mode=1777 tmpfs /tmp
      # With cgroup v2, slurmd moves everything that is in its own cgroup, and fails where one of those just ended.
      group=$(readlink --canonicalize /run/init.cgroup)/../$1.$$
      mkdir -p "$group"
      echo $$ >"$group/cgroup.procs"
      exec slurmd -D -N "$1"
    ' sh "$node" >/dev/null 2>&1 </dev/null &
    ;;
  kill)
    # As when its power fails: the daemon, the jobs and their containers, all that has its host name.
    namespace=$(readlink "/proc/$(cat "/run/slurmd.$node.pid")/ns/uts")
    for process in /proc/[0-9]*; do
      if [ "$(readlink "$process/ns/uts")" = "$namespace" ]; then
        kill -KILL "${process#/proc/}"
      fi
    done
    ;;
esac
