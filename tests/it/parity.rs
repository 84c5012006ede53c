//! The same seed gives the same training on every mesh and in every cut into micro-batches, up to the order of sums;
//! on the same mesh, the same bits.

use std::sync::Arc;

use guildhall::data::{Batch, IGNORE, Row, StepBatches};
use guildhall::launch::Rank;
use guildhall::model::{Caches, Context, Sizes};
use guildhall::moe::{Routings, ScheduleKind, Shadowing};
use guildhall::parallel::{Mesh, Rates};
use guildhall::train::{StepReport, Trainer};
use guildhall_tensor::{Dtype, Tape};

use crate::tiny::{
    Recipe, Tensors, Tolerance, all_near, bert, deepseek, families, gpt_oss, gpt2, mixtral, near, nllb, olmoe, qwen2,
    qwen3, share, state, transformer_xl, union, weights,
};
use crate::world::{MESHES, ONE, SLICED, Shape, on_mesh, shape, sliced};

pub(crate) const STEPS: u64 = 3;
/// Sums of a few hundred terms, each rounded at 2^-24 (6e-8), in other orders, three steps deep: 1e-6
/// was the most seen. The floor is for gradients that are zero in truth.
pub(crate) const REORDERED: Tolerance = Tolerance { relative: 1e-5, floor: 2e-9 };
/// Where the gradient is zero in truth (key biases), AdamW moves a weight by its noise times rate / epsilon = 100.
pub(crate) const MOVED: Tolerance = Tolerance { floor: 1e-6, ..REORDERED };

/// A run, over all ranks.
#[derive(PartialEq)]
pub(crate) struct Run {
    pub(crate) reports: Vec<StepReport>,
    pub(crate) weights: Tensors,
    moments: Tensors,
}

impl Run {
    /// One rank's part.
    pub(crate) fn of(trainer: &mut Trainer, reports: Vec<StepReport>) -> Run {
        let moments = state(trainer).into_iter().filter(|(name, _)| name.starts_with("m/")).collect();
        Run { reports, weights: weights(&mut trainer.model), moments }
    }

    /// All ranks' parts together.
    pub(crate) fn of_all(ranks: Vec<Run>) -> Run {
        let reports = ranks[0].reports.clone();
        assert!(ranks.iter().all(|rank| rank.reports == reports), "ranks report differently");
        let weights = union(ranks.iter().map(|rank| rank.weights.clone()));
        Run { reports, weights, moments: union(ranks.into_iter().map(|rank| rank.moments)) }
    }
}

pub(crate) fn run(recipe: &Recipe, shape: Shape) -> Run {
    run_prepared(recipe, shape, |_| ())
}

/// A run that follows or keeps routings.
pub(crate) fn run_with(recipe: &Recipe, shape: Shape, routings: Routings) -> Run {
    run_on(recipe, shape, routings, |_, mesh| mesh.clone())
}

/// A run of trainers that `prepare` has changed.
pub(crate) fn run_prepared(recipe: &Recipe, shape: Shape, prepare: impl Fn(&mut Trainer) + Sync) -> Run {
    train_on(recipe, shape, |_, mesh| mesh.clone(), prepare)
}

/// A run on a mesh that is changed first.
pub(crate) fn run_with_mesh(recipe: &Recipe, shape: Shape, change: impl Fn(Mesh) -> Mesh + Sync) -> Run {
    train_on(recipe, shape, |_, mesh| change(mesh.clone()), |_| ())
}

/// A run that follows or keeps routings, on a mesh that is changed first.
pub(crate) fn run_on(
    recipe: &Recipe,
    shape: Shape,
    routings: Routings,
    change: impl Fn(&Rank, &Mesh) -> Mesh + Sync,
) -> Run {
    let routings = Arc::new(routings);
    train_on(recipe, shape, change, |trainer| trainer.routings = routings.clone())
}

/// A run on a mesh, and of trainers, that are changed first.
pub(crate) fn train_on(
    recipe: &Recipe,
    shape: Shape,
    change: impl Fn(&Rank, &Mesh) -> Mesh + Sync,
    prepare: impl Fn(&mut Trainer) + Sync,
) -> Run {
    let ranks = on_mesh(shape, |rank, mesh| {
        let mut trainer = recipe.trainer(rank, &change(rank, mesh));
        prepare(&mut trainer);
        let reports = recipe.train(&mut trainer, 1..=STEPS);
        Run::of(&mut trainer, reports)
    });
    Run::of_all(ranks)
}

