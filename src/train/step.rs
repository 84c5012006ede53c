//! One training step, on one page.

use std::sync::Arc;

use guildhall_comm::Error as CommError;
use guildhall_tensor::{Device, Gradient, Recompute, Tape, to_host};
use serde::{Deserialize, Serialize};

use super::error::{Error, within};
use super::locate;
use super::pairs::PairSums;
use super::replacing::Replacing;
use super::row_losses::RowSums;
use super::totals::Totals;
use crate::data::{Batch, StepBatches};
use crate::metrics::{Imbalance, MigratedSequences, MoeRecord, ReplacedExperts, SentRows};
use crate::model::{Context, Model, Sizes, counted, counted_of_source};
use crate::moe::{Config, LossTrend, Routings, StepFacts};
use crate::optim::{self, LearningRate, Optimizer, Settings};
use crate::parallel::{Bucketing, GradientSync, Mesh, Sums, SyncPlan, TouchedRows, gather_weights, global_norm};

/// A rank's model, optimizer and place in the mesh.
pub struct Trainer {
    pub device: Arc<Device>,
    pub mesh: Mesh,
    pub model: Model,
    pub optimizer: Optimizer,
    /// Which gradients travel together.
    pub sync: SyncPlan,
    pub learning_rate: LearningRate,
    /// Largest gradient norm; 0 means none.
    pub clip: f64,
    pub seed: u64,
    /// Routings to follow or to keep in training.
    pub routings: Arc<Routings>,
    /// What of a forward runs again in backward.
    pub recompute: Recompute,
    /// The losses so far, if thresholds of condensation follow them.
    pub trend: Option<LossTrend>,
    /// Experts chosen together since [`Trainer::sum_pairs`].
    pub pairs: PairSums,
    /// The losses of the last step's rows, if they are asked for.
    pub rows: RowSums,
    /// When experts move to other ranks, if they do.
    pub replacing: Option<Replacing>,
}

/// What a step did, over all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    pub step: u64,
    /// Mean cross-entropy per valid token.
    pub loss: f64,
    /// Summed over MoE layers, unweighted.
    pub balance: f64,
    pub z: f64,
    pub gradient_norm: f64,
    pub lr: f64,
    pub valid_tokens: u64,
    /// Tokens that count in the auxiliary losses, and as trained on; those of sources among them.
    pub counted_tokens: u64,
    /// Experts shadowed, summed over MoE layers, micro-batches and expert groups.
    pub shadowed: u64,
    /// Of the step's micro-batches, the largest.
    pub imbalance: Imbalance,
    /// Cosine from which tokens were condensed.
    pub condense_threshold: Option<f64>,
    pub moe: Vec<MoeRecord>,
    /// By MoE layer. Of all that is here, this, `migrated`, `replaced`, `shadowed` and `imbalance` alone depend on the mesh.
    pub sent: Vec<SentRows>,
    /// By MoE layer, if sequences may migrate.
    pub migrated: Vec<MigratedSequences>,
    /// The layers whose experts changed ranks behind the step.
    pub replaced: Vec<ReplacedExperts>,
}

impl StepReport {
    /// With how many tokens chose each two experts, a table for each MoE layer, or none.
    pub(super) fn tell_pairs(&mut self, tables: Vec<Vec<u64>>) {
        for (layer, table) in self.moe.iter_mut().zip(tables) {
            layer.tell_pairs(table);
        }
    }
}

/// What the first half of a step knows besides the gradients, over all ranks.
pub struct StepSums {
    step: u64,
    valid_tokens: u64,
    counted_tokens: u64,
    totals: Totals,
    /// Of all parameters, each counted once; what clipping goes by.
    pub gradient_norm: f64,
}

impl Trainer {
    /// A model with initial values on this rank.
    ///
    /// # Errors
    /// State of the optimizer that is to be kept elsewhere and cannot.
    pub fn new(
        device: &Arc<Device>,
        mesh: Mesh,
        sizes: &Sizes,
        settings: impl Into<Settings>,
        rate: LearningRate,
        clip: f64,
        bucketing: Bucketing,
    ) -> Result<Trainer, optim::Error> {
        let mut model = Model::new(device, sizes, &mesh);
        let optimizer = Optimizer::new(device, &mut model, &mesh, settings)?;
        let (sync, routings) = (SyncPlan::new(&mut model, bucketing), Arc::new(Routings::NONE));
        let (device, seed, recompute) = (device.clone(), sizes.seed, Recompute::default());
        let pairs = PairSums::new(&device, sizes);
        Ok(Trainer {
            device,
            mesh,
            model,
            optimizer,
            sync,
            learning_rate: rate,
            clip,
            seed,
            routings,
            recompute,
            trend: None,
            pairs,
            rows: RowSums::default(),
            replacing: None,
        })
    }

