//! Models of Hugging Face and checkpoints of this program become each other (`docs/huggingface.md`): logits that
//! transformers computed, bytes that come back, and folders in which something is wrong.

use std::fs;
use std::path::{Path, PathBuf};

use guildhall::convert::{ModelFolder, audit, compare};
use guildhall::data::{IGNORE, Row};
use guildhall::model::{Context, Model, Sizes};
use guildhall::moe::StepFacts;
use guildhall::{checkpoint, train};
use guildhall_tensor::Tape;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::program::{RECIPE, RUN, Workshop, reseal};
use crate::task_recipes;
use crate::tiny::{Tolerance, near, share};
use crate::world::{ONE, on_mesh};

const FAMILIES: [&str; 13] = [
    "mixtral",
    "llama",
    "llama_stretched",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v3_straight",
    "gpt2",
    "m2m",
    "nllb_moe",
    "switch",
];
const ROWS: usize = 2;
/// Tokens of an encoder's row and of a decoder's, as `oracle/huggingface.py` has them.
const SOURCE: usize = 8;
const SEQ: usize = 12;
const VOCAB: usize = 32;
/// Both sides round in f32, whose step is 6e-8 of a value, over two or four layers of products of 16 to 40 terms.
const ROUNDING: Tolerance = Tolerance { relative: 5e-6, floor: 0.0 };

pub(crate) fn golden(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("oracle/golden/huggingface").join(family)
}

/// Copies a golden folder without the numbers that are only ours.
pub(crate) fn copied(shop: &Workshop, family: &str) -> PathBuf {
    let to = shop.path(&format!("hf/{family}"));
    fs::create_dir_all(&to).unwrap();
    for entry in fs::read_dir(golden(family)).unwrap().flatten() {
        if entry.file_name() != "logits.safetensors" {
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
    to
}

/// What a model whose tensors are read where they lie computes, over the rows of the golden numbers.
fn logits(model: &ModelFolder, tokens: &[u32]) -> Vec<f32> {
    let sizes: Sizes = train::sizes(&model.config);
    let (source, reads) = (model.source().unwrap(), sizes.model.blueprint().reads_a_source());
    let width = if reads { SOURCE + SEQ } else { SEQ };
    let row = |row: usize, from: usize, len: usize| Row {
        tokens: tokens[row * width + from..][..len].to_vec(),
        targets: vec![IGNORE; len],
        segments: vec![0; len],
        positions: (0..len as u32).collect(),
        ..Row::default()
    };
    let of_ranks = on_mesh(ONE, |rank, mesh| {
        let mut model = Model::new(&rank.device, &sizes, mesh);
        checkpoint::check_fit(&source, &mut model, mesh).unwrap();
        checkpoint::load_model(&source, &mut model).unwrap();
        let batch = share(0..ROWS, SEQ, |at| row(at, width - SEQ, SEQ));
        let batch = if reads { batch.reading(share(0..ROWS, SOURCE, |at| row(at, 0, SOURCE))) } else { batch };
        let context = Context::of_training(mesh, StepFacts::of_inference(), (ROWS * SEQ) as u64);
        let context = Context { source_tokens: (ROWS * SOURCE) as u64, ..context };
        model.logits(&Tape::inference(&rank.device), &batch, &context).unwrap().to_vec()
    });
    of_ranks.into_iter().next().expect("a rank")
}

fn numbers(family: &str) -> (Vec<u32>, Vec<f32>) {
    let bytes = fs::read(golden(family).join("logits.safetensors")).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| all.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
    let tokens = words("tokens").into_iter().map(u32::from_le_bytes).collect();
    (tokens, words("logits").into_iter().map(f32::from_le_bytes).collect())
}

#[test]
fn imported_models_compute_what_transformers_computes() {
    let shop = Workshop::new();
    for family in FAMILIES {
        let (tokens, want) = numbers(family);
        assert_eq!(want.len(), ROWS * SEQ * VOCAB, "{family}");
        let folder = golden(family);
        shop.succeeds(&format!("convert {} {family}", folder.display()));
        for folder in [folder, shop.path(family)] {
            let model = ModelFolder::open(&folder, None).unwrap_or_else(|error| panic!("{family}: {error}"));
            near(family, &logits(&model, &tokens), &want, ROUNDING);
        }
    }
}

/// Name, type, shape and bytes.
pub(crate) type Stored = (String, String, Vec<usize>, Vec<u8>);

pub(crate) fn tensors(folder: &Path) -> Vec<Stored> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        if name.starts_with("model") && name.ends_with(".safetensors") {
            let bytes = fs::read(entry.path()).unwrap();
            let read = SafeTensors::deserialize(&bytes).unwrap();
            all.extend(read.iter().map(|(name, view)| {
                (name.to_owned(), format!("{:?}", view.dtype()), view.shape().to_vec(), view.data().to_vec())
            }));
        }
    }
    all.sort();
    all
}

/// There and back, from either side, in one file and in several, in f32 and in bf16.
#[test]
fn what_goes_there_and_back_has_the_same_bytes() {
    let shop = Workshop::new();
    for family in FAMILIES {
        let folder = golden(family);
        for (n, dtype) in ["f32", "bf16"].into_iter().enumerate() {
            let name = |part: &str| format!("{family}-{n}-{part}");
            let (start, own, back, again) = (name("start"), name("own"), name("back"), name("again"));
            shop.succeeds(&format!("convert {} {start} --to hf --dtype {dtype} --file-mib 1", folder.display()));
            shop.succeeds(&format!("convert {start} {own}"));
            shop.succeeds(&format!("convert {own} {back}"));
            shop.succeeds(&format!("convert {back} {again}"));
            let of = |name: &str| tensors(&shop.path(name));
            assert!(of(&start) == of(&back), "{family} in {dtype}");
            assert!(of(&own) == of(&again), "{family} in {dtype}");
            let config = |name: &str| shop.read(&format!("{name}/config.json"));
            assert_eq!(config(&start), config(&back), "{family} in {dtype}");
            let recipe = |name: &str| shop.read(&format!("{name}/config.toml"));
            assert_eq!(recipe(&own), recipe(&again), "{family} in {dtype}");
            let sums = [&start, &own, &back].map(|name| audit(&shop.path(name)).unwrap().1.sha256);
            assert!(sums.iter().all(|sum| *sum == sums[0]), "{family} in {dtype}: {sums:?}");
            if n == 0 {
                assert!(of(&start) == tensors(&folder), "{family}: what transformers wrote");
            }
        }
    }
}