pub(crate) fn compare(what: &str, got: &Run, want: &Run) {
    for (got, want) in got.reports.iter().zip(&want.reports) {
        let numbers = |r: &StepReport| [r.loss, r.balance, r.z, r.gradient_norm].map(|x| x as f32);
        let names = ["loss", "balance", "z", "gradient norm"];
        for ((name, got), want) in names.iter().zip(numbers(got)).zip(numbers(want)) {
            near(&format!("{what}, {name}"), &[got], &[want], REORDERED);
        }
        // Integers: a routing that flipped would show here.
        let counts = |r: &StepReport| (r.moe.clone(), r.valid_tokens, r.counted_tokens);
        assert_eq!(counts(got), counts(want), "{what}");
    }
    all_near(&format!("{what}, weights"), &got.weights, &want.weights, MOVED);
    all_near(&format!("{what}, first moments"), &got.moments, &want.moments, REORDERED);
}

fn check(name: &str, sizes: &Sizes, rows: usize) {
    let recipe = |micro_batch| Recipe { sizes: sizes.clone(), rows, micro_batch };
    let want = run(&recipe(rows), ONE);
    check_loads(sizes, rows, &want.reports);
    for micro_batch in [rows, 1, 4] {
        let sliced = SLICED.into_iter().filter(|_| micro_batch == 4);
        for shape in MESHES.into_iter().chain(sliced) {
            let got = run(&recipe(micro_batch), shape);
            compare(&format!("{name} on {shape:?}, micro-batches of {micro_batch} of {rows} rows"), &got, &want);
        }
    }
}

/// Rows arrive at the ranks that hold their experts, however many groups there are.
#[test]
fn rows_between_ranks_are_the_loads_of_their_experts() {
    let recipe = Recipe { sizes: mixtral(), rows: 6, micro_batch: 4 };
    for shape in MESHES {
        let reports = run(&recipe, shape).reports;
        for (moe, sent) in reports.iter().flat_map(|report| report.moe.iter().zip(&report.sent)) {
            assert_eq!((sent.layer, sent.rows.len()), (moe.layer, shape.ranks));
            let arrived = |place: usize| sent.rows.iter().map(|row| row[place]).sum::<u64>();
            let arrived: Vec<u64> = (0..shape.expert).map(arrived).collect();
            let loads = moe.load.chunks(4 / shape.expert).map(|loads| loads.iter().sum::<u64>());
            assert_eq!(arrived, loads.collect::<Vec<u64>>(), "{shape:?}");
        }
        // Six rows in micro-batches of 4 and 2: with four ranks, two of them have two rows, of 8 tokens with 2 choices.
        let of_rank = |rank: usize| reports[0].sent[0].rows[rank].iter().sum::<u64>();
        let rows: Vec<u64> = (0..shape.ranks).map(of_rank).collect();
        let want: &[u64] = if shape.ranks == 4 { &[1, 2, 1, 2] } else { &[6 / shape.ranks as u64; 2][..shape.ranks] };
        assert_eq!(rows, want.iter().map(|rows| rows * 16).collect::<Vec<_>>(), "{shape:?}");

        // In steps the same rows travel; where all experts visit, none does.
        let sent = |change: fn(&mut guildhall::moe::Config)| {
            let mut changed = recipe.clone();
            change(changed.sizes.moe.as_mut().expect("experts"));
            run(&changed, shape).reports.into_iter().flat_map(|report| report.sent).collect::<Vec<_>>()
        };
        let plain: Vec<_> = reports.iter().flat_map(|report| report.sent.clone()).collect();
        assert_eq!(sent(|moe| moe.schedule = ScheduleKind::Smart), plain, "{shape:?}");
        for layer in sent(|moe| moe.shadowing = "force:4".to_owned()) {
            for (rank, row) in layer.rows.iter().enumerate() {
                assert_eq!(row[rank % shape.expert], row.iter().sum::<u64>(), "{shape:?}, rank {rank}");
            }
        }
    }
}

/// Every token of a MoE layer has its k routes and none is lost.
fn check_loads(sizes: &Sizes, rows: usize, reports: &[StepReport]) {
    let routes = (rows * sizes.model.seq * sizes.moe.as_ref().expect("experts").top_k) as u64;
    for record in reports.iter().flat_map(|report| &report.moe) {
        assert_eq!((record.load.iter().sum::<u64>(), record.dropped), (routes, 0), "layer {}", record.layer);
    }
    let layers = (0..sizes.model.layers).filter(|&layer| sizes.moe_of(layer).is_some()).count();
    assert!(reports.iter().all(|report| report.moe.len() == layers));
}

