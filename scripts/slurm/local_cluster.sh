#!/usr/bin/env bash
# A SLURM of your own on this machine: a controller and N node daemons, on loopback.
#
#   scripts/slurm/local_cluster.sh up N     starts it, waits until its nodes are idle
#   scripts/slurm/local_cluster.sh down     cancels its jobs, ends its daemons
#   scripts/slurm/local_cluster.sh install  gets what it needs, where apt-get can
#
# For trying a launch without a cluster; nodes that share a machine show nothing about
# speed. To use it, tell SLURM's commands where it is, as `up` prints:
#
#   export SLURM_CONF=/tmp/local_cluster.UID/slurm.conf
#   srun --nodes=2 --ntasks-per-node=2 hostname
#
# All it has lies in one folder, LOCAL_CLUSTER_DIR, by default as above: configuration,
# keys, state, logs, pid files. /etc is left alone and ports are picked when it starts,
# so several can run side by side, one a folder.
#
# Needs root, and Debian's packages slurm-wlm and munge (others name them alike); without
# them it ends with status 3.
set -euo pipefail

dir=${LOCAL_CLUSTER_DIR:-${TMPDIR:-/tmp}/local_cluster.$UID}
export SLURM_CONF=$dir/slurm.conf
PATH=$PATH:/usr/sbin:/sbin

fail() { # STATUS LINE...
  printf 'local_cluster.sh: %s\n' "${@:2}" >&2
  exit "$1"
}

usage() {
  sed -n "s,^#   \\(scripts.*\\),\\1,p" "$0" >&2
  exit 2
}

check_needs() {
  [ "$UID" = 0 ] || fail 3 "this user is not root, and SLURM's daemons need it." \
    "  Run it as root, for example in a container."
  local command
  for command in munged slurmctld slurmd srun python3; do
    command -v "$command" >/dev/null || fail 3 "there is no $command." \
      "  Run scripts/slurm/local_cluster.sh install, or install SLURM and munge."
  done
}

free_ports() { # N: so many ports that nobody listens at now
  python3 -c '
import socket, sys
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(each.getsockname()[1] for each in held))' "$1"
}

write_config() { # N
  local ports host n
  read -ra ports < <(free_ports $(($1 + 1)))
  host=$(uname -n)
  cat >"$SLURM_CONF" <<CONF
ClusterName=local
SlurmctldHost=${host%%.*}(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is queued again waits until its old credential is void: 120 s by default.
AuthInfo=socket=$dir/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPidFile=$dir/controller.pid
SlurmdPidFile=$dir/node.%n.pid
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool.%n
SlurmctldLogFile=$dir/controller.log
SlurmdLogFile=$dir/node.%n.log
# Nothing of cgroups, accounting or MPI: a container need not have them.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SchedulerParameters=sched_interval=2,bf_interval=2
KillWait=10
ReturnToService=2
# As many tasks as asked for, whatever this machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PartitionName=local Nodes=ALL Default=YES State=UP MaxTime=INFINITE
CONF
  # The name of a node is also its address, as no name server knows another: JAX looks
  # for its coordinator at the name of a step's first node.
  for n in $(seq "$1"); do
    echo "NodeName=127.0.0.$n NodeHostname=${host%%.*} NodeAddr=127.0.0.$n" \
      "Port=${ports[$n]} CPUs=64"
  done >>"$SLURM_CONF"
}

up() { # N
  local n
  check_needs
  down
  mkdir -p "$dir/state"
  write_config "$1"
  (umask 077 && head -c 128 /dev/urandom >"$dir/munge.key")
  # --force: its folder is ours, not one of the system's.
  munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" \
    --pid-file="$dir/munge.pid" --log-file="$dir/munge.log" \
    --seed-file="$dir/munge.seed" 2>>"$dir/munge.log"
  slurmctld
  for n in $(seq "$1"); do
    slurmd -N "127.0.0.$n"
  done
  for _ in $(seq 60); do
    if [ "$(sinfo -h -N -o '%N %t' 2>/dev/null | grep -c ' idle$')" = "$1" ]; then
      sinfo
      echo "export SLURM_CONF=$SLURM_CONF"
      return
    fi
    sleep 0.5
  done
  tail -n 5 "$dir"/*.log >&2
  down
  fail 1 "the nodes did not come up; the ends of the logs in $dir are above."
}

down() {
  local file pid
  [ -d "$dir" ] || return 0
  if [ -S "$dir/munge.socket" ]; then
    timeout 10 scancel --user=root 2>/dev/null || true
    for _ in $(seq 40); do # KillWait, and some time for its epilogue
      [ -n "$(timeout 10 squeue -h 2>/dev/null)" ] || break
      sleep 0.5
    done
  fi
  # The controller and nodes first: they speak through munge to the end.
  for file in "$dir"/node.*.pid "$dir/controller.pid" "$dir/munge.pid"; do
    [ -f "$file" ] || continue
    pid=$(cat "$file")
    end "$pid" "$(basename "$file")"
    rm -f "$file"
  done
}

end() { # PID NAME: asks, waits, insists
  kill "$1" 2>/dev/null || return 0
  for _ in $(seq 100); do
    kill -0 "$1" 2>/dev/null || return 0
    sleep 0.1
  done
  echo "local_cluster.sh: ${2%.pid} ($1) does not end when told; killing it." >&2
  kill -KILL "$1" 2>/dev/null || true
}

case ${1:-} in
  up)
    [[ ${2:-} =~ ^[1-9][0-9]?$ ]] || usage
    up "$2"
    ;;
  down)
    down
    ;;
  install)
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends slurm-wlm munge
    ;;
  *) usage ;;
esac
