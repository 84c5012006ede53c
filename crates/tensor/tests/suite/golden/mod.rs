//! The ops against numbers that PyTorch computed in f64 (`oracle/ops.py`): the references might share a
//! misunderstanding with the ops, these do not.

use guildhall_tensor::ops::{AttentionShape, AttentionSpans, causal_keys};
use guildhall_tensor::{Tape, Tensor, Var};
use safetensors::SafeTensors;

use super::harness::{all_near, gradient_of, on_devices, rounding};
use super::reference as r;

struct Golden(&'static [u8]);

impl Golden {
    /// Built in: the suite may run where the repository is not.
    fn read() -> Golden {
        Golden(include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../oracle/golden/ops.safetensors")))
    }

    fn words(&self, name: &str) -> (Vec<usize>, Vec<[u8; 4]>) {
        let all = SafeTensors::deserialize(self.0).unwrap();
        let tensor = all.tensor(&format!("op/{name}")).unwrap();
        (tensor.shape().to_vec(), tensor.data().as_chunks().0.to_vec())
    }

    fn f32s(&self, name: &str) -> Vec<f32> {
        self.words(name).1.into_iter().map(f32::from_le_bytes).collect()
    }

    /// -1 becomes `u32::MAX`.
    fn u32s(&self, name: &str) -> Vec<u32> {
        self.words(name).1.into_iter().map(u32::from_le_bytes).collect()
    }

    /// The inputs side by side, row by row: how fused projections hold them.
    fn fused(&self, op: &str, part: &str, names: &[&str], rows: usize) -> Vec<f32> {
        let parts: Vec<Vec<f32>> = names.iter().map(|name| self.f32s(&format!("{op}/{part}/{name}"))).collect();
        let row = |r: usize| parts.iter().flat_map(move |p| p[p.len() / rows * r..][..p.len() / rows].to_vec());
        (0..rows).flat_map(row).collect()
    }

    /// Runs `f` on the first input, which is the golden inputs `names` fused, and on the others.
    fn check(&self, op: &str, names: &[&str], others: &[&str], terms: usize, f: impl Fn(&[Var]) -> Var) {
        let rows = self.words(&format!("{op}/in/{}", names[0])).0;
        let rows = if op == "attention" { rows[0] * rows[1] } else { rows[0] };
        let first = self.fused(op, "in", names, rows);
        on_devices(|device| {
            let tape = Tape::new(device);
            let mut vars = vec![tape.leaf(Tensor::from_slice(device, &[rows, first.len() / rows], &first))];
            vars.extend(others.iter().map(|name| {
                let values = self.f32s(&format!("{op}/in/{name}"));
                tape.leaf(Tensor::from_slice(device, &[values.len()], &values))
            }));
            let y = f(&vars);
            all_near(op, &y.value().to_vec(), &self.f32s(&format!("{op}/out/y")), rounding(terms));
            let dy = Tensor::from_slice(device, y.shape(), &self.f32s(&format!("{op}/in/dy")));
            let gradients = tape.backward_from(&y, dy);
            let want = self.fused(op, "grad", names, rows);
            all_near(op, &gradient_of(&gradients, &vars[0]), &want, rounding(terms));
            for (name, var) in others.iter().zip(&vars[1..]) {
                let want = self.f32s(&format!("{op}/grad/{name}"));
                all_near(name, &gradient_of(&gradients, var), &want, rounding(terms));
            }
        });
    }
}

#[test]
fn norms_and_activations_equal_those_of_pytorch() {
    let golden = Golden::read();
    golden.check("layer_norm", &["x"], &["weight", "bias"], 24, |v| v[0].layer_norm(&v[1], &v[2], 1e-5));
    golden.check("rms_norm", &["x"], &["weight"], 24, |v| v[0].rms_norm(&v[1], 1e-5));
    golden.check("gelu_tanh", &["x"], &[], 1, |v| v[0].gelu());
    golden.check("silu_mul", &["gate", "up"], &[], 1, |v| v[0].swiglu());
    golden.check("softmax", &["x"], &[], 9, |v| v[0].softmax());
}

#[test]
fn attention_equals_that_of_pytorch() {
    let (golden, shape) = (Golden::read(), AttentionShape { heads: 4, kv_heads: 2, head_dim: 8 });
    let keys = causal_keys(&golden.u32s("attention/in/segments"), 12);
    golden.check("attention", &["q", "k", "v"], &[], 20, |v| {
        v[0].attention(shape, &AttentionSpans::new(v[0].device(), 12, &keys, None))
    });
}

/// With the unit matrix for a head, logits are the input. The golden loss is a mean over the targets that count.
#[test]
fn cross_entropy_equals_that_of_pytorch() {
    let golden = Golden::read();
    let targets = golden.u32s("cross_entropy/in/targets");
    let count = targets.iter().filter(|t| **t != u32::MAX).count();
    golden.check("cross_entropy", &["logits"], &[], 11, |v| {
        let unit = Tensor::from_fn(v[0].device(), &[11, 11], |i| f32::from(u8::from(i % 12 == 0)));
        v[0].linear_cross_entropy(&v[0].tape().constant(unit), None, &targets, 1.0 / count as f32)
    });
}

/// Rotary positions are no op of their own; the reference that attention is held against has them.
#[test]
fn rotary_positions_of_the_reference_equal_those_of_pytorch() {
    let golden = Golden::read();
    let wide = |name: &str| golden.f32s(name).into_iter().map(f64::from).collect::<Vec<f64>>();
    let (x, positions) = (wide("rotary/in/x"), golden.u32s("rotary/in/positions"));
    let heads = |(i, x): (usize, &[f64])| r::rotary(x, positions[i / 4], 10_000.0);
    let got: Vec<f32> = x.chunks_exact(8).enumerate().flat_map(heads).map(|x| x as f32).collect();
    all_near("rotary", &got, &golden.f32s("rotary/out/y"), rounding(0));
}
