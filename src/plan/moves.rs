//! Rows that move, within a rank and between ranks: of sizes, as `src/parallel/{collectives,operands}.rs` and
//! `crates/tensor/src/ops/rows.rs` have them.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use guildhall_comm::Collective;
use guildhall_tensor::{Cause, Dtype};

use super::books::{Books, When};
use super::sketch::{Array, Gradients};
use super::tape::Tape;
use super::var::Var;
use crate::parallel::Axis;

/// A group of ranks as one of them sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) axis: Axis,
    pub(super) size: u64,
    pub(super) index: u64,
}

impl Group {
    /// Tells the others what every rank of the group gets to know: `bytes` from each.
    pub(super) fn all_gather(self, books: &Books, bytes: u64) {
        self.gather(books, When::Now, bytes);
    }

    /// The same, ahead of its use.
    pub(super) fn all_gather_ahead(self, books: &Books, bytes: u64) {
        self.gather(books, When::Ahead, bytes);
    }

    fn gather(self, books: &Books, when: When, bytes: u64) {
        books.send(self.axis, Collective::AllGather, when, (self.size - 1) * bytes);
    }

    /// Adds up `bytes`.
    pub(super) fn all_reduce(self, books: &Books, when: When, bytes: u64) {
        books.send(self.axis, Collective::AllReduce, when, 2 * (self.size - 1) * bytes / self.size);
    }

    /// Adds up `bytes`, of which this rank gets `own`.
    pub(super) fn reduce_scatter(self, books: &Books, when: When, (bytes, own): (u64, u64)) {
        books.send(self.axis, Collective::ReduceScatter, when, bytes - own);
    }

    /// Part `index` of `parts` nearly equal ones.
    pub(super) fn share(self, size: u64) -> u64 {
        let bound = |index: u64| (u128::from(size) * u128::from(index) / u128::from(self.size)) as u64;
        bound(self.index + 1) - bound(self.index)
    }
}

fn buffer(books: &Rc<Books>, size: (u64, u64), dtype: Dtype) -> Array {
    Array::new(books, Cause::Communication, size, dtype)
}

/// What was sent comes back and is dropped; what arrived is there.
fn received((sent, arrived): (Array, Array)) -> Array {
    drop(sent);
    arrived
}

/// How one form of a value becomes another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Map {
    Identity,
    AllReduce,
    AllGather,
    ReduceScatter,
    OwnRows,
}

impl Map {
    /// `rows` of all ranks together.
    fn apply(self, x: Array, (rows, dtype): (u64, Dtype), group: Group) -> Array {
        let books = x.books().clone();
        let (own, all) = ((group.share(rows), x.cols), (rows, x.cols));
        match self {
            Map::Identity => x,
            Map::AllReduce => {
                let x = x.into_dtype(dtype).depart(Cause::Activations);
                group.all_reduce(&books, When::Now, x.bytes());
                x
            }
            Map::AllGather => {
                let x = x.into_dtype(dtype);
                let arrives = buffer(&books, all, dtype);
                let x = x.depart(Cause::Communication);
                group.all_gather(&books, x.bytes());
                received((x, arrives))
            }
            Map::ReduceScatter => {
                let arrives = buffer(&books, own, dtype);
                let x = x.into_dtype(dtype).depart(Cause::Communication);
                group.reduce_scatter(&books, When::Now, (x.bytes(), arrives.bytes()));
                received((x, arrives))
            }
            Map::OwnRows => Array::new(&books, Cause::Activations, own, x.dtype),
        }
    }
}

/// How tokens lie on a tensor group between sub-layers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    pub(super) tokens: u64,
    pub(super) group: Group,
    pub(super) split: bool,
}

impl Stream {
    /// The tokens that are here.
    pub(super) fn here(&self) -> u64 {
        if self.split { self.group.share(self.tokens) } else { self.tokens }
    }

    pub(super) fn whole(self, tokens: u64) -> Stream {
        Stream { tokens, split: false, ..self }
    }

    fn pair(&self, x: Var, whole: (Map, Map), split: (Map, Map)) -> Var {
        let (forward, backward) = if self.split { split } else { whole };
        let (to, tape, group, wire) = (x.node, x.tape.clone(), self.group, (self.tokens, x.dtype()));
        let value = match forward {
            // What they give is larger than what it is made of, or costs nothing: it is made again.
            Map::Identity | Map::OwnRows | Map::AllGather => forward.apply(x.into_value(), wire, group),
            Map::AllReduce | Map::ReduceScatter => tape.keep(group, || forward.apply(x.into_value(), wire, group)),
        };
        tape.consuming_op(value, &[to], move |gradient, gradients| {
            gradients.add(to, backward.apply(gradient, wire, group));
        })
    }

