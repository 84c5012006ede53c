//! One operation on its way through its stages.

use std::mem;
use std::panic::Location;

use super::moves::{Message, MessagePlace, MessageStage, Moves, Sum};
use super::post::PointToPoint;
use crate::arithmetic::reduce;
use crate::operation::{Operation, Reduce, Request};
use crate::payload::Payload;

/// How far an operation has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RoundPhase {
    First,
    /// The second stage has not begun: those of operations before it come first.
    Between,
    Second,
    Done,
}

/// An operation and the buffers that it was lent. Those of a round that is not done may still be written by whoever carries
/// its messages: [`MessageRound::forsake`] it instead of dropping it.
pub(super) struct MessageRound<T> {
    pub(super) operation: Operation,
    pub(super) site: &'static Location<'static>,
    moves: Moves,
    phase: RoundPhase,
    /// What of this phase's messages is not under way yet.
    rest: Vec<MessageRest>,
    /// Parts of messages under way.
    under_way: Vec<MessageUnderWay<T>>,
    /// The first bytes of what is sent and of what is received.
    buffers: [*mut u8; 2],
    /// By rank of the group: what it alone sends. Words keep every kind of element aligned.
    parts: Vec<Vec<u64>>,
    /// Parts of messages that have left or come and are not counted yet.
    pub(super) moved: u64,
    /// Nobody wants the result.
    pub(super) is_abandoned: bool,
    /// Why it goes no further.
    pub(super) failed: Option<String>,
}

// SAFETY: the pointers are into buffers of the same round.
unsafe impl<T: Send> Send for MessageRound<T> {}

struct MessageUnderWay<T> {
    ticket: T,
    /// Rank of the group that has to send or to take it.
    peer: usize,
    /// Whether this rank sends it.
    is_sent: bool,
}

/// The rest of a message to a peer, or from it.
struct MessageRest {
    /// Rank of the group.
    peer: usize,
    is_sent: bool,
    tag: u32,
    at: *mut u8,
    len: usize,
}

/// Parts of an operation's messages to a peer that may be on their way. A link with few parts in front of it is soon free for
/// other operations; two keep it busy.
const PARTS_SENT: usize = 2;
/// Of messages from a peer: more, so that none that comes has to wait until this rank looks.
const PARTS_AWAITED: usize = 4;

/// Of which stages later operations of a lane may send and receive messages: each peer sends all of a stage in the order of
/// operations.
#[derive(Clone, Copy)]
pub(super) struct StagesOpen {
    pub(super) first: bool,
    pub(super) second: bool,
}

impl StagesOpen {
    pub(super) const BOTH: StagesOpen = StagesOpen { first: true, second: true };
}

/// Where the messages of one lane go.
#[derive(Clone, Copy)]
pub(super) struct LaneAddress<'a> {
    /// Rank of the world of each rank of the group.
    pub(super) members: &'a [usize],
    /// Of the messages of the first stage; those of the second have the next.
    pub(super) tag: u32,
    pub(super) me: usize,
}

static TOKEN: u8 = 0;

impl<T> MessageRound<T> {
    /// Starts a validated operation: its first messages are on their way if they may be.
    pub(super) fn begin<P: PointToPoint<Ticket = T>>(
        request: Request,
        post: &mut P,
        at: LaneAddress,
        open: StagesOpen,
    ) -> Result<MessageRound<T>, String> {
        let Request { operation, site } = request;
        let moves = Moves::of(&operation, at.me, at.members.len());
        let words = |rank: usize| {
            let own = moves.first.receive.iter().find(|message| message.place == MessagePlace::Part(rank));
            vec![0u64; own.map_or(0, |message| message.bytes.len().div_ceil(size_of::<u64>()))]
        };
        let parts = (0..at.members.len()).map(words).collect();
        let (mut operation, under_way) = (operation, Vec::new());
        let buffers = pointers(&mut operation);
        let phase = RoundPhase::First;
        let mut round = MessageRound {
            operation,
            site,
            moves,
            phase,
            rest: Vec::new(),
            under_way,
            buffers,
            parts,
            moved: 0,
            is_abandoned: false,
            failed: None,
        };
        if let Some([from, to]) = round.moves.copy.clone() {
            let (source, target) =
                (round.bytes(MessagePlace::Send, from.start), round.bytes(MessagePlace::Receive, to.start));
            // SAFETY: validation has made both ranges lie within their buffers, which are distinct.
            unsafe { target.copy_from_nonoverlapping(source, from.len()) };
        }
        let stage = mem::take(&mut round.moves.first);
        round.begin_stage(stage, at.tag);
        let started = if open.first { round.start_parts(post, at) } else { Ok(()) };
        match started {
            Ok(()) => Ok(round),
            Err(detail) => {
                round.forsake();
                Err(detail)
            }
        }
    }

