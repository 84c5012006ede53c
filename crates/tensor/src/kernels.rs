//! Every kernel there is, as a verb on tensors, and the one place that looks where tensors are.
//!
//! A line of the table names the kernel, what it writes, what it reads and its other arguments. On the host it runs the
//! function of that name in `cpu/`, which has the same arguments as slices; where tensors are sizes it notes the launch; on
//! an accelerator it launches the kernel of that name in `gpu/kernels/`, of the file named as the module, with the same
//! parameters in the same order. Where results are checked, it must agree with the CPU's, `within` a tolerance if not that of
//! most. `as composed` marks what accelerators make of several launches, or of matrix products, which they have of their own.
//! Kernels allocate nothing that counts: temporaries are operands, made by the op, so that they are seen on any engine.
//!
//! `accumulate` says whether a kernel adds to what its first operand holds. `any` operands are f32 or bf16; `f64` ones have
//! the halves of each number as two u32; `scratch` ones are f32, and what a kernel leaves there is of no use.

use std::ops::Range;

use crate::cpu;
use crate::cpu::activation::Pointwise;
use crate::cpu::adamw::{AdamW, Strips};
use crate::cpu::attention_call::AttentionSizes;
use crate::cpu::columns::ColumnRange;
use crate::cpu::gather::Width;
use crate::cpu::grouped_swiglu::Widths;
use crate::cpu::product::{Matrix, Product};
use crate::cpu::relative_attention_call::RelativeAttentionSizes;
use crate::cpu::select::Among;
use crate::cpu::variation::RowGroup;
use crate::device::Engine;
use crate::draws::Draws;
use crate::gpu::{Call, KernelArgument, OperandKind, TwinTolerance, compare, composed, rounding_of, sums_of};
use crate::ops::NormMoments;
use crate::row_ids::RowIds;
use crate::tensor::Tensor;

macro_rules! operand {
    ($tensor:ident, f32) => {
        $tensor.f32s()
    };
    ($tensor:ident, u32) => {
        $tensor.u32s()
    };
    ($tensor:ident, any) => {
        $tensor.stored_ref()
    };
}

macro_rules! result {
    ($tensor:ident, f32) => {
        $tensor.f32s_mut()
    };
    ($tensor:ident, scratch) => {
        $tensor.f32s_mut()
    };
    ($tensor:ident, u32) => {
        $tensor.u32s_mut()
    };
    ($tensor:ident, f64) => {
        $tensor.u32s_mut()
    };
    ($tensor:ident, any) => {
        $tensor.stored()
    };
}

macro_rules! kind {
    (f32) => {
        OperandKind::F32
    };
    (u32) => {
        OperandKind::U32
    };
    (f64) => {
        OperandKind::F64
    };
    (scratch) => {
        OperandKind::Scratch
    };
    (any) => {
        OperandKind::Any
    };
}

/// A line on an accelerator, and on the CPU where results are checked.
macro_rules! accelerated {
    ($way:tt $gpu:ident $device:ident $module:ident $name:ident
        [$($out:ident: $out_kind:ident),*] [$($in:ident: $in_kind:ident),*] [$($argument:ident: $type:ty),*] $tolerance:expr
    ) => {{
        // The CPU's goes first: what it reads may be overwritten.
        let expected = $gpu.twin().map(|host| {
            $(let mut $out = $out.seen_by(host);)*
            $(let $in = $in.seen_by(host);)*
            crate::kernels::$name($(&mut $out,)* $(&$in,)* $(<$type>::clone(&$argument)),*);
            [$($out),*]
        });
        $device.timed(stringify!($name), || launched!($way $gpu $device $module $name
            [$($out: $out_kind),*] [$($in: $in_kind),*] [$($argument),*]));
        for (got, (want, kind)) in [$(&*$out),*].into_iter().zip(expected.iter().flatten().zip([$(kind!($out_kind)),*])) {
            compare(stringify!($name), got, want, kind, $tolerance());
        }
    }};
}

