//! What `quantization_config` says: how some of the weights are packed.

use serde_json::Value;

use crate::checkpoint::WeightPacking;

/// The key of `config.json`.
pub(super) const QUANTIZATION: &str = "quantization_config";
/// Keys within it that say nothing of what weights come to: which modules are not packed, the files say, and here nothing
/// is computed in fewer bits.
const FREE: &[&str] = &["quant_method", "modules_to_not_convert", "ignored_layers", "dequantize", "scale_fmt"];
/// The key that says how large blocks are, and the one that says of which kind floats are.
const BLOCK: &str = "weight_block_size";
const FLOATS: &str = "fmt";
/// How products would be computed in fewer bits elsewhere; otherwise than like this there are scales for that, too.
const PRODUCTS: &str = "activation_scheme";

/// How weights are packed.
///
/// # Errors
/// A way that is not read, or a key that no table knows.
pub(super) fn packing(told: &Value) -> Result<WeightPacking, String> {
    let method = told.get("quant_method").unwrap_or(&Value::Null);
    let packing = match method.as_str() {
        Some("mxfp4") => WeightPacking::Mxfp4,
        Some("fp8") => WeightPacking::Fp8 { block: block(told)? },
        _ => {
            let remedy = "known are mxfp4 and fp8; save the model as bf16 first, as transformers can";
            return Err(format!("{QUANTIZATION}.quant_method is {method}: {remedy}"));
        }
    };
    let keys = told.as_object().into_iter().flatten();
    let own: &[&str] = if packing == WeightPacking::Mxfp4 { &[] } else { &[BLOCK, FLOATS, PRODUCTS] };
    let strange = keys.into_iter().find(|(key, _)| !FREE.contains(&key.as_str()) && !own.contains(&key.as_str()));
    match strange {
        None => Ok(packing),
        Some((key, value)) => Err(format!("{QUANTIZATION}.{key} = {value}: no table knows the key")),
    }
}

/// Rows and columns that share a scale.
fn block(told: &Value) -> Result<[usize; 2], String> {
    let get = |key: &str| told.get(key).unwrap_or(&Value::Null);
    for (key, only) in [(FLOATS, "e4m3"), (PRODUCTS, "dynamic")] {
        let told = get(key);
        if !told.is_null() && told.as_str() != Some(only) {
            return Err(format!("{QUANTIZATION}.{key} = {told}: here there is {only:?} alone"));
        }
    }
    let sizes: Option<Vec<usize>> = get(BLOCK).as_array().and_then(|sizes| {
        let size = |size: &Value| size.as_u64().filter(|&size| size > 0).map(|size| size as usize);
        sizes.iter().map(size).collect()
    });
    match sizes.as_deref() {
        Some(&[height, width]) => Ok([height, width]),
        _ => Err(format!("{QUANTIZATION}.{BLOCK} = {}: here it is two numbers, of rows and columns", get(BLOCK))),
    }
}
