//! Weights that are published in fewer bits (`docs/huggingface.md`): what they come to here is what the program that
//! others read them with makes of them, to the bit.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::convert::{Stored, copied, golden, json_of, tensors, write};
use crate::program::Workshop;

const MXFP4: &str = "gpt_oss_mxfp4";
const FP8: &str = "deepseek_v3_fp8";

/// The same model with the weights that others make of it.
fn unpacked(shop: &Workshop, family: &str) -> PathBuf {
    let to = copied(shop, family);
    let folder = shop.path(&format!("plain/{family}"));
    fs::create_dir_all(folder.parent().unwrap()).unwrap();
    fs::rename(to, &folder).unwrap();
    fs::rename(folder.join("unpacked.safetensors"), folder.join("model.safetensors")).unwrap();
    let mut config = json_of(&folder.join("config.json"));
    config.as_object_mut().unwrap().remove("quantization_config").expect("it says how");
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    folder
}

#[test]
fn packed_models_are_what_others_unpack() {
    let shop = Workshop::new();
    for (family, stored) in [(MXFP4, "MXFP4"), (FP8, "FP8")] {
        let (packed, plain) = (golden(family), unpacked(&shop, family));
        let told = shop.succeeds(&format!("audit {}", packed.display()));
        assert!(told.out.contains(stored) && told.err.contains(&format!("are stored in {stored}")), "{}", told.err);
        let made = |folder: &Path, options: &str| {
            shop.succeeds(&format!("convert {} made {options}", folder.display()));
            let config = fs::read(shop.path("made/config.json")).unwrap();
            let made = (tensors(&shop.path("made")), options.contains("hf").then_some(config));
            fs::remove_dir_all(shop.path("made")).unwrap();
            made
        };
        for options in ["--dtype bf16", "--to hf --dtype bf16", "--dtype f32", "--to hf --dtype f32"] {
            let (own, theirs) = (made(&packed, options), made(&plain, options));
            assert!(own.0 == theirs.0, "{family} {options}");
            assert_eq!(own.1, theirs.1, "{family} {options}: nothing is packed any more");
        }
        for layout in ["", "--to hf"] {
            let rounded = made(&packed, &format!("{layout} --dtype bf16"));
            assert!(made(&packed, layout) == rounded, "{family}: a model of bf16");
        }
    }
}

#[track_caller]
fn refused(shop: &Workshop, family: &str, words: &[&str], act: impl Fn(&mut Vec<Stored>, &mut Value)) {
    let folder = copied(shop, family);
    let (mut all, mut config) = (tensors(&folder), json_of(&folder.join("config.json")));
    act(&mut all, &mut config);
    write(&folder.join("model.safetensors"), &all);
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    shop.fails(&format!("convert hf/{family} out"), 2, words);
    assert!(!shop.path("out").exists());
    fs::remove_dir_all(folder).unwrap();
}

/// Changes one tensor.
fn change(name: &str, act: impl Fn(&mut Stored)) -> impl Fn(&mut Vec<Stored>, &mut Value) {
    move |all, _| act(all.iter_mut().find(|tensor| tensor.0 == name).unwrap())
}

/// Changes a key of `quantization_config`.
fn say(key: &str, value: Value) -> impl Fn(&mut Vec<Stored>, &mut Value) {
    move |_, config| config["quantization_config"][key] = value.clone()
}

