//! Training that runs parts of its forwards twice: no bit differs, nothing is decided twice, what is kept does not travel
//! again, and memory falls by what the documents say.

use std::collections::BTreeMap;
use std::fs;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use guildhall::config;
use guildhall::launch::Rank;
use guildhall::model::{Context, Sizes};
use guildhall::moe::gates::{Gate, Tokens};
use guildhall::moe::{
    self, BalanceScope, Facts, GateKind, History, Homes, Importance, LayerSizes, MoeLayer, Overflow, Recording,
    Routings, ScheduleKind, StepFacts, Weighting,
};
use guildhall::parallel::{Init, Mesh, Rows, Zero};
use guildhall::train::StepReport;
use guildhall_comm::Collective;
use guildhall_tensor::{BackwardError, Cause, Dtype, Part, Recompute, Tape, Tensor, Var};

use crate::gates::biased;
use crate::recording::recorded;
use crate::tiny::{Recipe, Tensors, families, gpt2, gradients, mixtral, nllb, weights};
use crate::world::{ONE, Shape, on_mesh, shape, sliced};

const PLAIN: Recompute = Recompute { parts: Vec::new(), keeps: Vec::new() };

pub(crate) fn blocks(keep_communication: bool) -> Recompute {
    Recompute::of(vec![Part::Block], keep_communication)
}

fn operations() -> Recompute {
    Recompute::of(vec![Part::Attention, Part::Activation, Part::Experts], true)
}

fn bits(tensors: &Tensors) -> BTreeMap<String, Vec<u32>> {
    tensors.iter().map(|(name, x)| (name.clone(), x.iter().map(|x| x.to_bits()).collect())).collect()
}

type Bits = BTreeMap<String, Vec<u32>>;

/// Goes forward and back over a rank's micro-batches of step 3, outside of training.
fn back(recipe: &Recipe, trainer: &guildhall::train::Trainer) {
    let context = Context::of_training(&trainer.mesh, StepFacts::of_training(0, 3), 7);
    for batch in recipe.batches(&trainer.mesh, 3).micro {
        let tape = Tape::new(&trainer.device).recomputing(&trainer.recompute);
        let forward = trainer.model.forward(&tape, &batch, &context).unwrap();
        tape.try_backward(&forward.loss).unwrap();
    }
}

/// Of every rank: what two steps reported, the weights after them, and the gradients of a third before any sum.
fn learnt(recipe: &Recipe, shape: Shape, recompute: &Recompute) -> Vec<(Vec<StepReport>, Bits, Bits)> {
    on_mesh(shape, |rank, mesh| {
        let mut trainer = recipe.trainer(rank, mesh);
        trainer.recompute = recompute.clone();
        let reports = recipe.train(&mut trainer, 1..=2);
        let after = bits(&weights(&mut trainer.model));
        back(recipe, &trainer);
        (reports, after, bits(&gradients(&mut trainer.model)))
    })
}

#[track_caller]
fn same(what: &str, sizes: Sizes, shapes: &[Shape]) {
    let recipe = Recipe { sizes, rows: 5, micro_batch: 4 };
    for &shape in shapes {
        let want = learnt(&recipe, shape, &PLAIN);
        for recompute in [blocks(true), blocks(false), operations()] {
            let got = learnt(&recipe, shape, &recompute);
            for (rank, (got, want)) in got.iter().zip(&want).enumerate() {
                let at = format!("{what} on {shape:?}, {recompute:?}, rank {rank}");
                assert_eq!(got.0, want.0, "{at}: reports");
                for (part, got, want) in [("weights", &got.1, &want.1), ("gradients", &got.2, &want.2)] {
                    let differing: Vec<_> = want.keys().filter(|name| got.get(*name) != want.get(*name)).collect();
                    assert!(got.len() == want.len() && differing.is_empty(), "{at}: {part} of {differing:?}");
                }
            }
        }
    }
}

const SHAPES: [Shape; 3] = [ONE, shape(2, 2), shape(4, 2)];

