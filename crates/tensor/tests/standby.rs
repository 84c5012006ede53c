//! Threads of ranks that wait change no bit of what they help with.

use std::sync::{Arc, mpsc};
use std::thread;

use guildhall_tensor::{Blocking, Device, Draws, Dtype, Parameter, Purpose, Standby, Tape, Tensor};

const OUTER: usize = 96;
const INNER: usize = 160;
/// One expert of many rows, some of few, and one of none.
const COUNTS: [usize; 5] = [1900, 40, 0, 700, 3];

fn random(device: &Arc<Device>, shape: &[usize], dtype: Dtype, stream: u32) -> Tensor {
    let draws = Draws::new(41, Purpose::Test, 0, stream);
    Tensor::from_fn(device, shape, |i| draws.normal(i as u64)).cast(dtype)
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.to_vec().into_iter().map(f32::to_bits).collect()
}

/// Experts of two kinds, forward and backward: results, and gradients of rows and weights, which are stored in `stored`.
fn results(device: &Arc<Device>, dtype: Dtype, stored: Dtype) -> Vec<Vec<u32>> {
    let rows = COUNTS.iter().sum();
    let weight = |name: &str, shape: [usize; 3], stream| {
        let weight = Parameter::new(name, random(device, &shape, dtype, stream));
        weight.gradient().store_as(stored);
        weight
    };
    let weights = [
        weight("gate_up", [COUNTS.len(), 2 * INNER, OUTER], 0),
        weight("down", [COUNTS.len(), OUTER, INNER], 1),
        weight("first", [COUNTS.len(), INNER, OUTER], 2),
        weight("second", [COUNTS.len(), OUTER, INNER], 3),
    ];
    let tape = Tape::new(device);
    let x = tape.leaf(random(device, &[rows, OUTER], dtype, 4));
    let [gate_up, down, first, second] = weights.each_ref().map(|weight| tape.parameter(weight));
    let gated = x.grouped_swiglu(&gate_up, &down, &COUNTS);
    let y = gated.grouped_linear(&first, None, &COUNTS).gelu().grouped_linear(&second, None, &COUNTS);
    let gradients = tape.backward_from(&y, random(device, &[rows, OUTER], y.dtype(), 5));
    let of_rows = gradients.of(&x).expect("rows have a gradient");
    let of_weights = weights.iter().map(|weight| bits(&weight.gradient().take()));
    [bits(y.value()), bits(of_rows)].into_iter().chain(of_weights).collect()
}

#[test]
fn guests_change_no_bit() {
    for threads in [1, 2] {
        for (dtype, stored) in [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::F32), (Dtype::Bf16, Dtype::Bf16)] {
            let want = results(&Device::new(threads), dtype, stored);
            let standby = Standby::new(4, threads);
            let device = Device::beside(threads, Blocking::default(), Some(standby.clone()));
            let (wake, woken) = mpsc::channel::<()>();
            thread::scope(|scope| {
                // It sleeps until the other end is dropped, also where a comparison fails.
                let sleeping = standby.clone();
                scope.spawn(move || sleeping.while_waiting(|| woken.recv().is_err()));
                let _wake = wake;
                while standby.visits() == 0 {
                    assert!(results(&device, dtype, stored) == want, "{threads} {dtype:?} {stored:?}");
                }
                // Guests have done parts; they come again.
                for _ in 0..5 {
                    assert!(results(&device, dtype, stored) == want, "{threads} {dtype:?} {stored:?}");
                }
            });
        }
    }
}