/// Gate, up and down of an expert of Qwen's kind.
const QWEN_EXPERTS: [&str; 3] = ["mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj", "mlp.experts.{e}.down_proj"];

/// The layout that transformers has in memory: experts of a layer are stacked, gate and up one behind the other.
#[test]
fn stacked_experts_are_the_same_model() {
    let shop = Workshop::new();
    for (family, names) in [
        (
            "mixtral",
            ["block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3", "block_sparse_moe.experts.{e}.w2"],
        ),
        ("olmoe", QWEN_EXPERTS),
        ("qwen2_moe", QWEN_EXPERTS),
        ("qwen3_moe", QWEN_EXPERTS),
        ("deepseek_v3_straight", QWEN_EXPERTS),
    ] {
        let folder = copied(&shop, family);
        let mut all = tensors(&folder);
        for layer in 0..2 {
            let take = |all: &mut Vec<_>, pattern: &str, expert: usize| {
                let name = format!("model.layers.{layer}.{}.weight", pattern.replace("{e}", &expert.to_string()));
                let at = all.iter().position(|(own, ..): &Stored| *own == name)?;
                Some(all.remove(at))
            };
            let (mut gate_up, mut down, mut shapes) = (Vec::new(), Vec::new(), None);
            for expert in 0..4 {
                let [Some(gate), Some(up), Some(out)] = names.map(|name| take(&mut all, name, expert)) else {
                    continue;
                };
                shapes = Some((vec![4, 2 * gate.2[0], gate.2[1]], vec![4, out.2[0], out.2[1]]));
                gate_up.extend([gate.3, up.3].concat());
                down.extend(out.3);
            }
            let Some((one, other)) = shapes else { continue };
            let at = format!("model.layers.{layer}.mlp.experts");
            all.push((format!("{at}.gate_up_proj"), "F32".into(), one, gate_up));
            all.push((format!("{at}.down_proj"), "F32".into(), other, down));
        }
        for (name, ..) in &mut all {
            *name = name.replace("block_sparse_moe.gate", "mlp.gate");
        }
        write(&folder.join("model.safetensors"), &all);
        let sums = [golden(family), folder].map(|folder| audit(&folder).unwrap_or_else(|error| panic!("{error}")).1);
        assert_eq!(sums[0].sha256, sums[1].sha256, "{family}");
        assert!(sums[1].stored < sums[0].stored, "{family}");
    }
}

pub(crate) fn write(path: &Path, tensors: &[Stored]) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        let dtype = match dtype.as_str() {
            "F32" => safetensors::Dtype::F32,
            "BF16" => safetensors::Dtype::BF16,
            "F16" => safetensors::Dtype::F16,
            "U8" => safetensors::Dtype::U8,
            "F8_E4M3" => safetensors::Dtype::F8_E4M3,
            "BOOL" => safetensors::Dtype::BOOL,
            "I64" => safetensors::Dtype::I64,
            other => panic!("{other}"),
        };
        (name, safetensors::tensor::TensorView::new(dtype, shape.clone(), bytes).unwrap())
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Half precision is read exactly, and written by rounding, which is told.
#[test]
fn types_are_widened_exactly_and_rounded_when_asked() {
    let shop = Workshop::new();
    let folder = golden("gpt2");
    let told = shop.succeeds(&format!("convert {} half --to hf --dtype f16", folder.display()));
    assert!(told.err.contains("are rounded to the type they are stored in"), "{}", told.err);
    assert_eq!(json_of(&shop.path("half/config.json"))["dtype"], json!("float16"));
    shop.succeeds("convert half own");
    assert!(shop.read("own/config.toml").contains("dtype = \"f32\""));
    shop.succeeds("convert own again --dtype f16");
    assert!(tensors(&shop.path("half")) == tensors(&shop.path("again")));
    shop.fails("convert half other --dtype f16 --to guildhall", 2, &["--dtype f16", "f32 or bf16"]);
    shop.fails("convert half other --dtype i8", 2, &["--dtype i8", "f32, bf16 or f16"]);
    // Beyond the largest of f16, 65504.
    let wide = copied(&shop, "mixtral");
    let mut all = tensors(&wide);
    let norm = all.iter_mut().find(|tensor| tensor.0 == "model.norm.weight").unwrap();
    norm.3[..4].copy_from_slice(&1e6f32.to_le_bytes());
    write(&wide.join("model.safetensors"), &all);
    shop.fails("convert hf/mixtral other --to hf --dtype f16", 2, &["model.norm.weight", "F16", "--dtype"]);
    assert!(!shop.path("other").exists(), "what cannot be written has no name");
    shop.succeeds("convert hf/mixtral other --to hf --dtype bf16");
}

