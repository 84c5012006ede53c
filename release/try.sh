#!/usr/bin/env bash
# Tries an archive of release/archive.sh as its user would, on a Debian that has nothing else: release/try.sh ARCHIVE [SUITE]
#
# Needs root, debootstrap and a network. An archive with MPI gets Open MPI's launcher besides, and trains with two processes.
set -euo pipefail
if [ $# -lt 1 ] || [ ! -f "$1" ]; then
    echo "usage: release/try.sh ARCHIVE [SUITE]" >&2
    exit 2
fi
archive="$(realpath "$1")"
suite="${2:-bookworm}"
name="$(basename "$archive" .tar.gz)"
(cd "$(dirname "$archive")" && sha256sum --check "$name.tar.gz.sha256")

root="$(mktemp -d)"
clean() {
    umount "$root/proc" 2>/dev/null || true
    rm -rf --one-file-system "$root" "$root.log"
}
trap clean EXIT
# Runs a command whose output is of interest only if it fails.
quietly() {
    "$@" >"$root.log" 2>&1 || {
        tail -n 5 "$root.log" >&2
        exit 1
    }
}
quietly debootstrap --variant=minbase "$suite" "$root"
mount -t proc proc "$root/proc"
inside() {
    chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb "$@"
}
tar -xzf "$archive" -C "$root/root" --no-same-owner
small=(train recipes/pairs.toml --set train.steps=40 --set train.warmup_steps=10)
case "$name" in
*-mpi)
    quietly inside apt-get install -y -qq --no-install-recommends openmpi-bin
    mpi="OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1"
    inside sh -c "cd root/$name && $mpi mpirun -n 2 ./guildhall ${small[*]}"
    ;;
*) inside sh -c "cd root/$name && ./guildhall ${small[*]} --ranks 2" ;;
esac
inside sh -c "cd root/$name && echo Hund | ./guildhall translate runs/pairs/checkpoints/latest --from de --to en && \
    ./guildhall verify recipes/verify/decoder.toml --only mesh --ranks 2 && test -s runs/pairs/report.html"
echo "tried $name on $suite: $(inside sh -c 'ldd --version' | head -n 1)"
