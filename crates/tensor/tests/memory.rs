//! What the tape holds and for how long, what parameters gather, and the bytes that are counted meanwhile.

use std::sync::Arc;

use guildhall_tensor::{
    Cause, Device, Draws, Dtype, Elements, Gradient, NonFinite, Parameter, Purpose, RowIds, Tape, Tensor, Var,
};

fn random(device: &Arc<Device>, shape: &[usize], stream: u32) -> Tensor {
    let draws = Draws::new(31, Purpose::Test, 0, stream);
    Tensor::from_fn(device, shape, |i| draws.normal(i as u64))
}

fn ones(device: &Arc<Device>, len: usize) -> Tensor {
    Tensor::from_slice(device, &[len], &vec![1.0; len])
}

fn live(device: &Device) -> u64 {
    device.account().live_total()
}

// --- parameters -------------------------------------------------------------------------------------------------

fn gradient_of(parameter: &Parameter) -> Vec<f32> {
    parameter.with_gradient(|gradient| gradient.to_vec())
}

/// Backward from `sum_i weights[i] * parameter[i]`.
fn contribute(device: &Arc<Device>, parameter: &Parameter, weights: &[f32]) {
    let tape = Tape::new(device);
    let weights = Tensor::from_slice(device, &[weights.len()], weights);
    tape.backward(&tape.parameter(parameter).dot_constant(weights));
}

#[test]
fn parameters_gather_gradients_until_cleared() {
    let device = Device::new(1);
    let parameter = Parameter::new("w", ones(&device, 3));
    assert_eq!(gradient_of(&parameter), [0.0; 3]);
    contribute(&device, &parameter, &[1., 2., 3.]);
    contribute(&device, &parameter, &[10., 20., 30.]);
    assert_eq!(gradient_of(&parameter), [11., 22., 33.]);
    parameter.clear_gradient();
    contribute(&device, &parameter, &[1., 2., 3.]);
    assert_eq!(gradient_of(&parameter), [1., 2., 3.]);
    parameter.clear_gradient();
    assert_eq!(gradient_of(&parameter), [0.0; 3]);
    contribute(&device, &parameter, &[1., 2., 3.]);
    assert_eq!(gradient_of(&parameter), [1., 2., 3.]);
}

/// Gradients that come as a tensor (from an addition) and those that an op writes in place (from a scaling), in
/// either order, and a parameter whose own gradient is the first to arrive.
#[test]
fn parameters_used_twice_get_both_gradients() {
    let device = Device::new(1);
    for order in [true, false] {
        let (w, v) = (Parameter::new("w", ones(&device, 3)), Parameter::new("v", ones(&device, 3)));
        for _ in 0..2 {
            let tape = Tape::new(&device);
            let (a, b) = (tape.parameter(&w), tape.parameter(&v));
            let (sum, scaled) = (a.add(&b), tape.parameter(&w).scale(5.0));
            let out = if order { sum.add(&scaled) } else { scaled.add(&sum) };
            tape.backward_from(&out.add(&a), ones(&device, 3));
        }
        assert_eq!((gradient_of(&w), gradient_of(&v)), (vec![14.0; 3], vec![2.0; 3]));
    }
}

#[test]
fn a_value_changes_by_its_gradient() {
    let device = Device::new(1);
    let mut parameter = Parameter::new("w", ones(&device, 2));
    contribute(&device, &parameter, &[1., 2.]);
    let gradient = parameter.with_gradient(|gradient| gradient.f32s().to_vec());
    parameter.value_mut().f32s_mut().iter_mut().zip(gradient).for_each(|(v, g)| *v -= 0.5 * g);
    assert_eq!(parameter.value().f32s(), [0.5, 0.0]);
    assert_eq!((parameter.name(), parameter.shape(), parameter.len()), ("w", vec![2], 2));
}

#[test]
#[should_panic(expected = "only handle")]
fn a_parameter_on_a_tape_cannot_change() {
    let device = Device::new(1);
    let mut parameter = Parameter::new("w", ones(&device, 2));
    let tape = Tape::new(&device);
    let _held = tape.parameter(&parameter);
    parameter.value_mut().f32s_mut()[0] = 2.0;
}

