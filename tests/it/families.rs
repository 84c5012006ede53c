//! Every family of models, from recipe to checkpoint: counted rightly, learning, resumed to the bit, and refused where
//! what is asked of it makes no sense.

use guildhall::model::{self, Family, Model, NormKind, Sizes, StackBlueprint, count};
use guildhall::moe::{GateKind, Layers};
use guildhall::parallel::{Parameters, Spread};

use crate::program::{RECIPE, RUN, Workshop, ended};
use crate::tiny::{bert, families, gpt2, mixtral, nllb, transformer_xl};
use crate::world::{ONE, on_mesh};

const LATEST: &str = "runs/tiny/checkpoints/latest";
const BERT: &str = "--set model.family=bert";
const XL: &str = "--set model.family=transformer_xl --set model.segment=8 --set model.memory=12";

/// Numbers in the weights of a built model: all, and those of experts.
fn built(sizes: &Sizes) -> [u64; 2] {
    let ranks = on_mesh(ONE, |rank, mesh| {
        let (mut all, mut experts) = (0, 0);
        Model::new(&rank.device, sizes, mesh).visit(&mut |weight| {
            let length = weight.parameter.value().len() as u64;
            all += length;
            experts += if matches!(weight.placement.spread, Spread::Expert(_)) { length } else { 0 };
        });
        [all, experts]
    });
    ranks[0]
}

#[test]
fn parameters_are_counted_as_they_are_built() {
    for (_, sizes) in families() {
        let with = |change: &dyn Fn(&mut Sizes)| {
            let mut sizes = sizes.clone();
            change(&mut sizes);
            let counts = count(&sizes);
            assert_eq!([counts.total, counts.experts], built(&sizes), "{sizes:?}");
        };
        with(&|_| {});
        with(&|sizes| sizes.moe = None);
        with(&|sizes| sizes.model.tie_embeddings = !sizes.model.tie_embeddings);
        with(&|sizes| sizes.model.d_ff = None);
        with(&|sizes| {
            let moe = sizes.moe.as_mut().expect("experts");
            (moe.shared_experts, moe.gate, moe.layers) = (2, GateKind::Noisy.into(), Layers::Every(2));
        });
    }
}

/// What a run's loss was at its first step and at its last.
fn fall(shop: &Workshop, options: &str) -> [f64; 2] {
    let rest = "--ranks 2 --set parallel.expert=2 --set train.eval_every=0 --set train.checkpoint_every=0";
    shop.train(&format!("{options} {rest}"));
    let summary = shop.summary(RUN);
    ["loss_first", "loss_last"].map(|loss| summary[loss].as_f64().unwrap())
}

/// Words of three or four letters in sentences of few kinds: what is hidden can be told from what stands around it.
#[test]
fn bert_learns_what_is_hidden() {
    let shop = Workshop::new();
    for gate in ["softmax", "expert_choice"] {
        let [first, last] = fall(&shop, &format!("{BERT} --set moe.gate={gate} --set train.steps=150"));
        // As much as by chance at first.
        assert!((first - 300f64.ln()).abs() < 0.5, "{gate}: {first}");
        assert!(last < 0.75 * first, "{gate}: {first} to {last}");
    }
}

/// Text of a word or two at a time: what it remembers says what comes next.
#[test]
fn transformer_xl_learns_what_follows() {
    let shop = Workshop::new();
    let [first, last] = fall(&shop, &format!("{XL} --set train.steps=100"));
    assert!(last < 0.75 * first, "{first} to {last}");
}

/// Memory is worth something: the same model without it predicts worse.
#[test]
fn transformer_xl_uses_its_memory() {
    let shop = Workshop::new();
    let with = |memory: usize| {
        let options = format!("--set model.family=transformer_xl --set model.segment=1 --set model.memory={memory}");
        shop.train(&format!("{options} --set train.steps=200 --set train.eval_every=200"));
        shop.summary(RUN)["eval_loss"].as_f64().unwrap()
    };
    let (some, none) = (with(8), with(0));
    assert!(some < none - 0.05, "{some} with memory, {none} without");
}

