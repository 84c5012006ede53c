//! Messages carried by MPI, for ranks that are processes under `mpirun` or `srun`.
//!
//! One thread at a time calls MPI, whichever it is (`MPI_THREAD_SERIALIZED`): the engine's lock sees to it. Everything
//! travels over one communicator of our own, as bytes, in parts of 256 KiB, so that counts never overflow an `int`. Groups
//! are told apart by tags, of which MPI promises 32 768.

use std::ffi::{c_char, c_int};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

use mpi::ffi;

use super::post::PointToPoint;

/// This process's part in an MPI world: to be started once, before anything else is done with MPI, and left by the thread
/// that started it.
pub struct Session {
    rank: usize,
    size: usize,
    comm: ffi::MPI_Comm,
    /// MPI wants to be left by the thread that entered it.
    thread: PhantomData<*const ()>,
}

impl Session {
    /// Joins the world that a launcher has made; without one, a world of this process alone.
    ///
    /// # Errors
    /// What MPI reports; a library that lets one thread alone call it.
    pub fn start() -> Result<Session, String> {
        // SAFETY: MPI is entered once, as the documentation asks of the caller; the statics are the library's constants.
        unsafe {
            let (serialized, mut provided) = (ffi::RSMPI_THREAD_SERIALIZED, 0);
            check(ffi::MPI_Init_thread(null_mut(), null_mut(), serialized, &raw mut provided))?;
            if provided < serialized {
                return Err("this MPI library was built for one thread; build it with thread support".to_owned());
            }
            // What belongs to no communicator is reported as the world's errors are, and since MPI 4 as those of this process
            // alone: by ending the process, until this.
            for comm in [ffi::RSMPI_COMM_WORLD, ffi::RSMPI_COMM_SELF] {
                check(ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN))?;
            }
            let mut comm = MaybeUninit::uninit();
            check(ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, comm.as_mut_ptr()))?;
            let comm = comm.assume_init();
            check(ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN))?;
            let (mut rank, mut size) = (0, 0);
            check(ffi::MPI_Comm_rank(comm, &raw mut rank))?;
            check(ffi::MPI_Comm_size(comm, &raw mut size))?;
            Ok(Session { rank: rank as usize, size: size as usize, comm, thread: PhantomData })
        }
    }

    /// This process's place in the world.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Processes of the world.
    pub fn size(&self) -> usize {
        self.size
    }

    /// What carries the messages of this process: one at a time.
    pub fn post(&self) -> MpiPost {
        MpiPost { rank: self.rank, size: self.size, comm: self.comm }
    }

    /// Leaves the world when all its processes do. A process whose world has failed ends without: its launcher then ends
    /// the others.
    ///
    /// # Errors
    /// What MPI reports.
    pub fn leave(self) -> Result<(), String> {
        // SAFETY: it has been entered by this thread, and communicators are gone or have nothing under way.
        check(unsafe { ffi::MPI_Finalize() })
    }
}

/// Carries messages between the processes of an MPI world.
pub struct MpiPost {
    rank: usize,
    size: usize,
    comm: ffi::MPI_Comm,
}

// SAFETY: a communicator is a handle of the library, which any thread may use, one at a time.
unsafe impl Send for MpiPost {}

/// A message under way.
pub struct MpiTicket {
    request: ffi::MPI_Request,
    /// Bytes to be received.
    awaited: Option<usize>,
}

// SAFETY: as for the communicator.
unsafe impl Send for MpiTicket {}

impl PointToPoint for MpiPost {
    type Ticket = MpiTicket;

    /// Far from MPI's largest count, and two milliseconds of a link of 1 Gbit/s.
    const BYTES_MAX: usize = 256 << 10;

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn tag_max(&self) -> u32 {
        32_767
    }

