//! Plans of runs whose sequences migrate: what their ranks sent is what is planned from their recordings.

use std::path::Path;
use std::sync::Arc;

use guildhall::model::{self, Sizes};
use guildhall::moe::migration::{Migrating, RowCopies};
use guildhall::moe::recording::{ClusterFile, Companion, Header, HostChoices, Hosting, Recording, StepFile, Visiting};
use guildhall::moe::{Config, Layers, Routings, ScheduleKind};
use guildhall::parallel::{Axis, ExpertTable, MeshShape, Migrate, Rates};
use guildhall::plan::{Layout, RecordedFiles, Task, traffic};
use guildhall_comm::Collective;
use guildhall_tensor::Dtype;

use crate::plan::plain;
use crate::plan_recorded::{STEPS, blocks, by_name, clustering, condensing, sent, split, tensor};
use crate::program::{RECIPE, Workshop};
use crate::recording::{ROWS, recorded};
use crate::tiny::{Recipe, bert, gpt2, mixtral, with};

fn hosting(sizes: &Sizes, layout: &Layout, micro_batch: usize) -> Hosting {
    let (routes, moe) = (recorded(sizes), sizes.moe.as_ref().expect("experts"));
    let tables = vec![ExpertTable::even(moe.experts.largest(), layout.mesh.expert); routes.layers.len()];
    Hosting(Visiting::new(&routes, layout.mesh, &tables, micro_batch))
}

fn create<H: Header + Companion>(path: &Path, header: H) -> StepFile<H> {
    StepFile::create(&StepFile::<H>::beside(path), header, 1).unwrap()
}

fn follow<H: Header + Companion>(path: &Path, header: H) -> StepFile<H> {
    StepFile::follow(&StepFile::<H>::beside(path), header, 1..=STEPS).unwrap().unwrap()
}

/// By hand: experts lie in blocks on the ranks of an expert group.
fn concentration(routes: &Recording, task: &Task) -> f64 {
    let (ranks, mut shares) = (task.layout.mesh.expert, Vec::new());
    let of_rank = task.sizes.moe.as_ref().expect("experts").experts.largest() / ranks;
    for (step, layer) in (1..=STEPS).flat_map(|step| recorded(&task.sizes).layers.into_iter().map(move |l| (step, l))) {
        for row in 0..ROWS as u64 {
            let routing = routes.read(step, layer, row..row + 1).unwrap();
            let to = |rank: usize| routing.expert.iter().filter(|expert| **expert as usize / of_rank == rank).count();
            shares.push((0..ranks).map(to).max().unwrap() as f64 / routing.expert.len() as f64);
        }
    }
    shares.iter().sum::<f64>() / shares.len() as f64
}

/// Runs with forced migration, records, and plans what it recorded; by group and collective, calls and bytes.
fn compare(what: &str, path: &Path, sizes: &Sizes, (layout, micro_batch): (Layout, usize)) {
    let what = format!("{what} on {:?}, split: {}, by {micro_batch}", layout.mesh, layout.sequence);
    let migrating = Migrating::new(Migrate::Force, (None, 0.25), sizes.blueprint().stacks().len());
    let routings = Routings {
        record: Some(Recording::create(path, recorded(sizes), 1).unwrap()),
        record_clusters: clustering(sizes).map(|header| create(path, header)),
        record_hosts: Some(create(path, hosting(sizes, &layout, micro_batch))),
        migration: migrating.clone().map(|policy| Arc::new(policy) as _),
        ..Routings::NONE
    };
    let counted = sent(&Recipe { sizes: sizes.clone(), rows: ROWS, micro_batch }, &layout, &routings);
    let routes = Recording::open(path, recorded(sizes), 1..=STEPS).unwrap();
    let clusters: Option<ClusterFile> = clustering(sizes).map(|header| follow(path, header));
    let hosts: HostChoices = follow(path, hosting(sizes, &layout, micro_batch));
    let files = RecordedFiles { routes: &routes, clusters: clusters.as_ref(), visits: None, hosts: Some(&hosts) };
    // A policy that would choose other hosts.
    let migrating = migrating.map(|policy| Migrating { forces: false, ..policy });
    let own = Layout { migrating, ..layout.clone() };
    let task = Task { sizes: sizes.clone(), layout: own, rows_per_step: ROWS, micro_batch, predicted: 1.0 };
    let planned = by_name(task.traffic_recorded(files, 1..=STEPS).unwrap(), &layout);
    assert_eq!(planned, counted, "{what}");
    let said = task.concentration(files, 1..=STEPS).unwrap();
    assert!((said - concentration(&routes, &task)).abs() < 1e-12, "{what}: {said}");
    let stayed = Task { layout: Layout { migrating: None, ..task.layout.clone() }, ..task };
    let stayed = by_name(stayed.traffic_recorded(files, 1..=STEPS).unwrap(), &layout);
    assert_ne!(stayed, counted, "{what}: nothing moved");
}

