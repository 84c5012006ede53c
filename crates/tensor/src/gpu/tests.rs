//! What holds of every kernel, and that mistakes are found.

mod tensor_cores;

use std::sync::Arc;

use super::simulated::Simulated;
use super::sources::{self, MODULES};
use super::{
    Accelerator, Call, DeviceFailure, DeviceMatrix, DeviceProduct, Gpu, KernelArgument, OperandKind, SimulatedLimits,
    TwinTolerance, compare, on_device,
};
use crate::cpu::gather::Width;
use crate::cpu::grouped_swiglu::Widths;
use crate::device::{Device, Engine};
use crate::draws::{Draws, Purpose};
use crate::dtype::Dtype;
use crate::kernels::{self, TABLE, TableLine};
use crate::tensor::Tensor;

/// The C type that a kernel has for an operand.
fn operand(kind: &str, is_output: bool) -> String {
    let constant = if is_output { "" } else { "const " };
    match (kind, is_output) {
        ("any", true) => "Any".to_owned(),
        ("any", false) => "ConstAny".to_owned(),
        ("f32" | "scratch", _) => format!("Span<{constant}float>"),
        _ => format!("Span<{constant}u32>"),
    }
}

/// The C type that a kernel has for an argument.
fn argument(rust: &str) -> String {
    let name = rust.rsplit([':', '&', ' ']).next().unwrap_or(rust).trim_matches(['[', ']']);
    let c = match rust {
        "usize" => "u64",
        "bool" | "u32" => "u32",
        "f32" => "float",
        "Range<usize>" => "Range",
        "[usize; 2]" => "Pair",
        "&[usize]" => "Span<const u64>",
        "&RowIds" => "Span<const Range>",
        "&[RowGroup]" => "Span<const RowGroup>",
        _ => name,
    };
    c.to_owned()
}

/// The types of a kernel's parameters in its source.
fn parameters(name: &str, source: &str) -> Option<Vec<String>> {
    let source = source.split_whitespace().collect::<Vec<_>>().join(" ");
    let after = source.split_once(&format!("KERNEL({name}, ("))?.1;
    let list = after.split_once("))").expect("the end of the parameters").0;
    let type_of = |parameter: &str| Some(parameter.trim().rsplit_once(char::is_whitespace)?.0.to_owned());
    list.split(',').map(type_of).collect()
}