/// Sums are taken in f32 and rounded when they are put down, whether an op writes in place or brings a tensor: 1 and a
/// quarter of a bf16's step is 1, and so is that and another quarter, where f32 would have gone on.
#[test]
fn gradients_of_bf16_parameters_are_bf16() {
    let device = Device::new(1);
    let step = 1.0 / 128.0;
    for brings in [false, true] {
        let parameter = Parameter::new("w", ones(&device, 3).cast(Dtype::Bf16));
        let add = |weights: &[f32]| match brings {
            false => contribute(&device, &parameter, weights),
            true => {
                let tape = Tape::new(&device);
                let x = tape.parameter(&parameter);
                tape.backward_from(&x.cast(Dtype::F32), Tensor::from_slice(&device, &[3], weights));
            }
        };
        add(&[1.0, 1.0 + 0.75 * step, 1e-3]);
        assert_eq!(parameter.with_gradient(|g| g.dtype()), Dtype::Bf16);
        let small = half::bf16::from_f32(1e-3).to_f32();
        assert_eq!(gradient_of(&parameter), [1.0, 1.0 + step, small]);
        add(&[0.25 * step, 0.25 * step, small]);
        add(&[0.25 * step, 0.75 * step, 0.0]);
        assert_eq!(gradient_of(&parameter), [1.0, 1.0 + 2.0 * step, 2.0 * small]);
    }
}

/// An embedding's and a product's gradients of 2^20 elements pass through 1 MiB of f32 memory, not through their size.
#[test]
fn bf16_gradients_of_matrices_are_written_through_a_bounded_temporary() {
    let device = Device::new(1);
    let (rows, width, bounded) = (1 << 14, 64, 1 << 20);
    let own = (rows * width * 2) as u64;
    let peak = |parameter: &Parameter, op: &dyn Fn(&Var) -> Var| {
        let tape = Tape::new(&device);
        let y = op(&tape.parameter(parameter));
        let before = device.account().live_total();
        // What the forward once had at its peak is in nobody's way: only the way back is measured.
        let _ballast = device.hold(Cause::Other, device.account().peak_total() - before);
        let before = device.account().live_total();
        tape.backward_from(&y, Tensor::zeros(&device, y.shape()));
        device.account().peak_total() - before
    };
    let bf16 = |shape: &[usize]| random(&device, shape, 1).cast(Dtype::Bf16);
    let table = Parameter::new("table", bf16(&[rows, width]));
    let x = bf16(&[2, width]);
    let made = [
        peak(&table, &|table| table.embed(&[3, 3], Dtype::Bf16)),
        peak(&Parameter::new("w", bf16(&[rows, width])), &|w| w.tape().constant(x.clone()).linear(w, None)),
        peak(&Parameter::new("w", bf16(&[1, rows, width])), &|w| {
            w.tape().constant(x.clone()).grouped_linear(w, None, &[2])
        }),
    ];
    for (which, made) in made.into_iter().enumerate() {
        assert!(made >= own, "op {which}: {made} bytes cannot hold the gradient");
        // Beside the output's gradient and x in f32.
        let all = own + bounded + (2 * rows * 4 + 2 * width * 4) as u64;
        assert!(made <= all, "op {which}: {made} bytes where {all} are enough");
    }
}

// --- the tape ---------------------------------------------------------------------------------------------------

#[test]
fn backward_reaches_what_the_loss_depends_on() {
    let device = Device::new(1);
    let tape = Tape::new(&device);
    let (x, unused, constant) =
        (tape.leaf(ones(&device, 2)), tape.leaf(ones(&device, 2)), tape.constant(ones(&device, 2)));
    let _aside = unused.scale(2.0);
    let loss = x.add(&constant).dot_constant(ones(&device, 2));
    let gradients = tape.backward(&loss);
    assert_eq!(gradients.of(&x).unwrap().f32s(), [1.0, 1.0]);
    assert!(gradients.of(&unused).is_none() && gradients.of(&constant).is_none());
    assert!(gradients.wants(x.input()) && !gradients.wants(constant.input()));
}

#[test]
fn a_second_backward_finds_nothing() {
    let device = Device::new(1);
    let tape = Tape::new(&device);
    let x = tape.leaf(ones(&device, 2));
    let loss = x.dot_constant(ones(&device, 2));
    assert!(tape.backward(&loss).of(&x).is_some());
    assert!(tape.backward(&loss).of(&x).is_none());
}

#[test]
fn gradients_can_be_asked_of_the_output_itself() {
    let device = Device::new(1);
    let tape = Tape::new(&device);
    let x = tape.leaf(ones(&device, 2));
    assert_eq!(tape.backward_from(&x, ones(&device, 2)).of(&x).unwrap().f32s(), [1.0, 1.0]);
}