    pub(super) fn parts_of(&self, x: &Var) -> Var {
        self.pair(x.clone(), (Map::Identity, Map::AllReduce), (Map::AllGather, Map::ReduceScatter))
    }

    pub(super) fn sum_of_parts(&self, x: Var) -> Var {
        self.pair(x, (Map::AllReduce, Map::Identity), (Map::ReduceScatter, Map::AllGather))
    }

    pub(super) fn whole_of(&self, x: &Var) -> Var {
        match self.split {
            false => x.clone(),
            true => self.pair(x.clone(), (Map::Identity, Map::Identity), (Map::AllGather, Map::OwnRows)),
        }
    }

    /// A bias that the first rank adds; others have zeros instead.
    pub(super) fn once(&self, x: Var) -> Var {
        let to = x.node;
        let value = match self.group.index {
            0 => x.value().clone(),
            _ => x.value().f32_like().cast(x.value().dtype),
        };
        x.tape.op(value, &[&x], move |gradient, gradients| gradients.add(to, gradient))
    }
}

/// Rows to and from every rank of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowCounts {
    pub send: Vec<u64>,
    pub receive: Vec<u64>,
}

impl RowCounts {
    /// Those to some ranks and from some.
    pub(super) fn between(&self, to: &Range<usize>, from: &Range<usize>) -> RowCounts {
        let only = |rows: &[u64], ranks: &Range<usize>| {
            let here = |(rank, &n): (usize, &u64)| if ranks.contains(&rank) { n } else { 0 };
            rows.iter().enumerate().map(here).collect()
        };
        RowCounts { send: only(&self.send, to), receive: only(&self.receive, from) }
    }

    pub(super) fn swapped(&self) -> RowCounts {
        RowCounts { send: self.receive.clone(), receive: self.send.clone() }
    }

    pub(super) fn sent(&self) -> u64 {
        self.send.iter().sum()
    }

    fn received(&self) -> u64 {
        self.receive.iter().sum()
    }
}

/// What a collective sends and what it fills.
type Flight = (Array, Array);

/// The way back of a collective, from the gradient of what arrived.
type Return = Box<dyn FnOnce(Array) -> Flight>;

/// A collective that has been started, unless a segment's second run has its result already.
pub(super) struct Underway {
    mark: Var,
    flight: Option<Flight>,
    group: Group,
    start_back: Return,
    /// The way back, between its start and its end.
    returning: Rc<RefCell<Option<Flight>>>,
}

fn exchange(rows: Array, counts: &RowCounts, group: Group) -> Flight {
    let (books, width) = (rows.books().clone(), rows.cols);
    let arrives = buffer(&books, (counts.received(), width), rows.dtype);
    let others = counts.send.iter().sum::<u64>() - counts.send.get(group.index as usize).copied().unwrap_or(0);
    books.send(group.axis, Collective::AllToAll, When::Now, others * width * rows.dtype.bytes() as u64);
    (rows.depart(Cause::Communication), arrives)
}

/// Rows go to others, and others' come.
pub(super) fn start_all_to_all(x: Var, counts: &RowCounts, group: Group) -> Underway {
    let (to, tape, dtype, back) = (x.node, x.tape.clone(), x.dtype(), counts.swapped());
    let flight = (!tape.has_kept(group)).then(|| exchange(x.into_value(), counts, group));
    let start_back: Return = Box::new(move |gradient| exchange(gradient.into_dtype(dtype), &back, group));
    Underway::new(&tape, (flight, group), start_back, to, move |flight, gradients| gradients.add(to, received(flight)))
}

/// Some parts of a weight, `own` elements of this rank's and `all` over the group, come to every rank; the sums of their
/// gradients return.
pub(super) fn start_gather_parts(x: &Var, (own, all): ((u64, u64), (u64, u64)), group: Group) -> Underway {
    let (to, dtype, whole) = (x.node, x.dtype(), x.size());
    let books = x.tape.books().clone();
    let flight = (!x.tape.has_kept(group)).then(|| {
        let (sends, arrives) = (buffer(&books, own, dtype), buffer(&books, all, dtype));
        group.all_gather(&books, sends.bytes());
        (sends, arrives)
    });
    let start_back: Return = Box::new(move |gradient| {
        let gradient = gradient.into_dtype(dtype);
        let arrives = buffer(gradient.books(), own, dtype);
        let sends = gradient.depart(Cause::Communication);
        group.reduce_scatter(arrives.books(), When::Now, (sends.bytes(), arrives.bytes()));
        (sends, arrives)
    });
    Underway::new(&x.tape, (flight, group), start_back, to, move |flight, gradients| {
        let _sums = received(flight).into_f32();
        gradients.write(to, whole, || ());
    })
}

