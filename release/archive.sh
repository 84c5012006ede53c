#!/usr/bin/env bash
# Builds a release and packs it into an archive to download: release/archive.sh [mpi]
#
# Leaves target/archive/guildhall-VERSION-TARGET[-mpi].tar.gz and its SHA-256 beside it. Paths of this machine
# are left out, and times are the commit's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
variant="${1:-}"
case "$variant" in
"" | mpi) ;;
*)
    echo "release/archive.sh: there is no variant '$variant'; use none, or mpi" >&2
    exit 2
    ;;
esac
if [ -n "$(git status --porcelain)" ]; then
    echo "release/archive.sh: there are changes that no commit has: commit or stash them, an archive is of a commit" >&2
    exit 2
fi

home="${CARGO_HOME:-$HOME/.cargo}"
target="$(rustc -vV | sed -n 's/^host: //p')"
version="$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)"
name="guildhall-$version-$target${variant:+-$variant}"
out="$PWD/target/archive"
features=(${variant:+--features "$variant"})

export CARGO_TARGET_DIR="$out/build${variant:+-$variant}"
export CARGO_PROFILE_RELEASE_STRIP=symbols CARGO_PROFILE_RELEASE_DEBUG=none
export RUSTFLAGS="--remap-path-prefix=$home=/cargo --remap-path-prefix=$PWD=/guildhall"
GUILDHALL_COMMIT="$(git rev-parse HEAD)"
export GUILDHALL_COMMIT
cargo build --release --locked "${features[@]}"

rm -rf "${out:?}/$name"
mkdir -p "$out/$name/licenses"
cp "$CARGO_TARGET_DIR/release/guildhall" README.md LICENSE CHANGELOG.md "$out/$name"
cp -r docs recipes "$out/$name"

# What the licenses of the crates in it ask for.
cargo tree --locked "${features[@]}" --edges normal --prefix none --format '{p}|{l}' |
    sed 's/ (\*)$//' | grep '|' | grep -v '^guildhall' | sort -u | while IFS='|' read -r package license; do
    set -- $package
    crate="$1-${2#v}"
    echo "$crate: $license" >>"$out/$name/licenses/LIST"
    for text in "$home"/registry/src/*/"$crate"/{LICEN[SC]E*,COPYING*,NOTICE*}; do
        [ -f "$text" ] || continue
        mkdir -p "$out/$name/licenses/$crate"
        cp "$text" "$out/$name/licenses/$crate"
    done
done

cd "$out"
chmod -R u=rwX,go=rX "$name"
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct)" -c "$name" |
    gzip -9n >"$name.tar.gz"
rm -r "$name"
sha256sum "$name.tar.gz" | tee "$name.tar.gz.sha256"
du -h "$name.tar.gz"
