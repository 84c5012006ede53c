//! Re-placement: every so many steps experts move to other ranks of their groups, with all that belongs to them, so that
//! the ranks have rows more evenly. Each layer has a table of its own, made of its own loads. Nothing but who computes
//! what, and who keeps what, changes with it.

use serde::{Deserialize, Serialize};

use super::error::Error;
use super::step::Trainer;
use crate::checkpoint::{self, OpenCheckpoint};
use crate::config::Config;
use crate::metrics::{MoeRecord, ReplacedExperts};
use crate::model::Model;
use crate::optim::Optimizer;
use crate::parallel::{Axis, ExpertTable, Mesh, Nodes, Parameters, Relocation, Zero, largest_load, reassigned};

/// More routes than an expert gets while loads are summed: what says so was not written by a run.
const LOAD_MAX: u64 = 1 << 40;

/// The file of a checkpoint that says which rank owned which expert. The numbers do not depend on it, but for the order
/// in which the gradient's norm is summed.
const EXPERTS_FILE: &str = "experts.json";

/// When experts move, and what they were given since they could.
#[derive(Clone, Debug, PartialEq)]
pub struct Replacing {
    /// Steps between two looks at the loads.
    pub every: u64,
    /// By what part of it the largest load of a rank must fall.
    pub gain: f64,
    /// By MoE layer: the routes of each expert since the last look, over all ranks.
    pub loads: Vec<Vec<u64>>,
}

/// What a checkpoint says of one MoE layer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OwnedExperts {
    layer: usize,
    /// The rank of an expert group that has each expert.
    owners: Vec<usize>,
    /// The routes of each since the loads were last looked at.
    load: Vec<u64>,
}

impl Replacing {
    /// As a recipe asks for it, if it does.
    pub(super) fn of(config: &Config) -> Option<Replacing> {
        let parallel = &config.parallel;
        let (every, gain) = (parallel.replace_every, parallel.replace_gain);
        (every > 0).then(|| Replacing { every, gain, loads: Vec::new() })
    }

    /// Takes the loads of a step, and moves experts if it is time to and pays. Collective.
    ///
    /// # Errors
    /// What the world reports; state of the optimizer that cannot be moved.
    pub(super) fn after(
        &mut self,
        step: u64,
        layers: &[MoeRecord],
        (model, optimizer, mesh): (&mut Model, &mut Optimizer, &Mesh),
    ) -> Result<Vec<ReplacedExperts>, Error> {
        self.loads.resize_with(layers.len(), Vec::new);
        for (sums, layer) in self.loads.iter_mut().zip(layers) {
            sums.resize(layer.load.len(), 0);
            sums.iter_mut().zip(&layer.load).for_each(|(sum, n)| *sum += n);
        }
        if !step.is_multiple_of(self.every) {
            return Ok(Vec::new());
        }
        let mut replaced = Vec::new();
        for (loads, layer) in std::mem::take(&mut self.loads).into_iter().zip(layers) {
            let now = table(model, layer.layer);
            let mesh = mesh.at(now.ranks());
            let best = reassigned(&loads, &now, &nodes(&mesh));
            let [before, after] = [&now, &best].map(|table| largest_load(&loads, table));
            if gains(self.gain, [before, after]) {
                replaced.push(record(layer.layer, &loads, &now, &best));
                relocate(layer.layer, best, (model, optimizer, &mesh))?;
            }
        }
        Ok(replaced)
    }
}

/// Whether the largest load of a rank falls by more than this part of what it was.
fn gains(part: f64, [before, after]: [u64; 2]) -> bool {
    (before - after) as f64 > part * before as f64
}

/// The node of each rank of an expert group, counted from 0: of the first, for all groups have one table.
fn nodes(mesh: &Mesh) -> Vec<usize> {
    let group = mesh.shape().members(Axis::Expert(mesh.shape().expert), 0);
    Nodes::named(mesh.nodes().among(&group)).among(&(0..group.len()).collect::<Vec<_>>())
}

fn record(layer: usize, loads: &[u64], before: &ExpertTable, after: &ExpertTable) -> ReplacedExperts {
    let even = loads.iter().sum::<u64>() as f64 / before.ranks() as f64;
    let imbalance = |table| largest_load(loads, table) as f64 / even;
    let (owners, old) = (after.owners(), before.owners());
    let moved = owners.iter().zip(old).filter(|(new, old)| *new != old).count();
    ReplacedExperts { layer, moved, imbalance_before: imbalance(before), imbalance_after: imbalance(after), owners }
}

fn table(model: &mut Model, layer: usize) -> ExpertTable {
    model.moe_layer(layer).expect("a MoE layer").transport.table.clone()
}