impl Underway {
    fn new(
        tape: &Tape,
        (flight, group): (Option<Flight>, Group),
        start_back: Return,
        to: Option<usize>,
        deliver: impl FnOnce(Flight, &mut Gradients) + 'static,
    ) -> Underway {
        let returning = Rc::new(RefCell::new(None::<Flight>));
        let arriving = returning.clone();
        let mark = tape.consuming_op(buffer(tape.books(), (0, 0), Dtype::F32), &[to], move |_, gradients| {
            if let Some(flight) = arriving.take() {
                deliver(flight, gradients);
            }
        });
        Underway { mark, flight, group, start_back, returning }
    }

    pub(super) fn finish(self) -> Var {
        let Underway { mark, flight, group, start_back, returning } = self;
        let (to, tape) = (mark.node, mark.tape);
        let value = tape.keep(group, || received(flight.expect("what is not kept was started")));
        tape.consuming_op(value, &[to], move |gradient, gradients| {
            let empty = buffer(gradient.books(), (0, 0), Dtype::F32);
            returning.replace(Some(start_back(gradient)));
            gradients.add(to, empty);
        })
    }
}

impl Var {
    /// `rows` of this, some maybe more than once: whole rows are copied.
    pub(super) fn gather_rows(&self, rows: u64) -> Var {
        let (x, to, size, dtype) = (self.clone(), self.node, self.size(), self.dtype());
        let index = Array::new(self.tape.books(), Cause::Activations, (rows, 1), Dtype::U32);
        let make = move || {
            let out = x.value().f32(rows, size.1);
            drop(x.value().to_f32());
            out.books().pass(2 * out.bytes());
            out.cast(dtype)
        };
        self.tape.late_op(((rows, size.1), dtype), &[self], make, move |g, gradients| {
            let _index = index;
            g.books().pass(2 * g.bytes());
            gradients.write(to, size, || ());
        })
    }

    /// This rank's part, of `own` rows, of copying `all` rows together.
    pub(super) fn gather_rows_in_part(&self, (own, all): (u64, u64), group: Group) -> Var {
        let (to, size, dtype) = (self.node, self.value().size(), self.value().dtype);
        let (_own, index, out) =
            (self.value().f32(own, 1), self.value().f32(all, 1), self.value().f32(own, self.cols()));
        drop(self.value().to_f32());
        self.tape.books().pass(2 * out.bytes());
        self.tape.op(out.cast(self.value().dtype), &[self], move |g, gradients| {
            let gathered = Map::AllGather.apply(g, (all, dtype), group);
            let (_index, _places, g) = (index, gathered.f32(all, 1), gathered.f32_like());
            drop(gathered);
            g.books().pass(4 * g.bytes());
            gradients.write(to, size, || ());
        })
    }

    pub(super) fn concat_rows(parts: Vec<Var>) -> Var {
        let (tape, dtype, cols) = (parts[0].tape.clone(), parts[0].value().dtype, parts[0].cols());
        let out = parts[0].value().f32(parts.iter().map(Var::rows).sum(), cols);
        let pieces: Vec<_> = parts.iter().map(|part| (part.node, part.value().size())).collect();
        let inputs: Vec<&Var> = parts.iter().collect();
        tape.books().pass(2 * out.bytes());
        tape.op(out.cast(dtype), &inputs, move |g, gradients| {
            g.books().pass(2 * g.bytes());
            pieces.into_iter().for_each(|(to, (rows, cols))| gradients.add(to, g.f32(rows, cols)));
        })
    }

    /// Weights `[T, K]` of rows `[R, D]` give `[T, D]`.
    pub(super) fn weighted_sum_rows(&self, weights: &Var) -> Var {
        let (x, w) = (self.value().clone(), weights.value().clone());
        let (out, places) = (x.f32(w.rows, x.cols), w.f32_like());
        drop((x.to_f32(), w.to_f32()));
        let to = (self.node, weights.node);
        x.books().pass(x.bytes() + out.bytes());
        self.tape.op(out.cast(x.dtype), &[self, weights], move |g, gradients| {
            let _places = places;
            g.books().pass(3 * x.bytes());
            let (size, x32, w32) = (x.size(), x.to_f32(), w.to_f32());
            gradients.add(to.1, w32.f32_like());
            gradients.write(to.0, size, || ());
            drop(x32);
        })
    }
}
