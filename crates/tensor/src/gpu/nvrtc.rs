//! Kernels as NVRTC makes them.
//!
//! They are made for the architecture of one GPU (cubin). PTX would be compiled a second time by the driver, which refuses PTX of
//! an NVRTC that is newer than itself; cubin it takes from any NVRTC of its own major version.

use std::ffi::{CStr, CString, c_char};
use std::path::Path;
use std::ptr;

use cudarc::nvrtc::result::{self, NvrtcError};
use cudarc::nvrtc::sys;

use super::error::EngineError;
use super::sources::KernelSource;

/// Whatever the architecture.
pub(super) const OPTIONS: [&str; 3] = [
    "--std=c++17",
    // What says nothing of where it runs is no function of the host: there is none.
    "--device-as-default-execution-space",
    // As on the host: products and sums are fused where a kernel says so.
    "--fmad=false",
];

/// What is made of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KernelImage {
    /// For a real architecture, `sm_90`.
    Cubin,
    /// Text, in which tests look for instructions.
    #[cfg(test)]
    Ptx,
}

/// A program of NVRTC's.
struct NvrtcProgram(sys::nvrtcProgram);

impl Drop for NvrtcProgram {
    fn drop(&mut self) {
        // Nobody is left to be told of a failure.
        // SAFETY: the program is there and used by nobody else.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Major and minor version.
pub(super) fn version() -> Result<(i32, i32), NvrtcError> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both are there to be written.
    unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) }.result()?;
    Ok((major, minor))
}

/// Kernels of a source that includes what is in `folder`.
pub(super) fn compile(
    folder: &Path,
    source: &KernelSource,
    architecture: &str,
    image: KernelImage,
) -> Result<Vec<u8>, EngineError> {
    let refused = |log: String| {
        let (compiler, module) = ("NVRTC".to_owned(), source.module.to_owned());
        EngineError::Refused { compiler, module, log }
    };
    let text = CString::new(source.text.as_str()).expect("kernels have no zero bytes");
    let name = CString::new(format!("{}.cu", source.module)).expect("nor have names of modules");
    let places = [format!("--gpu-architecture={architecture}"), format!("--include-path={}", folder.display())];
    let options: Vec<String> = OPTIONS.map(str::to_owned).into_iter().chain(places).collect();
    let program = result::create_program(&text, Some(&name)).map_err(|error| refused(error.to_string()))?;
    let program = NvrtcProgram(program);
    // SAFETY: the program is there.
    unsafe { result::compile_program(program.0, &options) }.map_err(|error| refused(log(&program, error)))?;
    bytes(&program, image).map_err(|error| refused(error.to_string()))
}

/// What NVRTC has to say of an error.
fn log(program: &NvrtcProgram, error: NvrtcError) -> String {
    // SAFETY: the program is there, and the log ends with a zero.
    let log = unsafe { result::get_program_log(program.0) }.ok().filter(|log| log.last() == Some(&0));
    // SAFETY: as above.
    let said = log.map(|log| unsafe { CStr::from_ptr(log.as_ptr()) }.to_string_lossy().trim().to_owned());
    said.filter(|said| !said.is_empty()).unwrap_or_else(|| error.to_string())
}

fn bytes(program: &NvrtcProgram, image: KernelImage) -> Result<Vec<u8>, NvrtcError> {
    type Size = unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult;
    type Get = unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult;
    let (size, get): (Size, Get) = match image {
        KernelImage::Cubin => (sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN),
        #[cfg(test)]
        KernelImage::Ptx => (sys::nvrtcGetPTXSize, sys::nvrtcGetPTX),
    };
    let mut len = 0;
    // SAFETY: the program is there and compiled, and there is room for as many bytes as it says.
    unsafe {
        size(program.0, &raw mut len).result()?;
        let mut bytes = vec![0u8; len];
        get(program.0, ptr::from_mut(bytes.as_mut_slice()).cast()).result()?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::compile::write_sources;
    use crate::gpu::sources;

    /// By the options that a run compiles with, for the oldest architecture and for Hopper's.
    #[test]
    #[ignore = "needs NVRTC's library, and takes a while"]
    fn kernels_compile_by_nvrtc() {
        let (sources, folder) = (sources::all(), std::env::temp_dir().join(format!("kernels-{}", std::process::id())));
        write_sources(&folder, &sources).unwrap();
        for architecture in [80, 90] {
            let made = |source: &KernelSource, kind: &str, image| {
                let architecture = format!("{kind}_{architecture}");
                compile(&folder, source, &architecture, image).unwrap_or_else(|error| panic!("{error}"))
            };
            for source in &sources {
                let ptx = String::from_utf8(made(source, "compute", KernelImage::Ptx)).unwrap();
                assert!(ptx.contains(".visible .entry"), "{} has no kernel", source.module);
                let by_tensor_cores = ptx.contains("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32");
                let multiplies = ["attention", "flash_attention"].contains(&source.module);
                assert_eq!(by_tensor_cores, multiplies, "products of {}", source.module);
                assert!(made(source, "sm", KernelImage::Cubin).starts_with(b"\x7fELF"), "{}", source.module);
            }
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
