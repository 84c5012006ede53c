#!/usr/bin/env bash
# Ranks behind really limited links on one machine: a network namespace for each, or for several, on one bridge, limited both ways by tbf.
#   links.sh up N RATE           makes N namespaces (RATE as tc takes it: 1gbit, 100mbit; or none)
#   links.sh rate N RATE         changes the limit
#   links.sh mpirun N[xK] PROGRAM..  starts a rank of Open MPI in each, or K; they talk TCP
#   links.sh in I COMMAND..      runs a command in namespace I, whose address is 10.77.0.(I + 1)
#   links.sh sent N              bytes that each has sent so far
#   links.sh down N              removes all
# Needs root, iproute2, util-linux and, for mpirun, openmpi-bin. Adds no latency: many kernels lack netem.
set -eu
name=guild
net=10.77.0
self=$(readlink -f "$0")

inside() {
    local i=$1
    shift
    exec nsenter --net="/run/netns/$name$i" unshare --uts sh -c 'hostname "$0"; exec "$@"' "$name$i" "$@"
}

# A burst below 256 kB does not reach 1 Gbit/s; messages that are shorter see no limit.
limit() {
    local within=$1 device=$2 rate=$3
    $within tc qdisc del dev "$device" root 2>/dev/null || true
    [ "$rate" = none ] || $within tc qdisc add dev "$device" root tbf rate "$rate" burst 256kb latency 100ms
}

limit_all() {
    for i in $(seq 0 $(($1 - 1))); do
        limit "ip netns exec $name$i" eth0 "$2"
        limit "" "${name}v$i" "$2"
    done
}

case ${1:?up, rate, mpirun, in, sent or down} in
up)
    ip link add "${name}br" type bridge
    ip address add "$net.254/24" dev "${name}br"
    ip link set "${name}br" up
    for i in $(seq 0 $(($2 - 1))); do
        ip netns add "$name$i"
        ip link add "${name}v$i" type veth peer name eth0 netns "$name$i"
        ip link set "${name}v$i" master "${name}br" up
        ip -n "$name$i" address add "$net.$((i + 1))/24" dev eth0
        ip -n "$name$i" link set eth0 up
        ip -n "$name$i" link set lo up
    done
    limit_all "$2" "$3"
    ;;
rate) limit_all "$2" "$3" ;;
down)
    for i in $(seq 0 $(($2 - 1))); do
        ip link del "${name}v$i" 2>/dev/null || true
        ip netns del "$name$i" 2>/dev/null || true
    done
    ip link del "${name}br" 2>/dev/null || true
    ;;
in)
    shift
    inside "$@"
    ;;
sent)
    for i in $(seq 0 $(($2 - 1))); do ip netns exec "$name$i" cat /sys/class/net/eth0/statistics/tx_bytes; done
    ;;
agent) # What mpirun starts in place of ssh: [options] ADDRESS COMMAND..
    shift
    while [ "${1#-}" != "$1" ]; do shift; done
    i=$((${1##*.} - 1))
    shift
    inside "$i" sh -c "$*"
    ;;
mpirun)
    nodes=${2%x*}
    case $2 in *x*) each=${2#*x} ;; *) each=1 ;; esac
    shift 2
    hosts=$(seq -f "$net.%g:$each" -s , 1 "$nodes")
    agent=$(mktemp)
    printf '#!/bin/sh\nexec bash %s agent "$@"\n' "$self" >"$agent"
    chmod +x "$agent"
    inside 0 mpirun --allow-run-as-root -n $((nodes * each)) --host "$hosts" --bind-to none --mca plm_rsh_agent "$agent" \
        --mca plm_rsh_no_tree_spawn 1 --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include "$net.0/24" \
        --mca oob_tcp_if_include "$net.0/24" --mca mpi_yield_when_idle 1 "$@"
    ;;
esac
