#!/bin/sh
# Become a machine of its own: namespaces, a cgroup, a root file system, and a process 1 that waits. namespace.py starts
# this; each step execs the next, so that one process id stands for all of it, and killing it ends everything inside.
#
#   enter.sh cgroup STATE TREE CGROUP NETWORK [SOURCE:TARGET[:ro]]...
#
# STATE    a directory for the process id and for mounts that only this machine sees
# TREE     the root file system; it is never written to, what changes lies in memory and goes with the machine
# CGROUP   v1 or v2, what the kernel has
# NETWORK  private (loopback only) or host
set -eu
step=$1 state=$2 tree=$3 cgroup=$4 network=$5

mount_cgroup() {
  case $cgroup in
    v1) mount -t cgroup -o freezer cgroup "$1" ;; # the only controller that proctrack/cgroup needs
    v2) mount -t cgroup2 cgroup2 "$1" ;;
  esac
}

make_devices() {
  mount -t tmpfs -o mode=755 tmpfs dev
  while read -r name major minor; do
    mknod -m 666 "dev/$name" c "$major" "$minor"
  done <<EOF
null 1 3
zero 1 5
full 1 7
random 1 8
urandom 1 9
tty 5 0
fuse 10 229
gpu0 1 3
gpu1 1 3
gpu2 1 3
gpu3 1 3
EOF
  ln -s /proc/self/fd dev/fd
  ln -s /proc/self/fd/0 dev/stdin
  ln -s /proc/self/fd/1 dev/stdout
  ln -s /proc/self/fd/2 dev/stderr
  mkdir dev/pts dev/shm
  mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
  ln -s pts/ptmx dev/ptmx
  mount -t tmpfs -o mode=1777 tmpfs dev/shm
}

bind() {
  source=${1%%:*} rest=${1#*:}
  target=${rest%%:*}
  if [ -d "$source" ]; then
    mkdir -p ".$target"
  else
    mkdir -p ".${target%/*}"
    [ -e ".$target" ] || : >".$target"
  fi
  mount --rbind "$source" ".$target"
  [ "$rest" = "$target" ] || mount -o remount,bind,ro ".$target"
}

case $step in
  cgroup)
    # A cgroup namespace starts at the cgroup of who makes it.
    echo $$ >"$state/pid"
    mkdir -p "$state/cgroup"
    mount_cgroup "$state/cgroup"
    group=$state/cgroup/${state##*/}
    mkdir -p "$group/outside" "$group/init"
    echo $$ >"$group/cgroup.procs"
    shift
    exec unshare --cgroup -- sh "$0" namespaces "$@"
    ;;
  namespaces)
    # cgroup v2 wants processes in leaves only, and slurmd none from outside in the one it is started in.
    echo $$ >"$state/cgroup/${state##*/}/outside/cgroup.procs"
    umount --lazy "$state/cgroup"
    shift
    net=--net
    [ "$network" = private ] || net=
    # shellcheck disable=SC2086 # no option where the network is the host's
    exec unshare --uts --ipc --pid --mount $net --fork --kill-child --propagation private -- sh "$0" root "$@"
    ;;
  root)
    shift 5
    mkdir -p "$state/root"
    mount -t tmpfs -o mode=755 tmpfs "$state/root"
    cd "$state/root"
    mkdir upper work tree
    mount -t overlay -o "lowerdir=$tree,upperdir=upper,workdir=work" overlay tree
    cd tree
    mount -t proc proc proc
    mount -t sysfs sysfs sys
    if [ "$cgroup" = v2 ]; then
      mount_cgroup sys/fs/cgroup
    else
      mount -t tmpfs tmpfs sys/fs/cgroup
      mkdir sys/fs/cgroup/freezer
      mount_cgroup sys/fs/cgroup/freezer
    fi
    make_devices
    for item; do
      bind "$item"
    done
    [ "$network" = private ] || cat /etc/resolv.conf >etc/resolv.conf
    # Apptainer refuses a chroot.
    mkdir old-root
    pivot_root . old-root
    cd /
    umount --lazy /old-root
    rmdir /old-root
    hostname login
    if [ "$network" = private ]; then
      ip link set lo up
      {
        echo 127.0.0.1 localhost login
        for number in 1 2 3; do
          # With 127.0.0.1 alone getaddrinfo finds this machine without a network and resolves nothing.
          ip address add "127.0.1.$number/8" dev lo
          echo "127.0.1.$number" "n$number"
        done
      } >/etc/hosts
    fi
    ln -s "$(ls -d /sys/fs/cgroup/init /sys/fs/cgroup/freezer/init 2>/dev/null)" /run/init.cgroup
    echo $$ >/run/init.cgroup/cgroup.procs
    : >/run/ready
    # Orphans need someone who waits for them.
    if command -v tini >/dev/null; then
      exec tini -s -- sleep infinity
    fi
    exec sleep infinity
    ;;
esac
