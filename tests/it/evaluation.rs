//! Measuring and writing draw nothing: what training adds by chance is absent from both.

use std::fs;

use guildhall::model::{Caches, Context, Sizes};
use guildhall::moe::{Dialect, GateKind};
use guildhall::train::held_out_loss;
use safetensors::SafeTensors;

use crate::gates::of_workers;
use crate::parity::run;
use crate::program::{RECIPE, RUN, Workshop, reseal};
use crate::tiny::{Documents, Recipe, gpt2, mixtral};
use crate::world::{ONE, on_mesh, shape};

/// Gates that draw or move choices in training, and what each is without.
const TWINS: &[(GateKind, usize, GateKind, Option<Dialect>)] = &[
    (GateKind::Noisy, 2, GateKind::Naive, None),
    (GateKind::Switch, 1, GateKind::Softmax, Some(Dialect::Deepseek)),
    (GateKind::Gshard, 2, GateKind::Naive, None),
    (GateKind::Swipe, 2, GateKind::Naive, None),
    (GateKind::Sinkhorn, 2, GateKind::Softmax, Some(Dialect::Deepseek)),
];

fn gated(sizes: &Sizes, (gate, top_k, dialect): (GateKind, usize, Option<Dialect>), dropout: f32) -> Sizes {
    let mut sizes = sizes.clone();
    let moe = sizes.moe.as_mut().expect("experts");
    (moe.gate, moe.top_k, moe.dialect) = (of_workers(gate, 2), top_k, dialect);
    sizes.model.dropout = dropout;
    sizes
}

/// The bits of the loss on held-out rows, taken twice, and of logits after the first tokens and after one more.
fn measured(sizes: Sizes, ranks: usize) -> (Vec<u64>, Vec<u32>) {
    let recipe = Recipe { sizes, rows: 4, micro_batch: 2 };
    let shape = if ranks == 1 { ONE } else { shape(ranks, ranks) };
    let mut all = on_mesh(shape, |rank, mesh| {
        let trainer = recipe.trainer(rank, mesh);
        let (model, device) = (&trainer.model, &rank.device);
        let loss = || held_out_loss(model, device, mesh, &Documents, (7, 3)).unwrap().to_bits();
        let losses = vec![loss(), loss()];
        let (mut caches, context) = (Caches::new(recipe.sizes.model.layers), Context::of_inference(mesh, 1));
        let mut logits = Vec::new();
        for tokens in [&[3, 1, 4, 1][..], &[5]] {
            let next = model.next_logits(device, tokens, &mut caches, &context).unwrap();
            logits.extend(next.f32s().iter().map(|x| x.to_bits()));
        }
        (losses, logits)
    });
    all.swap_remove(0)
}

#[test]
fn evaluation_has_neither_dropout_nor_the_noise_of_gates() {
    for sizes in [mixtral(), gpt2()] {
        for &(gate, top_k, plain, dialect) in TWINS {
            for ranks in [1, 2] {
                let (losses, logits) = measured(gated(&sizes, (gate, top_k, None), 0.3), ranks);
                assert_eq!(losses[0], losses[1], "{gate:?} on {ranks} ranks: another loss the second time");
                let (want, written) = measured(gated(&sizes, (plain, top_k, dialect), 0.0), ranks);
                assert_eq!(losses, want, "{gate:?} on {ranks} ranks: not the loss without dropout and noise");
                assert_eq!(logits, written, "{gate:?} on {ranks} ranks: not the logits without dropout and noise");
            }
        }
    }
}

/// Nor jitter, whose size a recipe says; none of it is none in training, too.
#[test]
fn jitter_is_of_training_alone() {
    let with = |gate, top_k, dialect, jitter| {
        let mut sizes = gated(&mixtral(), (gate, top_k, dialect), 0.0);
        sizes.moe.as_mut().expect("experts").jitter = jitter;
        sizes
    };
    let trained = |sizes: Sizes| run(&Recipe { sizes, rows: 4, micro_batch: 4 }, ONE).reports[0].loss.to_bits();
    let softmax = |jitter| with(GateKind::Softmax, 2, None, jitter);
    assert_eq!(measured(softmax(Some(0.3)), 1), measured(softmax(None), 1));
    assert_ne!(trained(softmax(Some(0.3))), trained(softmax(None)));
    assert_eq!(trained(softmax(Some(0.0))), trained(softmax(None)));
    let switch = |jitter| trained(with(GateKind::Switch, 1, None, jitter));
    assert_eq!(switch(Some(0.1)), switch(None));
    let still = trained(with(GateKind::Softmax, 1, Some(Dialect::Deepseek), None));
    assert!(switch(Some(0.0)) == still && switch(None) != still, "switch has a jitter of its own, which 0 takes away");
}

/// Results of experts are skipped in training, by draws of its own; elsewhere they are all there, and smaller.
#[test]
fn results_are_skipped_in_training_alone() {
    let with = |output_masking: f32| {
        let mut sizes = gated(&mixtral(), (GateKind::Softmax, 2, None), 0.0);
        sizes.moe.as_mut().expect("experts").output_masking = output_masking;
        sizes
    };
    let trained = |sizes: Sizes| run(&Recipe { sizes, rows: 4, micro_batch: 4 }, ONE).reports[0].loss.to_bits();
    let (losses, logits) = measured(with(0.3), 1);
    assert_eq!(losses[0], losses[1], "another loss the second time");
    let (whole, written) = measured(with(0.0), 1);
    assert!(losses != whole && logits != written, "results are as large as they were");
    assert_ne!(trained(with(0.3)), trained(with(0.0)));
}