fn chain(x: &Var) -> Var {
    x.scale(2.0).gelu().softmax().scale(3.0)
}

/// What nothing will read again is given back at once: on a tape that does not record, and for constants on one
/// that does.
#[test]
fn without_recording_only_the_result_is_kept() {
    let device = Device::new(1);
    let (recording, inference) = (Tape::new(&device), Tape::inference(&device));
    let bytes = 4 * 8 * 4;
    for x in [
        inference.leaf(random(&device, &[4, 8], 1)),
        inference.parameter(&Parameter::new("x", random(&device, &[4, 8], 1))),
        recording.constant(random(&device, &[4, 8], 1)),
    ] {
        let before = live(&device);
        let y = chain(&x);
        assert_eq!(live(&device) - before, bytes);
        assert!(x.tape().backward_from(&y, random(&device, &[4, 8], 2)).of(&x).is_none());
    }
    assert!(recording.is_recording() && !inference.is_recording());
    let x = recording.leaf(random(&device, &[4, 8], 1));
    let before = live(&device);
    let y = chain(&x);
    // The result, and what backward reads: the inputs of the gelu and of the softmax's gradient, which is its value.
    assert_eq!(live(&device) - before, 3 * bytes);
    assert_eq!(y.value().to_vec(), chain(&inference.leaf(random(&device, &[4, 8], 1))).value().to_vec());
}

#[test]
#[should_panic(expected = "starts at a scalar")]
fn backward_of_a_vector_needs_a_gradient() {
    let device = Device::new(1);
    let tape = Tape::new(&device);
    tape.backward(&tape.leaf(ones(&device, 2)));
}

/// The names of the parameters told to be complete, in order, and their gradients at that time.
fn told(parameters: &[&Parameter], tape: &Tape, loss: &Var) -> Vec<(String, Vec<f32>)> {
    let mut told = Vec::new();
    let mut note = |gradient: &Gradient| {
        let parameter = parameters.iter().find(|parameter| parameter.gradient().is(gradient)).unwrap();
        told.push((parameter.name().to_owned(), gradient_of(parameter)));
        Ok(())
    };
    tape.try_backward_telling(loss, &mut note).unwrap();
    told
}

/// One used twice, one that reaches no loss, one not on the tape: complete is what nothing will be added to.
#[test]
fn parameters_are_complete_past_their_first_use() {
    let device = Device::new(1);
    let [tied, middle, idle, absent] =
        ["tied", "middle", "idle", "absent"].map(|name| Parameter::new(name, ones(&device, 2)));
    for uses in 1..3 {
        let tape = Tape::new(&device);
        let x = tape.parameter(&tied).scale(2.0);
        let _aside = tape.parameter(&idle).scale(3.0);
        let x = x.add(&tape.parameter(&middle));
        let loss = x.add(&tape.parameter(&tied)).dot_constant(ones(&device, 2));
        let sum = |each: f32| vec![each * uses as f32; 2];
        let want = [("middle", sum(1.0)), ("idle", sum(0.0)), ("tied", sum(3.0))];
        let want = want.map(|(name, values)| (name.to_owned(), values));
        assert_eq!(told(&[&tied, &middle, &idle, &absent], &tape, &loss), want);
    }
    assert_eq!(gradient_of(&absent), [0.0; 2]);
}

/// A gradient may leave as soon as it is complete; the parameter's next one then begins anew.
#[test]
fn a_complete_gradient_can_be_taken_and_put_back() {
    let device = Device::new(1);
    let parameter = Parameter::new("w", ones(&device, 2));
    let mut taken = Vec::new();
    for _ in 0..2 {
        let tape = Tape::new(&device);
        let loss = tape.parameter(&parameter).dot_constant(ones(&device, 2));
        let mut take = |gradient: &Gradient| {
            taken.push(gradient.take());
            Ok(())
        };
        tape.try_backward_telling(&loss, &mut take).unwrap();
    }
    assert_eq!([taken[0].f32s(), taken[1].f32s()], [[1.0; 2]; 2]);
    parameter.gradient().put(taken.remove(0));
    contribute(&device, &parameter, &[5.0, 6.0]);
    assert_eq!(gradient_of(&parameter), [6.0, 7.0]);
}