pub(crate) fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// A run's checkpoint goes there with its tokenizer, and a run starts from what came back, on any mesh.
#[test]
fn runs_start_from_a_folder_of_hugging_face() {
    let shop = Workshop::new();
    shop.train("--set train.steps=2");
    shop.succeeds(&format!("convert {RUN} hf"));
    let told = json_of(&shop.path("hf/config.json"));
    assert_eq!((&told["model_type"], &told["num_local_experts"]), (&json!("mixtral"), &json!(4)));
    let begin = |init: &str, dir: &str, more: &str| {
        let tokenizer = "--set data.tokenizer=hf/tokenizer.json";
        shop.train(&format!("--set train.init={init} --set run.dir={dir} --set train.steps=2 {tokenizer} {more}"));
        shop.series(dir, "loss")
    };
    let want = begin(RUN, "own", "");
    assert_eq!(begin("hf", "theirs", ""), want);
    let numbers = |values: &[Value]| values.iter().map(|value| value.as_f64().unwrap()).collect::<Vec<f64>>();
    let far = |a: &[Value], b: &[Value]| {
        let pairs = numbers(a).into_iter().zip(numbers(b));
        pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    };
    for (n, mesh) in ["--ranks 2 --set parallel.expert=2", "--ranks 4 --set parallel.tensor=2 --set parallel.zero=3"]
        .iter()
        .enumerate()
    {
        let losses = begin("hf", &format!("mesh-{n}"), mesh);
        assert!(far(&losses, &want) < 1e-4, "{mesh}: {losses:?} instead of {want:?}");
    }
    let words = ["train.init", "does not fit the recipe", "model.d_model is 16 there, 32 in the recipe"];
    shop.fails(&format!("train {RECIPE} --set train.init=hf --set model.d_model=32 --set run.dir=x"), 2, &words);
    // Transposed and fused tensors are read by parts too.
    let sizes = "--set model.vocab=32 --set model.family=gpt2 --set model.seq=12 --set train.batch_tokens=96 --set model.d_ff=40";
    let gpt2 = format!("train dense.toml --set train.init={} --set run.dir=y {sizes}", golden("gpt2").display());
    dense(&shop);
    let told = format!(
        "{gpt2} --set data.tokenizer={}/tokenizer.json --set model.tie_embeddings=true",
        golden("gpt2").display()
    );
    let one = shop.succeeds(&told);
    assert!(one.err.contains("init     the weights of"), "{}", one.err);
    shop.succeeds(&told.replace("run.dir=y", "run.dir=z --ranks 2 --set parallel.tensor=2"));
    assert!(far(&shop.series("y", "loss"), &shop.series("z", "loss")) < 1e-4);
}

/// The recipe without experts, as `dense.toml`.
fn dense(shop: &Workshop) {
    let dense = shop.read(RECIPE).replace("[moe]\nexperts = 4\nd_expert = 32\n", "");
    shop.write("dense.toml", &dense);
}

/// What a recipe leaves to its family is written out, and comes back with the same weights.
#[test]
fn models_trained_here_go_there_and_come_back() {
    let shop = task_recipes::shop();
    dense(&shop);
    let switch = "model.family=switch moe.gate=switch moe.top_k=1 model.d_ff=32";
    let train = |recipe: &str, keys: &str| {
        let sets: String = keys.split_whitespace().map(|key| format!(" --set {key}")).collect();
        shop.succeeds(&format!("train {recipe} --set train.steps=1 --set run.dir=run{sets}"));
    };
    for (recipe, keys, model_type, says) in [
        (RECIPE, "model.family=olmoe moe.dialect=deepseek", "olmoe", vec![("/norm_topk_prob", json!(false))]),
        (
            RECIPE,
            "model.family=qwen2_moe moe.shared_experts=2 moe.layers={every=2}",
            "qwen2_moe",
            vec![
                ("/shared_expert_intermediate_size", json!(64)),
                ("/mlp_only_layers", json!([0])),
                ("/layer_types", json!(["full_attention", "full_attention"])),
            ],
        ),
        (RECIPE, "model.family=qwen3_moe", "qwen3_moe", vec![("/head_dim", json!(128))]),
        (
            "dense.toml",
            "model.family=llama model.rope_factor=8.0",
            "llama",
            vec![
                ("/rope_parameters/rope_type", json!("llama3")),
                ("/rope_parameters/original_max_position_embeddings", json!(8192)),
                ("/rope_parameters/low_freq_factor", json!(1.0)),
                ("/rope_parameters/high_freq_factor", json!(4.0)),
            ],
        ),
        (
            "dense.toml",
            "model.family=llama model.rope_factor=1.0",
            "llama",
            vec![("/rope_parameters", json!({"rope_type": "default", "rope_theta": 10000.0}))],
        ),
        (
            RECIPE,
            "model.family=gpt_oss",
            "gpt_oss",
            vec![
                ("/head_dim", json!(64)),
                ("/sliding_window", json!(128)),
                ("/layer_types", json!(["sliding_attention", "full_attention"])),
                ("/rope_parameters/factor", json!(32.0)),
                ("/rope_parameters/rope_theta", json!(10000.0)),
            ],
        ),
        (
            RECIPE,
            "model.family=deepseek_v3 moe.gate=sigmoid moe.gate.bias_rate=0.1 moe.shared_experts=1 moe.layers={list=[1]}",
            "deepseek_v3",
            vec![
                ("/q_lora_rank", json!(1536)),
                ("/qk_head_dim", json!(192)),
                ("/first_k_dense_replace", json!(1)),
                ("/n_group", json!(1)),
                ("/norm_topk_prob", json!(true)),
                ("/rope_parameters/factor", json!(40.0)),
                ("/rope_parameters/mscale_all_dim", json!(1.0)),
            ],
        ),
        (
            RECIPE,
            "model.family=deepseek_v3 model.query_rank=0 model.rope_factor=1.0 moe.gate=sigmoid moe.gate.normalised=false",
            "deepseek_v3",
            vec![
                ("/q_lora_rank", Value::Null),
                ("/first_k_dense_replace", json!(0)),
                ("/n_shared_experts", json!(0)),
                ("/norm_topk_prob", json!(false)),
                ("/rope_parameters", json!({"rope_type": "default", "rope_theta": 10000.0})),
            ],
        ),
        (
            "tasks.toml",
            "model.family=nllb_moe model.tie_embeddings=true model.d_ff=32 moe.output_masking=0.25",
            "nllb-moe",
            vec![
                ("/decoder_layers", json!(2)),
                ("/decoder_sparse_step", json!(2)),
                ("/moe_token_dropout", json!(0.25)),
            ],
        ),
        (
            "tasks.toml",
            switch,
            "switch_transformers",
            vec![
                ("/expert_capacity", json!(48)),
                ("/num_sparse_decoder_layers", json!(1)),
                ("/d_kv", json!(64)),
                ("/router_jitter_noise", json!(0.1)),
            ],
        ),
    ] {
        train(recipe, keys);
        shop.succeeds("convert run there");
        let config = json_of(&shop.path("there/config.json"));
        assert_eq!(config["model_type"], json!(model_type), "{keys}");
        let generation = json_of(&shop.path("there/generation_config.json"));
        assert!(config["eos_token_id"].is_u64() && config["eos_token_id"] == generation["eos_token_id"], "{keys}");
        for (key, value) in says {
            assert_eq!(config.pointer(key), Some(&value), "{keys}: {key}");
        }
        shop.succeeds("convert there back");
        let of = |folder: &str| tensors(&shop.path(folder));
        assert!(of("run/checkpoints/latest") == of("back"), "{keys}");
        for folder in ["run", "there", "back"] {
            fs::remove_dir_all(shop.path(folder)).unwrap();
        }
    }
    train("tasks.toml", &format!("{switch} moe.dialect=hf"));
    shop.fails("convert run there", 2, &["the nearest is switch_transformers", "weighs experts otherwise"]);
}

