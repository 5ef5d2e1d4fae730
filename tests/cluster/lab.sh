#!/bin/bash
# Real multi-node Slurm on one machine: one private set of namespaces (net, uts, pid, ipc, mount) per "host".
#   cluster.sh up N          start munged + slurmctld (host "ctl") + N hosts node1..nodeN running slurmd; returns when all are idle
#   cluster.sh down          kill everything by recorded pids (the kernel then removes the namespaces, veths, bridge, mounts)
#   cluster.sh exec CMD...   run CMD on the "ctl" host (sbatch, squeue, srun, scontrol ... work there); keeps cwd and env
#   cluster.sh on K CMD...   run CMD on nodeK
#   cluster.sh link K up|down      unplug / replug nodeK's cable at the switch (nodeK still sees its own eth0 administratively up)
#   cluster.sh iface K up|down     ip link set eth0 up|down inside nodeK itself
#   cluster.sh poweroff K    SIGKILL everything on nodeK at once
#   cluster.sh slurmd K      (re)start slurmd on nodeK
#   cluster.sh boot K        create nodeK's namespaces again and start its slurmd (after poweroff)
# Needs root, slurm-wlm, munge, iproute2, util-linux. Touches nothing outside $LAB: no /etc, no /run/netns, no host interface.
set -euo pipefail
LAB=${SLURMLAB:-${TMPDIR:-/tmp}/lit-lab}          # state, logs, config; removed and rebuilt by `up`
NET=${SLURMLAB_NET:-10.77.0}              # /24 inside the private namespaces only
CPUS=${SLURMLAB_CPUS:-4}                  # CPUs Slurm believes each node has (oversubscribes the real ones)
CRED=${SLURMLAB_CRED_EXPIRE:-5}           # s; a requeued job may not start sooner than this (Slurm's default 120)
EXTRA=${SLURMLAB_CONF:-}                  # extra slurm.conf lines
GPUS=${SLURMLAB_GPUS:-0}                  # pretend GPUs per node (so that --gres=gpu:N / --gpus-per-node=N is accepted)
export SLURM_CONF=$LAB/slurm.conf

say() { echo "cluster: $*" >&2; }
start_of() { awk '{print $22}' "/proc/$1/stat" 2>/dev/null || true; }
# a record "PID STARTTIME" is alive only if that very process still exists (guards against pid reuse)
alive() { local p s; [ -s "$1" ] && read -r p s <"$1" && [ -n "$s" ] && [ "$(start_of "$p")" = "$s" ]; }
init_pid() { local p s; read -r p s <"$LAB/pids/$1"; cat "/proc/$p/task/$p/children" | awk '{print $1}'; }  # pid 1 of that host, seen from here
enter() { local h=$1; shift; exec nsenter -t "$(init_pid "$h")" -n -u -i -m -p -- "$@"; }
inhost() { ( enter "$@" ); }

host() {  # host NAME: make the namespaces; bash is its pid 1 (it reaps orphans, which `sleep` would not)
  local h=$1
  LAB=$LAB H=$h setsid unshare -n -u -i -m -p --propagation private --fork --kill-child --mount-proc bash -c '
    hostname $H; mount --bind $LAB/hosts.$H /etc/hosts; mount --bind $LAB/resolv.conf /etc/resolv.conf
    mount -t tmpfs -o size=2g,mode=1777 tmpfs /dev/shm; ip link set lo up; touch $LAB/pids/$H.ready; trap : TERM INT HUP USR1; while :; do sleep 86400 & wait; done' \
    </dev/null >"$LAB/log/host.$h.out" 2>&1 &
  echo "$! $(start_of $!)" >"$LAB/pids/$h"
  for _ in $(seq 100); do [ -e "$LAB/pids/$h.ready" ] && return 0; sleep 0.02; done; say "host $h did not come up"; cat "$LAB/log/host.$h.out" >&2; return 1
}
plug() {  # veth from nodeK to the bridge in ctl's namespace
  local k=$1 c n; c=$(init_pid ctl); n=$(init_pid "node$k")
  nsenter -t "$c" -n ip link del "port$k" 2>/dev/null || true
  nsenter -t "$c" -n ip link add "port$k" type veth peer name eth0 netns "$n"
  nsenter -t "$c" -n ip link set "port$k" master br0 up
  nsenter -t "$n" -n sh -c "ip addr add $NET.$((10 + k))/24 dev eth0; ip link set eth0 up"
}
daemon() { local h=$1 out=$2; shift 2; ( enter "$h" setsid "$@" ) </dev/null >>"$LAB/log/$out" 2>&1 & disown; }
slurmd_on() { mkdir -p "$LAB/spool/node$1"; daemon "node$1" "slurmd.node$1.out" slurmd -D -N "node$1" -f "$SLURM_CONF"; }