    /// One optimizer step, counted from 1, over this rank's micro-batches. Collective.
    ///
    /// # Errors
    /// What a group reports, or where a number stopped being finite; the weights are then as before the step.
    pub fn step(&mut self, batches: &StepBatches, step: u64) -> Result<StepReport, Error> {
        let sums = self.gradients(batches, step).map_err(within(step, "gradients"))?;
        self.update(sums).map_err(within(step, "update"))
    }

    /// The first half of a step: leaves in the model, or with the optimizer where its state is elsewhere, the gradients of
    /// all micro-batches and ranks, before they are clipped. Collective.
    ///
    /// # Errors
    /// What a group reports, or where a number stopped being finite.
    pub fn gradients(&mut self, batches: &StepBatches, step: u64) -> Result<StepSums, Error> {
        let [valid_tokens, counted_tokens, read_tokens, source_tokens] = self.tokens_of_all(batches)?;
        let mesh = self.mesh.clone();
        let facts = StepFacts {
            seed: self.seed,
            step,
            trains: true,
            unlimited: false,
            trend: self.trend,
            routings: self.routings.clone(),
        };
        let tells_rows = self.rows.are_told();
        let context = Context { mesh: mesh.clone(), facts, valid_tokens, counted_tokens, source_tokens, tells_rows };
        let migrates = self.routings.migration.is_some();
        let mut totals = Totals::new(&self.device, batches.len(), self.model.sizes(), (&mesh, migrates));
        let mut rows = self.rows.begin(&self.device);
        let takes_sums = self.optimizer.takes_sums();
        let mut keep = |sums| self.optimizer.keep(sums);
        let away: Option<&mut dyn FnMut(Sums)> = if takes_sums { Some(&mut keep) } else { None };
        let sync = GradientSync::new(&self.sync, &mut self.model, &mesh).leaving_for(away);
        let touched = match sync.could_send_rows() {
            true => touched_rows(batches, self.model.sizes().model.vocab, read_tokens, &mesh)?,
            false => None,
        };
        let mut sync = sync.sending_rows(touched);
        for (batch, left) in batches.micro.iter().zip((0..batches.micro.len()).rev()) {
            self.device.stand_for(batch.alike());
            let tape = Tape::new(&self.device).recomputing(&self.recompute);
            let forward = self.model.forward(&tape, batch, &context);
            let forward =
                forward.map_err(|error| Error::from(error).at(step, Some(self.device.scope().to_string())))?;
            totals.add(&forward, batch.len(), &mesh);
            self.pairs.add(&forward, &mesh);
            RowSums::add(&mut rows, &forward);
            within_budget(&self.device, &mesh, step)?;
            // Earlier micro-batches leave gradients to be added to, where gradients are whole.
            let travel = left == 0 || sync.every_micro_batch();
            let mut complete = |gradient: &Gradient| if travel { Ok(sync.complete(gradient)?) } else { Ok(()) };
            let backward = tape.try_backward_telling(&forward.loss, &mut complete);
            let place = || format!("{} in backward", self.device.scope());
            backward.map_err(|error| Error::Backward(error).at(step, Some(place())))?;
            if travel {
                sync.settle()?;
            }
            within_budget(&self.device, &mesh, step)?;
        }
        self.device.stand_for(1);
        sync.finish()?;
        let squares = self.optimizer.gradient_squares(&mut self.model, &mesh)?;
        // All that the host looks at, at once: nothing before it waits for the device.
        let seen = to_host(&[totals.losses_on_device(), squares.tensor(), &rows]);
        let [losses, squares, rows] = seen.try_into().expect("three tensors");
        self.rows.end(rows.into_f32s());
        totals.sum_over(&losses.into_f32s(), &mesh)?;
        let gradient_norm = global_norm(&mut self.model, &mesh, &squares.into_f64s())?;
        for (what, value) in [("the loss", totals.loss()), ("the gradient", gradient_norm)] {
            if !value.is_finite() {
                return Err(locate::non_finite(self, batches, &context, what));
            }
        }
        Ok(StepSums { step, valid_tokens, counted_tokens: counted_tokens + source_tokens, totals, gradient_norm })
    }