/// Moves the experts of a layer to the ranks that a table says: weights, and all that the optimizer keeps of them, one
/// weight after the other. Collective.
///
/// # Errors
/// What the world reports; state of the optimizer that cannot be moved.
fn relocate(
    index: usize,
    table: ExpertTable,
    (model, optimizer, mesh): (&mut Model, &mut Optimizer, &Mesh),
) -> Result<(), Error> {
    let rank = mesh.expert.rank();
    let layer = model.moe_layer(index).expect("a MoE layer");
    let relocation = Relocation::new(&layer.transport.table, &table, mesh);
    let (mut own, mut weights, mut number) = (Vec::new(), Vec::new(), 0);
    layer.experts.visit(&mut |weight| own.push(weight.parameter.gradient().clone()));
    model.visit(&mut |weight| {
        let trained = !weight.parameter.is_frozen();
        if own.iter().any(|gradient| gradient.is(weight.parameter.gradient())) {
            weights.push((trained.then_some(number), weight.parameter.stored().clone()));
        }
        number += usize::from(trained);
    });
    for (number, value) in weights {
        let (width, in_shares) = (value.len() / table.of(rank).len(), value.is_parted());
        value.with_kept(|kept, _| relocation.exchange(kept, (0, width), in_shares))?;
        let Some(number) = number else { continue };
        let in_shares = mesh.zero() >= Zero::Optimizer;
        optimizer.with_state(number, |state| {
            let &[strips, len] = state.shape() else { panic!("strips of a weight: {:?}", state.shape()) };
            (0..strips).try_for_each(|strip| relocation.exchange(state, (strip * len, width), in_shares))?;
            Ok::<_, Error>(())
        })?;
    }
    model.moe_layer(index).expect("a MoE layer").reassign(table, rank);
    Ok(())
}

impl Trainer {
    /// The files of a checkpoint that say who owned which expert; none if experts stay where the recipe puts them.
    pub fn experts_files(&mut self) -> Vec<(String, Vec<u8>)> {
        let Some(replacing) = &self.replacing else { return Vec::new() };
        let layers: Vec<(usize, usize)> =
            self.model.sizes().moe_layers().map(|(layer, moe)| (layer, moe.experts)).collect();
        let mut loads = replacing.loads.iter();
        let mut owned = |(layer, experts): (usize, usize)| OwnedExperts {
            layer,
            owners: table(&mut self.model, layer).owners(),
            load: loads.next().cloned().unwrap_or_else(|| vec![0; experts]),
        };
        let owned: Vec<OwnedExperts> = layers.into_iter().map(&mut owned).collect();
        vec![(EXPERTS_FILE.to_owned(), serde_json::to_vec(&owned).expect("numbers are plain JSON"))]
    }

    /// Begins with the owners that a checkpoint tells of, if experts move and it does. Those of expert groups of other
    /// sizes are nothing to begin with. What weights hold is read afterwards.
    ///
    /// # Errors
    /// A file that cannot be read, or is of another model.
    pub fn adopt_experts(&mut self, source: &OpenCheckpoint) -> Result<(), Error> {
        let Some(replacing) = self.replacing.as_mut().filter(|_| source.manifest.files.contains_key(EXPERTS_FILE))
        else {
            return Ok(());
        };
        let path = source.file(EXPERTS_FILE)?;
        let text = std::fs::read(&path);
        let text = text.map_err(|source| checkpoint::Error::Io { action: "read", path: path.clone(), source })?;
        let damaged = |reason: String| checkpoint::Error::Damaged { path: path.clone(), reason };
        let owned: Vec<OwnedExperts> = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        let layers: Vec<(usize, usize)> =
            self.model.sizes().moe_layers().map(|(layer, moe)| (layer, moe.experts)).collect();
        let told = owned.iter().map(|told| (told.layer, told.owners.len()));
        let is_strange = |told: &OwnedExperts| {
            told.load.len() != told.owners.len() || told.load.iter().any(|&routes| routes > LOAD_MAX)
        };
        if !told.eq(layers) || owned.iter().any(is_strange) {
            return Err(damaged("it is not about the layers and experts of the model".to_owned()).into());
        }
        for OwnedExperts { layer, owners, .. } in &owned {
            let now = table(&mut self.model, *layer);
            let owns = |rank: usize| owners.iter().filter(|&&owner| owner == rank).count();
            if (0..now.ranks()).all(|rank| owns(rank) == now.of(rank).len()) {
                let rank = self.mesh.at(now.ranks()).expert.rank();
                let layer = self.model.moe_layer(*layer).expect("a MoE layer");
                layer.reassign(ExpertTable::new(owners, now.ranks()), rank);
            }
        }
        replacing.loads = owned.into_iter().map(|told| told.load).collect();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fifth of what it was is a quarter of what it is.
    #[test]
    fn a_gain_is_a_part_of_the_load_before() {
        assert!(gains(0.19, [100, 80]) && !gains(0.2, [100, 80]) && !gains(0.22, [100, 80]));
        assert!(!gains(0.0, [100, 100]));
    }
}
