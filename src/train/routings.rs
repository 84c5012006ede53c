//! Opening what `moe.record` and `moe.replay` name.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::job::{Job, Start};
use super::setup::sizes;
use crate::config::Config;
use crate::moe::migration::Migrating;
use crate::moe::recording::{
    ClusterFile, Clustering, Companion, Error, HostChoices, Hosting, Ready, Recording, Shape, StepFile, Visiting,
    Visits,
};
use crate::moe::{self, LayerConfig, MigrationPolicy, Routings, Shadowing};
use crate::parallel::{ExpertTable, PerLayer};

/// The recordings a run follows and writes, and what it decides anew, and why, if it does not follow recorded decisions;
/// `data` names the text it trains on. Called once a process, before the ranks begin: they share its files. Of several processes the others come after the one that leads, before any rank writes:
/// what it made they make again, to the byte.
///
/// # Errors
/// A recording that cannot be followed or continued, or a file that cannot be written.
pub fn routings(job: &Job, data: &str) -> Result<(Routings, Vec<String>), Error> {
    let Some(moe) = &job.config.moe else { return Ok((Routings::NONE, Vec::new())) };
    let shape = recorded_shape(&job.config, moe, data);
    let migration = migration_policy(&job.config);
    let own = visiting(&job.config, &shape);
    let hosting = migration.is_some().then(|| Hosting(own.clone()));
    let visiting = (moe.shadowing() != Shadowing::Off).then_some(own);
    let clustering = moe.condensation().map(|condensation| Clustering::new(&shape, condensation.tokens));
    let (mut routings, mut anew) = (Routings { migration, ..Routings::NONE }, Vec::new());
    if let Some(path) = &moe.replay {
        let steps = job.steps_done() + 1..=job.config.train.steps;
        routings.replay = Some(Recording::open(path, shape.clone(), steps.clone())?);
        let mut tell = |what: &str, why: String| anew.push(format!("{what} are decided anew: {why}"));
        routings.replay_visits = followed(path, &visiting, steps.clone(), |why| tell("shadow sets", why))?;
        routings.replay_clusters = followed(path, &clustering, steps.clone(), |why| tell("clusters", why))?;
        routings.replay_hosts = followed(path, &hosting, steps, |why| tell("hosts of sequences", why))?;
    }
    if let Some(path) = &moe.record {
        let files =
            |path: &PathBuf| [path.clone(), Visits::beside(path), ClusterFile::beside(path), HostChoices::beside(path)];
        let replayed = moe.replay.iter().flat_map(files);
        let mut written_files = files(path).into_iter();
        if let Some(same) = written_files.find(|path| replayed.clone().any(|other| is_same(path, &other))) {
            return Err(Error::Same(same));
        }
        let resumed = matches!(job.start, Start::From(_)).then(|| job.steps_done());
        let routes = match resumed {
            Some(done) => Recording::to_resume(path, shape, done),
            None => Recording::to_create(path, shape, 1),
        };
        // Nothing is touched before all files are found fit.
        let (routes, visits) = (routes?, written(path, visiting, resumed)?);
        let (clusters, hosts) = (written(path, clustering, resumed)?, written(path, hosting, resumed)?);
        routings.record = Some(routes.begin()?);
        routings.record_visits = begun(path, visits)?;
        routings.record_clusters = begun(path, clusters)?;
        routings.record_hosts = begun(path, hosts)?;
    }
    Ok((routings, anew))
}

/// The policy by which a run's sequences migrate, if they can.
pub fn migration_policy(config: &Config) -> Option<Arc<dyn MigrationPolicy>> {
    migrating(config).map(|policy| Arc::new(policy) as Arc<dyn MigrationPolicy>)
}

/// The same by its terms.
pub fn migrating(config: &Config) -> Option<Migrating> {
    let parallel = &config.parallel;
    let moe = config.moe.as_ref().filter(|_| parallel.has_hosts())?;
    let terms = (parallel.migrate_candidates, parallel.migrate_slack);
    let migrating = Migrating::new(parallel.migrate, terms, config.model.blueprint().stacks().len())?;
    // Tokens that may share rows stay on one host.
    Some(Migrating { group_tokens: moe.condense_tokens.unwrap_or(1), ..migrating })
}

/// Decisions to follow that lie beside the routings at `path`, if the run makes such; `tell` gets why there are none.
pub fn followed<H: Companion>(
    path: &Path,
    own: &Option<H>,
    steps: RangeInclusive<u64>,
    tell: impl FnOnce(String),
) -> Result<Option<StepFile<H>>, Error> {
    let Some(own) = own else { return Ok(None) };
    let followed = StepFile::follow(&StepFile::<H>::beside(path), own.clone(), steps)?;
    Ok(followed.map_err(tell).ok())
}

/// The file beside the routings at `path` that a run is to write, if it makes such decisions; continued after the step
/// at which the run is resumed.
fn written<H: Companion>(path: &Path, own: Option<H>, resumed: Option<u64>) -> Result<Option<Ready<H>>, Error> {
    let beside = StepFile::<H>::beside(path);
    let ready = own.map(|own| match resumed {
        Some(done) => StepFile::to_continue(&beside, own, done),
        None => StepFile::to_create(&beside, own, 1),
    });
    ready.transpose()
}

/// Begins such a file; without one, takes away what an earlier run left there.
fn begun<H: Companion>(path: &Path, ready: Option<Ready<H>>) -> Result<Option<StepFile<H>>, Error> {
    match ready {
        Some(ready) => ready.begin().map(Some),
        None => StepFile::<H>::discard(&StepFile::<H>::beside(path)).map(|()| None),
    }
}

/// What shadow sets and hosts of such runs depend on besides.
pub fn visiting(config: &Config, routes: &Shape) -> Visiting {
    let (parallel, sizes) = (&config.parallel, sizes(config));
    let table = |(layer, moe): (usize, LayerConfig)| {
        let degree = sizes.expert_degree(layer, &parallel.expert);
        let even = || ExpertTable::even(moe.experts, degree);
        parallel.expert_table.as_ref().map_or_else(even, |owners| ExpertTable::new(owners, degree))
    };
    let tables: Vec<ExpertTable> = sizes.moe_layers().map(table).collect();
    Visiting::new(routes, parallel.shape(), &tables, config.train.micro_batch.unwrap_or(routes.rows))
}

/// What recordings of such runs have in common; `data` names the text.
pub fn recorded_shape(config: &Config, moe: &moe::Config, data: &str) -> Shape {
    let layers = moe.of_layers(config.model.layers);
    Shape {
        experts: moe.experts.clone(),
        slots: PerLayer::of_each(layers.iter().map(|(_, moe)| moe.slots()).collect()),
        seq: config.model.seq,
        rows: config.rows_per_step(),
        layers: layers.iter().map(|(layer, _)| *layer as u32).collect(),
        seed: config.train.seed,
        data: Shape::fingerprint(data),
    }
}

/// Whether both are one file, by whatever names.
fn is_same(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}
