//! A conversion holds two tensors, not a model: it ends well where the system gives it no more memory.

use std::fs;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use crate::program::{PROGRAM, Workshop};

const D_MODEL: usize = 32;
/// A matrix of a feed-forward is 16 MiB in f32, and there are six: with a layer's three the limits below are exceeded.
const WIDTH: usize = 1 << 17;
const VOCAB: usize = 32;
/// Two tensors, and the program itself, in KiB of memory that is not of files.
const LIMIT: usize = 2 * (WIDTH * D_MODEL * 4) / 1024 + 12 * 1024;

/// A Llama of two layers, as transformers writes one.
fn write_model(folder: &Path) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("oracle/golden/huggingface/llama");
    fs::create_dir_all(folder).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        fs::copy(golden.join(name), folder.join(name)).unwrap();
    }
    let mut config: Value = serde_json::from_slice(&fs::read(golden.join("config.json")).unwrap()).unwrap();
    config["hidden_size"] = json!(D_MODEL);
    config["head_dim"] = json!(D_MODEL / 4);
    config["intermediate_size"] = json!(WIDTH);
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, D_MODEL]),
        ("model.norm.weight".to_owned(), vec![D_MODEL]),
    ];
    for layer in 0..2 {
        let of_layer = [
            ("input_layernorm", vec![D_MODEL]),
            ("post_attention_layernorm", vec![D_MODEL]),
            ("mlp.down_proj", vec![D_MODEL, WIDTH]),
            ("mlp.gate_proj", vec![WIDTH, D_MODEL]),
            ("mlp.up_proj", vec![WIDTH, D_MODEL]),
            ("self_attn.q_proj", vec![D_MODEL, D_MODEL]),
            ("self_attn.k_proj", vec![D_MODEL / 2, D_MODEL]),
            ("self_attn.v_proj", vec![D_MODEL / 2, D_MODEL]),
            ("self_attn.o_proj", vec![D_MODEL, D_MODEL]),
        ];
        shapes.extend(of_layer.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)));
    }
    // Small whole numbers, which every type has.
    let bytes: Vec<u8> = (0..WIDTH * D_MODEL).flat_map(|i| ((i % 7) as f32).to_le_bytes()).collect();
    let view = |shape: Vec<usize>| {
        let len = 4 * shape.iter().product::<usize>();
        TensorView::new(Dtype::F32, shape, &bytes[..len]).unwrap()
    };
    let views = shapes.into_iter().map(|(name, shape)| (name, view(shape)));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

#[test]
fn a_conversion_holds_two_tensors() {
    let shop = Workshop::new();
    write_model(&shop.path("theirs"));
    for words in ["theirs ours", "ours back --to hf", "ours half --to hf --dtype bf16"] {
        let limited = format!("ulimit -d {LIMIT}; exec {PROGRAM} convert {words}");
        let ended = shop.start_shell(&limited).wait();
        assert_eq!(ended.code, Some(0), "{words}: {}", ended.err);
    }
    // The limit is one: a process that would hold a layer is refused memory.
    let held = 3 * WIDTH * D_MODEL * 4;
    let too_much = format!("ulimit -d {LIMIT}; head -c {held} /dev/zero | dd of=/dev/null bs={held} iflag=fullblock");
    assert_ne!(shop.start_shell(&too_much).wait().code, Some(0));
}
