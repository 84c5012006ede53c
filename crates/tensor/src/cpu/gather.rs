//! Moving rows by index: gather, scatter-add, a gather of rows that carry others, and the weighted sum that ends an MoE
//! layer.

use super::rows::{dot, for_rows, put_line};
use super::stored::{Stored, StoredNumber, StoredRef, as_numbers};
use crate::cpu::select::NOWHERE;
use crate::device::Device;

/// Choices a token, and elements a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Width {
    pub(crate) k: usize,
    pub(crate) row: usize,
}

pub(crate) fn gather(device: &Device, out: Stored, x: StoredRef, index: &[u32], width: usize, accumulate: bool) {
    match (out, x) {
        (Stored::F32(out), StoredRef::F32(x)) if !accumulate => copy_lines(device, out, x, index, width),
        (Stored::Bf16(out), StoredRef::Bf16(x)) if !accumulate => copy_lines(device, out, x, index, width),
        (out, x) => as_numbers!(Stored(out), StoredRef(x) => put_lines(
            device,
            out,
            x,
            (index, width),
            #[inline(always)]
            |line, from| put_line(line, from, accumulate),
        )),
    }
}

fn copy_lines<T: StoredNumber>(device: &Device, out: &mut [T], x: &[T], index: &[u32], width: usize) {
    put_lines(
        device,
        out,
        x,
        (index, width),
        #[inline(always)]
        |line, from| line.copy_from_slice(from),
    );
}

/// `put(out[i], x[index[i]])` of lines of `width`.
fn put_lines<O: StoredNumber, X: StoredNumber>(
    device: &Device,
    out: &mut [O],
    x: &[X],
    (index, width): (&[u32], usize),
    put: impl Fn(&mut [O], &[X]) + Sync,
) {
    for_rows(
        device,
        out,
        width,
        64,
        #[inline(always)]
        |first, run| {
            for (line, &from) in run.chunks_exact_mut(width).zip(&index[first..]) {
                put(line, &x[from as usize * width..][..width]);
            }
        },
    );
}

/// For every target row, the source rows that add into it: turns a scatter, where threads would collide, into a
/// gather, where each owns its rows and adds in a fixed order.
struct Inverse {
    starts: Vec<u32>,
    sources: Vec<u32>,
}

impl Inverse {
    fn new(index: &[u32], targets: usize) -> Inverse {
        let mut starts = vec![0u32; targets + 1];
        for &to in index {
            starts[to as usize + 1] += 1;
        }
        for i in 0..targets {
            starts[i + 1] += starts[i];
        }
        let (mut next, mut sources) = (starts.clone(), vec![0u32; index.len()]);
        for (from, &to) in index.iter().enumerate() {
            sources[next[to as usize] as usize] = from as u32;
            next[to as usize] += 1;
        }
        Inverse { starts, sources }
    }

    fn of(&self, target: usize) -> &[u32] {
        &self.sources[self.starts[target] as usize..self.starts[target + 1] as usize]
    }
}

pub(crate) fn scatter_add(
    device: &Device,
    out: &mut [f32],
    x: StoredRef,
    index: &[u32],
    width: usize,
    accumulate: bool,
) {
    as_numbers!(StoredRef(x) => add_lines(device, out, x, index, width, accumulate));
}

fn add_lines<X: StoredNumber>(
    device: &Device,
    out: &mut [f32],
    x: &[X],
    index: &[u32],
    width: usize,
    accumulate: bool,
) {
    let inverse = Inverse::new(index, out.len() / width.max(1));
    for_rows(
        device,
        out,
        width,
        64,
        #[inline(always)]
        |first, run| {
            for (i, line) in run.chunks_exact_mut(width).enumerate() {
                if !accumulate {
                    line.fill(0.0);
                }
                for &from in inverse.of(first + i) {
                    let from = &x[from as usize * width..][..width];
                    line.iter_mut().zip(from).for_each(|(o, x)| *o += x.wide());
                }
            }
        },
    );
}

pub(crate) fn carry(
    device: &Device,
    out: Stored,
    x: StoredRef,
    w: &[f32],
    carried: StoredRef,
    order: &[u32],
    carriers: &[u32],
    width: usize,
) {
    as_numbers!(Stored(out), StoredRef(x), StoredRef(carried) => {
        carry_lines(device, out, x, (w, carried), [order, carriers], width)
    });
}

fn carry_lines<O: StoredNumber, X: StoredNumber, C: StoredNumber>(
    device: &Device,
    out: &mut [O],
    x: &[X],
    (w, carried): (&[f32], &[C]),
    [order, carriers]: [&[u32]; 2],
    width: usize,
) {
    for_rows(
        device,
        out,
        width,
        64,
        #[inline(always)]
        |first, run| {
            for (i, line) in run.chunks_exact_mut(width).enumerate() {
                let (from, carrier) = (order[first + i] as usize, carriers[first + i]);
                let from = &x[from * width..][..width];
                if carrier == NOWHERE {
                    put_line(line, from, false);
                } else {
                    let (weight, carried) = (w[carrier as usize], &carried[carrier as usize * width..][..width]);
                    for ((o, x), y) in line.iter_mut().zip(from).zip(carried) {
                        *o = O::of(weight.mul_add(x.wide(), y.wide()));
                    }
                }
            }
        },
    );
}

