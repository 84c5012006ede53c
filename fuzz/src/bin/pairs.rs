#![no_main]
//! Parallel text: lines, TSV, JSONL, Parquet, TMX and catalogues, by the names of the files.

use guildhall::data::pairs::{Cleaning, PairSpec, list, read_all};

guildhall_fuzz::target!(|input| {
    let folder = guildhall_fuzz::unpack(input);
    let path = folder.path().to_str().expect("a plain path").to_owned();
    let spec = PairSpec { path, from: Some("en".to_owned()), to: Some("de".to_owned()), ..PairSpec::default() };
    let Ok(listing) = list(&[spec], &folder.path().join("cache")) else { return };
    let _ = read_all(&listing, Cleaning::default(), &mut |_| Ok(()));
});