#[test]
fn transformer_xl_writes() {
    let shop = Workshop::new();
    shop.train(&format!("{XL} --set train.steps=20 --set train.eval_every=0"));
    let text = |options: &str| {
        let mut command = shop.command(&format!("generate {LATEST} --temperature 0 {options}"));
        command.args(["--prompt", "the cat"]);
        let generated = ended(command);
        assert_eq!(generated.code, Some(0), "{}", generated.err);
        generated.out
    };
    // More than a row, and longer than what is remembered.
    assert!(text("--tokens 70").starts_with(text("--tokens 10").trim_end()));
    assert!(text("--tokens 70").len() > 80);
}

#[test]
fn families_resume_to_the_bit_and_evaluate_alike_on_every_mesh() {
    for family in [BERT, XL] {
        expect_resumable(family);
    }
}

fn expect_resumable(family: &str) {
    let shop = Workshop::new();
    let options =
        format!("{family} --ranks 2 --set parallel.expert=2 --set train.schedule=constant --set model.dropout=0.1");
    shop.train(&format!("{options} --set run.dir=whole"));
    shop.train(&format!("{options} --set train.steps=3"));
    shop.train(&format!("{options} --resume"));
    for field in ["step", "loss", "eval_loss", "grad_norm", "tokens"] {
        assert_eq!(shop.series("whole", field), shop.series(RUN, field), "{field}");
    }
    assert_eq!(shop.routed("whole"), shop.routed(RUN));
    assert!(shop.tensors("whole", 6) == shop.tensors(RUN, 6));
    let loss = |options: &str| -> f64 {
        let finished = shop.succeeds(&format!("evaluate {LATEST} {options}"));
        serde_json::from_str::<serde_json::Value>(&finished.out).unwrap()["eval_loss"].as_f64().unwrap()
    };
    let own = shop.summary(RUN)["eval_loss"].as_f64().unwrap();
    assert_eq!(loss(""), own);
    for mesh in ["--ranks 1", "--ranks 4 --set parallel.expert=2"] {
        assert!((loss(mesh) - own).abs() < 1e-5, "{mesh}: {} instead of {own}", loss(mesh));
    }
}

#[test]
fn bert_does_not_write() {
    let shop = Workshop::new();
    let finished = shop.train(&format!("{BERT} --set train.steps=1"));
    assert!(finished.err.contains("guildhall evaluate"), "{}", finished.err);
    let words = ["checkpoints/latest", "\"bert\"", "from left to right", "guildhall evaluate"];
    shop.fails(&format!("generate {LATEST} --prompt the"), 2, &words);
}

#[test]
fn a_tokenizer_without_a_mask_is_refused_before_it_is_used() {
    let shop = Workshop::new();
    shop.train("--set train.steps=1");
    let json = shop.read(&format!("{LATEST}/tokenizer.json"));
    shop.write("own.json", &json.replace("<mask>", "<hidden>"));
    let folders = || shop.path("cache").read_dir().unwrap().count();
    let (own, before) = (format!("{RECIPE} {BERT} --set data.tokenizer=own.json"), folders());
    for command in ["train", "prepare"] {
        shop.fails(&format!("{command} {own}"), 2, &["`<mask>`, `[MASK]`", "data.tokenizer"]);
    }
    assert_eq!(folders(), before, "text was prepared in vain");
    shop.succeeds(&format!("train {RECIPE} --set data.tokenizer=own.json --set train.steps=1"));
}