pub(crate) fn carry_back(
    device: &Device,
    dx: &mut [f32],
    g: &[f32],
    w: &[f32],
    places: &[u32],
    carriers: &[u32],
    width: usize,
    accumulate: bool,
) {
    for_rows(
        device,
        dx,
        width,
        64,
        #[inline(always)]
        |first, run| {
            for (line, &place) in run.chunks_exact_mut(width).zip(&places[first..]) {
                let (g, carrier) = (&g[place as usize * width..][..width], carriers[place as usize]);
                let weight = if carrier == NOWHERE { 1.0 } else { w[carrier as usize] };
                if accumulate {
                    line.iter_mut().zip(g).for_each(|(o, g)| *o = weight.mul_add(*g, *o));
                } else {
                    line.iter_mut().zip(g).for_each(|(o, g)| *o = weight * g);
                }
            }
        },
    );
}

pub(crate) fn carry_back_weights(
    device: &Device,
    dw: &mut [f32],
    x: StoredRef,
    g: &[f32],
    at: &[u32],
    outs: &[u32],
    width: usize,
) {
    as_numbers!(StoredRef(x) => carried_weight_gradients(device, dw, (x, g), [at, outs], width));
}

fn carried_weight_gradients<X: StoredNumber>(
    device: &Device,
    dw: &mut [f32],
    (x, g): (&[X], &[f32]),
    [at, outs]: [&[u32]; 2],
    width: usize,
) {
    for_rows(
        device,
        dw,
        1,
        64,
        #[inline(always)]
        |first, run| {
            for ((dw, &row), &out) in run.iter_mut().zip(&at[first..]).zip(&outs[first..]) {
                *dw = dot(&x[row as usize * width..][..width], &g[out as usize * width..][..width]);
            }
        },
    );
}

/// Columns that are summed at once, in registers.
const COLUMNS: usize = 64;

pub(crate) fn weighted_sum(device: &Device, out: Stored, x: StoredRef, w: &[f32], places: &[u32], width: Width) {
    as_numbers!(Stored(out), StoredRef(x) => weighted_sums(device, out, x, (w, places), width));
}

fn weighted_sums<O: StoredNumber, X: StoredNumber>(
    device: &Device,
    out: &mut [O],
    x: &[X],
    (w, places): (&[f32], &[u32]),
    width: Width,
) {
    let Width { k, row: width } = width;
    for_rows(
        device,
        out,
        width,
        64,
        #[inline(always)]
        |first, run| {
            for (t, line) in run.chunks_exact_mut(width).enumerate() {
                for (out, column) in line.chunks_mut(COLUMNS).zip((0..).step_by(COLUMNS)) {
                    let mut sums = [0.0f32; COLUMNS];
                    for route in (first + t) * k..(first + t + 1) * k {
                        if places[route] != NOWHERE {
                            let from = &x[places[route] as usize * width + column..][..out.len()];
                            sums.iter_mut().zip(from).for_each(|(sum, x)| *sum = w[route].mul_add(x.wide(), *sum));
                        }
                    }
                    out.iter_mut().zip(sums).for_each(|(o, sum)| *o = O::of(sum));
                }
            }
        },
    );
}

pub(crate) fn weighted_sum_back_weights(
    device: &Device,
    dw: &mut [f32],
    x: StoredRef,
    g: &[f32],
    places: &[u32],
    width: Width,
) {
    as_numbers!(StoredRef(x) => weight_gradients(device, dw, (x, g), places, width));
}

fn weight_gradients<X: StoredNumber>(
    device: &Device,
    dw: &mut [f32],
    (x, g): (&[X], &[f32]),
    places: &[u32],
    width: Width,
) {
    let Width { k, row: width } = width;
    for_rows(
        device,
        dw,
        k,
        64,
        #[inline(always)]
        |first, run| {
            for (i, out) in run.iter_mut().enumerate() {
                let route = first * k + i;
                *out = if places[route] == NOWHERE {
                    0.0
                } else {
                    let x = &x[places[route] as usize * width..][..width];
                    dot(x, &g[route / k * width..][..width])
                };
            }
        },
    );
}

pub(crate) fn weighted_sum_back_rows(
    device: &Device,
    dx: &mut [f32],
    g: &[f32],
    w: &[f32],
    places: &[u32],
    width: Width,
    accumulate: bool,
) {
    let Width { k, row: width } = width;
    let routes = routes_of_places(places, dx.len() / width.max(1));
    for_rows(
        device,
        dx,
        width,
        64,
        #[inline(always)]
        |first, run| {
            for (line, &first) in run.chunks_exact_mut(width).zip(&routes.first[first..]) {
                if !accumulate {
                    line.fill(0.0);
                }
                let mut route = first;
                while route != NOWHERE {
                    let from = &g[route as usize / k * width..][..width];
                    let weight = w[route as usize];
                    line.iter_mut().zip(from).for_each(|(o, g)| *o = weight.mul_add(*g, *o));
                    route = routes.next(route);
                }
            }
        },
    );
}

/// The routes of each row, ascending.
struct RoutesOfRows {
    /// Of each row.
    first: Vec<u32>,
    /// Of each route, the next of the same row. Empty where no row has several.
    next: Vec<u32>,
}

impl RoutesOfRows {
    fn next(&self, route: u32) -> u32 {
        if self.next.is_empty() { NOWHERE } else { self.next[route as usize] }
    }
}

fn routes_of_places(places: &[u32], rows: usize) -> RoutesOfRows {
    let mut routes = RoutesOfRows { first: vec![NOWHERE; rows], next: Vec::new() };
    for (route, &place) in places.iter().enumerate().rev().filter(|(_, place)| **place != NOWHERE) {
        let first = &mut routes.first[place as usize];
        if *first != NOWHERE {
            routes.next.resize(places.len(), NOWHERE);
            routes.next[route] = *first;
        }
        *first = route as u32;
    }
    routes
}
