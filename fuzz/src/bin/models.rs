#![no_main]
//! Folders of Hugging Face: `config.json` with tensors, as `guildhall audit` reads them.

use guildhall::convert;

guildhall_fuzz::target!(|input| {
    let folder = guildhall_fuzz::unpack(input);
    let _ = convert::audit(folder.path());
});