#[test]
fn every_family_learns_the_same_bits() {
    for (name, sizes) in families() {
        let mut dropping = sizes;
        dropping.model.dropout = 0.2;
        same(name, dropping.clone(), &SHAPES);
        same(&format!("{name} without experts"), Sizes { moe: None, ..dropping.clone() }, &SHAPES[..2]);
        same(&format!("{name} in bf16"), Sizes { dtype: Dtype::Bf16, ..dropping }, &SHAPES[..2]);
    }
}

#[test]
fn slices_of_a_model_learn_the_same_bits() {
    for sizes in [mixtral(), gpt2(), nllb()] {
        same("slices", sizes, &[sliced(2, 2, 1), sliced(4, 2, 2)]);
    }
}

/// Weights that come and go are looked up again in a second run, and no segment holds on to them meanwhile.
#[test]
fn sharded_weights_learn_the_same_bits() {
    let recipe = Recipe { sizes: gpt2(), rows: 5, micro_batch: 4 };
    let train = |recompute: &Recompute| {
        on_mesh(shape(4, 2), |rank, mesh| {
            let mut trainer = recipe.trainer(rank, &mesh.clone().with_zero(Zero::Parameters));
            trainer.recompute = recompute.clone();
            (recipe.train(&mut trainer, 1..=3), rank.device.account().peak(Cause::Parameters))
        })
    };
    let want = train(&PLAIN);
    for recompute in [blocks(true), blocks(false), operations()] {
        assert!(train(&recompute) == want, "{recompute:?}");
    }
}

/// Draws of gates and of capacity, memory from step to step, schedules and shadows, experts beside the chosen ones.
#[test]
fn every_kind_of_moe_layer_learns_the_same_bits() {
    let with = |change: &dyn Fn(&mut moe::Config)| {
        let mut sizes = mixtral();
        change(sizes.moe.as_mut().expect("experts"));
        sizes
    };
    let jitter = with(&|moe| (moe.gate, moe.top_k) = (GateKind::Switch.into(), 1));
    let noise = with(&|moe| (moe.gate, moe.balance_scope) = (GateKind::Noisy.into(), Some(BalanceScope::MicroBatch)));
    let dropped_at_random = with(&|moe| {
        (moe.gate, moe.top_k, moe.capacity_factor, moe.overflow) =
            (GateKind::Gshard.into(), 2, Some(0.7), Overflow::Random);
    });
    let biased = with(&|moe| {
        (moe.gate, moe.balance_scope) = (biased(0.05), Some(BalanceScope::GlobalBatch));
    });
    let scheduled = with(&|moe| {
        (moe.schedule, moe.shadowing, moe.shared_experts) = (ScheduleKind::Smart, "force:1".into(), 1);
    });
    let competing = with(&|moe| {
        (moe.gate, moe.balance_scope, moe.residual) =
            (GateKind::ExpertChoice.into(), Some(BalanceScope::MicroBatch), true);
    });
    for (name, sizes) in [
        ("jitter", jitter),
        ("noise", noise),
        ("random drops", dropped_at_random),
        ("bias", biased),
        ("schedule and shadows", scheduled),
        ("competing tokens", competing),
        ("skipped results", with(&|moe| moe.output_masking = 0.4)),
    ] {
        same(name, sizes, &SHAPES);
    }
}

/// Calls and bytes of the expert group's all-to-alls in one step of one micro-batch, and the rows that a rank sent to and
/// received from others, over all layers.
fn all_to_alls(recompute: &Recompute) -> Vec<([u64; 2], u64)> {
    let recipe = Recipe { sizes: mixtral(), rows: 4, micro_batch: 4 };
    on_mesh(shape(2, 2), |rank, mesh| {
        let mut trainer = recipe.trainer(rank, mesh);
        trainer.recompute = recompute.clone();
        let report = recipe.train(&mut trainer, 1..=1).remove(0);
        let key = ("expert".to_owned(), Collective::AllToAll);
        let traffic = rank.ledger.snapshot()[&key];
        let rows = report.sent.iter().map(|layer| layer.rows[0][1] + layer.rows[1][0]).sum();
        ([traffic.calls, traffic.bytes], rows)
    })
}

