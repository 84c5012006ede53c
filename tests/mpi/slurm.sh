#!/usr/bin/env bash
# What docs/clusters.md says of Slurm, on two nodes that are network namespaces with a slurmd each.
#
#   tests/mpi/slurm.sh [PROGRAM] [pmix|pmi2]
#
# PROGRAM (target/release/guildhall) is built with the feature mpi: with Open MPI for pmix, with MPICH for pmi2. Needs root,
# iproute2 and Debian's slurmctld, slurmd, slurm-client and munge, all of whose files and daemons are of this script alone.
# Takes a few minutes on two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
program=$(readlink -f "${1:-target/release/guildhall}")
plugin=${2:-pmix}
links=peers/network/links.sh
steps=120

for tool in slurmctld slurmd srun sbatch munged ip; do
    command -v "$tool" >/dev/null || { echo "$tool is missing: apt-get install slurmctld slurmd slurm-client munge iproute2" >&2; exit 2; }
done
[ "$(id -u)" -eq 0 ] || { echo "network namespaces need root" >&2; exit 2; }
[ -x "$program" ] || { echo "$program is no program: cargo build --release --features mpi" >&2; exit 2; }

work=$(mktemp -d)
recipe=$work/pairs.toml
export SLURM_CONF=$work/slurm.conf

