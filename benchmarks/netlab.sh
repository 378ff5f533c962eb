#!/bin/bash
# netlab.sh NRANKS RATE COMMAND [ARG...]: run COMMAND once per rank, each behind a link of its own.
#
# Each rank lives in its own network namespace; a veth pair joins it to one bridge in a further
# namespace. Both directions of every link are shaped to RATE by tbf (tc's words: 100mbit, 1gbit,
# 10gbit); "none" leaves the veth pair unshaped. Root and iproute2 are needed. Bandwidth is
# emulated, latency is not (that needs netem).
#
# COMMAND sees RANK, LOCAL_RANK=0, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and
# OMP_NUM_THREADS=1, so init_process_group("gloo") works as it does under torchrun.
#
# The first rank that fails decides the exit status; the others get NETLAB_GRACE_S (5) seconds to
# report what they saw, then they are killed. After NETLAB_TIMEOUT_S (600) seconds every rank is
# killed, and the status is 124. The status is 2 for a usage or set-up error. Namespaces and
# processes are removed on every exit, signals included (SIGKILL excepted). Several labs may run at
# once: names are unique, and addresses and ports are private to a lab.
set -u

die() { echo "netlab: $*" >&2; exit 2; }

[ $# -ge 3 ] || die "usage: netlab.sh NRANKS RATE COMMAND [ARG...]"
nranks=$1 rate=$2
shift 2
timeout_s=${NETLAB_TIMEOUT_S:-600} grace_s=${NETLAB_GRACE_S:-5}

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 501)) ||
    die "needs bash 5.1 or newer, this is $BASH_VERSION"
[[ $nranks =~ ^[1-9][0-9]{0,2}$ && $nranks -le 254 ]] ||
    die "NRANKS must be 1 to 254, not '$nranks'"
[[ $rate =~ ^(none|[0-9]+(\.[0-9]+)?[kmgt]?bit)$ ]] ||
    die "RATE must be none or like 100mbit or 1gbit, not '$rate'"
[[ $timeout_s =~ ^[0-9]+$ ]] || die "NETLAB_TIMEOUT_S must be whole seconds, not '$timeout_s'"
[[ $grace_s =~ ^[0-9]+$ ]] || die "NETLAB_GRACE_S must be whole seconds, not '$grace_s'"
[ "$(id -u)" -eq 0 ] || die "needs root, because it makes network namespaces"
command -v ip >/dev/null || die "needs the command ip (package iproute2)"
[ "$rate" = none ] || command -v tc >/dev/null || die "needs the command tc (package iproute2)"

lab=agclab$$-$RANDOM
namespaces=()
declare -A running=() # pid -> rank; not yet waited for, so no other process can have the pid
timer=

# Every process of the lab: the ranks (one may still be entering its namespace) and what else runs
# in the namespaces.
lab_pids() {
    local ns
    printf '%s\n' "${!running[@]}"
    for ns in "${namespaces[@]}"; do ip netns pids "$ns" 2>/dev/null; done
}

# signal_lab SIGNAL: false if there was nobody to send it to.
signal_lab() {
    local pid sent=1
    for pid in $(lab_pids | sort -u); do kill -"$1" "$pid" 2>/dev/null && sent=0; done
    return $sent
}

cleanup() {
    local ns tries=20
    [ "$BASHPID" = "$$" ] || return # a child that has not become its command yet
    trap - EXIT
    trap '' HUP INT TERM
    [ -z "$timer" ] || kill "$timer" 2>/dev/null
    signal_lab TERM
    while signal_lab 0 && ((tries-- > 0)); do sleep 0.1; done
    signal_lab KILL
    wait
    for ns in "${namespaces[@]}"; do ip netns del "$ns"; done
}
trap cleanup EXIT
stop= # signals wait until the lab is complete, so that cleanup() knows all of it
trap 'stop=129' HUP
trap 'stop=130' INT
trap 'stop=143' TERM

add_namespace() {
    ip netns add "$1" || die "cannot make a network namespace (a container without CAP_SYS_ADMIN?)"
    namespaces+=("$1")
}

setup() { "$@" || die "failed: $*"; }

# The burst is what a link may send at once after a pause.
shape() {
    [ "$rate" = none ] && return
    tc -n "$1" qdisc add dev "$2" root tbf rate "$rate" burst 256kb latency 200ms ||
        die "cannot shape $2 to $rate (a kernel without sch_tbf?)"
}

add_namespace "$lab-sw"
setup ip -n "$lab-sw" link add br0 type bridge
setup ip -n "$lab-sw" link set br0 up
for ((rank = 0; rank < nranks; rank++)); do
    ns=$lab-$rank
    add_namespace "$ns"
    setup ip -n "$ns" link add eth0 type veth peer name "p$rank" netns "$lab-sw"
    setup ip -n "$ns" addr add "10.77.0.$((rank + 1))/24" dev eth0
    setup ip -n "$ns" link set lo up
    setup ip -n "$ns" link set eth0 up
    setup ip -n "$lab-sw" link set "p$rank" master br0 up
    shape "$ns" eth0
    shape "$lab-sw" "p$rank"
done

for ((rank = 0; rank < nranks; rank++)); do
    ip netns exec "$lab-$rank" env RANK="$rank" LOCAL_RANK=0 WORLD_SIZE="$nranks" \
        MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 "$@" &
    running[$!]=$rank
done

sleep "$timeout_s" >/dev/null 2>&1 &
timer=$!
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
[ -z "$stop" ] || exit "$stop"

status=0
while ((${#running[@]})); do
    ended=
    wait -n -p ended "${!running[@]}" "$timer"
    rc=$?
    if [ -z "$ended" ]; then die "lost track of the ranks"; fi
    if [ "$ended" = "$timer" ]; then
        timer=
        if ((status == 0)); then
            echo "netlab: no end after $timeout_s s; killing rank(s) ${running[*]}" >&2
            status=124
        else
            echo "netlab: killing rank(s) ${running[*]}" >&2
        fi
        break
    fi
    if ((rc != 0 && status == 0)); then
        echo "netlab: rank ${running[$ended]} ended with status $rc" >&2
        status=$rc
        kill "$timer" 2>/dev/null
        sleep "$grace_s" >/dev/null 2>&1 &
        timer=$!
    fi
    unset "running[$ended]"
done
exit "$status"