/// What is wrong with codes and scales is told by tensor.
#[test]
fn packed_models_in_which_something_is_wrong_are_refused() {
    let shop = Workshop::new();
    let scales = "model.layers.0.mlp.experts.down_proj_scales";
    let refused = |words: &[&str], act: &dyn Fn(&mut Vec<Stored>, &mut Value)| refused(&shop, MXFP4, words, act);
    refused(&["down_proj_scales is missing"], &|all, _| all.retain(|tensor| tensor.0 != scales));
    refused(&[scales, "by config.json it is [4, 64, 1]"], &change(scales, |tensor| tensor.2 = vec![4, 1, 64]));
    let halved = change(scales, |tensor| {
        tensor.1 = "F16".into();
        tensor.2[1] /= 2;
    });
    refused(&[scales, "is F16, which MXFP4 has not"], &halved);
    refused(&[".down_proj_blocks is MXFP4, and config.json does not say so"], &|_, config| {
        config["quantization_config"] = Value::Null;
    });
    refused(&["quantization_config.quant_method is \"awq\"", "mxfp4"], &say("quant_method", json!("awq")));
    refused(&["quantization_config.bits = 4"], &say("bits", json!(4)));
    refused(&["quantization_config.weight_block_size"], &say("weight_block_size", json!([1, 32])));
    // An exponent that means that there is no number.
    refused(&["values that are no finite numbers"], &change(scales, |tensor| tensor.3[5] = 255));
    // A norm of bytes, which nothing scales.
    let bytes = change("model.norm.weight", |tensor| {
        tensor.1 = "U8".into();
        tensor.3.truncate(64);
    });
    refused(&["model.norm.weight is U8"], &bytes);
}

#[test]
fn models_in_eight_bits_in_which_something_is_wrong_are_refused() {
    let shop = Workshop::new();
    let (codes, scales) =
        ("model.layers.0.self_attn.q_b_proj.weight", "model.layers.0.self_attn.q_b_proj.weight_scale_inv");
    let refused = |words: &[&str], act: &dyn Fn(&mut Vec<Stored>, &mut Value)| refused(&shop, FP8, words, act);
    refused(&["q_b_proj.weight_scale_inv is missing"], &|all, _| all.retain(|tensor| tensor.0 != scales));
    refused(&[scales, "by config.json it is [2, 2]"], &change(scales, |tensor| tensor.2 = vec![4, 1]));
    refused(&[scales, "by config.json it is [3, 5]"], &say("weight_block_size", json!([64, 32])));
    refused(&["values that are no finite numbers"], &change(codes, |tensor| tensor.3[3] = 0x7f));
    refused(&["q_b_proj.weight is F8_E4M3, and config.json does not say"], &|_, config| {
        config["quantization_config"] = Value::Null;
    });
    for (key, value) in [
        ("weight_block_size", Value::Null),
        ("weight_block_size", json!([128])),
        ("weight_block_size", json!([0, 128])),
        ("fmt", json!("e5m2")),
        ("activation_scheme", json!("static")),
    ] {
        refused(&[&format!("quantization_config.{key}")], &say(key, value));
    }
    // Experts that are stacked have one table of scales each, which nobody publishes.
    let experts = "model.layers.1.mlp.experts";
    refused(&["experts.gate_up_proj cannot be FP8"], &|all, _| {
        let is_expert = |tensor: &Stored| tensor.0.starts_with(experts);
        let one = all.iter().find(|tensor| is_expert(tensor) && tensor.1 == "F8_E4M3").cloned().unwrap();
        all.retain(|tensor| !is_expert(tensor));
        let stacked = |name: &str, shape: Vec<usize>| {
            let bytes = vec![one.3[0]; shape.iter().product()];
            (format!("{experts}.{name}"), one.1.clone(), shape, bytes)
        };
        all.extend([stacked("gate_up_proj", vec![8, 24, 16]), stacked("down_proj", vec![8, 16, 12])]);
    });
}

/// A checkpoint of this program has nothing packed, whatever its files say.
#[test]
fn codes_are_no_weights_of_a_checkpoint() {
    let bytes = fs::read(golden(MXFP4).join("model.safetensors")).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    assert!(all.iter().any(|(_, view)| view.dtype() == safetensors::Dtype::U8));
    let shop = Workshop::new();
    shop.succeeds(&format!("convert {} own", golden(MXFP4).display()));
    fs::copy(golden(MXFP4).join("model.safetensors"), shop.path("own/model.safetensors")).unwrap();
    crate::program::reseal(&shop.path("own"));
    shop.fails("audit own", 1, &["model.safetensors", "is U8, as no tensor here is"]);
}