/// The kernel of a line's name or, of composed lines, the function.
macro_rules! launched {
    ([] $gpu:ident $device:ident $module:ident $name:ident
        [$($out:ident: $out_kind:ident),*] [$($in:ident: $in_kind:ident),*] [$($argument:ident),*]
    ) => {{
        let mut call = Call::new($gpu, &$device, stringify!($module), stringify!($name));
        $(call.output($out, kind!($out_kind));)*
        $(call.input($in, kind!($in_kind));)*
        $(KernelArgument::pass($argument, &mut call);)*
        call.launch();
    }};
    ([composed] $gpu:ident $device:ident $module:ident $name:ident
        [$($out:ident: $out_kind:ident),*] [$($in:ident: $in_kind:ident),*] [$($argument:ident),*]
    ) => {{
        $($out.assert_unique();)*
        composed::$name($gpu, &$device, $($out,)* $($in,)* $($argument),*)
    }};
}

/// Of all operands, each once: what a kernel moves unless its line says otherwise.
fn bytes_of(operands: &[&Tensor]) -> usize {
    operands.iter().map(|operand| operand.len() * operand.dtype().bytes()).sum()
}

macro_rules! kernels {
    ($(
        $(#[$doc:meta])*
        $module:ident::$name:ident($first:ident: $first_kind:ident $(, $out:ident: $out_kind:ident)*)
            reads ($($in:ident: $in_kind:ident),*) with ($($argument:ident: $type:ty),*)
            $(moves ($bytes:expr))? $(within ($tolerance:expr))? $(as $way:ident)?;
    )*) => { $(
        $(#[$doc])*
        #[track_caller]
        #[allow(clippy::too_many_arguments, reason = "operands are what a kernel has")]
        pub(crate) fn $name(
            $first: &mut Tensor,
            $($out: &mut Tensor,)*
            $($in: &Tensor,)*
            $($argument: $type),*
        ) {
            let device = $first.device().clone();
            match device.engine() {
                Engine::Host => device.timed(stringify!($name), || cpu::$module::$name(
                    &device,
                    result!($first, $first_kind),
                    $(result!($out, $out_kind),)*
                    $(operand!($in, $in_kind),)*
                    $($argument),*
                )),
                Engine::Sizes(books) => {
                    let bytes = bytes_of(&[&*$first, $(&*$out,)* $($in),*]);
                    $(let bytes = { let _ = bytes; $bytes };)?
                    books.launch(stringify!($name), bytes);
                }
                Engine::Accelerator(gpu) => {
                    #[cfg(test)]
                    tests::note(stringify!($name), &[(stringify!($first_kind), $first.dtype())
                        $(, (stringify!($out_kind), $out.dtype()))* $(, (stringify!($in_kind), $in.dtype()))*]);
                    // Made only where there is something to compare: it may look at operands.
                    let tolerance = TwinTolerance::default;
                    $(let _ = tolerance;
                    let tolerance = || TwinTolerance::from($tolerance);)?
                    accelerated!([$($way)?] gpu device $module $name
                        [$first: $first_kind $(, $out: $out_kind)*] [$($in: $in_kind),*] [$($argument: $type),*] tolerance);
                }
            }
        }
    )*

    /// Every line.
    #[cfg(test)]
    pub(crate) const TABLE: &[TableLine] = &[$(TableLine {
        module: stringify!($module),
        name: stringify!($name),
        outputs: &[stringify!($first_kind) $(, stringify!($out_kind))*],
        inputs: &[$(stringify!($in_kind)),*],
        arguments: &[$(stringify!($type)),*],
        is_composed: !<[&str]>::is_empty(&[$(stringify!($way))?]),
    }),*];
    };
}

/// A line of the table, for whoever checks that it has its kernel.
#[cfg(test)]
pub(crate) struct TableLine {
    pub(crate) module: &'static str,
    pub(crate) name: &'static str,
    /// The kinds of operands and the types of arguments.
    pub(crate) outputs: &'static [&'static str],
    pub(crate) inputs: &'static [&'static str],
    pub(crate) arguments: &'static [&'static str],
    pub(crate) is_composed: bool,
}

