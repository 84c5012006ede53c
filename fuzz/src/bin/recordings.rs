#![no_main]
//! Recordings of routings, shadow sets, hosts and clusters. The first byte chooses what the rest is taken for.

use std::fs;
use std::path::Path;

use guildhall::moe::recording::{ClusterFile, HostChoices, Recording, Visits};

guildhall_fuzz::target!(|input| {
    let Some((kind, content)) = input.split_first() else { return };
    let folder = guildhall_fuzz::scratch();
    let path = folder.path().join("recording");
    fs::write(&path, content).expect("a file");
    match kind % 4 {
        0 => routes(&path),
        1 => drop(Visits::look(&path)),
        2 => drop(HostChoices::look(&path)),
        _ => drop(ClusterFile::look(&path)),
    }
});

/// Reads the first rows of every step and layer.
fn routes(path: &Path) {
    let Ok((shape, steps)) = Recording::look(path) else { return };
    let layers = shape.layers.clone();
    let Ok(file) = Recording::open(path, shape, steps.clone()) else { return };
    for step in steps.take(4) {
        for &layer in layers.iter().take(4) {
            let _ = file.read(step, layer, 0..1);
        }
    }
}