    /// The second half: clips, moves the weights and forgets the gradients. Collective.
    ///
    /// # Errors
    /// What a group reports; state of the optimizer that cannot be read or written.
    pub fn update(&mut self, sums: StepSums) -> Result<StepReport, Error> {
        let StepSums { step, valid_tokens, counted_tokens, totals, gradient_norm } = sums;
        let lr = self.learning_rate.at(step);
        let scale = if self.clip > 0.0 { (self.clip / (gradient_norm + 1e-6)).min(1.0) } else { 1.0 };
        self.optimizer.step(&mut self.model, step, lr, scale)?;
        gather_weights(&mut self.model, &self.sync, &self.mesh)?;
        self.within_budget(step)?;
        self.device.trim();
        let [loss, balance, z] = totals.losses();
        let (shadowed, imbalance) = (totals.shadowed(), totals.imbalance());
        let condensation = self.model.sizes().moe.as_ref().and_then(Config::condensation);
        let condense_threshold = condensation.as_ref().map(|it| it.threshold.at(step, self.trend.as_ref()));
        if condensation.is_some_and(|it| it.threshold.follows_the_loss()) {
            self.trend = Some(LossTrend::after(self.trend, loss));
        }
        let migrated = totals.migrated();
        let (moe, sent) = totals.records();
        let mut report = StepReport {
            step,
            loss,
            balance,
            z,
            gradient_norm,
            lr,
            valid_tokens,
            counted_tokens,
            shadowed,
            imbalance,
            condense_threshold,
            moe,
            sent,
            migrated,
            replaced: Vec::new(),
        };
        report.moe.iter().for_each(|layer| self.model.end_step(layer.layer, &layer.load));
        let Trainer { model, optimizer, mesh, replacing, .. } = self;
        if let Some(replacing) = replacing {
            report.replaced = replacing.after(step, &report.moe, (model, optimizer, mesh))?;
            self.within_budget(step)?;
        }
        Ok(report)
    }

    /// How many tokens of all ranks chose each two experts since the last call, by MoE layer as in
    /// [`MoeRecord::with_pairs`]; nothing if pairs are not counted. Collective.
    ///
    /// # Errors
    /// What the world reports.
    pub fn sum_pairs(&mut self) -> Result<Vec<Vec<u64>>, Error> {
        Ok(self.pairs.sum_over(&self.mesh)?)
    }

    /// Whether this rank's account has kept to its limit. A rank that has not ends the run: others find it gone.
    ///
    /// # Errors
    /// What went beyond it.
    pub fn within_budget(&self, step: u64) -> Result<(), Error> {
        within_budget(&self.device, &self.mesh, step)
    }

    /// A step's valid tokens, those that count in auxiliary losses, all that are read, and those of sources that count, over
    /// all ranks.
    fn tokens_of_all(&self, batches: &StepBatches) -> Result<[u64; 4], CommError> {
        let counts = |batch: &Batch| match batch.counted {
            Some(alike) => batch.len() as u64 * alike.alike,
            None => counted(self.model.sizes(), &batch.targets, &batch.segments)
                .into_iter()
                .filter(|&counts| counts)
                .count() as u64,
        };
        let sources =
            |batch: &Batch| batch.source.as_ref().map_or(0, |source| counted_of_source(source) * batch.alike());
        let read =
            |batch: &Batch| (batch.len() + batch.source.as_ref().map_or(0, |it| it.len())) as u64 * batch.alike();
        let own_sum = |of: &dyn Fn(&Batch) -> u64| batches.micro.iter().map(of).sum();
        let mut own = vec![batches.valid() as u64, own_sum(&counts), own_sum(&read)];
        if self.model.sizes().blueprint().reads_a_source() {
            own.push(own_sum(&sources));
        }
        let all = self.mesh.data.all_gather_u64(&own)?;
        Ok([0, 1, 2, 3].map(|which| match which < own.len() {
            true => all.iter().skip(which).step_by(own.len()).sum(),
            false => 0,
        }))
    }
}

/// The rows of the vocabulary that a rank reads in a step, if the step has fewer tokens than there are rows. Collective.
fn touched_rows(
    batches: &StepBatches,
    vocab: usize,
    read_tokens: u64,
    mesh: &Mesh,
) -> Result<Option<TouchedRows>, CommError> {
    if read_tokens >= vocab as u64 {
        return Ok(None);
    }
    if batches.micro.iter().any(|batch| batch.counted.is_some()) {
        return TouchedRows::of_counted(read_tokens as usize, vocab, &mesh.data).map(Some);
    }
    let texts = batches.micro.iter().flat_map(|batch| [Some(batch), batch.source.as_deref()]);
    let own = texts.flatten().flat_map(|text| text.tokens.iter().copied());
    TouchedRows::of_group(own, vocab, &mesh.data).map(Some)
}

fn within_budget(device: &Device, mesh: &Mesh, step: u64) -> Result<(), Error> {
    let account = device.account();
    let Some(excess) = account.excess() else { return Ok(()) };
    let (excess, peak) = (Box::new(excess.clone()), account.peak_total());
    Err(Error::Budget { step, rank: mesh.world.rank(), excess, peak })
}
