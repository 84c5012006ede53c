//! NVIDIA's library for what GPUs send each other, as far as it is used here: communicators, and messages between two ranks.
//!
//! Communicators do not block (`blocking = 0`): a call returns at once, and what it has begun is asked for
//! ([`NcclCommunicator::is_ready`]), so that no rank waits in the library for another one that has ended.

use std::env;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::mem;
use std::ptr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::result;
use libloading::Library;

use super::{Cuda, DeviceFailure, DeviceStream, Event, done};
use crate::gpu::EngineError;

type NcclHandle = *mut c_void;
type NcclCode = c_int;

const SUCCESS: NcclCode = 0;
const IN_PROGRESS: NcclCode = 7;
/// `ncclRemoteError`: another rank has ended, or is not reached.
const REMOTE: NcclCode = 6;
/// `ncclUint8`.
const BYTES: c_int = 1;

/// The release whose settings have this form; later ones take them.
const SETTINGS_OF: c_uint = 21_800;
/// The first that ends several communicators together.
const OLDEST: c_int = 22_200;
/// A variable by which users have the library wait.
const WAITING: &str = "NCCL_COMM_BLOCKING";

/// What ranks of one communicator know it by.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NcclId(pub [u8; 128]);

/// `ncclConfig_t` of release 2.18.
#[repr(C)]
struct NcclSettings {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cluster_size: c_int,
    least_blocks: c_int,
    most_blocks: c_int,
    network: *const c_char,
    shares_on_split: c_int,
}

impl NcclSettings {
    /// All but one are the library's own choice.
    fn without_waiting() -> NcclSettings {
        const UNDEFINED: c_int = c_int::MIN;
        NcclSettings {
            size: size_of::<NcclSettings>(),
            magic: 0xcafe_beef,
            version: SETTINGS_OF,
            blocking: 0,
            cluster_size: UNDEFINED,
            least_blocks: UNDEFINED,
            most_blocks: UNDEFINED,
            network: ptr::null(),
            shares_on_split: UNDEFINED,
        }
    }
}

/// The library's functions, by the names that it gives them.
struct Nccl {
    new_id: unsafe extern "C" fn(*mut NcclId) -> NcclCode,
    init: unsafe extern "C" fn(*mut NcclHandle, c_int, NcclId, c_int, *mut NcclSettings) -> NcclCode,
    state: unsafe extern "C" fn(NcclHandle, *mut NcclCode) -> NcclCode,
    finalize: unsafe extern "C" fn(NcclHandle) -> NcclCode,
    destroy: unsafe extern "C" fn(NcclHandle) -> NcclCode,
    abort: unsafe extern "C" fn(NcclHandle) -> NcclCode,
    group_start: unsafe extern "C" fn() -> NcclCode,
    group_end: unsafe extern "C" fn() -> NcclCode,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, NcclHandle, *mut c_void) -> NcclCode,
    receive: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, NcclHandle, *mut c_void) -> NcclCode,
    name_of: unsafe extern "C" fn(NcclCode) -> *const c_char,
    last_error: unsafe extern "C" fn(NcclHandle) -> *const c_char,
}

/// Names under which distributions and packages of Python have it.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

