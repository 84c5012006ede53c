#![no_main]
//! Headers of safetensors and their index, of other programs: every tensor that is listed can be read, or is an error.

use guildhall::checkpoint::{FileSet, TensorFiles};

guildhall_fuzz::target!(|input| {
    let folder = guildhall_fuzz::unpack(input);
    let Ok(set) = FileSet::read_foreign(folder.path()) else { return };
    let files = TensorFiles::new(folder.path(), set);
    for (name, (dtype, shape)) in files.list() {
        let read = files.read(&name);
        assert!(
            read.is_err() || read.is_ok_and(|bytes| bytes.len() == dtype.bytes() * shape.iter().product::<usize>())
        );
    }
});