/// Sequences all of whose routes go to one of two ranks: half of them are elsewhere, and with slack enough they move there.
/// If half of the routes go to each rank, no place is better than another.
#[test]
fn made_up_sequences_move_to_their_routes() {
    let task = |migrating| {
        // So little travels that messages must cost nothing by themselves.
        let rates = Rates { flops: 1e14, bandwidth: 1e6, latency: 0.0, memory: f64::INFINITY };
        let layout = Layout { migrating, rates, ..plain(MeshShape::of(2, 2)) };
        Task { sizes: mixtral(), layout, rows_per_step: 8, micro_batch: 8, predicted: 1.0 }
    };
    let [stay, go] = [None, Migrating::new(Migrate::Auto, (None, 1.0), 1)].map(task);
    assert_eq!(stay.concentrations(), Some(0.5..=1.0));
    let sent = |task: &Task, share: f64| -> u64 {
        let costs = task.walked(share);
        // As many sequences concentrate on each rank.
        assert!(costs[0].work == costs[1].work, "{share}: one rank computes more");
        costs.iter().map(|cost| traffic(&cost.messages)[&(Axis::Expert(2), Collective::AllToAll)].bytes).sum()
    };
    let Sizes { model, moe, .. } = mixtral();
    let moe = moe.expect("experts");
    let layers = (0..model.layers).filter(|&layer| moe.layers.contains(layer)).count();
    let (routes, counts) = (4 * model.seq * moe.top_k, 8 * moe.experts.largest());
    assert_eq!(sent(&stay, 1.0), (layers * (4 * routes * model.d_model * 4 + counts)) as u64);
    assert!(sent(&go, 1.0) < sent(&stay, 1.0), "{} and {}", sent(&go, 1.0), sent(&stay, 1.0));
    assert_eq!(sent(&go, 0.5), sent(&stay, 0.5));
}

/// The program says how much a run's sequences concentrated, and refuses shares that cannot be.
#[test]
fn the_program_says_how_much_sequences_concentrate() {
    let shop = Workshop::new();
    let mesh = "--ranks 2 --set parallel.expert=2 --set train.eval_every=0";
    shop.train(&format!("{mesh} --set moe.record=routes --set train.steps=1"));
    let plan = |more: &str| shop.succeeds(&format!("plan {RECIPE} {mesh} --set train.steps=1 --json {more}"));
    let json = |out: &str| serde_json::from_str::<serde_json::Value>(out).unwrap();
    let said = json(&plan("--recording routes").out)["recorded"]["concentration"].as_f64().unwrap();
    assert!((0.5..=1.0).contains(&said), "{said}");
    let more = format!("--set parallel.migrate=auto --concentration {said}");
    assert!(!plan(&more).err.contains("note: parallel.migrate"));
    assert!(plan("--set parallel.migrate=auto").err.contains("every sequence is taken to stay where it is"));
    shop.fails(&format!("plan {RECIPE} {mesh} --concentration 0.3"), 2, &["0.3 is not a share from 0.500 to"]);
}