#[test]
fn families_know_their_keys() {
    let families = [gpt2(), mixtral(), bert(), transformer_xl()];
    assert_eq!(families.map(|sizes| sizes.model.is_causal()), [true, true, false, true]);
    let shop = Workshop::new();
    let refused = |options: &str, words: &[&str]| shop.fails(&format!("train {RECIPE} {options}"), 2, words);
    refused("--set data.mask_rate=0.2", &["data.mask_rate", "nothing uses it", "\"bert\""]);
    refused(&format!("{BERT} --set data.mask_rate=0"), &["data.mask_rate", "above 0.0", "0.15"]);
    refused(&format!("{BERT} --set model.rope_theta=5"), &["model.rope_theta", "nothing uses it"]);
    refused(&format!("{BERT} --set model.kv_heads=1"), &["bert has no grouped heads", "model.heads is 2"]);
    for key in ["encoder_layers", "decoder_layers", "source_seq"] {
        let name = format!("model.{key}");
        refused(&format!("--set {name}=1"), &[&name, "nothing uses it", "one stack of layers"]);
    }
    for key in ["head_dim", "window", "rope_pretrained"] {
        let name = format!("model.{key}");
        refused(&format!("--set {name}=8"), &[&name, "nothing uses it"]);
    }
    refused("--set model.rope_factor=2.0", &["model.rope_factor", "nothing uses it", "\"gpt_oss\""]);
    let llama = "--set model.family=llama --set moe.layers={every=2}";
    refused(&format!("{llama} --set model.rope_pretrained=8"), &["model.rope_pretrained", "stretches nothing"]);
    let oss = "--set model.family=gpt_oss";
    refused(&format!("{oss} --set model.head_dim=7"), &["model.head_dim", "an even width per head", "6 and 8"]);
    refused(&format!("{oss} --set model.rope_factor=0.5"), &["model.rope_factor", "1"]);
    for key in ["query_rank", "kv_rank", "content_dim", "rotary_dim", "value_dim"] {
        let name = format!("model.{key}");
        refused(&format!("--set {name}=8"), &[&name, "nothing uses it", "\"deepseek_v3\""]);
    }
    let deepseek = "--set model.family=deepseek_v3";
    refused(&format!("{deepseek} --set model.rotary_dim=7"), &["model.rotary_dim", "an even width", "6 and 8"]);
    refused(&format!("{deepseek} --set model.head_dim=8"), &["model.head_dim", "model.content_dim"]);
    refused(&format!("{deepseek} --set model.kv_heads=1"), &["deepseek_v3 has no grouped heads"]);
    let plain = format!("{deepseek} --set model.rope_factor=1.0");
    refused(&format!("{plain} --set model.rope_pretrained=8"), &["model.rope_pretrained", "stretches nothing"]);
    for key in ["segment", "memory"] {
        let name = format!("model.{key}");
        refused(&format!("--set {name}=8"), &[&name, "nothing uses it", "\"transformer_xl\""]);
    }
    let xl = "--set model.family=transformer_xl";
    refused(xl, &["model.segment", "missing", "a divisor of model.seq = 32"]);
    refused(&format!("{xl} --set model.segment=8"), &["model.memory", "missing", "0 to 24 tokens"]);
    refused(&format!("{XL} --set model.segment=5"), &["does not divide model.seq = 32", "4 and 8"]);
    refused(&format!("{XL} --set model.memory=25"), &["there are 24", "the nearest valid value is 24"]);
    refused(&format!("{XL} --set model.memory=-1"), &["model.memory", "the nearest valid value is 0"]);
    refused(&format!("{XL} --set model.d_model=15 --set model.heads=3"), &["model.d_model", "even", "14 and 16"]);
    refused(&format!("{XL} --set moe.gate=expert_choice"), &["moe.gate", "a causal model must not see"]);
    refused("--set moe.gate=expert_choice", &["moe.gate", "a causal model must not see"]);
}

/// Every family can be trained; one that reads another text than it writes asks for tasks, and for nothing else.
#[test]
fn families_that_read_another_text_ask_for_tasks() {
    let shop = Workshop::new();
    let reads = |family: &Family| model::Config { family: *family, ..mixtral().model }.blueprint().reads_a_source();
    for family in Family::ALL.into_iter().filter(reads) {
        let option = format!("--set model.family={}", family.name());
        let words = ["error: 1 problem", "data.tasks", "missing", "kind = \"translation\""];
        shop.fails(&format!("train {RECIPE} {option}"), 2, &words);
    }
}