    /// Goes on as far as it can without waiting; what is open to later rounds then.
    pub(super) fn go_on<P: PointToPoint<Ticket = T>>(
        &mut self,
        post: &mut P,
        at: LaneAddress,
        open: StagesOpen,
    ) -> StagesOpen {
        if self.failed.is_none() {
            self.failed = self.try_to_go_on(post, at, open).err();
        }
        self.leaves_open(open)
    }

    /// The stages of which later rounds may start messages, where rounds before this one leave `open`.
    pub(super) fn leaves_open(&self, open: StagesOpen) -> StagesOpen {
        let is_started = |phase: RoundPhase| self.phase != phase || self.rest.is_empty();
        let has_begun_second = self.moves.second == MessageStage::default();
        StagesOpen {
            first: open.first && is_started(RoundPhase::First),
            second: open.second && has_begun_second && is_started(RoundPhase::Second),
        }
    }

    fn try_to_go_on<P: PointToPoint<Ticket = T>>(
        &mut self,
        post: &mut P,
        at: LaneAddress,
        open: StagesOpen,
    ) -> Result<(), String> {
        self.collect(post)?;
        if self.phase == RoundPhase::First && open.first {
            self.start_parts(post, at)?;
        }
        if self.phase == RoundPhase::First && self.is_over() {
            if let Some(sum) = self.moves.sum.take() {
                self.sum_up(&sum, at.me);
            }
            let is_over = self.moves.second == MessageStage::default();
            self.phase = if is_over { RoundPhase::Done } else { RoundPhase::Between };
        }
        if self.phase == RoundPhase::Between && open.second {
            let stage = mem::take(&mut self.moves.second);
            self.begin_stage(stage, at.tag + 1);
            self.phase = RoundPhase::Second;
        }
        if self.phase == RoundPhase::Second {
            self.start_parts(post, at)?;
            self.collect(post)?;
        }
        if self.phase == RoundPhase::Second && self.is_over() {
            self.phase = RoundPhase::Done;
        }
        Ok(())
    }

    /// Whether all messages of the phase have left and come.
    fn is_over(&self) -> bool {
        self.rest.is_empty() && self.under_way.is_empty()
    }

    pub(super) fn is_done(&self) -> bool {
        self.phase == RoundPhase::Done
    }

    /// The ranks of the group that still have to send or to take something.
    pub(super) fn awaited(&self) -> Vec<usize> {
        let rest = self.rest.iter().map(|message| message.peer);
        let mut awaited: Vec<usize> = self.under_way.iter().map(|message| message.peer).chain(rest).collect();
        awaited.sort_unstable();
        awaited.dedup();
        awaited
    }

    /// Gives up a round, and leaves its memory to the messages that are under way.
    pub(super) fn forsake(self) {
        if !self.under_way.is_empty() {
            mem::forget(self);
        }
    }

    /// Lets go of the messages that have left or come. Those to or from one peer do so in their order: behind one that has
    /// not, none is looked at.
    fn collect<P: PointToPoint<Ticket = T>>(&mut self, post: &mut P) -> Result<(), String> {
        let (mut failed, mut awaited, mut moved) = (Ok(()), Vec::new(), 0);
        self.under_way.retain_mut(|message| {
            let way = (message.peer, message.is_sent);
            if failed.is_err() || awaited.contains(&way) {
                return true;
            }
            let is_done = post.is_done(&mut message.ticket).unwrap_or_else(|detail| {
                failed = Err(detail);
                false
            });
            if !is_done {
                awaited.push(way);
            }
            moved += u64::from(is_done);
            !is_done
        });
        self.moved += moved;
        failed
    }