#[test]
fn every_line_of_the_table_has_its_kernel_with_its_parameters() {
    let mut wrong = Vec::new();
    for TableLine { module, name, outputs, inputs, arguments, .. } in TABLE.iter().filter(|line| !line.is_composed) {
        let source = MODULES.iter().find(|(of, _)| of == module).map(|(_, source)| source);
        let found = source.and_then(|source| parameters(name, source));
        let outputs = outputs.iter().map(|kind| operand(kind, true));
        let inputs = inputs.iter().map(|kind| operand(kind, false));
        let expected: Vec<String> = outputs.chain(inputs).chain(arguments.iter().map(|of| argument(of))).collect();
        if found.as_ref() != Some(&expected) {
            wrong.push(format!("`{name}` in {module}.cu has {found:?} instead of {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What is said of `scale` where its source has one text in place of another.
fn told_of_scale(right: &str, wrong: &str) -> String {
    let mut sources = sources::all();
    sources.retain(|source| ["elementwise", "stored"].contains(&source.module));
    let source = sources.iter_mut().find(|source| source.module == "elementwise").unwrap();
    assert!(source.text.contains(right), "{}", source.text);
    source.text = source.text.replace(right, wrong);
    let engine: Arc<dyn Accelerator> = Arc::new(Simulated::new(SimulatedLimits::default(), &sources).unwrap());
    let device = Device::accelerated(1, Gpu::new(engine, Some(Device::new(1))));
    let x = Tensor::from_slice(&device, &[3], &[1.0, 2.0, 3.0]);
    let mut out = Tensor::zeros(&device, &[3]);
    let scaled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| kernels::scale(&mut out, &x, 2.0, false)));
    *scaled.unwrap_err().downcast::<String>().unwrap()
}

#[test]
fn a_wrong_kernel_is_found_by_its_name() {
    let scale = "EACH(i, out.len) set_or_add(out.data[i], x.data[i] * factor, accumulate);";
    let told = told_of_scale(scale, &scale.replace("factor", "factor * 1.0001f"));
    assert!(told.starts_with("kernel `scale` wrote 2.0002"), "{told}");
    let told = told_of_scale(scale, &scale.replace("out.len", "out.len - 1"));
    assert!(told.starts_with("kernel `scale` wrote 0e0 where the CPU's wrote 6e0: element 2"), "{told}");
    let told = told_of_scale(scale, &scale.replace("out.len", "out.len + 1").replace("x.data[i]", "1.0f"));
    assert!(told.starts_with("kernel `scale` wrote behind the end of an operand of 12 bytes"), "{told}");
}

/// What stands between the products of SwiGLU experts has no line of the table: it is part of a product there.
#[test]
fn swiglu_experts_values_and_gradients_are_those_of_the_activation() {
    const ROWS: usize = 7;
    const INNER: usize = 19;
    let (device, host) = (Device::simulated(1).unwrap(), Device::new(1));
    let Engine::Accelerator(gpu) = device.engine() else { panic!("an accelerator") };
    let draws = Draws::new(3, Purpose::Test, 0, 0);
    let drawn = |device: &Arc<Device>, width: usize, first: u64| {
        Tensor::from_fn(device, &[ROWS, width], |i| draws.normal(first + i as u64))
    };
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let [x, y] = [&host, &device].map(|device| drawn(device, 2 * INNER, 0).cast(dtype));
        let [slopes, slopes_there] = [&host, &device].map(|device| drawn(device, INNER, 1000));
        let mut values = Tensor::zeros(&host, &[ROWS, INNER]);
        let mut gradients = Tensor::zeros(&host, &[ROWS, 2 * INNER]);
        kernels::swiglu(&mut values, &x.to_f32(), INNER);
        kernels::swiglu_back(&mut gradients, &x.to_f32(), &slopes, INNER, false);

        let (mut kept, mut hidden) = (y.to_owned_copy(), Tensor::stale(&device, &[ROWS, INNER], dtype));
        let mut call = Call::new(gpu, &device, "grouped_swiglu", "gated");
        call.output(&mut hidden, OperandKind::Any);
        call.input(&kept, OperandKind::Any);
        INNER.pass(&mut call);
        call.launch();
        compare("gated", &hidden, &values.cast(dtype), OperandKind::Any, TwinTolerance::default());

        let mut call = Call::new(gpu, &device, "grouped_swiglu", "gated_gradient");
        call.output(&mut kept, OperandKind::Any);
        call.output(&mut hidden, OperandKind::Any);
        call.input(&slopes_there, OperandKind::F32);
        INNER.pass(&mut call);
        call.launch();
        compare("gated_gradient", &kept, &gradients.cast(dtype), OperandKind::Any, TwinTolerance::default());
        compare("gated_gradient", &hidden, &values.cast(dtype), OperandKind::Any, TwinTolerance::default());
    }
}

/// Numbers of bf16 that are neighbours may stand for each other, and no others.
#[test]
fn one_unit_in_the_last_place_of_bf16_is_rounding() {
    let device = Device::new(1);
    let beyond = |units: u16| {
        let numbers = |by: u16| (0..128).map(|i| half::bf16::from_bits(0x3f80 + i + by).to_f32()).collect::<Vec<f32>>();
        let [got, want] = [units, 0].map(|by| Tensor::from_slice(&device, &[128], &numbers(by)).cast(Dtype::Bf16));
        let check = || compare("any", &got, &want, OperandKind::Any, TwinTolerance::default());
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).is_err()
    };
    assert_eq!([0, 1, 2, 3].map(beyond), [false, false, true, true]);
}

#[test]
#[should_panic(expected = "the host does not have this device's elements")]
fn the_host_reaches_no_elements_of_a_device() {
    Tensor::zeros(&Device::simulated(1).unwrap(), &[2]).f32s();
}

/// Of a device with little memory: what waits for reuse makes room, and what tensors hold ends the run with a reason.
#[test]
fn memory_that_waits_makes_room() {
    let engine = Arc::new(
        Simulated::new(SimulatedLimits { bytes: 1 << 20, ..SimulatedLimits::default() }, &sources::all()).unwrap(),
    );
    let device = Device::accelerated(1, Gpu::new(engine, None));
    let quarter = |n: usize| Tensor::zeros(&device, &[n << 16]);
    let first = quarter(1);
    drop([quarter(1), quarter(1)]);
    let second = quarter(2);
    let told = on_device(|| quarter(2)).unwrap_err();
    assert!(matches!(told, DeviceFailure::NoRoom { bytes: 524_288, held: 786_432, .. }), "{told}");
    drop((first, second));
    drop(quarter(4));
}

/// Some hidden value or gate's gradient lies so near the middle of two numbers of bf16 that two libraries' exponentials round
/// it differently, and with these draws one does; the tolerance of these lines knows.
#[test]
fn swiglu_experts_agree_in_either_type() {
    let (device, counts) = (Device::simulated(1).unwrap(), [700, 0, 900]);
    let widths = Widths { outer: 32, inner: 256 };
    let rows: usize = counts.iter().sum();
    let draws = Draws::new(13, Purpose::Test, 0, 0);
    let small = |i: u64| 0.05 * draws.normal(i);
    let drawn = |shape: [usize; 2], first: u64| Tensor::from_fn(&device, &shape, |i| small(first + i as u64));
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let x = drawn([rows, widths.outer], 0).cast(dtype);
        let first = drawn([counts.len() * 2 * widths.inner, widths.outer], 1 << 20).cast(dtype);
        let second = drawn([counts.len() * widths.outer, widths.inner], 2 << 20).cast(dtype);
        let stale = |width: usize, dtype: Dtype| Tensor::stale(&device, &[rows, width], dtype);
        let (mut kept, mut y) = (stale(2 * widths.inner, dtype), stale(widths.outer, dtype));
        kernels::swiglu_experts(&mut kept, &mut y, &x, &first, &second, &counts, widths);
        let mut again = stale(widths.outer, dtype);
        kernels::from_gate_and_up(&mut again, &kept, &second, &counts, widths);
        assert_eq!(again.to_vec(), y.to_vec(), "{dtype:?}");
        let (mut hidden, mut dx) = (stale(widths.inner, dtype), stale(widths.outer, Dtype::F32));
        let g = drawn([rows, widths.outer], 3 << 20);
        kernels::swiglu_experts_back(&mut kept, &mut hidden, &mut dx, &g, &first, &second, &counts, widths, false);
    }
}