/// Going back is one pass of rows and results, going forward another, and running again one more where nothing is kept.
/// Counts are told once a layer, whatever runs again.
#[test]
fn rows_travel_three_times_or_two() {
    let (layers, row_bytes, count_bytes) = (2, 16 * 4, 2 * 8);
    for (recompute, passes) in [(PLAIN, 2), (operations(), 2), (blocks(true), 2), (blocks(false), 3)] {
        for ([calls, bytes], rows) in all_to_alls(&recompute) {
            assert_eq!(calls, layers * (1 + 2 * passes), "{recompute:?}");
            assert_eq!(bytes, layers * count_bytes + passes * rows * row_bytes, "{recompute:?}");
        }
    }
}

/// Multiply-adds of going back over `recipe`'s rows, of all ranks.
fn multiply_adds(recipe: &Recipe, shape: Shape, recompute: &Recompute) -> u64 {
    let all = on_mesh(shape, |rank, mesh| {
        let mut trainer = recipe.trainer(rank, mesh);
        trainer.recompute = recompute.clone();
        back(recipe, &trainer);
        rank.device.multiply_adds()
    });
    all.iter().sum()
}

/// Mixtral's tiny sizes: tokens, D, columns of queries, keys and values, F, experts, choices, layers.
const T: u64 = 4 * 8;
const D: u64 = 16;
const QKV: u64 = 32;
const LAYERS: u64 = 2;

/// The second product of experts goes into an exchange whose result is kept, and is not made again.
#[test]
fn products_before_kept_results_are_not_made_again() {
    let recipe = Recipe { sizes: mixtral(), rows: 4, micro_batch: 4 };
    let (experts, rows, inner) = (4, 2 * T, 12);
    let plain = multiply_adds(&recipe, shape(2, 2), &PLAIN);
    let again = |recompute: &Recompute| multiply_adds(&recipe, shape(2, 2), recompute) - plain;
    let (attention, router, first, second) =
        (T * D * QKV + T * D * D, T * D * experts, rows * D * 2 * inner, rows * inner * D);
    assert_eq!(again(&blocks(true)), LAYERS * (attention + router + first));
    assert_eq!(again(&blocks(false)), LAYERS * (attention + router + first + second));
    // Queries, keys and values are kept, and nobody asks for what the output's product gives.
    assert_eq!(again(&operations()), LAYERS * first);
}

/// Under tensor parallelism both products of a dense block that are summed over the group are such; without keeping,
/// the sums need them.
#[test]
fn products_before_kept_sums_are_not_made_again() {
    let recipe = Recipe { sizes: Sizes { moe: None, ..mixtral() }, rows: 4, micro_batch: 4 };
    let shape = sliced(2, 2, 1);
    let plain = multiply_adds(&recipe, shape, &PLAIN);
    let again = |recompute: &Recompute| multiply_adds(&recipe, shape, recompute) - plain;
    let (qkv, first, inner) = (T * D * QKV, T * D * 48, 24);
    assert_eq!(again(&blocks(true)), LAYERS * (qkv + first));
    assert_eq!(again(&blocks(false)), LAYERS * (qkv + first + T * D * D + T * D * inner));
}

/// Bytes of activations and messages that a forward leaves alive, and the most that was ever held, of all ranks.
fn bytes(layers: usize, recompute: &Recompute) -> [u64; 2] {
    let mut sizes = mixtral();
    sizes.model.layers = layers;
    let recipe = Recipe { sizes, rows: 4, micro_batch: 4 };
    let measure = |rank: &Rank, mesh: &Mesh| {
        let trainer = recipe.trainer(rank, mesh);
        let live = || {
            [Cause::Activations, Cause::Communication]
                .map(|cause| rank.device.account().live(cause))
                .iter()
                .sum::<u64>()
        };
        let context = Context::of_training(mesh, StepFacts::of_training(0, 1), T);
        let tape = Tape::new(&rank.device).recomputing(recompute);
        let forward = trainer.model.forward(&tape, &recipe.batches(mesh, 1).micro[0], &context).unwrap();
        let kept = live();
        tape.try_backward(&forward.loss).unwrap();
        [kept, rank.device.account().peak_total()]
    };
    let all = on_mesh(shape(2, 2), measure);
    [0, 1].map(|which| all.iter().map(|bytes| bytes[which]).sum())
}

