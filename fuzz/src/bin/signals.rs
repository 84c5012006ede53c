#![no_main]
//! Signals of the control lane, which come over TCP: what is taken for one is one that would be sent so.

use guildhall_comm::control::Signal;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    if let Ok(signal) = Signal::decode(input) {
        assert_eq!(signal.encode(), input);
    }
});
