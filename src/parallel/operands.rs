//! Collectives between the forms in which the ranks of a group hold one value, each beside its adjoint.
//!
//! A value is *whole* where every rank has the same copy, *split* where each has some of its rows, in rank order, and in
//! *parts* where the sum over the ranks is meant. The gradient of a whole value is whole and that of a split one split;
//! what every rank uses for work of its own comes back in parts.
//!
//! | function | forward | backward |
//! |---|---|---|
//! | [`whole_to_parts`] | identity | all_reduce |
//! | [`parts_to_whole`] | all_reduce | identity |
//! | [`split_to_parts`] | all_gather | reduce_scatter |
//! | [`parts_to_split`] | reduce_scatter | all_gather |
//! | [`split_to_whole`] | all_gather | own rows |
//! | [`whole_as_parts`] | the first rank's alone | identity |
//!
//! `rows` are the numbers of rows of the ranks, the same on each; they may be uneven, and zero. What travels is stored as
//! the value is, its gradient too.

use std::sync::Arc;

use guildhall_comm::{Communicator, Error, Reduce, Request};
use guildhall_tensor::{Cause, Device, Dtype, Tensor, Var};

use super::collectives::kept;
use super::flight::{Flight, arriving, payload, received, tensor};

type Group = Arc<dyn Communicator>;

/// How a value travels: the rows of all ranks, their group, and the type in which it is sent.
struct Wire {
    rows: Vec<usize>,
    group: Group,
    dtype: Dtype,
}

impl Wire {
    fn of(x: &Var, rows: &[usize], group: &Group) -> Wire {
        Wire { rows: rows.to_vec(), group: group.clone(), dtype: x.dtype() }
    }
}

/// What becomes of this rank's `[R, D]`.
type Map = fn(Tensor, &Wire) -> Result<Tensor, Error>;

/// What a segment's second run does for a forward.
enum SecondForward {
    /// The same again: it costs nothing, or what it gives is larger than what it is made of.
    Again(Map),
    /// Nothing, where what came from other ranks is kept.
    Once(Map),
}

use SecondForward::{Again, Once};

/// x is used by every rank for a part of the work: each adds its part of the gradient.
///
/// # Errors
/// What the group reports, here and from the tape.
pub fn whole_to_parts(x: Var, group: &Group) -> Result<Var, Error> {
    let wire = Wire::of(&x, &[], group);
    pair("whole_to_parts", x, wire, Again(identity), all_reduce)
}

/// The sum of all ranks' parts, on every rank.
///
/// # Errors
/// As [`whole_to_parts`].
pub fn parts_to_whole(x: Var, group: &Group) -> Result<Var, Error> {
    let wire = Wire::of(&x, &[], group);
    pair("parts_to_whole", x, wire, Once(all_reduce), identity)
}

/// All rows, which every rank uses for a part of the work.
///
/// # Errors
/// As [`whole_to_parts`].
pub fn split_to_parts(x: Var, rows: &[usize], group: &Group) -> Result<Var, Error> {
    let wire = Wire::of(&x, rows, group);
    pair("split_to_parts", x, wire, Again(gather), reduce_scatter)
}

/// This rank's rows of the sum of all ranks' parts.
///
/// # Errors
/// As [`whole_to_parts`].
pub fn parts_to_split(x: Var, rows: &[usize], group: &Group) -> Result<Var, Error> {
    let wire = Wire::of(&x, rows, group);
    pair("parts_to_split", x, wire, Once(reduce_scatter), gather)
}

/// All rows, with which every rank does the same.
///
/// # Errors
/// As [`whole_to_parts`].
pub fn split_to_whole(x: Var, rows: &[usize], group: &Group) -> Result<Var, Error> {
    let wire = Wire::of(&x, rows, group);
    pair("split_to_whole", x, wire, Again(gather), own_rows)
}

/// x on the first `rank` and zeros on the others: parts whose sum is x. Their gradient must be whole, as behind
/// [`parts_to_whole`] and [`parts_to_split`]; x's is then whole too, and nothing is sent.
pub fn whole_as_parts(x: Var, rank: usize) -> Var {
    let to = x.input();
    let value = match rank {
        0 => x.value().clone(),
        _ => Tensor::zeros(x.device(), x.shape()).cast(x.dtype()),
    };
    x.tape().op("whole_as_parts", value, &[&x], move |gradient, gradients| gradients.add(to, gradient))
}

fn pair(name: &'static str, x: Var, wire: Wire, forward: SecondForward, backward: Map) -> Result<Var, Error> {
    let (to, tape) = (x.input(), x.tape().clone());
    let value = match forward {
        Again(map) => map(x.into_value(), &wire)?,
        Once(map) => tape.keep(kept(&wire.group), || map(x.into_value(), &wire))?,
    };
    Ok(tape.consuming_op(name, value, &[to], move |gradient, gradients| {
        gradients.add(to, backward(gradient, &wire)?);
        Ok(())
    }))
}

fn identity(x: Tensor, _: &Wire) -> Result<Tensor, Error> {
    Ok(x)
}

fn all_reduce(x: Tensor, wire: &Wire) -> Result<Tensor, Error> {
    let (device, shape) = (x.device().clone(), x.shape().to_vec());
    let request = Request::all_reduce(Reduce::Sum, payload(&wire.group, x.into_dtype(wire.dtype)));
    // In its own memory, which is lent by nobody.
    let flight = Flight::start(&wire.group, &device, Cause::Activations, request)?;
    Ok(tensor(&device, &shape, flight.wait()?.recv))
}

fn gather(x: Tensor, wire: &Wire) -> Result<Tensor, Error> {
    all_gather(x.into_dtype(wire.dtype), &wire.rows, &wire.group)
}

/// The rows of all ranks, sent as they are stored, outside any tape.
///
/// # Errors
/// What the group reports.
pub fn all_gather(x: Tensor, rows: &[usize], group: &Group) -> Result<Tensor, Error> {
    let (device, width) = (x.device().clone(), x.cols());
    assert_eq!(x.rows(), rows[group.rank()], "the rows of rank {}", group.rank());
    let shape = [rows.iter().sum(), width];
    let (counts, receive) =
        (rows.iter().map(|rows| rows * width).collect(), arriving(group, &device, &shape, x.dtype()));
    travel(group, &device, &shape, Request::all_gather(payload(group, x), receive, counts))
}

fn reduce_scatter(x: Tensor, wire: &Wire) -> Result<Tensor, Error> {
    let (device, width, rows) = (x.device().clone(), x.cols(), &wire.rows);
    assert_eq!(x.rows(), rows.iter().sum::<usize>(), "the rows of all ranks");
    let shape = [rows[wire.group.rank()], width];
    let (counts, receive) =
        (rows.iter().map(|rows| rows * width).collect(), arriving(&wire.group, &device, &shape, wire.dtype));
    let send = payload(&wire.group, x.into_dtype(wire.dtype));
    travel(&wire.group, &device, &shape, Request::reduce_scatter(Reduce::Sum, send, receive, counts))
}

fn travel(group: &Group, device: &Arc<Device>, shape: &[usize], request: Request) -> Result<Tensor, Error> {
    let flight = Flight::start(group, device, Cause::Communication, request)?;
    Ok(received(device, shape, flight.wait()?))
}

fn own_rows(x: Tensor, wire: &Wire) -> Result<Tensor, Error> {
    let rows = &wire.rows;
    assert_eq!(x.rows(), rows.iter().sum::<usize>(), "the rows of all ranks");
    let first = rows[..wire.group.rank()].iter().sum::<usize>();
    Ok(x.rows_of(first..first + rows[wire.group.rank()]))
}