/// What a family cannot say is named, with the nearest family.
#[test]
fn models_of_no_family_are_refused_with_what_stands_in_the_way() {
    let shop = Workshop::new();
    for (n, (options, words)) in [
        ("--set moe.shared_experts=1", vec!["the nearest is mixtral", "moe.shared_experts is 1"]),
        ("--set moe.output_masking=0.25", vec!["the nearest is mixtral", "moe.output_masking is 0.25"]),
        ("--set moe.residual=true", vec!["the nearest is mixtral", "moe.residual is true"]),
        ("--set moe.gate=sigmoid", vec!["the nearest is mixtral", "moe.gate is \"sigmoid\""]),
        ("--set moe.layers={every=2}", vec!["mixtral", "moe.layers"]),
        ("--set moe.capacity_factor=1.5", vec!["the nearest is mixtral", "moe.capacity_factor"]),
        ("--set model.family=gpt2", vec!["the nearest is gpt2", "moe.experts = 4"]),
    ]
    .into_iter()
    .enumerate()
    {
        let dir = format!("run-{n}");
        shop.train(&format!("--set train.steps=1 --set run.dir={dir} {options}"));
        let words: Vec<&str> = words.into_iter().chain(["no model of Hugging Face"]).collect();
        shop.fails(&format!("convert {dir} out"), 2, &words);
        assert!(!shop.path("out").exists());
    }
    // What is of training alone stands in nobody's way.
    shop.train(
        "--set train.steps=1 --set run.dir=fine --set moe.z_weight=0.1 --set moe.jitter=0.01 --set model.dropout=0.1",
    );
    shop.succeeds("convert fine out");
}

