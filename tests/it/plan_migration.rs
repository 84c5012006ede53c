//! Plans of runs whose sequences migrate: what their ranks sent is what is planned from their recordings.

use std::path::Path;
use std::sync::Arc;

use guildhall::model::Sizes;
use guildhall::moe::migration::Migrating;
use guildhall::moe::recording::{ClusterFile, Companion, Header, HostChoices, Hosting, Recording, StepFile, Visiting};
use guildhall::moe::{Config, Routings, ScheduleKind};
use guildhall::parallel::{ExpertTable, MeshShape, Migrate};
use guildhall::plan::{Layout, RecomputePolicy, RecordedFiles, Task};

use crate::plan::plain;
use crate::plan_recorded::{STEPS, by_name, clustering, condensing, sent};
use crate::recording::{ROWS, recorded};
use crate::tiny::{Recipe, gpt2, mixtral};

fn hosting(sizes: &Sizes, layout: &Layout, micro_batch: usize) -> Hosting {
    let (routes, moe) = (recorded(sizes), sizes.moe.as_ref().expect("experts"));
    let tables = vec![ExpertTable::even(moe.experts, layout.mesh.expert); routes.layers.len()];
    Hosting(Visiting::new(&routes, layout.mesh, &tables, micro_batch))
}

fn create<H: Header + Companion>(path: &Path, header: H) -> StepFile<H> {
    StepFile::create(&StepFile::<H>::beside(path), header, 1).unwrap()
}

fn follow<H: Header + Companion>(path: &Path, header: H) -> StepFile<H> {
    StepFile::follow(&StepFile::<H>::beside(path), header, 1..=STEPS).unwrap().unwrap()
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
    let stayed = Task { layout: Layout { migrating: None, ..task.layout.clone() }, ..task };
    let stayed = by_name(stayed.traffic_recorded(files, 1..=STEPS).unwrap(), &layout);
    assert_ne!(stayed, counted, "{what}: nothing moved");
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
    let tensor = |expert_tensor| MeshShape { tensor: 2, expert_tensor, ..MeshShape::of(4, 2) };
    let split = |layout| Layout { sequence: true, ..layout };
    let blocks = |layout: Layout| Layout { recompute: RecomputePolicy::Blocks { keep: false }, ..layout };
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
                compare(&format!("{name}{condenses}"), &path, &sizes, (layout, micro_batch));
            }
        }
    }
    // Norms before sub-layers, and one choice a token.
    compare("gpt2", &path, &gpt2(), (plain(MeshShape::of(2, 2)), 6));
}