/// Nor do experts visit: there is no way back on which their journey would pay, so ranks send what they send without.
#[test]
fn experts_visit_in_training_alone() {
    let sent = |shadowing: &str, trains: bool| {
        let mut sizes = mixtral();
        sizes.moe.as_mut().expect("experts").shadowing = shadowing.to_owned();
        let recipe = Recipe { sizes, rows: 4, micro_batch: 4 };
        on_mesh(shape(2, 2), |rank, mesh| {
            let mut trainer = recipe.trainer(rank, mesh);
            if trains {
                recipe.train(&mut trainer, 1..=1);
            } else {
                held_out_loss(&trainer.model, &rank.device, mesh, &Documents, (7, 4)).unwrap();
            }
            rank.ledger.snapshot()
        })
    };
    assert!(sent("force:2", true) != sent("off", true), "nothing visits");
    assert!(sent("force:2", false) == sent("off", false), "something visits in evaluation");
}

/// Text that has changed, or another, would make another tokenizer, whose tokens mean nothing to the model.
#[test]
fn a_checkpoint_reads_any_text_by_its_own_tokenizer() {
    let shop = Workshop::new();
    shop.train("--set train.steps=2");
    let folder = shop.checkpoint(RUN, 2);
    let text: String = (0..4000u32).map(|i| format!("{} zygote quartz {} ", i * i % 977, i % 13)).collect();
    shop.write("other.txt", &text);
    let other = format!("evaluate {} --set data.sources=[\"other.txt\"]", folder.display());
    let named = format!("{other} --set data.tokenizer={:?}", folder.join("tokenizer.json"));
    let want = shop.succeeds(&named);
    assert!(!want.err.contains("training a tokenizer"), "{}", want.err);
    let own = shop.succeeds(&other);
    assert!(own.out == want.out && !own.err.contains("training a tokenizer"), "{}", own.err);
    // Where the text has been prepared as for training, its tokenizer is there to be compared.
    shop.succeeds(&format!("prepare {RECIPE} --set data.sources=[\"other.txt\"]"));
    let compared = shop.succeeds(&other);
    assert!(compared.out == want.out && compared.err.contains("makes another tokenizer"), "{}", compared.err);
    // The text of training, prepared anew elsewhere, has the same tokens.
    let same = shop.succeeds(&format!("evaluate {}", folder.display()));
    let elsewhere = shop.succeeds(&format!("evaluate {} --set data.cache=elsewhere", folder.display()));
    assert!(elsewhere.out == same.out && !elsewhere.err.contains("training a tokenizer"), "{}", elsewhere.err);
    // As a model is that came from elsewhere: with a path of another place.
    let recipe = fs::read_to_string(folder.join("config.toml")).unwrap();
    fs::write(folder.join("config.toml"), recipe.replace("tokenizer = \"bpe\"", "tokenizer = \"gone/tokenizer.json\""))
        .unwrap();
    reseal(&folder);
    assert_eq!(shop.succeeds(&other).out, want.out);
}

/// Through the program: with the dropout of a checkpoint's recipe at zero and the weights that size its noise changed,
/// the same loss and the same text.
#[test]
fn a_checkpoint_is_used_without_what_only_training_has() {
    let shop = Workshop::new();
    shop.train("--set model.dropout=0.3 --set moe.gate=noisy --set train.steps=2 --set train.eval_every=2");
    let folder = shop.checkpoint(RUN, 2);
    let used = || {
        let measured = shop.succeeds(&format!("evaluate {}", folder.display()));
        let written = ["0", "1"].map(|temperature| {
            let options = format!("--prompt the --tokens 60 --seed 4 --temperature {temperature}");
            shop.succeeds(&format!("generate {} {options}", folder.display())).out
        });
        (measured.out, written)
    };
    let want = used();
    assert_eq!(used(), want, "the second time");
    let loss: serde_json::Value = serde_json::from_str(&want.0).unwrap();
    assert_eq!(loss["eval_loss"], shop.summary(RUN)["eval_loss"], "and what training measured");

    let recipe = fs::read_to_string(folder.join("config.toml")).unwrap();
    assert!(recipe.contains("dropout = 0.3"), "{recipe}");
    fs::write(folder.join("config.toml"), recipe.replace("dropout = 0.3", "dropout = 0.0")).unwrap();
    let path = folder.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let noises = noises(&bytes);
    assert_eq!(noises.len(), 2, "a layer each");
    for noise in noises {
        for weight in bytes[noise].as_chunks_mut::<4>().0 {
            *weight = (f32::from_le_bytes(*weight) * 100.0 + 3.0).to_le_bytes();
        }
    }
    fs::write(&path, bytes).unwrap();
    reseal(&folder);
    assert_eq!(used(), want, "without dropout, and with other noise");
}

/// Where a file has the weights that size the noise of gates.
fn noises(file: &[u8]) -> Vec<std::ops::Range<usize>> {
    let tensors = SafeTensors::deserialize(file).unwrap();
    let of_noise = tensors.iter().filter(|(name, _)| name.ends_with("noise.weight"));
    let place = |data: &[u8]| data.as_ptr() as usize - file.as_ptr() as usize;
    of_noise.map(|(_, view)| place(view.data())..place(view.data()) + view.data().len()).collect()
}
