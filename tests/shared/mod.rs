//! What tests of the program need, whichever binary they are in.

#[allow(dead_code, reason = "each binary needs a part of it")]
pub(crate) mod disk;
#[allow(dead_code, reason = "each binary needs a part of it")]
pub(crate) mod fake_gpu;
pub(crate) mod memory;
#[allow(dead_code, reason = "each binary needs a part of it")]
pub(crate) mod program;
