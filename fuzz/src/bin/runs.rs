#![no_main]
//! A run's folder: its recipe, metrics, summary and scores, as `guildhall report` reads them.

use guildhall::{metrics, report};

guildhall_fuzz::target!(|input| {
    let folder = guildhall_fuzz::unpack(input);
    let _ = metrics::read(&folder.path().join(metrics::METRICS_FILE));
    let _ = report::render(folder.path(), None);
});
