//! `guildhall devices`: what can compute here.

use std::fs;

use guildhall_tensor::{CudaDevice, cuda_devices, find_compiler, find_nccl, instruction_sets};

use super::{CommandFailure, print};
use crate::launch;
use crate::parallel::Backend;

pub(super) fn run() -> Result<(), CommandFailure> {
    let line = |backend: Backend| {
        let told = match launch::open_backend(backend, 1) {
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
        Backend::Cuda => {
            let devices = cuda_devices().unwrap_or_default();
            let nccl =
                find_nccl().map_or_else(|missing| format!("without NCCL: {missing}"), |()| "with NCCL".to_owned());
            format!("{}; {nccl}", devices.iter().map(told).collect::<Vec<_>>().join("; "))
        }
    }
}

fn told(CudaDevice { name, capability: (major, minor), bytes, .. }: &CudaDevice) -> String {
    format!("{name}, {} GiB, compute capability {major}.{minor}", bytes >> 30)
}

/// What the system calls it.
pub(super) fn processor() -> String {
    told_of_processor("model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// The same, with what tells its kind where a virtual machine hides the name.
pub(super) fn processor_kind() -> String {
    let numbers = ["cpu family", "model", "stepping"].into_iter().filter_map(told_of_processor);
    std::iter::once(processor()).chain(numbers).collect::<Vec<_>>().join(" ")
}

/// A line of what the system says of the first processor.
fn told_of_processor(name: &str) -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.find_map(|(key, value)| (key.trim() == name).then(|| value.trim().to_owned()))
}