/// Rows with no source, one, several, and more than a block takes from a list; sources of no row; several blocks' columns.
#[test]
fn sums_of_rows_by_index_have_the_order_of_the_host() {
    const SOURCES: usize = 4000;
    const ROWS: usize = 50;
    let row_of = |source: usize| match source % 5 {
        0 | 1 => 7,
        2 => ROWS as u32 + source as u32,
        _ => (source * 31 % (ROWS - 1)) as u32,
    };
    let draws = Draws::new(5, Purpose::Test, 0, 0);
    for (width, accumulate, dtype) in [(1, false, Dtype::F32), (1030, true, Dtype::F32), (5, true, Dtype::Bf16)] {
        let sums = [Device::new(2), Device::simulated(1).unwrap()].map(|device| {
            let drawn = |len: usize, first: u64| Tensor::from_fn(&device, &[len], |i| draws.normal(first + i as u64));
            let rows: Vec<u32> = (0..SOURCES).map(row_of).collect();
            let known: Vec<u32> = rows.iter().map(|row| row % ROWS as u32).collect();
            let places: Vec<u32> = rows.iter().map(|&row| if row < ROWS as u32 { row } else { u32::MAX }).collect();
            let [rows, known, places] = [rows, known, places].map(|rows| Tensor::from_index(&device, &rows));
            let (g, w, to) = (drawn(SOURCES * width, 0), drawn(SOURCES, 1 << 40), drawn(ROWS * width, 1 << 41));
            let (mut scattered, mut weighted, mut table) =
                (to.to_owned_copy(), to.to_owned_copy(), to.to_owned_copy().cast(dtype));
            let mut scratch = Tensor::zeros(&device, &[ROWS * width]);
            kernels::scatter_add(&mut scattered, &g, &known, width, accumulate);
            kernels::weighted_sum_back_rows(&mut weighted, &g, &w, &places, Width { k: 1, row: width }, accumulate);
            kernels::look_up_back(&mut table, &mut scratch, &g, &rows, 0, width, accumulate);
            [scattered, weighted, table].map(|sums| sums.to_vec().into_iter().map(f32::to_bits).collect::<Vec<_>>())
        });
        assert!(sums[0] == sums[1], "{width}, {accumulate}, {dtype:?}");
    }
}