#[test]
fn who_is_told_may_end_the_way_back() {
    let device = Device::new(1);
    let (first, second) = (Parameter::new("first", ones(&device, 2)), Parameter::new("second", ones(&device, 2)));
    let tape = Tape::new(&device);
    let x = tape.parameter(&first).scale(2.0);
    let loss = x.add(&tape.parameter(&second)).dot_constant(ones(&device, 2));
    let failed = tape.try_backward_telling(&loss, &mut |_| Err("enough".into()));
    assert_eq!(failed.err().map(|failure| failure.to_string()).as_deref(), Some("enough"));
    assert_eq!((gradient_of(&first), gradient_of(&second)), (vec![0.0; 2], vec![1.0; 2]));
}

// --- finding NaN ------------------------------------------------------------------------------------------------

fn found(scope: &str, op: &'static str, in_backward: bool) -> Option<NonFinite> {
    Some(NonFinite { scope: scope.to_owned(), op, in_backward })
}

#[test]
fn a_checking_tape_names_the_first_op_that_went_wrong() {
    let device = Device::new(1);
    for (factor, want) in [(1.0, None), (1e38, found("layer 1", "scale", false))] {
        let tape = Tape::checking(&device);
        tape.set_scope("layer 0");
        let x = tape.leaf(random(&device, &[2, 8], 1)).gelu();
        tape.set_scope("layer 1");
        // Infinite, and NaN from there on.
        let x = x.scale(factor).scale(factor);
        tape.set_scope("layer 2");
        let loss = x.softmax().dot_constant(ones(&device, 16));
        tape.backward(&loss);
        assert_eq!(tape.non_finite(), want);
    }
}

/// 0 * infinity in the value.
#[test]
fn a_checking_tape_names_what_is_no_number() {
    let device = Device::new(1);
    let tape = Tape::checking(&device);
    tape.set_scope("router");
    tape.leaf(Tensor::zeros(&device, &[1, 3])).scale(f32::INFINITY);
    assert_eq!(tape.non_finite(), found("router", "scale", false));
}

/// Values that are finite, and a gradient that is not: it is reported where it arrives.
#[test]
fn a_checking_tape_names_gradients_too() {
    let device = Device::new(1);
    // 1e-38 times 1e30 twice is a fine 1e22; the gradient is 1e60.
    let run = |start: &dyn Fn(&Tape) -> Var| {
        let tape = Tape::checking(&device);
        tape.set_scope("start");
        let x = start(&tape);
        tape.set_scope("end");
        tape.backward(&x.scale(1e30).scale(1e30).dot_constant(ones(&device, 1)));
        tape.non_finite()
    };
    let tiny = || Tensor::from_slice(&device, &[1], &[1e-38]);
    let parameter = Parameter::new("x", tiny());
    assert_eq!(run(&|tape| tape.leaf(tiny()).reshape(&[1])), found("start", "reshape", true));
    assert_eq!(run(&|tape| tape.leaf(tiny())), found("start", "leaf", true));
    assert_eq!(run(&|tape| tape.parameter(&parameter)), found("start", "parameter", true));
    assert_eq!(run(&|tape| tape.constant(tiny())), None);
}

#[test]
fn tapes_that_do_not_check_say_nothing() {
    let device = Device::new(1);
    let tape = Tape::new(&device);
    tape.leaf(ones(&device, 1)).scale(f32::INFINITY);
    assert_eq!(tape.non_finite(), None);
}

// --- bytes ------------------------------------------------------------------------------------------------------

/// x `[4, 8]`, w `[16, 8]`, y = x w^T `[4, 16]`, loss = sum(y weights): by hand, in bytes.
#[test]
fn the_peak_of_a_small_example_is_what_it_should_be() {
    let device = Device::new(1);
    let (x_bytes, w_bytes, y_bytes, scalar) = (4 * 8 * 4, 16 * 8 * 4, 4 * 16 * 4, 4);
    {
        let tape = Tape::new(&device);
        let (x, w) = (tape.leaf(random(&device, &[4, 8], 1)), tape.leaf(random(&device, &[16, 8], 2)));
        assert_eq!(live(&device), x_bytes + w_bytes);
        let y = x.linear(&w, None);
        let loss = y.dot_constant(random(&device, &[64], 3));
        let forward = x_bytes + w_bytes + y_bytes + y_bytes + scalar;
        assert_eq!((live(&device), device.account().peak_total()), (forward, forward));
        drop(y);
        // Nothing reads y again (`dot_constant` keeps its weights, `linear` its inputs).
        assert_eq!(live(&device), forward - y_bytes);
        let gradients = tape.backward(&loss);
        assert_eq!(live(&device), 2 * (x_bytes + w_bytes) + scalar);
        // While `linear` goes back: both inputs, their gradients, the gradient of y, the loss.
        assert_eq!(device.account().peak_total(), 2 * (x_bytes + w_bytes) + y_bytes + scalar);
        drop(gradients);
    }
    assert_eq!(live(&device), 0);
}