impl Nccl {
    fn load() -> Result<Nccl, String> {
        if env::var_os(WAITING).is_some_and(|set| set != "0") {
            return Err(format!("{WAITING} is set, and a rank would wait in NCCL for one that has ended: unset it"));
        }
        // SAFETY: the vendor's library runs nothing that this program relies on.
        let found = NAMES.iter().find_map(|name| unsafe { Library::new(name) }.ok());
        let hint = "install NCCL 2.22 or later, or name the folder that has it in LD_LIBRARY_PATH";
        // Never unloaded: it has threads of its own.
        let library = mem::ManuallyDrop::new(found.ok_or(format!("libnccl.so.2 is not to be found: {hint}"))?);
        /// A function of this name.
        ///
        /// # Safety
        /// It is of this type.
        unsafe fn function<F: Copy>(library: &Library, name: &str) -> Result<F, String> {
            // SAFETY: the caller's promise.
            let found = unsafe { library.get::<F>(name.as_bytes()) };
            found.map(|function| *function).map_err(|_| format!("libnccl.so.2 has no {name}: install a newer NCCL"))
        }
        // SAFETY: types are those of NVIDIA's header.
        unsafe {
            let version: unsafe extern "C" fn(*mut c_int) -> NcclCode = function(&library, "ncclGetVersion")?;
            let mut found = 0;
            if version(&raw mut found) != SUCCESS || found < OLDEST {
                return Err(format!("libnccl.so.2 is version {found}: {hint}"));
            }
            Ok(Nccl {
                new_id: function(&library, "ncclGetUniqueId")?,
                init: function(&library, "ncclCommInitRankConfig")?,
                state: function(&library, "ncclCommGetAsyncError")?,
                finalize: function(&library, "ncclCommFinalize")?,
                destroy: function(&library, "ncclCommDestroy")?,
                abort: function(&library, "ncclCommAbort")?,
                group_start: function(&library, "ncclGroupStart")?,
                group_end: function(&library, "ncclGroupEnd")?,
                send: function(&library, "ncclSend")?,
                receive: function(&library, "ncclRecv")?,
                name_of: function(&library, "ncclGetErrorString")?,
                last_error: function(&library, "ncclGetLastError")?,
            })
        }
    }

    /// The library's words, and those about the last error of a communicator, if it is of one.
    fn told(&self, code: NcclCode, of: NcclHandle) -> String {
        let text = |text: *const c_char| {
            // SAFETY: the library gives a text that ends, or none.
            if text.is_null() { "".into() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy() }
        };
        // SAFETY: any code has a text; a handle is one of the library's or null.
        let (name, last) = unsafe { (text((self.name_of)(code)), text((self.last_error)(of))) };
        let space = if last.is_empty() { "" } else { ", " };
        format!("NCCL: {name}{space}{}", last.trim())
    }
}

/// The library, looked for once.
fn nccl() -> Result<&'static Nccl, String> {
    static NCCL: OnceLock<Result<Nccl, String>> = OnceLock::new();
    NCCL.get_or_init(Nccl::load).as_ref().map_err(String::clone)
}

/// Whether the library is there.
///
/// # Errors
/// What is missing, and where to get it.
pub fn find_nccl() -> Result<(), EngineError> {
    nccl().map(drop).map_err(|missing| EngineError::NoLibrary { missing })
}

impl NcclId {
    /// Of a new communicator, for one of its ranks to tell the others.
    ///
    /// # Errors
    /// The library's reason.
    pub fn new() -> Result<NcclId, String> {
        let (nccl, mut id) = (nccl()?, NcclId([0; 128]));
        // SAFETY: the place is there to be written.
        match unsafe { (nccl.new_id)(&raw mut id) } {
            SUCCESS => Ok(id),
            code => Err(nccl.told(code, ptr::null_mut())),
        }
    }
}

impl Cuda {
    /// What collectives have been asked for up to now, for any thread to look at.
    pub(crate) fn exchange_point(&self) -> Event {
        Event::Cuda(done(self.stream(DeviceStream::Exchange).record_event(None), "recording an event"))
    }

    /// Has the calling thread ask this device.
    pub(crate) fn bind(&self) {
        // Of a device that has failed others tell.
        let _ = self.context.bind_to_thread();
    }

    /// Waits until collectives are done, whatever has become of them. Does not fail: groups are dropped while a failure unwinds.
    pub(crate) fn finish_exchange(&self) {
        let stream = self.streams[DeviceStream::Exchange as usize].cu_stream();
        // Of a device that has failed others tell.
        // SAFETY: the context and its stream are there as long as the engine.
        let _ = unsafe {
            result::ctx::set_current(self.context.cu_ctx()).and_then(|()| result::stream::synchronize(stream))
        };
    }