/// Of as many parts as there may be, and of fewer; columns that are no whole strips.
#[test]
fn sums_of_columns_are_those_of_their_parts() {
    let device = Device::simulated(1).unwrap();
    for (rows, width) in [(0, 3), (63, 40), (700, 1), (300, 70)] {
        let draws = Draws::new(5, Purpose::Test, 0, 0);
        let x = Tensor::from_fn(&device, &[rows, width], |i| draws.normal(i as u64));
        let mut sums = Tensor::filled(&device, &[width], 1.0);
        kernels::column_sums(&mut sums, &x, rows, true);
        let exact =
            |column: usize| 1.0 + x.to_vec().iter().skip(column).step_by(width).map(|&x| f64::from(x)).sum::<f64>();
        for (column, &got) in sums.to_vec().iter().enumerate() {
            assert!((f64::from(got) - exact(column)).abs() < 1e-4, "{rows} x {width}, column {column}: {got}");
        }
    }
}

/// Of numbers whose squares' sums are rounded, so that another order has other bits, which the comparison with the host sees.
#[test]
fn sums_of_squares_have_the_bits_of_the_host() {
    let device = Device::simulated(1).unwrap();
    let draws = Draws::new(5, Purpose::Test, 0, 0);
    let x = Tensor::from_fn(&device, &[1_500_007], |i| draws.normal(i as u64));
    let mut sums = crate::ops::SquareSums::zeros(&device, 2);
    for range in [3..1_500_007, 5..5, 7..20_000, 11..12] {
        sums.add(1, &x, range);
    }
}

/// A device may do products in any order, so two of them must not write to the same elements.
#[test]
fn products_of_a_list_are_apart() {
    let device = Device::simulated(1).unwrap();
    let Engine::Accelerator(gpu) = device.engine() else { panic!("an accelerator") };
    let [c, a] = [(); 2].map(|()| Tensor::zeros(&device, &[3, 3]));
    let rows = |of: &Tensor, start: usize| {
        let whole = DeviceMatrix { elements: of.device_elements(), first: 0, rows: 3, cols: 3, transposed: false };
        whole.at_rows(start, 1)
    };
    let whole = DeviceMatrix { rows: 3, first: 0, ..rows(&a, 0) };
    let product = |start: usize| DeviceProduct { c: rows(&c, start), a: rows(&a, start), b: whole, accumulate: true };
    gpu.multiply_all(&device, &[product(2), product(0), product(1)]);
    let twice = || gpu.multiply_all(&device, &[product(0), product(2), product(0)]);
    let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(twice)).unwrap_err();
    assert_eq!(told.downcast_ref::<&str>(), Some(&"products that write to the same elements"));
}
