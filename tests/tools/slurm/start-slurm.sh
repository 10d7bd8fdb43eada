#!/bin/bash
# start-slurm.sh BASE - a real Slurm 22.05 cluster on loopback with fake GPUs.
# Debian 12:  apt-get install -y --no-install-recommends slurmctld slurmd slurm-client \
#     slurm-wlm-basic-plugins slurm-wlm-jwt-plugin slurmrestd munge \
#     [slurmdbd slurm-wlm-mysql-plugin mariadb-server]         (only for SLURM_DBD=1)
# Run as root. No systemd, no cgroups. Everything lives under BASE; ports are picked free.
# Environment (defaults in brackets):
#   NODES[4] GPUS[8] CPUS[64] MEM_MB[512000]   shape of each fake node
#   TYPES["h100 a100"]   GPU types, dealt to nodes in halves: first half TYPES[0], second TYPES[1]
#   GRES_FILE[1]         1: gres.conf with File= (fake regular files under BASE/dev); 0: Count only
#   SLURM_DBD[0]         1: mariadbd + slurmdbd (sacct, sacctmgr, fair share); 0: jobcomp/filetxt only
#   REST_USER[daemon]    unprivileged user slurmrestd runs as (never root nor SlurmUser)
#   SLURM_USER[root]     SlurmUser of slurmctld/slurmdbd
#   NODE_FEATURES[]      set: each node also has its own name as a feature
#   EXTRA_CONF[]         lines appended to slurm.conf ("\n" allowed)
# Writes BASE/env.sh (source it), BASE/pids/*.pid, BASE/log/*.log
set -euo pipefail
BASE=$(realpath -m "${1:?usage: start-slurm.sh BASE}")
NODES=${NODES:-4} GPUS=${GPUS:-8} CPUS=${CPUS:-64} MEM_MB=${MEM_MB:-512000}
TYPES=${TYPES:-"h100 a100"} GRES_FILE=${GRES_FILE:-1} SLURM_DBD=${SLURM_DBD:-0}
REST_USER=${REST_USER:-daemon} SLURM_USER=${SLURM_USER:-root} EXTRA_CONF=${EXTRA_CONF:-}
[ "$(id -u)" = 0 ] || { echo "run as root" >&2; exit 1; }
[ ${#BASE} -le 60 ] || { echo "BASE too long for unix sockets" >&2; exit 1; }
[ ! -e "$BASE/pids" ] || [ -z "$(ls -A "$BASE/pids" 2>/dev/null)" ] || { echo "already started? run stop-slurm.sh $BASE" >&2; exit 1; }
mkdir -p "$BASE"/{etc,run,log,pids,state,spool,dev,jobs}
# installing slurm-wlm-emulator flips the slurmctld/slurmd/slurmstepd alternatives, so name the real ones; but
# argv[0] must end in slurmctld / slurmd / slurmstepd: under any other name Slurm silently ignores Gres= in slurm.conf
mkdir -p "$BASE/sbin"
for p in slurmctld slurmd slurmstepd; do ln -sfn /usr/sbin/$p-wlm "$BASE/sbin/$p"; done
CTLD=$BASE/sbin/slurmctld SLURMD=$BASE/sbin/slurmd STEPD=$BASE/sbin/slurmstepd
chmod 755 "$BASE" "$BASE"/{etc,run,log,dev}; chmod 1777 "$BASE/jobs"
read -r CTLD_PORT DBD_PORT REST_PORT DB_PORT SLURMD_BASE < <(python3 - "$NODES" <<'PY'
import socket, sys, random
n = int(sys.argv[1]); held = []
def free(p):
    s = socket.socket()
    try: s.bind(("127.0.0.1", p)); held.append(s); return True
    except OSError: s.close(); return False
def block(k):
    while True:
        b = random.randrange(20000, 31000 - k)          # below the ephemeral range
        if all(free(b + i) for i in range(k)): return b
b = block(n + 4)
print(b, b + 1, b + 2, b + 3, b + 4)
PY
)
HOST=$(hostname -s)
# Slurm's daemons can bind only to any address or to what the host's name resolves to. Where /etc/hosts maps the name to
# 127.x (Debian's default: 127.0.1.1) everything stays on loopback; elsewhere they listen on all addresses (munge-authenticated).
IP=$(getent ahostsv4 "$HOST" | awk '{print $1; exit}')
case "$IP" in 127.*) COMM=NoInAddrAny,NoCtldInAddrAny;; *) IP=127.0.0.1; COMM=; echo "warning: '$HOST' is not a loopback name; Slurm's ports listen on all addresses" >&2;; esac
spawn() { # name command...  : daemonise, record pid
  local n=$1; shift
  setsid "$@" >>"$BASE/log/$n.out" 2>&1 </dev/null &
  echo $! >"$BASE/pids/$n.pid"
}
waitfor() { # seconds name command...  (fails at once if daemon `name` has exited)
  local end=$((SECONDS + $1)) d=$2; shift 2
  while ((SECONDS <= end)); do
    timeout 5 "$@" >/dev/null 2>&1 && return 0
    if [ -s "$BASE/pids/$d.pid" ] && ! kill -0 "$(cat "$BASE/pids/$d.pid")" 2>/dev/null; then
      echo "$d exited:" >&2; tail -n 5 "$BASE/log/$d.out" >&2; return 1
    fi
    sleep 0.1
  done
  echo "timed out: $d (see $BASE/log)" >&2; return 1
}
# ---- munge -----------------------------------------------------------------
[ -s "$BASE/etc/munge.key" ] || { (umask 077; head -c 1024 /dev/urandom >"$BASE/etc/munge.key"); }
SOCK=$BASE/run/munge.sock
spawn munged munged --foreground --force --key-file="$BASE/etc/munge.key" --socket="$SOCK" \
  --pid-file="$BASE/run/munged.pid" --log-file="$BASE/log/munged.log" --seed-file="$BASE/run/munged.seed" --num-threads=4