    unsafe fn send(&mut self, to: usize, tag: u32, bytes: *const u8, len: usize) -> Result<MpiTicket, String> {
        let (len, to, tag) = (len as c_int, to as c_int, tag as c_int);
        let mut request = MaybeUninit::uninit();
        // SAFETY: the caller vouches for the bytes until the request is done.
        let request = unsafe {
            let kind = ffi::RSMPI_UINT8_T;
            check(ffi::MPI_Isend(bytes.cast(), len, kind, to, tag, self.comm, request.as_mut_ptr()))?;
            request.assume_init()
        };
        Ok(MpiTicket { request, awaited: None })
    }

    unsafe fn receive(&mut self, from: usize, tag: u32, bytes: *mut u8, len: usize) -> Result<MpiTicket, String> {
        let (count, from, tag) = (len as c_int, from as c_int, tag as c_int);
        let mut request = MaybeUninit::uninit();
        // SAFETY: as above.
        let request = unsafe {
            let kind = ffi::RSMPI_UINT8_T;
            check(ffi::MPI_Irecv(bytes.cast(), count, kind, from, tag, self.comm, request.as_mut_ptr()))?;
            request.assume_init()
        };
        Ok(MpiTicket { request, awaited: Some(len) })
    }

    fn is_done(&mut self, ticket: &mut MpiTicket) -> Result<bool, String> {
        let (mut is_done, mut count) = (0, 0);
        let mut status = MaybeUninit::uninit();
        // SAFETY: the request has been started and is not done; the status is read when it has been written.
        unsafe {
            check(ffi::MPI_Test(&raw mut ticket.request, &raw mut is_done, status.as_mut_ptr()))?;
            if is_done == 0 || ticket.awaited.is_none() {
                return Ok(is_done != 0);
            }
            check(ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &raw mut count))?;
        }
        match ticket.awaited {
            Some(awaited) if awaited != count as usize => {
                Err(format!("{count} bytes came where {awaited} are received"))
            }
            _ => Ok(true),
        }
    }
}

/// The library's words for an error code.
fn check(code: c_int) -> Result<(), String> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    // As long as the longest text of any library.
    let (mut text, mut len) = ([0 as c_char; 8192], 0);
    // SAFETY: the buffer holds any text.
    let told = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &raw mut len) };
    let words: Vec<u8> = text[..(len.max(0) as usize).min(text.len())].iter().map(|&letter| letter as u8).collect();
    match told == ffi::MPI_SUCCESS as c_int {
        true => Err(format!("MPI: {}", String::from_utf8_lossy(&words))),
        false => Err(format!("MPI: error {code}")),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// Both in one test: MPI is entered once. Without a launcher there is a world of one.
    #[test]
    fn what_mpi_reports_and_what_it_loses_are_errors() {
        let session = Session::start().expect("MPI can be entered");
        let mut post = session.post();
        let (sent, mut received) = ([1u8; 4], [0u8; 8]);
        // SAFETY: the bytes live until the session is left.
        unsafe {
            let nobody = post.send(1, 0, sent.as_ptr(), sent.len()).map(|_| ()).expect_err("there is no rank 1");
            assert!(nobody.starts_with("MPI: ") && nobody.contains("rank"), "{nobody}");
            for (tag, awaited) in [(1, 4), (2, 8)] {
                let mut coming = post.receive(0, tag, received.as_mut_ptr(), awaited).expect("it is awaited");
                let mut going = post.send(0, tag, sent.as_ptr(), sent.len()).expect("it is sent");
                let since = Instant::now();
                let mut end = |ticket: &mut MpiTicket| loop {
                    match post.is_done(ticket) {
                        Ok(false) => assert!(since.elapsed() < Duration::from_secs(60), "it is still under way"),
                        end => break end,
                    }
                };
                assert_eq!(end(&mut going), Ok(true));
                let came = end(&mut coming);
                let told = if awaited == 4 { Ok(true) } else { Err("4 bytes came where 8 are received".to_owned()) };
                assert_eq!(came, told);
            }
        }
        session.leave().expect("all is done");
    }
}
