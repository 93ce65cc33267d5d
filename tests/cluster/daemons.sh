#!/bin/sh
# Start the daemons of the cluster, as root in its machine. usage: daemons.sh [accounting]
set -eu

wait_for() {
  for _ in $(seq 300); do
    "$@" >/dev/null 2>&1 && return
    sleep 0.1
  done
  "$@"
}

# As another user, because start-stop scripts of Debian do that for them, and there are none here.
as() {
  user=$1
  shift
  setpriv --reuid "$user" --regid "$user" --init-groups -- "$@"
}

install -d -o munge -g munge /run/munge
as munge munged
mkdir -p /var/spool/slurmctld

if [ "${1:-}" = accounting ]; then
  install -d -o mysql -g mysql /run/mysqld
  as mysql setsid mariadbd --skip-networking --innodb-flush-log-at-trx-commit=0 \
    >/var/log/slurm/mariadbd.log 2>&1 </dev/null &
  wait_for mariadb-admin ping
  # slurmdbd 24.11.5 would make it, but libmariadb 11.8.9 then fails its first query: "Number of columns in result".
  mariadb --execute "create database slurm_acct_db"
  slurmdbd
  wait_for sacctmgr --noheader show cluster
  # Jobs of other accounts are refused, as where users must name theirs.
  sacctmgr --immediate --quiet add cluster rechpc
  sacctmgr --immediate --quiet add account research
  sacctmgr --immediate --quiet add user hpc account=research
fi

slurmctld -c
for node in n1 n2 n3; do
  sh "${0%/*}/node.sh" "$node" start
done