waitfor 10 munged munge -n -S "$SOCK"
# ---- keys ------------------------------------------------------------------
[ -s "$BASE/etc/jwt.key" ] || (umask 077; head -c 32 /dev/urandom >"$BASE/etc/jwt.key")
chown "$SLURM_USER" "$BASE/etc/jwt.key"; chmod 600 "$BASE/etc/jwt.key"
# ---- slurm.conf / gres.conf ---------------------------------------------------
read -ra T <<<"$TYPES"
{
cat <<C
ClusterName=test
SlurmctldHost=$HOST($IP)
SlurmctldPort=$CTLD_PORT
SlurmUser=$SLURM_USER
SlurmdUser=root
AuthType=auth/munge
# cred_expire: a requeued job waits cred_expire+1 s before it may start again (default 120 s)
AuthInfo=socket=$SOCK,cred_expire=5
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key=$BASE/etc/jwt.key
CredType=cred/munge
${COMM:+CommunicationParameters=$COMM}
StateSaveLocation=$BASE/state
SlurmdSpoolDir=$BASE/spool/%n
SlurmctldPidFile=$BASE/run/slurmctld.pid
SlurmdPidFile=$BASE/run/slurmd-%n.pid
SlurmctldLogFile=$BASE/log/slurmctld.log
SlurmdLogFile=$BASE/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
# no systemd, no cgroups, no cpu binding
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerGPU=1000
GresTypes=gpu
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,bf_continue,sched_min_interval=0,batch_sched_delay=0,requeue_setup_env_fail
PriorityType=priority/multifactor
PriorityWeightAge=1000
PriorityWeightFairshare=10000
PriorityWeightQOS=100000
PreemptType=preempt/none
# test-speed timers
MinJobAge=86400
KillWait=2
WaitTime=0
InactiveLimit=0
SlurmctldTimeout=10
SlurmdTimeout=10
MessageTimeout=10
BatchStartTimeout=10
CompleteWait=0
OverTimeLimit=0
EpilogMsgTime=0
ReturnToService=1
JobRequeue=1
EnforcePartLimits=ALL
MailProg=/bin/true
JobCompType=jobcomp/filetxt
JobCompLoc=$BASE/log/jobcomp.txt
C
if [ "$SLURM_DBD" = 1 ]; then cat <<C
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$IP
AccountingStoragePort=$DBD_PORT
AccountingStoragePass=$SOCK
AccountingStorageEnforce=associations
AccountingStorageTRES=gres/gpu$(printf ',gres/gpu:%s' $TYPES)
AccountingStoreFlags=job_comment,job_env,job_script
C
else echo "AccountingStorageType=accounting_storage/none"; fi
for ((i = 0; i < NODES; i++)); do
  t=${T[$((i * ${#T[@]} / NODES))]}
  echo "NodeName=n$i NodeHostname=$HOST NodeAddr=$IP Port=$((SLURMD_BASE + i)) CPUs=$CPUS RealMemory=$MEM_MB Gres=gpu:$t:$GPUS Feature=$t${NODE_FEATURES:+,n$i} State=UNKNOWN"
done
echo "PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP DefaultTime=60"
printf '%b\n' "$EXTRA_CONF"
} >"$BASE/etc/slurm.conf"
for ((i = 0; i < NODES; i++)); do
  t=${T[$((i * ${#T[@]} / NODES))]}
  if [ "$GRES_FILE" = 1 ]; then echo "NodeName=n$i Name=gpu Type=$t File=$BASE/dev/nvidia[0-$((GPUS - 1))]"
  else echo "NodeName=n$i Name=gpu Type=$t Count=$GPUS"; fi
done >"$BASE/etc/gres.conf"
if [ "$GRES_FILE" = 1 ]; then # aliases of /dev/null; a plain file works too, with one logged error per file
  for ((g = 0; g < GPUS; g++)); do rm -f "$BASE/dev/nvidia$g"; mknod -m 666 "$BASE/dev/nvidia$g" c 1 3 2>/dev/null || : >"$BASE/dev/nvidia$g"; done
fi
: >"$BASE/etc/plugstack.conf"
chmod 644 "$BASE"/etc/{slurm,gres,plugstack}.conf
export SLURM_CONF=$BASE/etc/slurm.conf
# ---- accounting (optional) ------------------------------------------------------
if [ "$SLURM_DBD" = 1 ]; then
  mkdir -p "$BASE/mysql"
  DBS=$BASE/run/mysql.sock
  [ -d "$BASE/mysql/mysql" ] || mariadb-install-db --no-defaults --user=root --datadir="$BASE/mysql" \
     --auth-root-authentication-method=socket --skip-test-db >"$BASE/log/mariadb-install.log" 2>&1
  spawn mariadbd mariadbd --no-defaults --user=root --datadir="$BASE/mysql" --socket="$DBS" --bind-address=127.0.0.1 \
     --port="$DB_PORT" --pid-file="$BASE/run/mariadb.pid" --innodb-buffer-pool-size=256M --innodb-log-file-size=64M \
     --innodb-lock-wait-timeout=900 --innodb-flush-log-at-trx-commit=0 --skip-log-bin
  waitfor 30 mariadbd mariadb-admin --no-defaults -S "$DBS" ping
  mariadb --no-defaults -S "$DBS" -e "CREATE DATABASE IF NOT EXISTS slurm_acct_db;
     CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY 'slurm'; CREATE USER IF NOT EXISTS 'slurm'@'localhost' IDENTIFIED BY 'slurm';
     GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1'; GRANT ALL ON slurm_acct_db.* TO 'slurm'@'localhost';"
  cat >"$BASE/etc/slurmdbd.conf" <<C
AuthType=auth/munge
AuthInfo=socket=$SOCK
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key=$BASE/etc/jwt.key
DbdHost=$HOST
DbdAddr=$IP
${COMM:+CommunicationParameters=$COMM}
DbdPort=$DBD_PORT
SlurmUser=$SLURM_USER
LogFile=$BASE/log/slurmdbd.log
PidFile=$BASE/run/slurmdbd.pid
DebugLevel=info
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$DB_PORT
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
CommitDelay=1
C
  chown "$SLURM_USER" "$BASE/etc/slurmdbd.conf"; chmod 600 "$BASE/etc/slurmdbd.conf"
  spawn slurmdbd slurmdbd -D
  waitfor 60 slurmdbd sacctmgr -n list cluster
  sacctmgr -i add cluster test >/dev/null 2>&1 || true
  sacctmgr -i add account default cluster=test Description=default Organization=test >/dev/null 2>&1 || true
  for u in root "$REST_USER" nobody; do sacctmgr -i add user "$u" account=default cluster=test >/dev/null 2>&1 || true; done
fi
[ "$SLURM_USER" = root ] || chown -R "$SLURM_USER" "$BASE/state" "$BASE/log"
# ---- controller, nodes, REST ------------------------------------------------------
spawn slurmctld $CTLD -D
waitfor 30 slurmctld scontrol ping
for ((i = 0; i < NODES; i++)); do mkdir -p "$BASE/spool/n$i"; spawn slurmd-n$i $SLURMD -D -N n$i -d $STEPD; done
waitfor 30 "nodes idle" sh -c "[ \$(sinfo -h -N -t idle -o %N | sort -u | wc -l) -ge $NODES ]"
# the dbv* OpenAPI plugins make slurmrestd exit when there is no slurmdbd
OPENAPI=openapi/v0.0.36,openapi/v0.0.37,openapi/v0.0.38
[ "$SLURM_DBD" = 1 ] && OPENAPI=$OPENAPI,openapi/dbv0.0.36,openapi/dbv0.0.37,openapi/dbv0.0.38
RUNREST=$BASE/run/rest; mkdir -p "$RUNREST"; chown "$REST_USER" "$RUNREST"
spawn slurmrestd env SLURM_CONF="$SLURM_CONF" SLURM_JWT=daemon setpriv --reuid "$REST_USER" --regid "$(id -g "$REST_USER")" --clear-groups \
  slurmrestd -t 8 -s $OPENAPI -a rest_auth/jwt 127.0.0.1:$REST_PORT unix:$RUNREST/slurmrestd.sock
waitfor 15 slurmrestd sh -c "[ -S $RUNREST/slurmrestd.sock ]"
cat >"$BASE/env.sh" <<C
export SLURM_CONF=$SLURM_CONF SLURM_BASE=$BASE
export SLURMRESTD_URL=http://127.0.0.1:$REST_PORT SLURMRESTD_SOCK=$RUNREST/slurmrestd.sock
export SLURM_JWT_KEY=$BASE/etc/jwt.key
# token for a user:   scontrol token username=USER lifespan=3600   -> SLURM_JWT=...
C
echo "up: source $BASE/env.sh   (ctld $CTLD_PORT, rest $REST_PORT, nodes $SLURMD_BASE+, dbd=$SLURM_DBD)"