finish() {
    code=$?
    if [ "$code" -ne 0 ]; then tail -n 6 "$work"/*.log "$work"/*.out >&2 2>/dev/null || true; fi
    scancel --state=RUNNING --user=root 2>/dev/null || true
    for pid in "$work"/*.pid; do kill "$(cat "$pid")" 2>/dev/null || true; done
    for rank in $(ranks); do kill -KILL "$rank" 2>/dev/null || true; done
    "$links" down 2
    # slurmctld writes its state at its end.
    for _ in 1 2 3; do rm -rf "$work" 2>/dev/null && break || sleep 1; done
    exit "$code"
}

fail() {
    echo "failed: $*" >&2
    exit 1
}

# Processes that train this script's recipe.
ranks() {
    for process in /proc/[0-9]*; do
        [ "$(readlink "$process/exe" 2>/dev/null)" = "$program" ] || continue
        if tr '\0' ' ' <"$process/cmdline" 2>/dev/null | grep -q "train $recipe"; then basename "$process"; fi
    done
}

# Looks ten times a second, for so many seconds at most, until a command succeeds.
within() {
    local seconds=$1
    shift
    for _ in $(seq $((seconds * 10))); do
        if "$@"; then return; fi
        sleep 0.1
    done
    fail "after $seconds s: $*"
}

begun() { [ -s "$work/$1/metrics.jsonl" ]; }
stopped() { grep -q "^stopped" "$work/$1.out"; }
saved() { [ -e "$work/$1/checkpoints/latest" ]; }
state() { scontrol show job "$1" 2>/dev/null | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p'; }
is() { [ "$(state "$1")" = "$2" ]; }
none_left() { [ -z "$(ranks)" ]; }
idle() { [ "$(sinfo -h -t idle -o %D)" = 2 ]; }
lost() { sinfo -h -N -n guild1 -o %t | grep -q 'down'; }
resumed() { grep -Eq "^run .*: steps [0-9]+1 to $steps" "$work/$1.out" || fail "$1 did not go on from a checkpoint"; }
weights() { sha256sum <"$work/$1/checkpoints/step-$(printf %06d "$steps")/model.safetensors"; }

# The run $1 came to the weights of $2.
alike() {
    local one other
    one=$(weights "$1")
    other=$(weights "$2")
    [ "$one" = "$other" ] || fail "$1 has other weights than $2"
    echo "ok       $1: the weights of $2"
}

# The documented job, for the run $1 with further `options`; other arguments are Slurm's.
options=""
submit() {
    local run=$1
    shift
    awk '/^```/ { if (inside && block ~ /#SBATCH/) { printf "%s", block; exit } inside = !inside; block = ""; next }
        inside { block = block $0 "\n" }' docs/clusters.md |
        sed "s#target/release/guildhall#$program#; s#recipes/pairs.toml#$recipe --set run.dir=$work/$run$options#; s#--mpi=pmix#--mpi=$plugin#" \
            >"$work/$run.job"
    grep -q -- "run.dir=$work/$run$options --resume" "$work/$run.job" || fail "docs/clusters.md has no such job"
    sbatch --parsable --output="$work/$run.out" "$@" "$work/$run.job"
}

[ ! -e /run/netns/guild0 ] || fail "another program uses these namespaces: $links down 2"
trap finish EXIT
"$links" up 2 none

# The recipe as it is, but with many checkpoints and folders of its own.
sed "s/^steps = .*/steps = $steps/; s/^checkpoint_every = .*/checkpoint_every = 20/; s/^eval_every = .*/eval_every = 0/
    s#^held_out = .*#&\ncache = \"$work/cache\"#; s/^\[parallel\]/&\ntimeout_s = 5/" recipes/pairs.toml >"$recipe"

head -c 1024 /dev/urandom >"$work/key"
chmod 400 "$work/key"
chmod 755 "$work"
munged --force --key-file="$work/key" --socket="$work/munge" --pid-file="$work/munged.pid" --log-file="$work/munged.log" \
    --seed-file="$work/seed"
cat >"$SLURM_CONF" <<END
ClusterName=guild
SlurmctldHost=$(hostname)(10.77.0.254)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge,cred_expire=5
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool-%n
TmpFS=$work/tmp-%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd-%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SlurmdTimeout=10
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2
NodeName=guild0 NodeAddr=10.77.0.1 CPUs=2
NodeName=guild1 NodeAddr=10.77.0.2 CPUs=2
PartitionName=all Nodes=guild0,guild1 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
END
mkdir "$work/state" "$work"/{spool,tmp}-guild{0,1}
slurmctld
for node in 0 1; do "$links" in "$node" slurmd -N "guild$node"; done
within 60 idle
[[ "$(srun --mpi=list 2>&1)" == *"$plugin"* ]] || fail "Slurm has no plugin $plugin"

echo "==> threads, for comparison"
"$program" train "$recipe" --set "run.dir=$work/threads" >"$work/threads.out" 2>&1
"$program" train "$recipe" --ranks 4 --set parallel.expert=4 --set "run.dir=$work/four" >"$work/four.out" 2>&1

echo "==> srun on one node"
srun -N 1 -n 2 --mpi="$plugin" "$program" train "$recipe" --set "run.dir=$work/srun" >"$work/srun.out" 2>&1
alike srun threads

echo "==> srun on two nodes of two ranks"
srun -N 2 -n 4 --ntasks-per-node=2 --mpi="$plugin" "$program" train "$recipe" --ranks 4 --set parallel.expert=4 \
    --set parallel.all_to_all=two_level --set "run.dir=$work/nodes" >"$work/nodes.out" 2>&1
grep -q "^mesh.*on 2 nodes of 2 ranks, all-to-alls by two_level" "$work/nodes.out" || fail "no two nodes"
alike nodes four

echo "==> verify, whose ranks srun starts"
"$program" verify recipes/verify/decoder.toml --engine mpi --only mesh --ranks 2 --launcher "srun --mpi=$plugin -n {ranks}" \
    --set "run.dir=$work/verified" --set "data.cache=$work/cache" >"$work/verify.out" 2>&1 || fail "verify"
[[ "$(tail -n 1 "$work/verify.out")" =~ ^[2-9].*": 0 differ" ]] || fail "verify: $(tail -n 1 "$work/verify.out")"
tail -n 1 "$work/verify.out"

echo "==> kill -9 of a rank of the documented job"
job=$(submit killed -N 2)
within 120 saved killed
kill -KILL "$(ranks | tail -n 1)"
within 300 is "$job" COMPLETED
resumed killed
alike killed threads

echo "==> scancel --signal=USR1"
job=$(submit asked -N 2)
within 120 begun asked
scancel --signal=USR1 "$job"
within 60 is "$job" COMPLETED
stopped asked || fail "it did not stop"
job=$(submit asked -N 2)
within 300 is "$job" COMPLETED
alike asked threads

echo "==> USR1 before the time limit"
# Slurm's clock for this has a resolution of a minute.
options=" --set train.steps=10000"
job=$(submit limited -N 2 --time=2 --signal=USR1@30)
options=""
within 120 begun limited
within 180 is "$job" COMPLETED
stopped limited || fail "it did not stop"

echo "==> scancel"
job=$(submit cancelled -N 2)
within 120 begun cancelled
scancel "$job"
within 60 is "$job" CANCELLED
within 60 stopped cancelled
within 60 none_left
job=$(submit cancelled -N 2)
within 300 is "$job" COMPLETED
alike cancelled threads

echo "==> a node is cut off, and the job queued again"
within 60 idle
job=$(submit requeued -N 2 --requeue)
within 120 saved requeued
ip link set guildv1 down
within 60 none_left
within 120 lost
ip link set guildv1 up
within 120 idle
within 300 is "$job" COMPLETED
[ "$(scontrol show job "$job" | grep -o 'Restarts=[0-9]*')" = "Restarts=1" ] || fail "it was not queued again"
resumed requeued
alike requeued threads
none_left || fail "processes are left: $(ranks)"
echo "all of it"