kernels! {
    // --- storage --------------------------------------------------------------------------------------------------
    /// `to[first..] = from[range]`, converted.
    stored::convert(to: any) reads (from: any) with (first: usize, range: Range<usize>)
        moves (range.len() * (to.dtype().bytes() + from.dtype().bytes()));
    /// Every element of `range` becomes `value`.
    stored::fill(to: any) reads () with (value: f32, range: Range<usize>) moves (range.len() * to.dtype().bytes());
    /// `to[i] = first + i % period`.
    stored::count_up(to: u32) reads () with (first: u32, period: u32);
    /// `to (+)= x`.
    stored::put(to: any) reads (x: f32) with (accumulate: bool);
    /// `to[first..] += x[range]`.
    stored::add_range(to: any) reads (x: f32) with (first: usize, range: Range<usize>)
        moves (range.len() * (2 * to.dtype().bytes() + 4));

    // --- element by element ---------------------------------------------------------------------------------------
    /// `out = x + y`.
    elementwise::sum(out: any) reads (x: any, y: any) with ();
    /// `out (+)= x factor`.
    elementwise::scale(out: f32) reads (x: f32) with (factor: f32, accumulate: bool);
    /// `out (+)= x factor`, the factor being an element.
    elementwise::scale_by(out: f32) reads (x: f32, factor: f32) with (accumulate: bool);
    /// `x = x scale factor`, the factor being an element.
    elementwise::scale_in_place(x: f32) reads (factor: f32) with (scale: f32);
    /// `out (+)= x y`.
    elementwise::multiply(out: f32) reads (x: f32, y: f32) with (accumulate: bool);
    /// Zeroes elements with probability p and divides the others by 1 - p; element i of row r draws number
    /// `rows[r] * width + i`.
    elementwise::drop_elements(out: f32) reads (x: f32) with (p: f32, draws: Draws, rows: &RowIds, accumulate: bool);
    /// `out[0] = sum x y`, in f64.
    elementwise::dot(out: f32) reads (x: f32, y: f32) with () as composed;
    /// `out = f(x)`.
    activation::activate(out: any) reads (x: any) with (f: Pointwise);
    /// `dx (+)= f'(x) g`.
    activation::activate_back(dx: f32) reads (x: any, g: f32) with (f: Pointwise, accumulate: bool);
    /// `out = silu(gate) up`, rows of x being `[gate | up]`.
    activation::swiglu(out: any) reads (x: any) with (width: usize);
    activation::swiglu_back(dx: f32) reads (x: any, g: f32) with (width: usize, accumulate: bool);
    /// `out = a sigmoid(1.702 a) (b + 1)` with a and b clamped, rows of x being `[a | b]`.
    activation::clamped_swiglu(out: any) reads (x: any) with (width: usize, limit: f32);
    activation::clamped_swiglu_back(dx: f32) reads (x: any, g: f32) with (width: usize, limit: f32, accumulate: bool);

    // --- products -------------------------------------------------------------------------------------------------
    /// `out[rows of p] (+)= a b`.
    product::multiply_into(out: any) reads (a: any, b: any) with (p: &Product) as composed;
    /// `out[first rows] = a b + row`, for every row.
    product::linear(out: any) reads (a: any, b: any, row: any) with (read: [&Matrix; 2]) as composed;
    /// `dw (+)= g^T x`: g `[R, out]`, x `[R, in]`.
    product::weight_gradient(dw: any, scratch: scratch) reads (g: any, x: any) with (widths: [usize; 2], accumulate: bool) as composed;
    /// The sums of some rows' columns.
    product::column_sums(sums: f32) reads (x: f32) with (rows: usize, accumulate: bool) within (sums_of(x)) as composed;
    /// x in the type of `out`, and the sums of its columns. Accelerators read x twice.
    product::convert_and_sum(out: any, sums: f32) reads (x: f32) with ()
        moves (bytes_of(&[&*out, &*sums, x]) + if out.device().is_wide() { bytes_of(&[x]) } else { 0 })
        within (sums_of(x)) as composed;

    // --- products by expert: `counts[e]` rows of expert e, one expert after the other -------------------------------
    /// `y[rows of e] (+)= x[rows of e] (W_e or W_e^T)`, w `[E, rows, cols]`.
    grouped::grouped_multiply(y: any) reads (x: any, w: any)
        with (counts: &[usize], w_dims: [usize; 2], by_transpose: bool, accumulate: bool) as composed;
    /// `dW_e (+)= g[rows of e]^T x[rows of e]`; zeros for an expert without rows.
    grouped::grouped_weight_gradient(dw: any, scratch: scratch) reads (g: any, x: any)
        with (counts: &[usize], widths: [usize; 2], accumulate: bool) as composed;
    /// Each row becomes its expert's bias.
    grouped::grouped_fill(y: any) reads (bias: any) with (counts: &[usize]);
    /// Each expert's sum of rows.
    grouped::grouped_bias_gradient(db: f32) reads (g: f32) with (counts: &[usize], accumulate: bool)
        within (sums_of(g));
    /// Gate and up of every row.
    grouped_swiglu::gate_and_up(kept: any) reads (x: any, first: any) with (counts: &[usize], widths: Widths) as composed;
    /// The same, and the experts' results while they are in cache.
    grouped_swiglu::swiglu_experts(kept: any, y: any) reads (x: any, first: any, second: any)
        with (counts: &[usize], widths: Widths) within (rounding_of(second)) as composed;
    /// The results from gate and up.
    grouped_swiglu::from_gate_and_up(y: any) reads (kept: any, second: any) with (counts: &[usize], widths: Widths)
        within (rounding_of(second)) as composed;
    /// Turns gate and up into their gradients, fills `hidden` with the gated products and `dx` with the rows' gradient.
    grouped_swiglu::swiglu_experts_back(kept: any, hidden: any, dx: f32) reads (g: any, first: any, second: any)
        with (counts: &[usize], widths: Widths, accumulate: bool) within (rounding_of(second)) as composed;

    // --- norms ----------------------------------------------------------------------------------------------------
    /// `out = x / sqrt(mean(x^2) + eps) w` by rows; `inverse` gets 1 / sqrt(...).
    norm::rms_norm(out: any, inverse: f32) reads (x: any, w: f32) with (eps: f32);
    norm::rms_norm_back(dx: f32) reads (x: any, w: f32, g: f32, inverse: f32) with (accumulate: bool);
    norm::rms_norm_back_weight(dw: f32) reads (x: any, g: f32, inverse: f32) with () as composed;
    /// `out[row] = sum_i x[row, i]^2`.
    norm::square_sums(out: f32) reads (x: f32) with ();
    norm::square_sums_back(dx: f32) reads (x: f32, g: f32) with (accumulate: bool);
    /// RMS norm of rows of which x has some columns; `squares` has the sums over all `columns`.
    norm::rms_norm_of(out: f32, inverse: f32) reads (x: f32, squares: f32, w: f32) with (columns: usize, eps: f32);
    norm::rms_norm_of_back(dx: f32) reads (w: f32, g: f32, inverse: f32) with (accumulate: bool);
    norm::rms_norm_of_back_squares(ds: f32) reads (x: f32, w: f32, g: f32, inverse: f32)
        with (columns: usize, accumulate: bool);
    /// `out = (x - mean) / sqrt(variance + eps) w + b` by rows; `moments` gets mean and inverse deviation.
    norm::layer_norm(out: any, moments: f32) reads (x: any, w: f32, b: f32) with (eps: f32);
    norm::layer_norm_back(dx: f32) reads (x: any, w: f32, g: f32, moments: f32) with (accumulate: bool);
    norm::layer_norm_back_weight(dw: f32) reads (x: any, g: f32, moments: f32) with () as composed;

    /// The two moments of each row that a norm divides by.
    denorm::row_moments(out: f32) reads (x: f32) with (width: usize, kind: NormMoments, eps: f32);
    denorm::row_moments_back(dx: f32) reads (x: f32, moments: f32, g: f32)
        with (width: usize, kind: NormMoments, accumulate: bool);
    /// `out = (x - b) / w m[1] + m[0]` by rows.
    denorm::denormalise(out: f32) reads (x: f32, moments: f32, w: f32, b: f32) with ();
    denorm::denormalise_back(dx: f32) reads (moments: f32, w: f32, g: f32) with (accumulate: bool);
    denorm::denormalise_back_moments(dm: f32) reads (x: f32, w: f32, b: f32, g: f32) with ();
    denorm::denormalise_back_affine(dw: f32, db: f32) reads (x: f32, moments: f32, w: f32, b: f32, g: f32) with ()
        as composed;

    // --- softmax and what follows it --------------------------------------------------------------------------------
    softmax::softmax(out: f32) reads (x: f32) with (width: usize);
    softmax::softmax_back(dx: f32) reads (y: f32, g: f32) with (width: usize, accumulate: bool);
    /// `ln sum exp(x[r])` for every row.
    softmax::log_sum_exp(lse: f32) reads (x: f32) with (width: usize);
    /// `out[0] = sum_r weights[r] lse[r]^2`, in f64.
    softmax::weighted_squares(out: f32) reads (lse: f32, weights: f32) with () as composed;
    softmax::weighted_squares_back(dx: f32) reads (x: f32, lse: f32, weights: f32, g: f32)
        with (width: usize, accumulate: bool);
    /// `chosen` `[T, k]` are the columns of the k largest of each row of scores `[T, width]`, the largest first, of equal
    /// ones the first; NaN is least. [`NOWHERE`](crate::ops::NOWHERE) where there are no more.
    select::top_k(chosen: u32) reads (scores: f32) with (k: usize, width: usize);
    /// Columns `index` of each row, and what `among` makes of them.
    select::select(chosen: f32, y: f32) reads (x: f32, index: u32) with (k: usize, width: usize, among: Among);
    select::select_back(dx: f32) reads (chosen: f32, y: f32, g: f32, index: u32)
        with (k: usize, width: usize, among: Among, accumulate: bool);

    // --- rows by index ----------------------------------------------------------------------------------------------
    /// `out[i] (+)= x[index[i]]`.
    gather::gather(out: any) reads (x: any, index: u32) with (width: usize, accumulate: bool)
        moves (out.len() * (out.dtype().bytes() + x.dtype().bytes()));
    /// `out[index[i]] (+)= x[i]`, rows that nothing adds to being zero.
    gather::scatter_add(out: f32) reads (x: any, index: u32) with (width: usize, accumulate: bool) within (sums_of(x))
        as composed;
    /// `out[t] = sum_j w[t, j] x[places[t, j]]`.
    gather::weighted_sum(out: any) reads (x: any, w: f32, places: u32) with (width: Width);
    /// `dw[t, j] = <x[places[t, j]], g[t]>`.
    gather::weighted_sum_back_weights(dw: f32) reads (x: any, g: f32, places: u32) with (width: Width);
    /// `dx[places[t, j]] (+)= w[t, j] g[t]`.
    gather::weighted_sum_back_rows(dx: f32) reads (g: f32, w: f32, places: u32)
        with (width: Width, accumulate: bool) as composed;
    /// `out[i] = x[order[i]]`, or `w[c] x[order[i]] + carried[c]` with `c = carriers[i]` where there is such a row.
    gather::carry(out: any) reads (x: any, w: f32, carried: any, order: u32, carriers: u32) with (width: usize);
    /// `dx[i] (+)= g[places[i]]`, or `w[c] g[places[i]]` with `c = carriers[places[i]]`.
    gather::carry_back(dx: f32) reads (g: f32, w: f32, places: u32, carriers: u32) with (width: usize, accumulate: bool);
    /// `dw[c] = <x[at[c]], g[outs[c]]>`.
    gather::carry_back_weights(dw: f32) reads (x: any, g: f32, at: u32, outs: u32) with (width: usize)
        moves ((x.dtype().bytes() + 4) * at.len() * width);
    /// Rows of the table by id, the first of which is `first`; zeros for ids it does not have.
    embedding::look_up(out: any) reads (table: any, ids: u32) with (first: usize, width: usize)
        moves (2 * out.len() * out.dtype().bytes());
    embedding::look_up_back(table: any, scratch: scratch) reads (g: f32, ids: u32)
        with (first: usize, width: usize, accumulate: bool) within (sums_of(g)) as composed;

    // --- loss -------------------------------------------------------------------------------------------------------
    /// Logits of some rows become `exp(logit - top)`; `statistics` gets top, sum and target of each row.
    cross_entropy::to_exponentials(block: f32, statistics: f32) reads (targets: u32)
        with (rows: Range<usize>, classes: Range<usize>);
    /// Statistics of rows over all parts' classes, from `[parts, rows, 3]`.
    cross_entropy::join_statistics(joined: f32) reads (parts: f32) with ();
    /// The loss of each row.
    cross_entropy::row_losses(losses: f32) reads (joined: f32, targets: u32) with (rows: Range<usize>);
    /// Exponentials become the gradients of the rows' losses.
    cross_entropy::to_gradients(block: f32) reads (own: f32, joined: f32, targets: u32)
        with (rows: Range<usize>, classes: Range<usize>);
    /// The sum of each of as many equal stretches of losses.
    cross_entropy::stretch_sums(sums: f32) reads (losses: f32) with ();
    /// `out[0] = scale sum losses`, in f64, block by block.
    cross_entropy::total(out: f32) reads (losses: f32) with (block: usize, scale: f32) as composed;

    // --- columns ----------------------------------------------------------------------------------------------------
    /// `out (+)=` columns of x.
    columns::columns(out: any) reads (x: any) with (columns: ColumnRange, accumulate: bool)
        moves (out.len() * (out.dtype().bytes() + x.dtype().bytes()));
    /// The columns of d become g, or g is added to them; without `accumulate` the others become zeros.
    columns::columns_back(d: f32) reads (g: f32) with (columns: ColumnRange, accumulate: bool);
    /// Row r of x and, behind it, row `r / repeats` of other.
    columns::beside(out: any) reads (x: any, other: any) with (widths: [usize; 2], repeats: usize);
    /// `d (+)=` the sums of columns of g over every `repeats` rows.
    columns::beside_back(d: f32) reads (g: f32) with (columns: ColumnRange, repeats: usize, accumulate: bool)
        moves (4 * (d.len() * (repeats + 1))) within (sums_of(g));

    // --- attention --------------------------------------------------------------------------------------------------
    /// From the fused projection; `keys` `[T, 2]` are the positions each token sees, `turns` cosines and sines.
    attention::attention(out: f32, lse: f32) reads (qkv: any, keys: u32, cos: f32, sin: f32) with (shape: AttentionSizes) within (rounding_of(qkv)) as composed;
    attention::attention_back(dqkv: f32) reads (qkv: any, out: any, lse: f32, g: f32, keys: u32, cos: f32, sin: f32)
        with (shape: AttentionSizes) within (rounding_of(qkv)) as composed;
    /// From queries, keys and values in tensors of their own; keys may be of other tokens than queries.
    attention::attention_apart(out: f32, lse: f32) reads (q: any, k: any, v: any, keys: u32, cos: f32, sin: f32,
        bias: f32, sinks: f32) with (shape: AttentionSizes) within (rounding_of(q)) as composed;
    /// Of what rows share (bias, sinks) each row of the batch gets a copy, to be added up.
    attention::attention_apart_back(dq: f32, dk: f32, dv: f32, dbias: f32, dsinks: f32)
        reads (q: any, k: any, v: any, out: any, lse: f32, g: f32, keys: u32, cos: f32, sin: f32, bias: f32, sinks: f32)
        with (shape: AttentionSizes) within (rounding_of(q)) as composed;
    /// New tokens attend to the cache, `cached` tokens of it, and to themselves, whose keys and values are added to it.
    cached_attention::attend_cached(out: f32, keys: f32, values: f32)
        reads (qkv: f32, cos: f32, sin: f32, bias: f32, sinks: f32) with (shape: AttentionSizes, cached: usize, window: usize);
    relative_attention::relative_attention(out: f32, lse: f32)
        reads (q: any, kv: any, distances: any, u: f32, v: f32, first_key: u32, own_key: u32)
        with (shape: RelativeAttentionSizes);
    /// Of what rows share (`distances`, u, v) each row of the batch gets a copy, to be added up.
    relative_attention::relative_attention_back(dq: f32, dkv: f32, remembered: f32, ddistances: f32, du: f32, dv: f32)
        reads (q: any, kv: any, distances: any, u: f32, v: f32, first_key: u32, own_key: u32,
            out: any, lse: f32, g: f32)
        with (shape: RelativeAttentionSizes);
    /// `to (+)=` the sum of copies.
    relative_attention::sum_copies(to: f32) reads (parts: f32) with (accumulate: bool) within (sums_of(parts));
    cached_attention::relative_attend_cached(out: f32, keys: f32, values: f32)
        reads (q: f32, kv: f32, distances: f32, u: f32, v: f32, first_key: u32) with (shape: RelativeAttentionSizes, cached: usize);

    // --- losses of noisy gates --------------------------------------------------------------------------------------
    /// For each element, the one it is measured against.
    variation::thresholds(against: u32) reads (noisy: f32) with (width: usize, k: usize);
    /// `z = (clean - noisy[against]) / sigma`, `p = Phi(z)`.
    variation::chances(p: f32, z: f32) reads (clean: f32, sigma: f32, noisy: f32, against: u32) with ();
    variation::chances_back_clean(d: f32) reads (z: f32, sigma: f32, g: f32) with (accumulate: bool);
    variation::chances_back_sigma(d: f32) reads (z: f32, sigma: f32, g: f32) with (accumulate: bool);
    variation::chances_back_noisy(d: f32) reads (z: f32, sigma: f32, g: f32, against: u32)
        with (width: usize, accumulate: bool);
    /// Column j of each row at column `index[r, j]` of a wider row of zeros.
    variation::scatter_columns(out: f32) reads (x: f32, index: u32) with (k: usize, width: usize);
    variation::scatter_columns_back(d: f32) reads (g: f32, index: u32) with (k: usize, width: usize, accumulate: bool);
    /// `out[0]` = weighted squared variations of groups, `slopes` `[groups, width]` those along each column's sum.
    variation::squared_variation(out: f32, slopes: f32) reads (x: f32) with (width: usize, groups: &[RowGroup]);
    variation::squared_variation_back(d: f32) reads (slopes: f32, g: f32)
        with (width: usize, groups: &[RowGroup], accumulate: bool);

    // --- the optimizer ----------------------------------------------------------------------------------------------
    /// One step of AdamW in place, by elements of weights and gradient from `firsts` on; strips of state are m, v and, where
    /// weights are bf16, their master.
    adamw::adamw(weights: any, state: f32) reads (gradient: f32) with (rule: &AdamW, firsts: [usize; 2], strips: Strips)
        moves (28 * strips.len);
    /// The same with the gradient as the last strip.
    adamw::adamw_of_strip(weights: any, state: f32) reads () with (rule: &AdamW, first: usize, strips: Strips)
        moves (28 * strips.len);
    /// `sums[place] += sum x[t]^2` of every tile t of so many elements of `range`, one tile after the other; an f64 in two
    /// halves.
    adamw::add_squares(sums: f64) reads (x: f32) with (place: usize, range: Range<usize>, tile: usize)
        moves (4 * range.len()) as composed;
}

#[cfg(test)]
mod tests;