/// `docs/recomputation.md`: a block keeps its input, and of a MoE layer also the rows that came and the results that came
/// home.
#[test]
fn a_block_keeps_what_the_documents_say() {
    let more = |recompute: &Recompute| bytes(4, recompute)[0] - bytes(2, recompute)[0];
    let (input, rows) = (T * D * 4, 2 * T * D * 4);
    assert_eq!(more(&blocks(false)), 2 * input);
    assert_eq!(more(&blocks(true)), 2 * (input + 2 * rows));
    let plain = more(&PLAIN);
    assert!(plain > 3 * more(&blocks(true)), "{plain} bytes without");
    // Hidden values, and attention's results with a number a head and token.
    assert_eq!(plain - more(&operations()), 2 * (2 * T * 2 * 12 + T * D + T * 4) * 4);
    let peak = |recompute: &Recompute| bytes(8, recompute)[1];
    assert!(peak(&blocks(false)) < peak(&blocks(true)) && peak(&blocks(true)) < peak(&PLAIN));
    assert!(peak(&operations()) < peak(&PLAIN));
}

/// A user's gate that answers differently every time.
#[derive(Debug, Default)]
struct Fickle(AtomicUsize);

impl Gate for Fickle {
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        let asked = self.0.fetch_add(1, Ordering::Relaxed);
        (0..tokens.len()).map(|token| ((token + asked) % tokens.experts) as u32).collect()
    }

    fn slots(&self) -> usize {
        1
    }

    fn weighting(&self) -> Weighting {
        Weighting::Probability
    }
}

#[test]
fn a_gate_is_asked_once() {
    for keep_communication in [true, false] {
        on_mesh(shape(2, 2), |rank, mesh| {
            let sizes = LayerSizes {
                d_model: 8,
                d_ff: 16,
                activation: moe::Activation::SwiGlu,
                gates_shared: false,
                router_bias: false,
                dtype: Dtype::F32,
                adapters: None,
                inits: [Init::Normal { std: 0.3, seed: 1 }; 2],
            };
            let gate = Arc::new(Fickle::default());
            let mut layer = MoeLayer::new(&rank.device, ("layer", 0), moe::Config::of(4, 1).widest(), &sizes, mesh);
            layer.selector.gate = gate.clone();
            let layer = Rc::new(layer);
            let tape = Tape::new(&rank.device).recomputing(&blocks(keep_communication));
            let x = Tensor::from_fn(&rank.device, &[6, 8], |i| ((i * 37) % 11) as f32 / 11.0);
            let (x, mesh) = (tape.leaf(x), mesh.clone());
            let run = move |inputs: &[Var]| {
                let importance = Importance::new(&[0; 6], 6, vec![true; 6], 1.0);
                let stream = mesh.stream(Rows::of_ids(0, &[0; 6]));
                let facts = Facts {
                    importance: &importance,
                    homes: &Homes::default(),
                    history: &History::default(),
                    step: &StepFacts::of_training(0, 1),
                };
                let output = layer.forward(&inputs[0], &stream, &facts, &mesh).map_err(BackwardError::from)?;
                Ok::<_, BackwardError>((vec![output.y], output.counts))
            };
            let (y, counts) = tape.checkpoint(Part::Block, &[&x], run).unwrap();
            let ones = Tensor::from_fn(&rank.device, &[6, 8], |_| 1.0);
            tape.try_backward(&y[0].dot_constant(ones)).unwrap();
            assert_eq!(gate.0.load(Ordering::Relaxed), 1);
            assert_eq!(counts.load, [2, 2, 1, 1]);
        });
    }
}