#[test]
fn mixtral_trains_alike_on_every_mesh() {
    check("mixtral", &mixtral(), 6);
}

#[test]
fn deepseek_trains_alike_on_every_mesh() {
    check("deepseek", &deepseek(), 6);
}

#[test]
fn gpt2_with_dropout_trains_alike_on_every_mesh() {
    let mut sizes = gpt2();
    sizes.model.dropout = 0.2;
    check("gpt2", &sizes, 6);
}

/// Few tokens are predicted, so that some ranks have rows without any; all count in the balance loss.
#[test]
fn bert_with_dropout_trains_alike_on_every_mesh() {
    let mut sizes = bert();
    sizes.model.dropout = 0.2;
    check("bert", &sizes, 6);
    let reports = run(&Recipe { sizes, rows: 6, micro_batch: 6 }, ONE).reports;
    assert!(reports.iter().all(|r| r.counted_tokens == 48 && r.valid_tokens < 24), "{reports:?}");
}

#[test]
fn transformer_xl_with_dropout_trains_alike_on_every_mesh() {
    let mut sizes = transformer_xl();
    sizes.model.dropout = 0.2;
    check("transformer_xl", &sizes, 6);
}

/// Sources are read by the ranks that have their targets.
#[test]
fn an_encoder_and_a_decoder_with_dropout_train_alike_on_every_mesh() {
    let mut sizes = nllb();
    sizes.model.dropout = 0.2;
    check("nllb", &sizes, 6);
    let reports = run(&Recipe { sizes, rows: 6, micro_batch: 6 }, ONE).reports;
    assert!(reports.iter().all(|r| r.counted_tokens == r.valid_tokens + 48), "{reports:?}");
}

#[test]
fn ranks_without_rows_change_nothing() {
    check("nllb of few rows", &nllb(), 3);
    check("mixtral of few rows", &mixtral(), 3);
    check("bert of few rows", &bert(), 3);
    check("transformer_xl of few rows", &transformer_xl(), 3);
}

#[test]
fn the_same_mesh_gives_the_same_bits() {
    for (_, sizes) in families() {
        let recipe = Recipe { sizes, rows: 6, micro_batch: 4 };
        for shape in MESHES.into_iter().chain([sliced(2, 2, 1)]) {
            assert!(run(&recipe, shape) == run(&recipe, shape), "{shape:?}: two runs differ");
        }
    }
}

/// Two documents in one row, or each in a row of its own: attention, positions and losses are the documents' own.
#[test]
fn packing_changes_nothing() {
    for (_, sizes) in families() {
        let recipe = Recipe { sizes, rows: 2, micro_batch: 2 };
        // What an encoder reads for a document is of another length.
        let (packed, apart) = ([[3, 5], [4, 2]].map(|lengths| row(&lengths)), [[3, 4], [5, 2]]);
        let apart = apart.map(|lengths| lengths.map(|length| row(&[length])));
        let train = |rows: &[[Row; 2]]| {
            let batch = |row: &Row| share(0..1, row.tokens.len(), |_| row.clone());
            let reads = recipe.sizes.blueprint().reads_a_source();
            let micro = rows.iter().map(|[row, source]| match reads {
                true => batch(row).reading(batch(source)),
                false => batch(row),
            });
            let micro: Vec<Batch> = micro.collect();
            let ranks = on_mesh(ONE, |rank, mesh| {
                let mut trainer = recipe.trainer(rank, mesh);
                let report = trainer.step(&StepBatches { step: 1, micro: micro.clone() }, 1).unwrap();
                Run::of(&mut trainer, vec![report])
            });
            ranks.into_iter().next().expect("one rank")
        };
        compare(&format!("{:?}, packed", recipe.sizes.model.family), &train(&[packed]), &train(&apart));
    }
}

/// Documents of these lengths one after the other; a document's tokens depend on its length alone.
pub(crate) fn row(lengths: &[usize]) -> Row {
    let mut row = Row::default();
    for (segment, &length) in lengths.iter().enumerate() {
        let token = |i: usize| ((7 * length + 5 * i * i) % 31) as u32;
        row.tokens.extend((0..length).map(token));
        row.targets.extend((1..length).map(token).chain([IGNORE]));
        row.segments.extend(vec![segment as u32; length]);
        row.positions.extend(0..length as u32);
    }
    row
}

