//! `guildhall devices`: what can compute here.

use std::fs;

use guildhall_tensor::{CudaDevice, cuda_devices, find_compiler, instruction_sets};

use super::{CommandFailure, print};
use crate::launch;
use crate::parallel::Backend;

pub(super) fn run() -> Result<(), CommandFailure> {
    let line = |backend: Backend| {
        let told = match launch::is_here(backend) {
            Ok(_) => format!("ready    {}", about(backend)),
            Err(missing) => format!("missing  {}", missing.reason),
        };
        format!("{:<10} {told}\n", backend.name())
    };
    print(&Backend::ALL.map(line).concat())
}

/// What there is to know of a backend that is here.
fn about(backend: Backend) -> String {
    match backend {
        Backend::Cpu => {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            format!("{}; cores {cores}; {}", processor(), instruction_sets().join(" "))
        }
        Backend::Simulated => {
            let compiler = find_compiler().map(|compiler| compiler.version).unwrap_or_default();
            format!("kernels compiled by {compiler}, each held against the CPU's: for tests")
        }
        Backend::Cuda => cuda_devices().unwrap_or_default().iter().map(told).collect::<Vec<_>>().join("; "),
    }
}

fn told(CudaDevice { name, capability: (major, minor), bytes }: &CudaDevice) -> String {
    format!("{name}, {} GiB, compute capability {major}.{minor}", bytes >> 30)
}

/// What the system calls it.
pub(super) fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    named.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}