up() {
  local n=$1 k t0; t0=$(date +%s.%N)
  [ ! -d "$LAB/pids" ] || down
  if [ -e "$LAB" ] && [ ! -e "$LAB/.slurmlab" ] && [ -n "$(ls -A "$LAB")" ]; then say "$LAB is not empty and not mine: refusing to remove it"; return 1; fi
  rm -rf "$LAB"; mkdir -p "$LAB"/{pids,log,run,state,spool}; touch "$LAB/.slurmlab"; chmod 755 "$LAB"
  : >"$LAB/resolv.conf"
  { echo "127.0.0.1 localhost"; echo "$NET.1 ctl"; for k in $(seq "$n"); do echo "$NET.$((10 + k)) node$k"; done; } >"$LAB/hosts"
  cp "$LAB/hosts" "$LAB/hosts.ctl"
  for k in $(seq "$n"); do
    if [ "${SLURMLAB_HOSTS:-}" = debian ]; then sed "s/^.* node$k\$/127.0.1.1 node$k/" "$LAB/hosts" >"$LAB/hosts.node$k"; else cp "$LAB/hosts" "$LAB/hosts.node$k"; fi
  done
  ( umask 077; head -c 1024 /dev/urandom >"$LAB/munge.key" )
  local gres=; if [ "$GPUS" -gt 0 ]; then gres=" Gres=gpu:$GPUS"; EXTRA="GresTypes=gpu
$EXTRA"; echo "Name=gpu File=/dev/tty[0-$((GPUS - 1))]" >"$LAB/gres.conf"; fi
  cat >"$SLURM_CONF" <<C
ClusterName=lab
SlurmctldHost=ctl($NET.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$LAB/run/munge.sock,cred_expire=$CRED
SlurmctldPidFile=$LAB/run/slurmctld.pid
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdPidFile=$LAB/run/slurmd.%n.pid
SlurmdLogFile=$LAB/log/slurmd.%n.log
SlurmdSpoolDir=$LAB/spool/%n
StateSaveLocation=$LAB/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$LAB/log/jobcomp.txt
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
KillWait=5
SlurmdTimeout=20
MessageTimeout=10
TCPTimeout=2
UnkillableStepTimeout=30
MinJobAge=3600
JobRequeue=1
JobFileAppend=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
$EXTRA
NodeName=node[1-$n] NodeAddr=$NET.[11-$((10 + n))] CPUs=$CPUS RealMemory=4000$gres State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
C
  host ctl
  nsenter -t "$(init_pid ctl)" -n sh -c "ip link add br0 type bridge; ip addr add $NET.1/24 dev br0; ip link set br0 up"
  for k in $(seq "$n"); do host "node$k"; plug "$k"; done
  daemon ctl munged.out munged -F --key-file="$LAB/munge.key" --socket="$LAB/run/munge.sock" --pid-file="$LAB/run/munged.pid" --log-file="$LAB/log/munged.log" --seed-file="$LAB/run/munge.seed"
  for _ in $(seq 200); do [ -S "$LAB/run/munge.sock" ] && break; sleep 0.05; done
  [ -S "$LAB/run/munge.sock" ] || { say "munged did not come up"; cat "$LAB/log/munged.out" >&2; return 1; }
  daemon ctl slurmctld.out slurmctld -D -f "$SLURM_CONF"
  for k in $(seq "$n"); do slurmd_on "$k"; done
  for _ in $(seq 150); do
    [ "$(inhost ctl sinfo -h -N -p main -t idle -o %N 2>/dev/null | grep -c .)" = "$n" ] && { say "up: $n nodes idle after $(awk -v a="$t0" -v b="$(date +%s.%N)" 'BEGIN{printf "%.1f",b-a}') s"; return 0; }
    sleep 0.2
  done
  say "nodes not idle after 30 s"; inhost ctl sinfo -N -l >&2 || true; tail -n 5 "$LAB"/log/*.out "$LAB"/log/slurmctld.log >&2; return 1
}

# SIGKILL the recorded unshare process and pid 1 of its pid namespace; the kernel then kills everything else in that host
kill_hosts() {
  local h p s c f rc=0 gone=() pend=()
  for h in "$@"; do f=$LAB/pids/$h; [ -e "$f" ] || continue
    if alive "$f"; then read -r p s <"$f"; c=$(init_pid "$h" 2>/dev/null) || c=; kill -9 $c "$p" 2>/dev/null || true; pend+=("$p:$s:$f" ${c:+"$c:$(start_of "$c"):$f"}); fi
    gone+=("$f"); done
  for _ in $(seq 300); do rc=0
    for x in "${pend[@]}"; do IFS=: read -r p s f <<<"$x"; [ -z "$s" ] || [ "$(start_of "$p")" != "$s" ] || rc=1; done
    [ $rc = 0 ] && { for f in "${gone[@]}"; do rm -f "$f" "$f.ready"; done; return 0; }; sleep 0.05; done
  say "still alive after 15 s: ${pend[*]}"; return 1
}
down() {
  [ -d "$LAB/pids" ] || { say "nothing recorded in $LAB"; return 0; }
  kill_hosts $(cd "$LAB/pids" && ls | grep -v '\.ready$') && rmdir "$LAB/pids"
}

cmd=${1:-}; shift || true
case $cmd in
  up) up "${1:?how many nodes}" ;;
  down) down ;;
  exec) enter ctl setpriv --pdeathsig KILL env "SLURM_CONF=$SLURM_CONF" sh -c 'cd "$0" 2>/dev/null; exec "$@"' "$PWD" "$@" ;;
  on) k=$1; shift; enter "node$k" setpriv --pdeathsig KILL env "SLURM_CONF=$SLURM_CONF" sh -c 'cd "$0" 2>/dev/null; exec "$@"' "$PWD" "$@" ;;
  link) nsenter -t "$(init_pid ctl)" -n ip link set "port$1" "$2" ;;
  iface) nsenter -t "$(init_pid "node$1")" -n ip link set eth0 "$2" ;;
  poweroff) kill_hosts "node$1" ;;
  slurmd) slurmd_on "$1" ;;
  boot) host "node$1"; plug "$1"; slurmd_on "$1" ;;
  *) sed -n '2,13p' "$0"; exit 2 ;;
esac