/// Each value of a key that no recipe can say is refused by the key's name.
#[test]
fn keys_that_no_recipe_can_say_are_refused_by_name() {
    let shop = Workshop::new();
    let scaled = json!({"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0});
    let rope = |family: &str, changes: &[(&str, Value)]| {
        let mut rope = json_of(&golden(family).join("config.json"))["rope_parameters"].clone();
        changes.iter().for_each(|(key, value)| rope[*key] = value.clone());
        rope
    };
    let yarn = |changes: &[(&str, Value)]| rope("gpt_oss", changes);
    let latent = |changes: &[(&str, Value)]| rope("deepseek_v3", changes);
    let stretched = |changes: &[(&str, Value)]| rope("llama_stretched", changes);
    for (family, key, value) in [
        ("deepseek_v3", "rope_parameters", latent(&[("mscale", json!(0.707))])),
        ("deepseek_v3", "rope_parameters", latent(&[("mscale_all_dim", Value::Null)])),
        ("deepseek_v3", "rope_parameters", latent(&[("rope_type", json!("linear"))])),
        ("deepseek_v3", "rope_parameters", latent(&[("rope_type", json!("default"))])),
        ("deepseek_v3", "rope_parameters", latent(&[("truncate", json!(false))])),
        ("deepseek_v3", "rope_parameters", latent(&[("factor", json!(0.5))])),
        ("deepseek_v3", "rope_parameters", json!({"rope_type": "yarn", "rope_theta": 10000.0})),
        ("deepseek_v3", "rope_interleave", json!(false)),
        ("deepseek_v3", "attention_bias", json!(true)),
        ("deepseek_v3", "scoring_func", json!("softmax")),
        ("deepseek_v3", "topk_method", json!("greedy")),
        ("deepseek_v3", "moe_layer_freq", json!(2)),
        ("deepseek_v3", "head_dim", json!(8)),
        ("deepseek_v3", "qk_head_dim", json!(12)),
        ("deepseek_v3", "kv_lora_rank", Value::Null),
        ("deepseek_v3", "q_lora_rank", json!("none")),
        ("deepseek_v3", "num_key_value_heads", json!(2)),
        ("deepseek_v3", "first_k_dense_replace", json!("one")),
        ("deepseek_v3", "n_group", json!(3)),
        ("deepseek_v3", "topk_group", json!(1)),
        ("deepseek_v3", "quantization_config", json!({"quant_method": "fp8"})),
        ("mixtral", "rope_parameters", scaled.clone()),
        ("mixtral", "rope_scaling", scaled),
        ("mixtral", "sliding_window", json!(4096)),
        ("mixtral", "hidden_act", json!("gelu")),
        ("mixtral", "attention_bias", json!(true)),
        ("mixtral", "head_dim", json!(8)),
        ("mixtral", "num_experts_per_tok", json!("two")),
        ("mixtral", "a_new_key", json!(1)),
        ("mixtral", "model_type", json!("mamba")),
        ("mixtral", "architectures", json!(["MixtralForSequenceClassification"])),
        ("llama_stretched", "rope_parameters", stretched(&[("low_freq_factor", json!(2.0))])),
        ("llama_stretched", "rope_parameters", stretched(&[("high_freq_factor", Value::Null)])),
        ("llama_stretched", "rope_parameters", stretched(&[("factor", Value::Null)])),
        ("llama_stretched", "rope_parameters", stretched(&[("rope_type", json!("default"))])),
        ("llama_stretched", "rope_parameters", stretched(&[("rope_type", json!("yarn"))])),
        ("llama_stretched", "rope_parameters", stretched(&[("partial_rotary_factor", json!(0.5))])),
        ("llama", "attention_bias", json!(true)),
        ("llama", "mlp_bias", json!(true)),
        ("olmoe", "clip_qkv", json!(8.0)),
        ("olmoe", "num_key_value_heads", json!(2)),
        ("olmoe", "attention_bias", json!(true)),
        ("olmoe", "norm_topk_prob", json!("no")),
        ("olmoe", "head_dim", json!(8)),
        ("qwen2_moe", "qkv_bias", json!(false)),
        ("qwen2_moe", "shared_expert_intermediate_size", json!(20)),
        ("qwen2_moe", "shared_expert_intermediate_size", json!(0)),
        ("qwen2_moe", "shared_expert_intermediate_size", Value::Null),
        ("qwen2_moe", "decoder_sparse_step", json!("every")),
        ("qwen2_moe", "mlp_only_layers", json!([0, "one"])),
        ("qwen2_moe", "use_sliding_window", json!(true)),
        ("qwen2_moe", "layer_types", json!(["sliding_attention", "full_attention"])),
        ("qwen3_moe", "head_dim", json!(7)),
        ("qwen3_moe", "head_dim", Value::Null),
        ("qwen3_moe", "use_sliding_window", json!(true)),
        ("qwen3_moe", "mlp_only_layers", json!("none")),
        ("gpt_oss", "rope_parameters", yarn(&[("beta_fast", json!(16.0))])),
        ("gpt_oss", "rope_parameters", yarn(&[("truncate", json!(true))])),
        ("gpt_oss", "rope_parameters", yarn(&[("attention_factor", json!(1.0))])),
        ("gpt_oss", "rope_parameters", yarn(&[("factor", json!(0.5))])),
        ("gpt_oss", "rope_parameters", json!({"rope_type": "yarn", "factor": 4.0, "truncate": false})),
        ("gpt_oss", "rope_parameters", json!({"rope_type": "default", "rope_theta": 10000.0})),
        ("gpt_oss", "layer_types", json!(["full_attention", "sliding_attention"])),
        ("gpt_oss", "layer_types", json!(["sliding_attention"])),
        ("gpt_oss", "sliding_window", Value::Null),
        ("gpt_oss", "sliding_window", json!(0)),
        ("gpt_oss", "head_dim", Value::Null),
        ("gpt_oss", "swiglu_limit", json!(10.0)),
        ("gpt_oss", "swiglu_alpha", json!(1.0)),
        ("gpt_oss", "attention_bias", json!(false)),
        ("gpt_oss", "num_experts_per_tok", json!(5)),
        ("gpt_oss", "quantization_config", json!({"quant_method": "gptq"})),
        ("gpt2", "activation_function", json!("relu")),
        ("gpt2", "scale_attn_by_inverse_layer_idx", json!(true)),
        ("m2m", "scale_embedding", json!(false)),
        ("m2m", "decoder_attention_heads", json!(4)),
        ("nllb_moe", "moe_token_dropout", json!(1.0)),
        ("nllb_moe", "second_expert_policy", json!("sampling")),
        ("switch", "dense_act_fn", json!("gelu_new")),
        ("switch", "feed_forward_proj", json!("gated-gelu")),
        ("switch", "is_gated_act", json!(true)),
        ("switch", "relative_attention_num_buckets", json!(64)),
        ("switch", "relative_attention_max_distance", json!(256)),
        ("switch", "router_dtype", json!("bfloat16")),
        ("switch", "router_bias", json!(true)),
        ("switch", "router_ignore_padding_tokens", json!(true)),
        ("switch", "num_sparse_encoder_layers", json!(2)),
        ("switch", "decoder_sparse_step", json!(1)),
        ("switch", "num_decoder_layers", Value::Null),
        ("switch", "num_selected_experts", json!(2)),
        ("switch", "tie_word_embeddings", json!("yes")),
        ("switch", "expert_capacity", json!(0)),
    ] {
        let folder = copied(&shop, family);
        let mut config = json_of(&folder.join("config.json"));
        config[key] = value;
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let out = shop.run(&format!("convert hf/{family} out"));
        out.failed(2, &[key, "config.json"]);
        assert!(!shop.path("out").exists(), "{family} {key}");
    }
}

/// Layers behind the last that predict further tokens are told and left out, and are strange where nobody tells of them.
#[test]
fn layers_that_predict_further_tokens_are_left_out() {
    let shop = Workshop::new();
    let folder = copied(&shop, "deepseek_v3");
    let mut all = tensors(&folder);
    let of_layer = all.iter().filter(|(name, ..)| name.starts_with("model.layers.1."));
    let further = of_layer.map(|(name, dtype, shape, bytes)| {
        (name.replace("layers.1.", "layers.2."), dtype.clone(), shape.clone(), bytes.clone())
    });
    let further: Vec<Stored> = further.collect();
    all.extend(further);
    write(&folder.join("model.safetensors"), &all);
    shop.fails("convert hf/deepseek_v3 out", 2, &["model.layers.2.", "is no tensor of DeepseekV3ForCausalLM"]);
    let mut config = json_of(&folder.join("config.json"));
    // Also where it claims more of them than fit into any memory.
    for count in [1, u64::MAX] {
        config["num_nextn_predict_layers"] = json!(count);
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let done = shop.succeeds("convert hf/deepseek_v3 out");
        let told = format!("{}{}", done.out, done.err);
        assert!(told.contains("model.layers.2: predicts further tokens and is left out"), "{told}");
        let sums = [golden("deepseek_v3"), shop.path("out")].map(|folder| audit(&folder).unwrap().1.sha256);
        assert_eq!(sums[0], sums[1]);
        fs::remove_dir_all(shop.path("out")).unwrap();
    }
}

/// A router or a bias in more bits, as DeepSeek publishes them, does not make a model of f32 of one of bf16.
#[test]
fn what_is_f32_here_anyway_does_not_say_the_type_of_a_model() {
    let shop = Workshop::new();
    shop.succeeds(&format!("convert {} half --to hf --dtype bf16", golden("deepseek_v3").display()));
    let wide = tensors(&golden("deepseek_v3"));
    let own = |name: &str| wide.iter().find(|tensor| tensor.0 == name).cloned().expect("the same names");
    let is_bias = |tensor: &Stored| tensor.0.ends_with("e_score_correction_bias");
    let mixed: Vec<Stored> = tensors(&shop.path("half"))
        .into_iter()
        .map(|tensor| if is_bias(&tensor) { own(&tensor.0) } else { tensor })
        .collect();
    assert_eq!(mixed.iter().filter(|tensor| tensor.1 == "F32").count(), 1);
    write(&shop.path("half/model.safetensors"), &mixed);
    shop.succeeds("convert half own");
    assert!(shop.read("own/config.toml").contains("dtype = \"bf16\""));
    shop.succeeds("convert own back");
    assert!(tensors(&shop.path("back")) == tensors(&shop.path("half")));
}

/// What is wrong with tensors and files is told by file and tensor, by both commands.
#[test]
fn folders_in_which_something_is_wrong_are_refused() {
    let shop = Workshop::new();
    let file = "model.safetensors";
    let change = |what: &str, words: &[&str], code: i32, act: &dyn Fn(&Path)| {
        let folder = copied(&shop, "mixtral");
        act(&folder);
        shop.run("audit hf/mixtral").failed(code, words);
        shop.run("convert hf/mixtral out").failed(2, words);
        assert!(!shop.path("out").exists(), "{what}");
        fs::remove_dir_all(folder).unwrap();
    };
    let edit = |act: fn(&mut Vec<Stored>)| {
        move |folder: &Path| {
            let mut all = tensors(folder);
            act(&mut all);
            write(&folder.join(file), &all);
        }
    };
    change(
        "a tensor less",
        &["model.norm.weight is missing"],
        1,
        &edit(|all| all.retain(|t| t.0 != "model.norm.weight")),
    );
    change("a tokenizer that is none", &["tokenizer.json"], 1, &|folder| {
        fs::write(folder.join("tokenizer.json"), "{}").unwrap()
    });
    change(
        "a tensor more",
        &["extra is no tensor of MixtralForCausalLM"],
        1,
        &edit(|all| {
            let mut other = all[0].clone();
            other.0 = "extra".into();
            all.push(other);
        }),
    );
    change(
        "a shape",
        &["model.norm.weight is [4, 4], by config.json it is [16]"],
        1,
        &edit(|all| {
            all.iter_mut().filter(|t| t.0 == "model.norm.weight").for_each(|t| t.2 = vec![4, 4]);
        }),
    );
    change(
        "an expert less",
        &["experts.3.w1.weight is missing"],
        1,
        &edit(|all| all.retain(|t| !t.0.contains("experts.3"))),
    );
    change(
        "not finite",
        &["model.norm.weight has values that are no finite numbers"],
        1,
        &edit(|all| {
            let norm = all.iter_mut().find(|t| t.0 == "model.norm.weight").unwrap();
            norm.3[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        }),
    );
    let cut = |len: u64| {
        move |folder: &Path| fs::File::options().write(true).open(folder.join(file)).unwrap().set_len(len).unwrap()
    };
    change("cut short", &[file, "outside the file"], 1, &cut(20_000));
    change("cut in the header", &[file, "its header claims"], 1, &cut(100));
    change("empty", &[file, "shorter than eight bytes"], 1, &cut(0));
    let lie = |bytes: Vec<u8>| move |folder: &Path| fs::write(folder.join(file), &bytes).unwrap();
    change(
        "a header of 2^63 bytes",
        &[file, "its header claims"],
        1,
        &lie([&(1u64 << 63).to_le_bytes()[..], b"{}"].concat()),
    );
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n";
    change("a pointer", &[file, "a pointer of Git LFS", "git lfs pull"], 1, &lie(pointer.into()));
    change("no file", &[file, "it is missing"], 1, &|folder| fs::remove_file(folder.join(file)).unwrap());
    change("no tokenizer", &["tokenizer.json"], 1, &|folder| fs::remove_file(folder.join("tokenizer.json")).unwrap());
    change("no JSON", &["config.json", "cannot be read"], 1, &|folder| {
        fs::write(folder.join("config.json"), "{").unwrap()
    });
    change("sizes of another model", &["1000 layers"], 1, &|folder| {
        let mut config = json_of(&folder.join("config.json"));
        config["num_hidden_layers"] = json!(1000);
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
    });
    change("a link out", &[file, "a link out of the folder"], 1, &|folder| {
        fs::rename(folder.join(file), shop.path("elsewhere")).unwrap();
        std::os::unix::fs::symlink(shop.path("elsewhere"), folder.join(file)).unwrap();
    });
    fs::create_dir(shop.path("nothing")).unwrap();
    for command in ["audit nothing", "convert nothing out", "audit absent"] {
        shop.fails(command, 2, &["manifest.json", "config.json", "is no model"]);
    }
    shop.fails(&format!("convert {} nothing", golden("mixtral").display()), 2, &["nothing", "exists already"]);
}

/// A tensor that does not fit is told once, also where it is of many here, and not as one that nobody knows.
#[test]
fn what_does_not_fit_is_told_once() {
    let shop = Workshop::new();
    let folder = copied(&shop, "gpt_oss");
    let mut all = tensors(&folder);
    let ups = "model.layers.0.mlp.experts.gate_up_proj";
    let tensor = all.iter_mut().find(|tensor| tensor.0 == ups).unwrap();
    tensor.2.swap(1, 2);
    write(&folder.join("model.safetensors"), &all);
    let told = shop.run("audit hf/gpt_oss");
    told.failed(1, &[ups, "by config.json it is"]);
    assert_eq!(told.err.matches(ups).count(), 1, "{}", told.err);
    let folder = copied(&shop, "gpt_oss_mxfp4");
    let mut config = json_of(&folder.join("config.json"));
    config["quantization_config"] = Value::Null;
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let told = shop.run("audit hf/gpt_oss_mxfp4");
    told.failed(1, &["config.json does not say so"]);
    assert_eq!(told.err.matches("layers.0.mlp.experts.gate_up_proj").count(), 1, "{}", told.err);
}

/// Models of several files: the index must name files of the folder, all there are, and each tensor once.
#[test]
fn an_index_that_lies_is_refused() {
    let shop = Workshop::new();
    let index = "model.safetensors.index.json";
    let (one, two) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let folder = copied(&shop, "llama");
    let all = tensors(&folder);
    let (first, second) = all.split_at(10);
    let map = |names: [&str; 2]| {
        let of = |part: &[Stored], file: &str| part.iter().map(|t| (t.0.clone(), json!(file))).collect::<Vec<_>>();
        let map: serde_json::Map<String, Value> = of(first, names[0]).into_iter().chain(of(second, names[1])).collect();
        json!({ "metadata": { "total_size": 1.5, "total_parameters": 3 }, "weight_map": map })
    };
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    write(&folder.join(one), first);
    write(&folder.join(two), second);
    let put = |index_text: &Value| fs::write(folder.join(index), index_text.to_string()).unwrap();
    put(&map([one, two]));
    let whole = audit(&folder).unwrap().1;
    assert_eq!((whole.files, whole.sha256), (2, audit(&golden("llama")).unwrap().1.sha256));
    let outside = format!("{}/{two}", shop.path("").display());
    for name in ["../x.safetensors", &outside, "./model-00002-of-00002.safetensors", "config.json", "a/b.safetensors"] {
        put(&map([one, name]));
        shop.fails("audit hf/llama", 1, &[index, "no name of a .safetensors file of this folder"]);
    }
    put(&map([one, "model-00003-of-00002.safetensors"]));
    shop.fails("audit hf/llama", 1, &["model-00003-of-00002.safetensors", "it is missing"]);
    put(&map(["model-00003-of-00002.safetensors", "model-00004-of-00002.safetensors"]));
    shop.fails(
        "audit hf/llama",
        1,
        &["2 files", "model-00003-of-00002.safetensors", "model-00004-of-00002.safetensors"],
    );
    put(&map([one, one]));
    shop.fails("convert hf/llama out", 2, &[two, "no index says what is in it"]);
    let mut lost = map([one, two]);
    lost["weight_map"].as_object_mut().unwrap().remove(&second[0].0);
    put(&lost);
    shop.fails("audit hf/llama", 1, &[two, &second[0].0, "the index does not list"]);
    // A tensor in both files.
    put(&map([one, two]));
    write(&folder.join(one), &[first, &second[..1]].concat());
    shop.fails("audit hf/llama", 1, &[two, &second[0].0, one]);
    write(&folder.join(one), first);
    fs::remove_file(folder.join(two)).unwrap();
    shop.fails("audit hf/llama", 1, &[two, "it is missing"]);
}

/// Files cut at every place and bytes changed one by one: refused, or a model with other weights, and never more.
#[test]
fn no_byte_of_a_header_makes_the_program_fall() {
    let shop = Workshop::new();
    let folder = copied(&shop, "llama");
    let path = folder.join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for at in (0..header).step_by(7) {
        let mut bytes = whole.clone();
        bytes[at] = bytes[at].wrapping_add(1 + (at % 250) as u8);
        fs::write(&path, &bytes).unwrap();
        let _ = audit(&folder);
        fs::write(&path, &whole[..at]).unwrap();
        assert!(audit(&folder).is_err(), "cut at {at}");
    }
    for (name, text) in [("config.json", fs::read(golden("llama").join("config.json")).unwrap())] {
        fs::write(&path, &whole).unwrap();
        for at in 0..text.len() {
            let mut bytes = text.clone();
            bytes[at] = b"0{]\"x9"[at % 6];
            fs::write(folder.join(name), &bytes).unwrap();
            let _ = audit(&folder);
        }
    }
}

/// A twin of a tied table is read if it is one.
#[test]
fn what_repeats_a_tied_table_must_be_equal_to_it() {
    let shop = Workshop::new();
    let folder = copied(&shop, "llama");
    let mut all = tensors(&folder);
    let mut twin = all.iter().find(|t| t.0 == "model.embed_tokens.weight").unwrap().clone();
    twin.0 = "lm_head.weight".into();
    all.push(twin);
    write(&folder.join("model.safetensors"), &all);
    assert_eq!(audit(&folder).unwrap().1.sha256, audit(&golden("llama")).unwrap().1.sha256);
    all.last_mut().unwrap().3[0] ^= 1;
    write(&folder.join("model.safetensors"), &all);
    shop.fails("audit hf/llama", 1, &["lm_head.weight differs from model.embed_tokens.weight"]);
}

/// A checkpoint of this program is audited too.
#[test]
fn checkpoints_are_audited() {
    let shop = Workshop::new();
    shop.train("--set train.steps=2 --ranks 2 --set parallel.expert=2");
    let told = shop.succeeds(&format!("audit {RUN}")).out;
    assert!(
        ["Guildhall (mixtral)", "experts       4 in each of 2 layers", "sha256"].iter().all(|word| told.contains(word)),
        "{told}"
    );
    let latest = shop.path(&format!("{RUN}/checkpoints/latest"));
    let optimizer = latest.join("optimizer.safetensors");
    let whole = fs::read(&optimizer).unwrap();
    let state = SafeTensors::deserialize(&whole).unwrap();
    let rest = state.iter().filter(|(name, _)| *name != "v/model.norm.weight");
    fs::write(&optimizer, safetensors::serialize(rest, None).unwrap()).unwrap();
    reseal(&latest);
    shop.fails(&format!("audit {RUN}"), 1, &["v/model.norm.weight is missing"]);
    fs::write(&optimizer, &whole).unwrap();
    reseal(&latest);
    shop.succeeds(&format!("audit {RUN}"));
    let path = latest.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    shop.fails(&format!("audit {RUN}"), 1, &["model.safetensors", "differ from its checksum"]);
    // All that is wrong, and nothing of an older checkpoint in its place.
    fs::remove_file(&optimizer).unwrap();
    let both = ["2 files", "model.safetensors is damaged", "optimizer.safetensors", "No such file"];
    shop.fails(&format!("audit {RUN}"), 1, &both);
    // A model of bf16 has weights of the optimizer besides.
    shop.train("--set train.steps=1 --set train.dtype=bf16 --set run.dir=narrow");
    shop.succeeds("audit narrow");
    let (latest, lost) = (shop.checkpoint("narrow", 1), "master/model.norm.weight");
    let whole = fs::read(latest.join("optimizer.safetensors")).unwrap();
    let state = SafeTensors::deserialize(&whole).unwrap();
    let rest = state.iter().filter(|(name, _)| *name != lost);
    fs::write(latest.join("optimizer.safetensors"), safetensors::serialize(rest, None).unwrap()).unwrap();
    reseal(&latest);
    shop.fails("audit narrow", 1, &["master/model.norm.weight is missing"]);
    shop.train("--set train.steps=4 --set run.dir=two");
    fs::remove_file(shop.checkpoint("two", 4).join("manifest.json")).unwrap();
    shop.fails("audit two", 1, &["step-000004/manifest.json is damaged (it is missing)"]);
}

/// The comparison that ends a conversion sees one element that is another, and one that is rounded otherwise.
#[test]
fn a_model_with_one_other_element_is_not_the_same() {
    let shop = Workshop::new();
    let folder = copied(&shop, "llama");
    let (from, path) = (ModelFolder::open(&golden("llama"), None).unwrap(), folder.join("model.safetensors"));
    let compared = || compare(&from, &ModelFolder::open(&folder, None).unwrap());
    assert_eq!(compared().unwrap(), 0);
    let mut all = tensors(&folder);
    let norm = all.iter_mut().find(|tensor| tensor.0 == "model.norm.weight").unwrap();
    norm.3[0] ^= 1;
    write(&path, &all);
    let told = compared().unwrap_err().to_string();
    assert!(told.contains("model.norm.weight has other elements") && !told.contains("layers"), "{told}");
    let told = shop.succeeds(&format!("convert {} half --to hf --dtype bf16", golden("llama").display())).err;
    let mut all = tensors(&shop.path("half"));
    assert!(told.contains(&format!("{} are rounded to the type they are stored in", all.len())), "{told}");
    write(&path, &all);
    assert_eq!(compared().unwrap() as usize, all.len());
    let last = all.iter_mut().find(|tensor| tensor.0 == "model.embed_tokens.weight").unwrap();
    last.3[0] ^= 1;
    write(&path, &all);
    assert!(compared().unwrap_err().to_string().contains("embed_tokens.weight has other elements"));
}

/// What config.json says of other things than the model comes back, and of several ends of text the first is the recipe's.
#[test]
fn keys_that_are_not_of_the_model_come_back() {
    let shop = Workshop::new();
    let path = copied(&shop, "mixtral").join("config.json");
    let mut config = json_of(&path);
    let others = [
        ("bos_token_id", json!(7)),
        ("eos_token_id", json!([2, 0])),
        ("pad_token_id", json!(5)),
        ("task_specific_params", json!({"summing": {"prefix": "sum: "}})),
    ];
    others.iter().for_each(|(key, value)| config[*key] = value.clone());
    fs::write(&path, config.to_string()).unwrap();
    shop.succeeds("convert hf/mixtral own");
    assert!(shop.read("own/config.toml").contains("end_of_text = \"</s>\""));
    shop.succeeds("convert own back");
    let back = json_of(&shop.path("back/config.json"));
    others.iter().for_each(|(key, value)| assert_eq!(&back[*key], value, "{key}"));
}

/// What a checkpoint keeps of the model that it comes from does not stand in for its manifest.
#[test]
fn a_checkpoint_without_a_manifest_is_no_model_of_others() {
    let shop = Workshop::new();
    shop.succeeds(&format!("convert {} own", golden("llama").display()));
    fs::remove_file(shop.path("own/manifest.json")).unwrap();
    shop.fails("audit own", 2, &["own is not a checkpoint: own/manifest.json"]);
}

/// Older versions stored masks of attention, some of them as truth values.
#[test]
fn masks_are_left_out_whatever_they_are_stored_as() {
    let shop = Workshop::new();
    let folder = copied(&shop, "gpt2");
    let whole = tensors(&folder);
    for (name, dtype, fits) in
        [("h.0.attn.bias", "BOOL", true), ("h.0.attn.bias", "I64", false), ("h.0.attn.c_attn.more", "BOOL", false)]
    {
        let bytes = vec![1; if dtype == "BOOL" { 4 } else { 32 }];
        let more = (format!("transformer.{name}"), dtype.to_owned(), vec![1, 1, 2, 2], bytes);
        write(&folder.join("model.safetensors"), &[&whole[..], &[more]].concat());
        match fits {
            true => assert!(shop.succeeds("audit hf/gpt2").err.contains("is computed here and left out")),
            false => shop.fails("audit hf/gpt2", 1, &[name]),
        }
    }
}
