//! The checksums of a checkpoint's files, each made by one rank while others make others'.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use guildhall_comm::Reduce;

use super::Error;
use super::manifest::{Hasher, regular};
use crate::parallel::{Mesh, gather_bytes};

/// Bytes that a rank hashes before all meet: so that no rank waits for another longer than for these.
const BETWEEN_MEETINGS: usize = 256 << 20;

/// One file that this rank hashes.
struct Hashing {
    name: String,
    path: PathBuf,
    file: File,
    hasher: Hasher,
}

/// The sha256 of the files `names`, which are dealt to the ranks in turn. Collective; every rank has all of them.
///
/// # Errors
/// Of this rank's files; the others then learn of it where they agree on the outcome.
pub(super) fn checksums(
    folder: &Path,
    names: &[&str],
    mesh: &Mesh,
) -> Result<Result<BTreeMap<String, String>, Error>, Error> {
    let (rank, ranks) = (mesh.world.rank(), mesh.world.size());
    let own = names.iter().skip(rank).step_by(ranks);
    let mut outcome = own.map(|name| Hashing::open(folder, name)).collect::<Result<Vec<_>, Error>>();
    loop {
        let more = outcome.as_mut().map_or(Ok(false), |own| advance(own));
        let state = vec![u64::from(outcome.is_err() || more.is_err()), u64::from(matches!(more, Ok(true)))];
        if let Err(error) = more {
            outcome = Err(error);
        }
        let all = mesh.world.all_reduce(Reduce::Max, state)?.into_u64();
        if all[0] > 0 || all[1] == 0 {
            break;
        }
    }
    let own: BTreeMap<String, String> = match &mut outcome {
        Ok(own) => own.drain(..).map(|one| (one.name, one.hasher.finish())).collect(),
        Err(_) => BTreeMap::new(),
    };
    let text = serde_json::to_vec(&own).expect("names and digits are plain JSON");
    let parts = gather_bytes(text, &mesh.world)?;
    let all = parts.iter().map(|part| serde_json::from_slice::<BTreeMap<_, _>>(part).expect("a rank's own JSON"));
    Ok(outcome.map(|_| all.flatten().collect()))
}

/// Hashes some more, and tells whether there is more.
fn advance(own: &mut [Hashing]) -> Result<bool, Error> {
    let mut left = BETWEEN_MEETINGS;
    for Hashing { path, file, hasher, .. } in own {
        left -= hasher.read(file, left).map_err(Error::io("read", path))?;
        if left == 0 {
            return Ok(true);
        }
    }
    Ok(false)
}

impl Hashing {
    fn open(folder: &Path, name: &str) -> Result<Hashing, Error> {
        let path = folder.join(name);
        let file = regular(&path).map_err(Error::io("open", &path))?;
        Ok(Hashing { name: name.to_owned(), path, file, hasher: Hasher::default() })
    }
}
