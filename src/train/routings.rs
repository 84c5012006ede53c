//! Opening what `moe.record` and `moe.replay` name.

use std::path::Path;

use super::job::{Job, Start};
use super::run::sizes;
use crate::config::Config;
use crate::moe::recording::{Error, Recording, Shape, Visiting, Visits};
use crate::moe::{self, Routings, Shadowing};
use crate::parallel::ExpertTable;

/// The recordings a run follows and writes, and why it decides shadow sets anew if it does not follow recorded ones; `data`
/// names the text it trains on. Called once a process, before the ranks
/// begin: they share its files. Of several processes the others come after the one that leads, before any rank writes:
/// what it made they make again, to the byte.
///
/// # Errors
/// A recording that cannot be followed or continued, or a file that cannot be written.
pub fn routings(job: &Job, data: &str) -> Result<(Routings, Option<String>), Error> {
    let Some(moe) = &job.config.moe else { return Ok((Routings::NONE, None)) };
    let shape = recorded_shape(&job.config, moe, data);
    let visiting = (moe.shadowing() != Shadowing::Off).then(|| visiting(&job.config, moe, &shape));
    let (mut routings, mut anew) = (Routings::NONE, None);
    if let Some(path) = &moe.replay {
        let steps = job.steps_done() + 1..=job.config.train.steps;
        routings.replay = Some(Recording::open(path, shape.clone(), steps.clone())?);
        if let Some(visiting) = &visiting {
            let followed = Visits::follow(&Visits::beside(path), visiting.clone(), steps)?;
            (routings.replay_visits, anew) =
                followed.map_or_else(|why| (None, Some(why)), |visits| (Some(visits), None));
        }
    }
    if let Some(path) = &moe.record {
        let replayed = moe.replay.iter().flat_map(|path| [path.clone(), Visits::beside(path)]);
        let mut written = [path.clone(), Visits::beside(path)].into_iter();
        if let Some(same) = written.find(|path| replayed.clone().any(|other| is_same(path, &other))) {
            return Err(Error::Same(same));
        }
        (routings.record, routings.record_visits) = written_to(path, shape, visiting, job)?;
    }
    Ok((routings, anew))
}

/// The files that a run writes its decisions to. Nothing is touched before all of them are found fit.
fn written_to(
    path: &Path,
    shape: Shape,
    visiting: Option<Visiting>,
    job: &Job,
) -> Result<(Option<Recording>, Option<Visits>), Error> {
    let (beside, done) = (Visits::beside(path), job.steps_done());
    let resumes = matches!(job.start, Start::From(_));
    let routes = if resumes { Recording::to_resume(path, shape, done) } else { Recording::to_create(path, shape, 1) }?;
    let visits = visiting.map(|own| match resumes {
        true => Visits::to_continue(&beside, own, done),
        false => Visits::to_create(&beside, own, 1),
    });
    let visits = visits.transpose()?;
    let routes = routes.begin()?;
    match visits {
        Some(visits) => Ok((Some(routes), Some(visits.begin()?))),
        None => Visits::discard(&beside).map(|()| (Some(routes), None)),
    }
}

/// What shadow sets of such runs depend on besides.
fn visiting(config: &Config, moe: &moe::Config, routes: &Shape) -> Visiting {
    let (parallel, sizes) = (&config.parallel, sizes(config));
    let table = |&layer: &u32| {
        let degree = sizes.expert_degree(layer as usize, &parallel.expert);
        let even = || ExpertTable::even(moe.experts, degree);
        parallel.expert_table.as_ref().map_or_else(even, |owners| ExpertTable::new(owners, degree))
    };
    let tables: Vec<ExpertTable> = routes.layers.iter().map(table).collect();
    Visiting::new(routes, parallel.shape(), &tables, config.train.micro_batch.unwrap_or(routes.rows))
}

/// What recordings of such runs have in common; `data` names the text.
pub fn recorded_shape(config: &Config, moe: &moe::Config, data: &str) -> Shape {
    let layers = (0..config.model.layers).filter(|&layer| moe.layers.contains(layer)).map(|layer| layer as u32);
    Shape {
        experts: moe.experts,
        slots: moe.slots(),
        seq: config.model.seq,
        rows: config.rows_per_step(),
        layers: layers.collect(),
        seed: config.train.seed,
        data: Shape::fingerprint(data),
    }
}

/// Whether both are one file, by whatever names.
fn is_same(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}
