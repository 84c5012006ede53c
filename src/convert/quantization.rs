//! What `quantization_config` says: how some of the weights are packed.

use serde_json::Value;

use crate::checkpoint::WeightPacking;

/// The key of `config.json`.
pub(super) const QUANTIZATION: &str = "quantization_config";
/// Keys within it that say nothing of what weights come to: which modules are not packed, the files say, and here nothing
/// is computed in fewer bits.
const FREE: &[&str] = &["quant_method", "modules_to_not_convert", "dequantize"];

/// How weights are packed.
///
/// # Errors
/// A way that is not read, or a key that no table knows.
pub(super) fn packing(told: &Value) -> Result<WeightPacking, String> {
    let method = told.get("quant_method").unwrap_or(&Value::Null);
    let packing = match method.as_str() {
        Some("mxfp4") => WeightPacking::Mxfp4,
        _ => {
            let remedy = "known is mxfp4; save the model as bf16 first, as transformers can";
            return Err(format!("{QUANTIZATION}.quant_method is {method}: {remedy}"));
        }
    };
    let keys = told.as_object().into_iter().flatten();
    let strange = keys.into_iter().find(|(key, _)| !FREE.contains(&key.as_str()));
    match strange {
        None => Ok(packing),
        Some((key, value)) => Err(format!("{QUANTIZATION}.{key} = {value}: no table knows the key")),
    }
}
