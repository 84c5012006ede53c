//! How much memory the process really took, as the operating system counts it.

/// Peak resident memory of this process, MiB; `None` where the system does not tell.
///
/// Thread ranks share a process, so this is the sum over the ranks of this process.
pub fn peak_rss_mb() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    high_water_kib(&status).map(|kib| kib.div_ceil(1024))
}

/// The `VmHWM` line of a Linux process status, KiB.
fn high_water_kib(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_high_water_mark_is_found_or_absent() {
        assert_eq!(high_water_kib("Name:\tx\nVmHWM:\t  2048 kB\nVmRSS:\t 9 kB\n"), Some(2048));
        assert_eq!(high_water_kib("Name:\tx\n"), None);
        assert_eq!(high_water_kib("VmHWM:\n"), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_has_used_memory() {
        assert!(peak_rss_mb().is_some_and(|mib| mib > 0));
    }
}
