#![no_main]
//! Folders of Hugging Face: `config.json` with tensors, as `guildhall audit` reads them.

use guildhall::convert;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let folder = guildhall_fuzz::unpack(input);
    let _ = convert::audit(folder.path());
});