/// Layers of an encoder, then those of the decoder: the numbers of experts' layers, of draws and of recordings.
#[test]
fn layers_are_numbered_through_both_stacks() {
    let sizes = nllb();
    let found = on_mesh(ONE, |rank, mesh| {
        let mut model = Model::new(&rank.device, &sizes, mesh);
        let mut names = Vec::new();
        model.visit(&mut |weight| names.extend(weight.placement.pieces.iter().map(|piece| piece.name.clone())));
        ([0, 1, 2, 3, 4].map(|layer| model.moe_layer(layer).map(|layer| (layer.index, layer.stack))), names)
    });
    let (layers, names) = &found[0];
    assert_eq!(*layers, [None, Some((1, 0)), None, Some((3, 1)), None]);
    for stack in ["encoder", "decoder"] {
        let name = format!("model.{stack}.layers.1.block_sparse_moe.gate.weight");
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    let uneven = |encoder_layers, decoder_layers| {
        model::Config { encoder_layers, decoder_layers, ..sizes.model.clone() }.stack_layers().expect("two stacks")
    };
    assert_eq!([uneven(None, None), uneven(Some(3), None), uneven(None, Some(3))], [[2, 2], [3, 1], [1, 3]]);
    let uneven = model::Config { encoder_layers: Some(1), ..sizes.model.clone() }.blueprint().stacks();
    assert_eq!(uneven.iter().map(|stack| stack.layers.clone()).collect::<Vec<_>>(), [0..1, 1..4]);
    // Every embedding and every sub-layer draws by a number of its own.
    let of_stack = |stack: &StackBlueprint| {
        let ends = [stack.first_place, stack.place(stack.layers.start), stack.place(stack.layers.end)];
        (stack.is_causal, stack.sub_layers.len(), ends)
    };
    assert_eq!(uneven.iter().map(of_stack).collect::<Vec<_>>(), [(false, 2, [0, 1, 3]), (true, 3, [3, 4, 13])]);
}

/// Numbers that are a family's own, as its authors published them.
#[test]
fn blueprints_are_what_was_published() {
    let of = |family| model::Config { family, heads: 4, kv_heads: Some(2), ..mixtral().model }.blueprint();
    let heads = |family| of(family).heads;
    // Where a recipe's width and heads do not say it, of Qwen3, GPT-OSS and T5.
    let dims = [Family::Qwen3Moe, Family::GptOss, Family::Switch, Family::Llama].map(|family| heads(family).head_dim);
    assert_eq!(dims, [128, 64, 64, 4]);
    let groups = [Family::Qwen3Moe, Family::Olmoe, Family::Gpt2, Family::NllbMoe].map(|family| heads(family).kv_heads);
    assert_eq!(groups, [2, 4, 4, 4]);
    let deepseek = heads(Family::DeepseekV3);
    let latent = deepseek.latent.expect("latent attention");
    assert_eq!((latent.query_rank, latent.kv_rank, latent.content_dim), (Some(1536), 512, 128));
    assert_eq!([deepseek.head_dim, deepseek.rotary_dim(), deepseek.value_dim()], [192, 64, 128]);
    assert!(Family::ALL.into_iter().all(|family| heads(family).latent.is_some() == (family == Family::DeepseekV3)));
    let norms = |norm| Family::ALL.into_iter().filter(|&family| of(family).norm == norm).collect::<Vec<_>>();
    let layer_norms = [Family::Gpt2, Family::Bert, Family::TransformerXl, Family::M2m, Family::NllbMoe];
    assert_eq!(norms(NormKind::Layer), layer_norms);
    assert_eq!(norms(NormKind::Rms).len(), Family::ALL.len() - layer_norms.len());
    let pairs = Family::ALL.into_iter().filter(|&family| of(family).reads_a_source());
    assert_eq!(pairs.collect::<Vec<_>>(), [Family::M2m, Family::NllbMoe, Family::Switch]);
}
