#![no_main]
//! Checkpoints of this program: the manifest, and tensors behind an index that the manifest lists.

use guildhall::checkpoint::{CheckpointManifest, FileSet, TensorKind, open};

guildhall_fuzz::target!(|input| {
    let folder = guildhall_fuzz::unpack(input);
    let _ = open(folder.path());
    let _ = CheckpointManifest::read(folder.path());
    let listed = [
        "model.safetensors",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    .map(str::to_owned);
    let is_there = |name: &&String| folder.path().join(name).exists();
    let _ = FileSet::read(TensorKind::Model, folder.path(), listed.iter().filter(is_there));
});