    /// From now on who waits for this device fails so.
    pub(crate) fn end_exchange(&self, failure: DeviceFailure) {
        let _ = self.ended.set(failure);
    }

    /// To be called when the host has waited: it would use what has not come.
    pub(super) fn check_exchange(&self) {
        if let Some(failure) = self.ended.get() {
            failure.clone().raise();
        }
    }
}

/// Bytes at an address, for a rank or from it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NcclMessage {
    pub(crate) peer: usize,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

/// One rank's membership in a group.
pub(crate) struct NcclCommunicator {
    nccl: &'static Nccl,
    /// None once it has been ended. Held by who calls the library, which takes one call at a time.
    handle: Mutex<Option<SharedHandle>>,
}

impl fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NcclCommunicator")
    }
}

#[derive(Clone, Copy)]
struct SharedHandle(NcclHandle);

// SAFETY: a communicator may be used by any thread, one at a time.
unsafe impl Send for SharedHandle {}

/// What a call met with that comes after the end.
const ENDED: &str = "its communicator has been ended";

impl NcclCommunicator {
    /// Begins to join the group. Ready when all its ranks have.
    pub(crate) fn join(cuda: &Cuda, id: NcclId, rank: usize, size: usize) -> Result<NcclCommunicator, String> {
        let (nccl, mut handle) = (nccl()?, ptr::null_mut());
        let mut settings = NcclSettings::without_waiting();
        done(cuda.context.bind_to_thread(), "turning to the device");
        // SAFETY: all are there for the call; the device is the thread's.
        let code = unsafe { (nccl.init)(&raw mut handle, size as c_int, id, rank as c_int, &raw mut settings) };
        match code {
            SUCCESS | IN_PROGRESS => Ok(NcclCommunicator { nccl, handle: Mutex::new(Some(SharedHandle(handle))) }),
            code => {
                let told = nccl.told(code, ptr::null_mut());
                if !handle.is_null() {
                    // SAFETY: nobody else has it.
                    let _ = unsafe { (nccl.abort)(handle) };
                }
                Err(told)
            }
        }
    }