#[test]
fn bytes_are_those_of_the_elements_and_of_their_cause() {
    let device = Device::new(1);
    let account = device.account();
    let charge = device.charge(Cause::Parameters);
    let w = random(&device, &[3, 5], 1);
    let inner = device.charge(Cause::Optimizer);
    let moment = w.cast(Dtype::Bf16);
    drop(inner);
    let other = Tensor::zeros(&device, &[2]);
    drop(charge);
    let y = w.to_owned_copy();
    // Sharing costs nothing.
    let (_again, _flat) = (w.clone(), w.reshape(&[15]));
    let live = |cause| account.live(cause);
    assert_eq!([Cause::Parameters, Cause::Optimizer, Cause::Activations].map(live), [60 + 8, 30, 60]);
    // Memory goes back to the cause it was taken for, whoever drops it.
    let _charge = device.charge(Cause::Communication);
    drop((other, moment, y));
    assert_eq!([Cause::Parameters, Cause::Optimizer, Cause::Activations].map(live), [60, 0, 0]);
    assert_eq!([Cause::Parameters, Cause::Optimizer, Cause::Activations].map(|c| account.peak(c)), [68, 30, 60]);
    assert_eq!((account.live_total(), account.peak_total()), (60, 158));
}

#[test]
fn gradients_of_parameters_are_charged_as_such_and_once() {
    let device = Device::new(1);
    let parameter = Parameter::new("w", ones(&device, 100));
    assert_eq!(device.account().live(Cause::Gradients), 0);
    for _ in 0..3 {
        contribute(&device, &parameter, &[1.0; 100]);
        assert_eq!(device.account().live(Cause::Gradients), 400);
    }
    drop(parameter);
    assert_eq!(live(&device), 0);
}

fn f32s(memory: &Elements) -> &[f32] {
    match memory {
        Elements::F32(data) => data,
        _ => panic!("f32 is expected"),
    }
}

#[test]
fn memory_that_travels_is_counted_while_it_is_here() {
    let device = Device::new(1);
    let x = random(&device, &[3, 50], 1);
    let values = x.to_vec();
    let shared = x.clone();
    let (copy, window) = x.into_window().expect("host memory");
    assert_eq!(f32s(&copy)[window], values, "a shared tensor is copied out");
    assert_eq!((shared.f32s(), live(&device)), (&values[..], 600));
    let half = shared.cast(Dtype::Bf16);
    let (data, window) = shared.into_window().expect("host memory");
    assert_eq!(live(&device), 300);
    let back = Tensor::from_window(&device, &[150], data, window);
    assert_eq!((back.f32s(), live(&device)), (&values[..], 900));
    drop(back);
    let rounded = half.to_vec();
    let (data, window) = half.into_window().expect("host memory");
    assert!(matches!(data, Elements::Bf16(_)) && live(&device) == 0, "bf16 travels as bf16");
    let back = Tensor::from_window(&device, &[3, 50], data, window);
    assert_eq!((back.to_vec(), live(&device)), (rounded, 300));
    drop(back);
    assert_eq!(live(&device), 0);
}

#[test]
fn memory_that_is_held_elsewhere_is_counted_until_it_is_let_go() {
    let device = Device::new(1);
    let (data, window) = random(&device, &[3, 50], 1).into_window().expect("host memory");
    let held = device.hold(Cause::Gradients, 600);
    assert_eq!((device.account().live(Cause::Gradients), live(&device)), (600, 600));
    drop(held);
    let _back = Tensor::from_window(&device, &[150], data, window);
    assert_eq!((device.account().live(Cause::Gradients), live(&device)), (0, 600));
    assert_eq!(device.account().peak_total(), 600);
}

