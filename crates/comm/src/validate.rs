//! Does a request make sense on its own? Checked by every implementation before a peer sees it.
//!
//! The thread ranks copy through raw pointers by these counts: what passes here is what makes that sound.

use crate::error::Error;
use crate::operation::{Operation, Request};
use crate::payload::Payload;

/// Checks `request` for rank `rank` of `size`; `world_rank` is who the error names.
pub(crate) fn validate(request: &Request, rank: usize, size: usize, world_rank: usize) -> Result<(), Error> {
    check(&request.operation, rank, size).map_err(|detail| error(request, world_rank, detail))
}

/// The same for a world that moves host memory alone.
pub(crate) fn validate_on_host(request: &Request, rank: usize, size: usize, world_rank: usize) -> Result<(), Error> {
    validate(request, rank, size, world_rank)?;
    let is_on_host = request.operation.given().is_none_or(Payload::is_on_host);
    let why = || "its elements are not in host memory, which is all that this world can move".to_owned();
    ensure(is_on_host, why).map_err(|detail| error(request, world_rank, detail))
}

/// The same for a world that moves memory of devices, too.
pub(crate) fn validate_in_memory(request: &Request, rank: usize, size: usize, world_rank: usize) -> Result<(), Error> {
    validate(request, rank, size, world_rank)?;
    let why = || "it has sizes and no elements, which this world cannot move".to_owned();
    ensure(!request.operation.is_opaque(), why).map_err(|detail| error(request, world_rank, detail))
}

fn error(request: &Request, rank: usize, detail: String) -> Error {
    Error::Counts { rank, operation: request.operation.to_string(), site: request.site, detail }
}

fn check(operation: &Operation, rank: usize, size: usize) -> Result<(), String> {
    match operation {
        Operation::Barrier => Ok(()),
        Operation::Broadcast { root, buf } => {
            check_range("buf", buf)?;
            ensure(*root < size, || format!("root {root} is not among the {size} ranks; choose 0..{size}"))
        }
        Operation::AllReduce { buf, .. } => check_range("buf", buf),
        Operation::AllGather { send, recv, counts } => {
            check_pair(send, recv)?;
            let total = total("counts", counts, size)?;
            check_length("send", send, counts[rank], "counts[own rank]")?;
            check_length("recv", recv, total, "the sum of counts")
        }
        Operation::ReduceScatter { send, recv, counts, .. } => {
            check_pair(send, recv)?;
            let total = total("counts", counts, size)?;
            check_length("send", send, total, "the sum of counts")?;
            check_length("recv", recv, counts[rank], "counts[own rank]")
        }
        Operation::AllToAll { send, send_counts, recv, recv_counts } => {
            check_pair(send, recv)?;
            check_length("send", send, total("send_counts", send_counts, size)?, "the sum of send_counts")?;
            check_length("recv", recv, total("recv_counts", recv_counts, size)?, "the sum of recv_counts")
        }
    }
}

fn ensure(holds: bool, detail: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(detail()) }
}

fn check_pair(send: &Payload, recv: &Payload) -> Result<(), String> {
    check_range("send", send)?;
    check_range("recv", recv)?;
    ensure(send.kind() == recv.kind(), || {
        format!("send holds {} but recv holds {}; lend buffers of one kind", send.kind().name(), recv.kind().name())
    })?;
    let is_together = send.is_on_host() == recv.is_on_host() && send.is_on_device() == recv.is_on_device();
    ensure(is_together, || {
        "send and recv are not in the same memory; lend both from the host or from a device".to_owned()
    })
}

fn check_range(name: &str, payload: &Payload) -> Result<(), String> {
    ensure(payload.is_within_data(), || format!("the range of {name} does not lie within its data"))
}

/// The sum of `counts`, which must be one per rank and must not overflow.
fn total(name: &str, counts: &[usize], size: usize) -> Result<usize, String> {
    ensure(counts.len() == size, || format!("{name} has {} entries for {size} ranks; give one a rank", counts.len()))?;
    let sum = counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
    sum.ok_or_else(|| format!("the sum of {name} overflows"))
}

fn check_length(name: &str, payload: &Payload, expected: usize, rule: &str) -> Result<(), String> {
    ensure(payload.len() == expected, || {
        format!("{name} has {} elements, but {rule} is {expected}; make them equal", payload.len())
    })
}