    fn held(&self) -> MutexGuard<'_, Option<SharedHandle>> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn checked(&self, code: NcclCode, handle: NcclHandle) -> Result<(), String> {
        if matches!(code, SUCCESS | IN_PROGRESS) { Ok(()) } else { Err(self.nccl.told(code, handle)) }
    }

    /// How far what the last call has begun has come, or what it, or a message, has failed with.
    fn state(&self, SharedHandle(handle): SharedHandle) -> NcclCode {
        let mut state = SUCCESS;
        // SAFETY: who has the handle holds it, and nobody else uses it.
        match unsafe { (self.nccl.state)(handle, &raw mut state) } {
            SUCCESS => state,
            refused => refused,
        }
    }

    /// Whether what the last call has begun is under way on the device.
    ///
    /// # Errors
    /// What it, or a message, has failed with; a communicator that has been ended.
    pub(crate) fn is_ready(&self) -> Result<bool, String> {
        let held = self.held();
        let handle = held.ok_or(ENDED)?;
        let state = self.state(handle);
        self.checked(state, handle.0).map(|()| state == SUCCESS)
    }

    /// What it, or a message, has failed with, and whether another rank is the cause. Nothing, once it has been left or ended.
    pub(crate) fn failure(&self) -> Option<(String, bool)> {
        let held = self.held();
        let handle = (*held)?;
        let state = self.state(handle);
        self.checked(state, handle.0).err().map(|told| (told, state == REMOTE))
    }

    /// Begins to send and to receive, on the stream of collectives.
    ///
    /// # Errors
    /// The library's reason.
    ///
    /// # Safety
    /// The addresses have the bytes until the stream is done with them.
    pub(crate) unsafe fn exchange(
        &self,
        cuda: &Cuda,
        sent: &[NcclMessage],
        received: &[NcclMessage],
    ) -> Result<(), String> {
        let stream = cuda.stream(DeviceStream::Exchange).cu_stream().cast::<c_void>();
        let held = self.held();
        let (nccl, SharedHandle(handle)) = (self.nccl, held.ok_or(ENDED)?);
        // SAFETY: the caller's promise; the handle is there, and nobody else uses it.
        unsafe {
            let mut begun = self.checked((nccl.group_start)(), handle);
            for &NcclMessage { peer, address, bytes } in sent {
                let code = || (nccl.send)(address as *const c_void, bytes, BYTES, peer as c_int, handle, stream);
                begun = begun.and_then(|()| self.checked(code(), handle));
            }
            for &NcclMessage { peer, address, bytes } in received {
                let code = || (nccl.receive)(address as *mut c_void, bytes, BYTES, peer as c_int, handle, stream);
                begun = begun.and_then(|()| self.checked(code(), handle));
            }
            // A group that was begun is ended, whatever became of it.
            let ended = self.checked((nccl.group_end)(), handle);
            begun.and(ended)
        }
    }

    /// Ends what communicators of this thread's device have under way: all together, since one alone waits for what the device
    /// is to do for another first.
    pub(crate) fn abort_all<'a>(communicators: impl Iterator<Item = &'a NcclCommunicator>) {
        let ended: Vec<_> = communicators.filter_map(|one| Some((one.nccl, one.held().take()?))).collect();
        let Some((nccl, _)) = ended.first() else { return };
        // Nobody is left to be told of a failure.
        // SAFETY: the handles are there, and nobody will use them any more.
        unsafe {
            let _ = (nccl.group_start)();
            for (nccl, SharedHandle(handle)) in &ended {
                let _ = (nccl.abort)(*handle);
            }
            let _ = (nccl.group_end)();
        }
    }

    /// Leaves the group, when it has nothing under way. To be called until it is true.
    ///
    /// # Errors
    /// The library's reason; then it is to be aborted.
    pub(crate) fn has_left(&self, is_first_call: bool) -> Result<bool, String> {
        if is_first_call {
            let held = self.held();
            let Some(SharedHandle(handle)) = *held else { return Ok(true) };
            // SAFETY: the handle is there, and nobody else uses it.
            self.checked(unsafe { (self.nccl.finalize)(handle) }, handle)?;
        }
        if !self.is_ready()? {
            return Ok(false);
        }
        // It may take a while, in which nobody is kept from looking.
        let left = self.held().take();
        let Some(SharedHandle(handle)) = left else { return Ok(true) };
        // SAFETY: the handle is there, and nobody will use it any more.
        self.checked(unsafe { (self.nccl.destroy)(handle) }, handle).map(|()| true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vendor's library, where it is installed, has what is called of it, and its words are understood. Without a GPU it
    /// refuses a group before it looks at the settings.
    #[test]
    #[ignore = "wants NVIDIA's library"]
    fn by_nccl_itself() {
        let nccl = nccl().unwrap_or_else(|missing| panic!("{missing}"));
        let id = NcclId::new().unwrap_or_else(|reason| panic!("{reason}"));
        assert_ne!(id.0, [0; 128]);
        let (mut handle, mut settings) = (ptr::null_mut(), NcclSettings::without_waiting());
        // SAFETY: all are there for the call, and a group of one needs nobody else.
        let code = unsafe { (nccl.init)(&raw mut handle, 1, id, 0, &raw mut settings) };
        if !matches!(code, SUCCESS | IN_PROGRESS) {
            let told = nccl.told(code, ptr::null_mut());
            assert!(told.starts_with("NCCL: unhandled cuda error") && told.contains("Cuda failure"), "{told}");
        }
    }
}
