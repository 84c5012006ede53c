//! What holds of every kernel, and that mistakes are found.

use std::sync::Arc;

use super::simulated::Simulated;
use super::sources::{self, MODULES};
use super::{Accelerator, Gpu};
use crate::device::Device;
use crate::kernels::{self, Line, TABLE};
use crate::tensor::Tensor;

/// The C type that a kernel has for an operand.
fn operand(kind: &str, is_output: bool) -> String {
    let constant = if is_output { "" } else { "const " };
    match (kind, is_output) {
        ("any", true) => "Any".to_owned(),
        ("any", false) => "ConstAny".to_owned(),
        ("f32", _) => format!("Span<{constant}float>"),
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
    let after = source.split_once(&format!("KERNEL({name}, ("))?.1;
    let list = after.split_once("))").expect("the end of the parameters").0;
    let type_of = |parameter: &str| Some(parameter.trim().rsplit_once(char::is_whitespace)?.0.to_owned());
    list.split(',').map(type_of).collect()
}

#[test]
fn every_line_of_the_table_has_its_kernel_with_its_parameters() {
    for Line { module, name, outputs, inputs, arguments, .. } in TABLE.iter().filter(|line| !line.is_product) {
        let (_, source) = MODULES.iter().find(|(of, _)| of == module).unwrap_or_else(|| panic!("no {module}.cu"));
        let found = parameters(name, source).unwrap_or_else(|| panic!("{module}.cu has no kernel `{name}`"));
        let outputs = outputs.iter().map(|kind| operand(kind, true));
        let inputs = inputs.iter().map(|kind| operand(kind, false));
        let expected: Vec<String> = outputs.chain(inputs).chain(arguments.iter().map(|of| argument(of))).collect();
        assert_eq!(found, expected, "the parameters of `{name}` in {module}.cu");
    }
}

#[test]
fn a_wrong_kernel_is_found_by_its_name() {
    let mut wrong = sources::all();
    wrong.retain(|source| ["elementwise", "stored"].contains(&source.module));
    let source = wrong.iter_mut().find(|source| source.module == "elementwise").unwrap();
    source.text = source.text.replace("x.data[i] * factor, accumulate", "x.data[i] * factor * 1.0001f, accumulate");
    let engine: Arc<dyn Accelerator> = Arc::new(Simulated::new(&wrong).unwrap());
    let device = Device::accelerated(1, Gpu { engine, twin: Some(Device::new(1)) });
    let x = Tensor::from_slice(&device, &[3], &[1.0, 2.0, 3.0]);
    let mut out = Tensor::zeros(&device, &[3]);
    let scaled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| kernels::scale(&mut out, &x, 2.0, false)));
    let message = *scaled.unwrap_err().downcast::<String>().unwrap();
    assert!(message.starts_with("kernel `scale` wrote 2.0002"), "{message}");
}
