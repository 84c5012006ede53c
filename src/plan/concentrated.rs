//! Routings that are made up of sequences: each has a rank that more of its routes go to than to others. Such sequences
//! can migrate, by the policy of a run.

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::layout::Task;
use super::recorded::RecordedFiles;
use super::step::StepCost;
use super::together::sharing;
use crate::moe::recording::Error;
use crate::moe::{Clusters, Error as LayerError, LayerConfig, Routing, Routings, Script, Site};
use crate::parallel::{ExpertTable, Rows};

impl Task {
    /// Of a sequence's routes, the shares that may go to the rank of the expert group that most go to; none where that is
    /// not asked for each token.
    pub fn concentrations(&self) -> Option<RangeInclusive<f64>> {
        self.sizes.moe.as_ref().filter(|moe| moe.chosen_per_token().is_none())?;
        let of_layer = |(layer, moe): (usize, LayerConfig)| {
            let table = self.table(layer);
            let held = (0..table.ranks()).map(|rank| table.of(rank).len());
            let (fewest, most) = (held.clone().min().unwrap_or(0), held.max().unwrap_or(0));
            let of_token = |experts: usize| (experts as f64 / moe.top_k as f64).min(1.0);
            // A token's choices differ.
            [(1.0 - of_token(moe.experts - most)).max(1.0 / table.ranks() as f64), of_token(fewest)]
        };
        let bounds = self.sizes.moe_layers().map(of_layer);
        let bounds = bounds.reduce(|a, b| [a[0].max(b[0]), a[1].min(b[1])])?;
        Some(bounds[0]..=bounds[1])
    }

    /// What a step costs each rank if so large a share of a sequence's routes goes to the rank that most go to; sequences
    /// migrate by the task's policy.
    ///
    /// # Panics
    /// If it is not in [`Task::concentrations`].
    pub fn walked(&self, concentration: f64) -> Vec<StepCost> {
        let possible = self.concentrations().expect("a task whose tokens choose");
        assert!(possible.contains(&concentration), "{concentration} of {possible:?}");
        let script = Concentrated { task: self.clone(), share: concentration };
        let routings = Routings { script: Some(Arc::new(script)), ..Routings::NONE };
        self.walk_all(1, &routings).expect("no recording is followed")
    }

    /// Of a sequence's routes, the share that went to the rank of this layout's expert group that most went to: the mean
    /// over sequences, layers and steps of a recording.
    ///
    /// # Errors
    /// A recording that cannot be read.
    pub fn concentration(&self, recording: RecordedFiles, steps: RangeInclusive<u64>) -> Result<f64, Error> {
        let (mut sum, mut count) = (0.0, 0u64);
        for layer in self.moe_layers() {
            let table = self.table(layer);
            for row in steps.clone().flat_map(|step| (0..self.rows_per_step as u64).map(move |row| (step, row))) {
                let rows = recording.routes.read(row.0, layer as u32, row.1..row.1 + 1)?.rows();
                let of_rank = |rank: usize| table.of(rank).iter().map(|&expert| rows[expert]).sum::<usize>();
                let of_ranks: Vec<usize> = (0..table.ranks()).map(of_rank).collect();
                let all: usize = of_ranks.iter().sum();
                // A sequence of which all routes were dropped goes nowhere.
                if let (1.., Some(most)) = (all, of_ranks.into_iter().max()) {
                    (sum, count) = (sum + most as f64 / all as f64, count + 1);
                }
            }
        }
        Ok(sum / count.max(1) as f64)
    }

    pub(super) fn table(&self, layer: usize) -> ExpertTable {
        self.layout.expert_table(self.experts(layer), self.degree(layer))
    }
}

/// Sends so large a share of a sequence's routes to the experts of one rank of the expert group, and the others evenly to
/// all others. Every rank is such a one for as many sequences, from whatever host, and for others in every layer.
#[derive(Debug)]
struct Concentrated {
    task: Task,
    share: f64,
}

impl Concentrated {
    /// The experts of the rank that most routes of a row go to, and the others.
    fn experts(&self, layer: usize, row: u64) -> [Vec<usize>; 2] {
        let table = self.task.table(layer);
        let (ranks, layer) = (table.ranks() as u64, layer as u64);
        let most = ((row + layer * (row / ranks)) % ranks) as usize;
        let others = (0..table.ranks()).filter(|&rank| rank != most).flat_map(|rank| table.of(rank)).copied();
        [table.of(most).to_vec(), others.collect()]
    }

    /// The experts of a row's routes.
    fn of_row(&self, (layer, row): (usize, u64), seq: usize, slots: usize) -> Vec<u32> {
        let [near, far] = self.experts(layer, row);
        let near_before = |token: usize| ((token * slots) as f64 * self.share) as usize;
        let expert = |token: usize, slot: usize| {
            let (before, now) = (near_before(token), near_before(token + 1) - near_before(token));
            match slot.checked_sub(now) {
                None => near[(before + slot) % near.len()],
                // Rows begin with different experts.
                Some(place) => far[(row as usize * slots + token * slots - before + place) % far.len()],
            }
        };
        (0..seq * slots).map(|route| expert(route / slots, route % slots) as u32).collect()
    }
}

impl Script for Concentrated {
    fn routing(&self, site: &Site, tokens: &Rows, slots: usize) -> Result<Routing, LayerError> {
        let (seq, experts) = (tokens.seq, self.task.experts(site.layer as usize));
        let row = |first: &u64| self.of_row((site.layer as usize, first / seq as u64), seq, slots);
        Ok(Routing::new(tokens.sequences.iter().flat_map(row).collect(), slots, experts))
    }

    fn condensed(&self, _: &Site, tokens: (&Rows, &Routing)) -> Result<Option<Clusters>, LayerError> {
        Ok(self.task.condensed().map(|share| sharing(tokens, share)))
    }
}