/// A step of a small model: every kind of memory use, in both storages.
fn step(device: &Arc<Device>, parameters: &[Parameter], dtype: Dtype) {
    let tape = Tape::new(device);
    let p: Vec<Var> = parameters.iter().map(|p| tape.parameter(p)).collect();
    let x = p[0].embed(&[0, 3, 3, 1, 2, 9], dtype);
    let h = x.rms_norm(&p[1], 1e-5).linear(&p[2].cast(dtype), Some(&p[3])).swiglu();
    let y = x.add(&h).dropout(0.1, Draws::new(1, Purpose::Dropout, 0, 0), RowIds::from(0..6));
    tape.backward(&y.linear_cross_entropy(&p[0], None, &[1, 2, 3, 4, 5, u32::MAX], 0.2));
    parameters.iter().for_each(Parameter::clear_gradient);
}

#[test]
fn a_repeated_step_takes_no_new_memory() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let device = Device::new(2);
        let shapes = [vec![40, 32], vec![32], vec![64, 32], vec![64]];
        let parameters = shapes.iter().zip(0..).map(|(shape, i)| Parameter::new("p", random(&device, shape, i)));
        let parameters: Vec<Parameter> = parameters.collect();
        // The second step finds all the memory that the first took.
        (0..2).for_each(|_| step(&device, &parameters, dtype));
        let now = || (live(&device), device.free_bytes(), device.account().peak_total());
        let (before, bytes) = (now(), parameters.iter().map(Parameter::len).sum::<usize>() * 4);
        assert_eq!(before.0, bytes as u64, "parameters alone: cleared gradients have given theirs back");
        assert!(before.0 + before.1 >= before.2, "what was ever live is live or waits for reuse: {before:?}");
        for _ in 0..4 {
            step(&device, &parameters, dtype);
            device.trim();
            assert_eq!(now(), before);
        }
        drop(parameters);
        assert_eq!(live(&device), 0);
        (0..3).for_each(|_| device.trim());
        assert_eq!(device.free_bytes(), 0, "memory that nobody takes is given back");
    }
}

/// Between forward and backward nothing but a part is here; backward finds what has been put back by then.
#[test]
fn a_value_may_be_elsewhere_between_forward_and_backward() {
    let device = Device::new(1);
    let values = random(&device, &[4, 3], 1);
    let gradient = |away: bool| {
        let parameter = Parameter::new("w", values.to_owned_copy());
        let tape = Tape::new(&device);
        let x = tape.leaf(random(&device, &[2, 3], 2));
        let value = parameter.stored();
        if away {
            let back = (value.clone(), values.clone());
            value.keep_part(5..9);
            value.put(values.clone());
            let y = x.linear(&tape.parameter(&parameter), None);
            value.release();
            assert_eq!(value.with_kept(|part, first| (first, part.to_vec())), (5, values.f32s()[5..9].to_vec()));
            tape.on_the_way_back(move || {
                back.0.put(back.1);
                Ok(())
            });
            let loss = y.dot_constant(random(&device, &[2, 4], 3));
            let gradients = tape.backward(&loss);
            return gradients.of(&x).unwrap().to_vec();
        }
        let loss = x.linear(&tape.parameter(&parameter), None).dot_constant(random(&device, &[2, 4], 3));
        tape.backward(&loss).of(&x).unwrap().to_vec()
    };
    assert_eq!(gradient(true), gradient(false));
}

#[test]
fn a_gradient_may_be_a_part() {
    let device = Device::new(1);
    let parameter = Parameter::new("w", Tensor::zeros(&device, &[2, 3]));
    parameter.gradient().put_part(2, Tensor::from_slice(&device, &[3], &[1.0, 2.0, 3.0]));
    assert_eq!(parameter.gradient().with_part(3..5, <[f32]>::to_vec), [2.0, 3.0]);
    assert_eq!(parameter.gradient().with_part(0..0, <[f32]>::len), 0);
    parameter.clear_gradient();
    assert_eq!(parameter.gradient().with_part(0..6, <[f32]>::to_vec), [0.0; 6]);
}

#[test]
#[should_panic(expected = "elements 1..3 where 2..5 are held")]
fn elements_held_elsewhere_are_not_made_up() {
    let device = Device::new(1);
    let parameter = Parameter::new("w", Tensor::zeros(&device, &[2, 3]));
    parameter.gradient().put_part(2, Tensor::zeros(&device, &[3]));
    parameter.gradient().with_part(1..3, |_| ());
}
