//! The ops of `crates/tensor/src/ops`, of sizes: what each takes for a moment, what it keeps until its way back, what it
//! makes there. In the order of the originals; a change there is one here, and `tests/it/plan.rs` sees a difference.

use guildhall_tensor::Dtype;

use super::books::Work;
use super::sketch::{Array, Gradients};
use super::var::Var;

/// Rows of logits that the head makes at a time.
const HEAD_ROWS: u64 = 256;

impl Var {
    pub(super) fn rows(&self) -> u64 {
        self.size().0
    }

    pub(super) fn cols(&self) -> u64 {
        self.size().1
    }

    fn pass(&self, bytes: u64) {
        self.tape.books().pass(bytes);
    }

    /// An op of one input whose way back needs what `kept` holds, and writes the input's gradient.
    fn local<T: 'static>(&self, out: Array, kept: T, needs: impl FnOnce(&T) -> Vec<Array> + 'static) -> Var {
        let (to, size, dtype) = (self.node, self.value().size(), self.value().dtype);
        self.pass(self.value().bytes() + out.bytes());
        self.tape.op(out.cast(dtype), &[self], move |g, gradients| {
            g.books().pass(3 * g.bytes());
            let _needed = needs(&kept);
            gradients.write(to, size, || ());
        })
    }

    /// Keeps its input as it is stored.
    pub(super) fn activation(&self) -> Var {
        let x = self.value().clone();
        let out = x.f32_like();
        drop(x.to_f32());
        self.local(out, x, |x| vec![x.to_f32()])
    }

    pub(super) fn swiglu(&self) -> Var {
        let x = self.value().clone();
        let out = {
            let _x32 = x.to_f32();
            x.f32(x.rows, x.cols / 2)
        };
        self.local(out, x, |x| vec![x.to_f32()])
    }

    /// Keeps its input in f32: sigmoid, softplus.
    pub(super) fn pointwise(&self) -> Var {
        let x = self.value().to_f32();
        self.local(x.f32_like(), x, |_| Vec::new())
    }

    pub(super) fn softmax(&self) -> Var {
        let _x = self.value().to_f32();
        let out = self.value().f32_like().cast(self.value().dtype);
        self.local(out.clone(), out, |y| vec![y.to_f32()])
    }

    /// Nothing is kept.
    pub(super) fn scaled(&self) -> Var {
        let x = self.value().to_f32();
        self.local(x.f32_like(), (), |()| Vec::new())
    }

    /// A product with constants, which are kept.
    pub(super) fn mul_constant(&self, factors: &Array) -> Var {
        let x = self.value().to_f32();
        self.local(x.f32_like(), factors.clone(), |_| Vec::new())
    }

    /// k columns a row, by whatever rule.
    pub(super) fn select(&self, k: u64) -> Var {
        let x = self.value().to_f32();
        let (index, chosen, y) = (x.f32(x.rows, k), x.f32(x.rows, k), x.f32(x.rows, k));
        self.local(y.clone(), (index, chosen, y), |_| Vec::new())
    }

    pub(super) fn scatter_columns(&self, width: u64) -> Var {
        let (x, index) = (self.value().to_f32(), self.value().f32(self.rows(), self.cols()));
        self.local(x.f32(x.rows, width), index, |_| Vec::new())
    }

    /// Adds up everything to a scalar, by weights that are kept or not.
    pub(super) fn to_scalar<T: 'static>(&self, kept: T) -> Var {
        let (to, size) = (self.node, self.value().size());
        self.pass(self.value().bytes());
        self.tape.op(self.value().f32(1, 1), &[self], move |_, gradients| {
            let _kept = kept;
            gradients.write(to, size, || ());
        })
    }

    pub(super) fn chance_of_top(&self, sigma: &Var, noisy: &Var) -> Var {
        let (spread, z, against) = (sigma.value().clone(), self.value().f32_like(), self.value().f32_like());
        let to = [self.node, sigma.node, noisy.node];
        self.tape.op(z.f32_like(), &[self, sigma, noisy], move |_, gradients| {
            let _kept = (spread, against);
            to.into_iter().for_each(|to| gradients.write(to, z.size(), || ()));
        })
    }

    pub(super) fn add(&self, other: &Var) -> Var {
        let (a, b, dtype) = (self.clone(), other.clone(), self.dtype());
        let make = move || {
            let (x, _y) = (a.value().to_f32(), b.value().to_f32());
            x.books().pass(3 * x.bytes());
            x.f32_like().cast(dtype)
        };
        let (to_x, to_y) = (self.node, other.node);
        self.tape.late_op((self.size(), dtype), &[self, other], make, move |g, gradients| {
            gradients.add(to_x, g.clone());
            gradients.add(to_y, g);
        })
    }

    pub(super) fn dropout(&self) -> Var {
        let (a, dtype, to, size) = (self.clone(), self.dtype(), self.node, self.size());
        let make = move || {
            let x = a.value().to_f32();
            x.books().pass(2 * x.bytes());
            x.f32_like().cast(dtype)
        };
        self.tape.late_op((size, dtype), &[self], make, move |g, gradients| {
            g.books().pass(3 * g.bytes());
            gradients.write(to, size, || ());
        })
    }

    pub(super) fn cast(&self, dtype: Dtype) -> Var {
        if self.dtype() == dtype {
            return self.clone();
        }
        let to = self.node;
        self.tape.op(self.value().cast(dtype), &[self], move |g, gradients| gradients.add(to, g))
    }

    /// Rows of this table.
    pub(super) fn embed(&self, tokens: u64, dtype: Dtype) -> Var {
        let (to, size) = (self.node, self.value().size());
        let (_table, ids) = (self.value().to_f32(), self.value().f32(tokens, 1));
        let out = self.value().f32(tokens, self.cols());
        self.pass(2 * out.bytes());
        self.tape.op(out.cast(dtype), &[self], move |g, gradients| {
            let _ids = ids;
            g.books().pass(2 * g.bytes());
            gradients.write(to, size, || ());
        })
    }

    pub(super) fn norm(&self, weight: &Var, bias: Option<&Var>) -> Var {
        let (x, w) = (self.value().clone(), weight.value().clone());
        // RMS norm keeps a number a row, layer norm two.
        let (out, kept) = (x.f32_like(), x.f32(x.rows, if bias.is_some() { 2 } else { 1 }));
        drop((x.to_f32(), w.to_f32()));
        let to = (self.node, weight.node, bias.map(|bias| bias.node));
        let inputs: Vec<&Var> = [self, weight].into_iter().chain(bias).collect();
        self.pass(2 * out.bytes());
        self.tape.op(out.cast(x.dtype), &inputs, move |g, gradients| {
            let _kept = kept;
            g.books().pass(3 * g.bytes());
            if let Some(bias) = to.2 {
                gradients.add(bias, g.f32(1, g.cols));
            }
            let (x32, w32) = (x.to_f32(), w.to_f32());
            gradients.add(to.1, w32.f32_like());
            gradients.write(to.0, x32.size(), || ());
        })
    }

    pub(super) fn linear(&self, w: &Var, bias: Option<&Var>) -> Var {
        let (x, weight, dtype) = (self.value().clone(), w.value().clone(), self.dtype());
        let (rows, inner, outer) = (x.rows, weight.cols, weight.rows);
        let operands = (x.clone(), weight.clone());
        let make = move || {
            let (x, weight) = operands;
            let y = x.f32(rows, outer);
            drop((x.to_f32(), weight.to_f32()));
            x.books().product(rows, inner, outer);
            y.cast(dtype)
        };
        let to = (self.node, w.node, bias.map(|bias| bias.node));
        let inputs: Vec<&Var> = [self, w].into_iter().chain(bias).collect();
        self.tape.late_op(((rows, outer), dtype), &inputs, make, move |g, gradients| {
            if let Some(bias) = to.2 {
                add_column_sums(gradients, bias, &g);
            }
            g.books().product(outer, rows, inner);
            gradients.write(to.1, weight.size(), || x.to_f32());
            if gradients.wants(to.0) {
                g.books().product(rows, outer, inner);
            }
            gradients.write(to.0, x.size(), || weight.to_f32());
        })
    }

    /// The same twice; through the second value no gradient goes to x.
    pub(super) fn linear_twice(&self, w: &Var) -> [Var; 2] {
        let first = self.linear(w, None);
        let (x, weight, to) = (self.value().clone(), w.value().clone(), w.node);
        let second = self.tape.op(first.value().clone(), &[w], move |g, gradients| {
            g.books().product(weight.rows, x.rows, weight.cols);
            gradients.write(to, weight.size(), || x.to_f32());
        });
        [first, second]
    }

    /// Fused projections `[T, width]` give `[T, attended]`; each token sees `keys` others on average.
    pub(super) fn attention(&self, (heads, head_dim): (u64, u64), keys: f64, spans: &[Array]) -> Var {
        let (qkv, spans) = (self.value().clone(), spans.to_vec());
        let (out, lse) = (qkv.f32(qkv.rows, heads * head_dim), qkv.f32(qkv.rows, heads));
        drop(qkv.to_f32());
        let flops = 4.0 * qkv.rows as f64 * keys * (heads * head_dim) as f64;
        let work = move |array: &Array, times: f64| {
            let work = Work { flops: flops * times, product_bytes: array.bytes() as f64, other_bytes: 0.0 };
            array.books().work(work);
        };
        work(&qkv, 1.0);
        let out = out.cast(qkv.dtype);
        let (saved, to) = (out.clone(), self.node);
        self.tape.op(out, &[self], move |g, gradients| {
            let _kept = (lse, spans);
            let dqkv = qkv.f32_like();
            let _operands = (saved.to_f32(), qkv.to_f32());
            work(&g, 2.5);
            gradients.add(to, dqkv);
        })
    }

    /// Queries, keys and values twice, and what depends on distances alone.
    pub(super) fn relative_attention(
        &self,
        keys_values: [&Var; 2],
        relative: [&Var; 3],
        (heads, sequences): (u64, u64),
        (keys, spans): (f64, &[Array]),
    ) -> Var {
        let spans = spans.to_vec();
        let kept: Vec<Array> =
            [self, keys_values[0]].into_iter().chain(relative).map(|var| var.value().held()).collect();
        let (out, lse) = (self.value().f32_like(), self.value().f32(self.rows(), heads));
        drop(kept.iter().map(Array::to_f32).collect::<Vec<_>>());
        let flops = 6.0 * self.rows() as f64 * keys * self.cols() as f64;
        let work = move |array: &Array, times: f64| {
            let work = Work { flops: flops * times, product_bytes: array.bytes() as f64, other_bytes: 0.0 };
            array.books().work(work);
        };
        work(&out, 1.0);
        let out = out.cast(self.value().dtype);
        let (saved, to) = (out.clone(), [self, keys_values[0], keys_values[1]].map(|var| var.node));
        let to_relative = relative.map(|var| var.node);
        let inputs: Vec<&Var> = [self].into_iter().chain(keys_values).chain(relative).collect();
        self.tape.op(out, &inputs, move |g, gradients| {
            let (_saved, _lse, _spans) = (saved.to_f32(), lse, spans);
            let own = [&kept[0], &kept[1], &kept[1]].map(Array::f32_like);
            let parts: Vec<Array> = kept[2..].iter().map(|part| part.f32(sequences, part.len())).collect();
            drop(kept.iter().map(Array::to_f32).collect::<Vec<_>>());
            work(&g, 2.5);
            to.into_iter().zip(own).for_each(|(to, gradient)| gradients.add(to, gradient));
            for ((to, like), _part) in to_relative.into_iter().zip(&kept[2..]).zip(parts) {
                gradients.write(to, like.size(), || ());
            }
        })
    }

    /// `[R, in]` sorted by expert through stacks of weights `[out, in]`.
    pub(super) fn grouped_linear(&self, w: &Var, bias: &Var, outer: u64) -> Var {
        let (x, weight, dtype) = (self.value().clone(), w.value().clone(), self.dtype());
        let (rows, inner) = (x.rows, x.cols);
        let operands = (x.clone(), weight.clone());
        let make = move || {
            let (x, weight) = operands;
            let y = x.f32(rows, outer);
            drop((x.to_f32(), weight.to_f32()));
            x.books().product(rows, inner, outer);
            y.cast(dtype)
        };
        let (to, bias_size) = ((self.node, w.node, bias.node), bias.size());
        self.tape.late_op(((rows, outer), dtype), &[self, w, bias], make, move |g, gradients| {
            g.books().product(rows, outer, 2 * inner);
            gradients.write(to.2, bias_size, || ());
            gradients.write(to.1, weight.size(), || x.to_f32());
            gradients.write(to.0, x.size(), || weight.to_f32());
        })
    }

    pub(super) fn grouped_swiglu(&self, gate_up: &Var, down: &Var, inner: u64) -> Var {
        let (x, first, second) = (self.value().clone(), gate_up.value().clone(), down.value().clone());
        let (rows, outer, dtype) = (x.rows, x.cols, self.dtype());
        let kept = x.f32(rows, 2 * inner);
        let y = (!self.tape.is_again()).then(|| x.f32(rows, outer));
        drop((x.to_f32(), first.to_f32(), second.to_f32()));
        x.books().product(rows, outer, 2 * inner);
        let made = (kept.clone(), second.clone());
        let make = move || {
            let (kept, second) = made;
            kept.books().product(rows, inner, outer);
            let y = y.unwrap_or_else(|| kept.f32(rows, outer));
            drop(second.to_f32());
            y.cast(dtype)
        };
        let kept = kept.cast(dtype);
        let to = (self.node, gate_up.node, down.node);
        self.tape.late_op(((rows, outer), dtype), &[self, gate_up, down], make, move |g, gradients| {
            let (x, _kept) = (x.to_f32(), kept.into_f32());
            let _hidden = x.f32(rows, inner);
            g.books().product(rows, outer, 6 * inner);
            match gradients.wants(to.0) {
                true => gradients.write(to.0, x.size(), || (first.to_f32(), second.to_f32())),
                false => drop((x.f32_like(), first.to_f32(), second.to_f32())),
            }
            gradients.write(to.2, second.size(), || ());
            gradients.write(to.1, first.size(), || ());
        })
    }

    /// The head's loss over a group of ranks: `told` is called for every block of rows.
    pub(super) fn linear_cross_entropy(
        &self,
        (w, bias): (&Var, Option<&Var>),
        ranks: u64,
        mut told: impl FnMut(u64),
    ) -> Var {
        let (x, weight, b) = (self.value().to_f32(), w.value().to_f32(), bias.map(|bias| bias.value().to_f32()));
        let (rows, inner, outer) = (x.rows, x.cols, weight.rows);
        let (_targets, _block, _losses) = (x.f32(rows, 1), x.f32(HEAD_ROWS.min(rows), outer), x.f32(rows, 1));
        // Three numbers a row: own, sent, of all ranks.
        let _statistics = x.f32(HEAD_ROWS.min(rows), 3 * (2 + ranks));
        let kept = self.tape.is_recording().then(|| {
            let products = x.books();
            products.product(rows, outer, 2 * inner);
            (weight.f32_like(), x.f32_like(), b.as_ref().map(Array::f32_like))
        });
        x.books().product(rows, inner, outer);
        (0..rows).step_by(HEAD_ROWS as usize).for_each(|first| told(HEAD_ROWS.min(rows - first)));
        let to = (w.node, self.node, bias.map(|bias| bias.node));
        let inputs: Vec<&Var> = [self, w].into_iter().chain(bias).collect();
        self.tape.op(x.f32(1, 1), &inputs, move |g, gradients| {
            let Some((dw, dx, db)) = kept else { return };
            g.books().pass(2 * (dw.bytes() + dx.bytes()));
            gradients.write(to.0, dw.size(), || ());
            drop(dw);
            gradients.write(to.1, dx.size(), || ());
            drop(dx);
            if let (Some(to), Some(db)) = (to.2, db) {
                gradients.write(to, db.size(), || ());
            }
        })
    }
}

fn add_column_sums(gradients: &mut Gradients, bias: Option<usize>, g: &Array) {
    if gradients.wants(bias) {
        gradients.add(bias, g.f32(1, g.cols));
    }
}
