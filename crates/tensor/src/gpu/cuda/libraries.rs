//! Whether the libraries are there, with what is called of them. The bindings look for a library and for each of its functions
//! when they first need them, and panic where there is none.

use std::ffi::c_void;

use cudarc::cublas::sys as blas_sys;
use cudarc::cublaslt::sys as lt_sys;
use cudarc::driver::sys;
use cudarc::nvrtc;

use crate::gpu::error::EngineError;

/// A library: whether it is there and whether it has a function, its name, what to do without, what is called of it.
struct NeededLibrary {
    is_there: unsafe fn() -> bool,
    has: fn(&str) -> bool,
    name: &'static str,
    hint: &'static str,
    functions: &'static str,
}

const WHEELS: &str = "install CUDA 13's, or name the folder that has it in LD_LIBRARY_PATH";

/// The call for products of groups is not among them: products do without it.
const NEEDED: [NeededLibrary; 4] = [
    NeededLibrary {
        is_there: sys::is_culib_present,
        // SAFETY: the library is there when it is asked; the address is not used.
        has: |function| unsafe { sys::culib().get::<*const c_void>(function.as_bytes()).is_ok() },
        name: "libcuda.so.1",
        hint: "it comes with NVIDIA's driver",
        functions: "cuInit cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceTotalMem_v2 \
                    cuDeviceGetAttribute cuDeviceGetUuid_v2 cuGetErrorString cuGetErrorName cuDevicePrimaryCtxRetain \
                    cuDevicePrimaryCtxRelease_v2 cuCtxEnablePeerAccess cuCtxGetCurrent cuCtxSetCurrent cuCtxSynchronize cuModuleLoad \
                    cuModuleUnload cuModuleGetFunction cuLaunchKernel cuMemAlloc_v2 cuMemFree_v2 cuMemGetInfo_v2 \
                    cuMemHostAlloc cuMemFreeHost cuMemHostRegister_v2 cuMemHostUnregister cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 \
                    cuMemcpyDtoDAsync_v2 cuMemcpyPeerAsync cuMemsetD8Async cuStreamCreate cuStreamDestroy_v2 cuStreamSynchronize \
                    cuStreamWaitEvent cuEventCreate cuEventRecord cuEventQuery cuEventSynchronize cuEventDestroy_v2",
    },
    NeededLibrary {
        is_there: nvrtc::sys::is_culib_present,
        // SAFETY: as above.
        has: |function| unsafe { nvrtc::sys::culib().get::<*const c_void>(function.as_bytes()).is_ok() },
        name: "libnvrtc.so",
        hint: WHEELS,
        functions: "nvrtcVersion nvrtcCreateProgram nvrtcDestroyProgram nvrtcCompileProgram nvrtcGetProgramLogSize \
                    nvrtcGetProgramLog nvrtcGetCUBINSize nvrtcGetCUBIN",
    },
    NeededLibrary {
        is_there: blas_sys::is_culib_present,
        // SAFETY: as above.
        has: |function| unsafe { blas_sys::culib().get::<*const c_void>(function.as_bytes()).is_ok() },
        name: "libcublas.so",
        hint: WHEELS,
        functions: "cublasCreate_v2 cublasDestroy_v2 cublasSetStream_v2 cublasSetMathMode",
    },
    NeededLibrary {
        is_there: lt_sys::is_culib_present,
        // SAFETY: as above.
        has: |function| unsafe { lt_sys::culib().get::<*const c_void>(function.as_bytes()).is_ok() },
        name: "libcublasLt.so",
        hint: WHEELS,
        functions: "cublasLtCreate cublasLtDestroy cublasLtMatrixLayoutCreate cublasLtMatrixLayoutDestroy \
                    cublasLtMatmulDescCreate cublasLtMatmulDescSetAttribute cublasLtMatmulDescDestroy \
                    cublasLtMatmulPreferenceCreate cublasLtMatmulPreferenceSetAttribute cublasLtMatmulPreferenceDestroy \
                    cublasLtMatmulAlgoGetHeuristic cublasLtMatmul",
    },
];

impl NeededLibrary {
    /// What is wrong with it here, and what to do.
    fn complaint(&self) -> Option<String> {
        let (name, hint) = (self.name, self.hint);
        // SAFETY: a library of the vendor is loaded, which runs nothing that this program relies on.
        if !unsafe { (self.is_there)() } {
            return Some(format!("{name} is not to be found: {hint}"));
        }
        let missing: Vec<&str> = self.functions.split_whitespace().filter(|function| !(self.has)(function)).collect();
        let more = if missing.len() > 3 { format!(" and {} more", missing.len() - 3) } else { String::new() };
        let told = missing.iter().take(3).copied().collect::<Vec<_>>().join(", ");
        (!missing.is_empty()).then(|| format!("{name} has no {told}{more}, so it is of another version: {hint}"))
    }
}

/// Looks for all of them.
///
/// # Errors
/// Those that are missing, or lack what is called.
pub(super) fn find_libraries() -> Result<(), EngineError> {
    let complaints: Vec<String> = NEEDED.iter().filter_map(NeededLibrary::complaint).collect();
    if complaints.is_empty() { Ok(()) } else { Err(EngineError::NoLibrary { missing: complaints.join("; ") }) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    /// What the stand-ins of these libraries offer besides: for each other, for tests, and what products do without.
    const BESIDES: &str = "fake_queue fake_queue_until fake_progress fake_device fake_holds fake_is_bound fake_fails fake_count cuModuleLoadData \
                           nvrtcGetPTXSize nvrtcGetPTX cublasGemmGroupedBatchedEx";

    /// The stand-ins have what tests have seen called. What is called and not listed would panic where it is missing.
    #[test]
    fn the_stand_ins_have_what_is_needed_and_no_more() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fake_cuda");
        let text = ["driver.cpp", "nvrtc.cpp", "cublas.cpp", "cublaslt.cpp"]
            .map(|file| fs::read_to_string(folder.join(file)).unwrap());
        let text = text.concat();
        let declared = text.lines().filter_map(|line| line.strip_prefix("EXPORT ")?.split_once('('));
        let offered: BTreeSet<&str> =
            declared.map(|(head, _)| head.rsplit([' ', '*']).next().unwrap_or_default()).collect();
        let needed = NEEDED.iter().flat_map(|library| library.functions.split_whitespace());
        assert_eq!(needed.chain(BESIDES.split_whitespace()).collect::<BTreeSet<_>>(), offered);
    }
}