#[test]
fn bytes_of_migrations_are_those_of_the_plan() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("routes");
    let ways: [(&str, fn(&mut Config)); 4] = [
        ("plain", |_| ()),
        ("steps", |moe| moe.schedule = ScheduleKind::Smart),
        ("visitors", |moe| moe.shadowing = "force:2".to_owned()),
        ("duplicates", |moe| moe.drop_duplicates = false),
    ];
    for (name, change) in ways {
        let mut plain_sizes = mixtral();
        change(plain_sizes.moe.as_mut().expect("experts"));
        for (condenses, sizes) in [("", plain_sizes.clone()), (", condensed", condensing(plain_sizes, 0.5))] {
            for (layout, micro_batch) in [
                (plain(MeshShape::of(2, 2)), 6),
                (plain(MeshShape::of(4, 4)), 4),
                (plain(MeshShape::of(4, 2)), 8),
                (plain(tensor(2)), 4),
                (split(plain(tensor(2))), 4),
                (plain(tensor(1)), 6),
                (split(plain(tensor(1))), 6),
                (blocks(plain(MeshShape::of(2, 2))), 4),
            ] {
                let drop_duplicates = sizes.moe.as_ref().expect("experts").drop_duplicates;
                let layout = Layout { drop_duplicates, ..layout };
                if layout.sequence && sizes.moe.as_ref().expect("experts").condenses() {
                    continue;
                }
                compare(&format!("{name}{condenses}"), &path, &sizes, (layout, micro_batch));
            }
        }
    }
    // Norms before sub-layers, and one choice a token.
    compare("gpt2", &path, &gpt2(), (plain(MeshShape::of(2, 2)), 6));
}

/// What a migration copies is what `auto` takes it to copy: readings and writings of rows, forward and backward. What is
/// foreseen does not depend on where norms are, nor on whether results carry residual rows, which copies do.
#[test]
fn copies_of_a_migration_are_foreseen() {
    let residual = with(mixtral(), |moe| moe.residual = true);
    let kinds = [("norms before", mixtral()), ("norms after", bert()), ("rows alone", residual)];
    for ((what, sizes), top_k, dtype) in kinds
        .iter()
        .flat_map(|kind| [1, 2].map(|top_k| (kind, top_k)))
        .flat_map(|(kind, top_k)| [Dtype::F32, Dtype::Bf16].map(|dtype| (kind, top_k, dtype)))
    {
        let sizes = with(sizes.clone(), |moe| (moe.top_k, moe.layers) = (top_k, Layers::List(vec![0])));
        // Integers beside a row are few.
        let sizes = Sizes { model: model::Config { d_model: 512, ..sizes.model }, dtype, gradients: dtype, ..sizes };
        // Half of the sequences can save, or none: then a quarter is made to move.
        for (share, moves) in [(1.0, 0.5), (0.5, 0.25)] {
            let copied = |migrating| -> u64 {
                let layout = Layout { migrating, ..plain(MeshShape::of(2, 2)) };
                let task = Task { sizes: sizes.clone(), layout, rows_per_step: 8, micro_batch: 8, predicted: 1.0 };
                task.walked(share).iter().flat_map(|cost| cost.work.values()).map(|work| work.other_bytes).sum()
            };
            let [stay, go] = [None, Migrating::new(Migrate::Force, (None, 1.0), 1)].map(copied);
            let tokens = (8 * sizes.model.seq) as f64;
            let RowCopies { result, token, moving } = RowCopies::of_rows(512, dtype);
            let foreseen = tokens * (top_k as f64 * result as f64 + token as f64 + moves * moving as f64);
            let ratio = (go - stay) as f64 / foreseen;
            // In bf16 the least is for norms before, the most for rows alone.
            assert!((0.7..1.2).contains(&ratio), "{what}, top {top_k}, {dtype:?}, {moves} move: {ratio}");
        }
    }
}