/// Token by token, with what earlier ones left in caches, or all at once.
#[test]
fn reading_with_caches_is_reading_at_once() {
    let all = [mixtral(), qwen3(), olmoe(), qwen2(), gpt_oss(), deepseek(), gpt2(), transformer_xl()];
    let cases = all.into_iter().flat_map(|sizes| {
        [(shape(2, 2), false), (sliced(2, 2, 1), false), (sliced(4, 4, 1), false), (sliced(2, 2, 1), true)]
            .map(|mesh| (sizes.clone(), mesh))
    });
    for (sizes, (shape, sequence)) in cases {
        let recipe = Recipe { sizes, rows: 1, micro_batch: 1 };
        let batch = share(0..1, 8, |_| row(&[8]));
        on_mesh(shape, |rank, mesh| {
            let mesh = &mesh.clone().with_sequence(sequence);
            let Trainer { model, device, .. } = recipe.trainer(rank, mesh);
            let context = Context::of_inference(mesh, 7);
            let want = model.logits(&Tape::inference(&device), &batch, &context).unwrap().to_vec();
            let mut caches = Caches::new(recipe.sizes.model.layers);
            for (tokens, last) in [(0..3, 2), (3..4, 3), (4..8, 7)] {
                let got = model.next_logits(&device, &batch.tokens[tokens], &mut caches, &context).unwrap().to_vec();
                near(&format!("logits after token {last}"), &got, &want[last * 31..(last + 1) * 31], REORDERED);
            }
        });
    }
}

/// Experts visit where that is said to pay, and stay where it is not: with slow arithmetic and fast links any expert that
/// is hotter than others pays, with slow links none of 576 weights for rows of 16 features.
#[test]
fn experts_visit_where_it_pays() {
    let mut sizes = mixtral();
    sizes.moe.iter_mut().for_each(|moe| moe.shadowing = "auto".to_owned());
    let recipe = Recipe { sizes, rows: 6, micro_batch: 4 };
    let want = run(&Recipe { sizes: mixtral(), ..recipe.clone() }, ONE);
    for shape in [shape(2, 2), shape(4, 2), shape(4, 4)] {
        for (flops, bandwidth, pays) in [(1e6, 1e15, true), (1e15, 1e6, false)] {
            let rates = Rates { flops, bandwidth, latency: 0.0, memory: f64::INFINITY };
            let got = run_on(&recipe, shape, Routings::NONE, |_, mesh| mesh.clone().with_rates(rates));
            compare(&format!("{rates:?} on {shape:?}"), &got, &want);
            let visits: u64 = got.reports.iter().map(|report| report.shadowed).sum();
            assert_eq!(visits > 0, pays, "{rates:?} on {shape:?}: {visits} visits");
        }
    }
}

/// However rows travel, whoever is shadowed, and wherever experts live.
#[test]
fn schedules_shadows_and_tables_change_nothing() {
    let want = run(&Recipe { sizes: mixtral(), rows: 6, micro_batch: 4 }, ONE);
    for kind in [ScheduleKind::Plain, ScheduleKind::Smart] {
        for shadowing in ["off", "auto", "force:1", "force:4"] {
            for shape in MESHES {
                let mut sizes = mixtral();
                let moe = sizes.moe.as_mut().expect("experts");
                (moe.schedule, moe.shadowing) = (kind, shadowing.to_owned());
                let recipe = Recipe { sizes, rows: 6, micro_batch: 4 };
                let got = run_on(&recipe, shape, Routings::NONE, |rank, mesh| {
                    mesh.clone().measured(&rank.device, Dtype::F32).unwrap()
                });
                compare(&format!("{kind:?}, {shadowing} on {shape:?}"), &got, &want);
                if let Some(Shadowing::Force(n)) = Shadowing::parse(shadowing) {
                    // Two layers, two micro-batches.
                    let groups = (shape.ranks / shape.expert) as u64;
                    assert!(got.reports.iter().all(|report| report.shadowed == 4 * groups * n as u64), "{shape:?}");
                }
            }
        }
    }
    for (experts, table) in [(4, vec![1, 0, 1, 1]), (5, vec![0, 1, 1, 0, 1])] {
        let mut sizes = mixtral();
        let moe = sizes.moe.as_mut().expect("experts");
        (moe.experts, moe.schedule, moe.shadowing) = (experts.into(), ScheduleKind::Smart, "force:2".to_owned());
        let recipe = Recipe { sizes, rows: 6, micro_batch: 4 };
        let want = run(&recipe, ONE);
        for shape in [shape(2, 2), shape(4, 2)] {
            let got = run_on(&recipe, shape, Routings::NONE, |_, mesh| mesh.clone().with_owners(&table));
            compare(&format!("table {table:?} on {shape:?}"), &got, &want);
        }
    }
}