    /// Makes a stage's messages those of this phase.
    fn begin_stage(&mut self, stage: MessageStage, tag: u32) {
        for (messages, is_sent) in [(stage.receive, false), (stage.send, true)] {
            for Message { peer, place, bytes } in messages {
                let at = self.bytes(place, bytes.start);
                self.rest.push(MessageRest { peer, is_sent, tag, at, len: bytes.len() });
            }
        }
    }

    /// Starts the next parts of messages to and from peers of which few are under way.
    fn start_parts<P: PointToPoint<Ticket = T>>(&mut self, post: &mut P, at: LaneAddress) -> Result<(), String> {
        let under_way = &mut self.under_way;
        for message in &mut self.rest {
            let &mut MessageRest { peer, is_sent, tag, .. } = message;
            let most = if is_sent { PARTS_SENT } else { PARTS_AWAITED };
            let mut parts = under_way.iter().filter(|part| (part.peer, part.is_sent) == (peer, is_sent)).count();
            while message.len > 0 && parts < most {
                let (rank, start, len) = (at.members[peer], message.at, message.len.min(P::BYTES_MAX));
                // SAFETY: the ranges lie within buffers that this round has until its messages are done; no two
                // messages of a stage write the same bytes, and none is sent from where another is received.
                let ticket = unsafe {
                    if is_sent { post.send(rank, tag, start, len) } else { post.receive(rank, tag, start, len) }
                }?;
                under_way.push(MessageUnderWay { ticket, peer, is_sent });
                (message.at, message.len) = (start.wrapping_add(len), message.len - len);
                parts += 1;
            }
        }
        self.rest.retain(|message| message.len > 0);
        Ok(())
    }

    /// Adds up the parts of all ranks, in rank order.
    fn sum_up(&mut self, Sum { own, to }: &Sum, me: usize) {
        let kind = self.operation.kind().expect("what is summed has elements");
        let how = match &self.operation {
            Operation::AllReduce { reduce, .. } | Operation::ReduceScatter { reduce, .. } => *reduce,
            _ => Reduce::Sum,
        };
        let source = |rank: usize, round: &mut Self| match rank == me {
            true => round.bytes(own.0, own.1.start).cast_const(),
            false => round.bytes(MessagePlace::Part(rank), 0).cast_const(),
        };
        let sources: Vec<*const u8> = (0..self.parts.len()).map(|rank| source(rank, self)).collect();
        let target = self.bytes(to.0, to.1.start);
        // SAFETY: all are buffers of this round, in which no message is under way, and hold the elements of this rank's
        // part, aligned; the target is the own part or in another buffer.
        unsafe { reduce(kind, how, &sources, target, to.1.len() / kind.size()) };
    }

    /// The byte at `at` of a buffer's part that takes part.
    fn bytes(&mut self, place: MessagePlace, at: usize) -> *mut u8 {
        let first = match place {
            MessagePlace::Part(rank) => self.parts[rank].as_mut_ptr().cast(),
            // It is sent alone: those that come go into parts.
            MessagePlace::Token => (&raw const TOKEN).cast_mut(),
            MessagePlace::Send => self.buffers[0],
            MessagePlace::Receive => self.buffers[1],
        };
        // SAFETY: ranges of moves lie within the buffers.
        unsafe { first.add(at) }
    }
}

/// The first bytes that take part of what is sent and of what is received; in place both are the same.
fn pointers(operation: &mut Operation) -> [*mut u8; 2] {
    match operation {
        Operation::Barrier => [std::ptr::null_mut(); 2],
        Operation::Broadcast { buf, .. } | Operation::AllReduce { buf, .. } => [buf.as_mut_bytes_ptr(); 2],
        Operation::AllGather { send, recv, .. }
        | Operation::ReduceScatter { send, recv, .. }
        | Operation::AllToAll { send, recv, .. } => [send, recv].map(Payload::as_mut_bytes_ptr),
    }
}
