#![no_main]
//! Signals of the control lane, which come over TCP: what is taken for one is one that would be sent so.

use guildhall_comm::control::Signal;

guildhall_fuzz::target!(|input| {
    if let Ok(signal) = Signal::decode(input) {
        assert_eq!(signal.encode(), input);
    }
});