/// A recording made with recomputation is the one made without, and is followed with it.
#[test]
fn recordings_are_written_and_followed_once() {
    let folder = tempfile::tempdir().unwrap();
    let [plain, again] = ["plain", "again"].map(|name| folder.path().join(name));
    let mut sizes = mixtral();
    sizes.moe.as_mut().expect("experts").gate = GateKind::Noisy.into();
    let recipe = Recipe { sizes: sizes.clone(), rows: 6, micro_batch: 4 };
    let train = |recompute: &Recompute, routings: Routings| {
        let routings = Arc::new(routings);
        on_mesh(shape(2, 2), |rank, mesh| {
            let mut trainer = recipe.trainer(rank, mesh);
            (trainer.recompute, trainer.routings) = (recompute.clone(), routings.clone());
            let reports = recipe.train(&mut trainer, 1..=2);
            (reports, bits(&weights(&mut trainer.model)))
        })
    };
    let record = |path| Some(Recording::create(path, recorded(&sizes), 1).unwrap());
    let want = train(&PLAIN, Routings { record: record(&plain), ..Routings::NONE });
    assert!(train(&blocks(false), Routings { record: record(&again), ..Routings::NONE }) == want);
    assert!(fs::read(&plain).unwrap() == fs::read(&again).unwrap());
    let replay = Some(Recording::open(&plain, recorded(&sizes), 1..=2).unwrap());
    assert!(train(&blocks(true), Routings { replay, ..Routings::NONE }) == want);
}

// --- recipes ----------------------------------------------------------------------------------------------------

const RECIPE: &str = "[train]\nsteps = 9\nbatch_tokens = 64\nlr = 1e-3\n[model]\nvocab = 300\nd_model = 32\nlayers = 2\n\
                      heads = 2\nseq = 32\n[data]\nsources = [\"text\"]\n";

fn load(more: &str, overrides: &[&str]) -> Result<config::Loaded, config::Problems> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.toml");
    fs::write(&path, format!("{RECIPE}{more}")).unwrap();
    config::load(&path, &overrides.iter().map(ToString::to_string).collect::<Vec<_>>(), None)
}

#[test]
fn recipes_say_what_runs_again() {
    let segments = |more: &str| load(more, &[]).unwrap().config.memory.segments();
    assert!(segments("").parts.is_empty());
    assert_eq!(segments("[memory]\nrecompute = \"block\"\n"), blocks(true));
    assert_eq!(segments("[memory]\nrecompute = \"block\"\nkeep_communication = false\n"), blocks(false));
    assert_eq!(segments("[moe]\nexperts = 4\n[memory]\nrecompute = \"operations\"\n"), operations());
    let two = "[memory]\nrecompute = \"operations\"\nrecompute_operations = [\"activations\", \"attention\"]\n";
    assert_eq!(segments(two).parts, [Part::Activation, Part::Attention]);
}

#[test]
fn what_cannot_run_again_is_an_error() {
    let operations = |list: &str| format!("[memory]\nrecompute = \"operations\"\nrecompute_operations = [{list}]\n");
    let sparse = "[moe]\nexperts = 4\n";
    for (recipe, overrides, says) in [
        (operations("\"norms\""), &[][..], "\"attention\", \"activations\", \"experts\""),
        (operations(""), &[], "names no operation"),
        (operations("\"experts\""), &[], "there are no experts"),
        (format!("{sparse}{}", operations("\"activations\"")), &[], "make their activations again as it is"),
        ("[memory]\nrecompute = \"blocks\"\n".into(), &[], "did you mean \"block\"?"),
        (String::new(), &["memory.keep_communication=false"], "nothing uses it: memory.recompute = \"none\""),
        (String::new(), &["memory.recompute_operations=[\"attention\"]"], "nothing uses it"),
    ] {
        let problems = load(&recipe, overrides).expect_err(says).to_string();
        assert!(problems.contains(says), "{recipe}{overrides:?}: {problems}");
    }
    let moot = "[memory]\nrecompute = \"operations\"\nkeep_communication = false\n";
    assert!(load(moot, &[]).unwrap().notices[0].contains("memory.keep_communication"));
}
