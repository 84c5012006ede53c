//! Bugs to plant, as a table: known ones of systems like this. Each is done to a run from outside, and a search for
//! differences must find it.

mod astray;
mod gate;
mod groups;
mod shows;

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Error, solo};
use guildhall_tensor::{Dtype, Kept, Tensor};

use self::astray::{Astray, take_others_results};
use self::gate::Forgetful;
use self::groups::{Absent, LeftBehind, Misplaced};
pub(super) use self::shows::Shows;
use self::shows::{
    ANYWHERE, BLOCKS_AGAIN, CHECKPOINT, CHOICES_AGAIN, CHOICES_ON_RANKS, CLUSTERS, EVALUATION, IDLE_RANKS, MANY_SUMS,
    MICRO_BATCHES, MOVES, OTHER_PLACES, RANKS, SHARED_EXPERTS, SHARED_ROWS, SLICES,
};
use crate::config::{Config, StorageType};
use crate::parallel::{Mesh, Parameters, Rows, Spread, Weight};
use crate::train::{StepReport, Trainer};

/// A bug and how it is planted.
pub struct Bug {
    pub name: &'static str,
    /// What a system with it does.
    pub what: &'static str,
    /// What a recipe needs for the bug to have an effect, if this one has it not.
    pub needs: fn(&Config) -> Option<&'static str>,
    /// What a layout needs besides.
    pub(super) shows: &'static Shows,
    pub(super) plant: Plant,
}

impl Bug {
    /// Whether all that is stored in half the bits has it, samples too: what a build does wrong, it does everywhere.
    pub(super) fn is_of_the_build(&self) -> bool {
        matches!(self.plant, Plant::Storage(_))
    }
}

/// How a bug is planted; every layout in which it can show has it, and never the reference.
pub(super) enum Plant {
    /// In what the ranks are configured with.
    Configuration(fn(&mut Config)),
    /// The same, of how half the bits are stored: where it shows and where not.
    Storage(fn(&mut Config)),
    /// In the groups of the mesh, before anything is made that rests on them.
    Mesh(fn(&mut Mesh, &Config)),
    /// In a new trainer.
    Trainer(fn(&mut Trainer)),
    /// In the gradients between the halves of a step.
    Gradients(fn(&mut Trainer)),
    /// In the norm that clipping goes by.
    Norm(fn(&mut Trainer) -> Result<f64, Error>),
    /// After a step.
    Update(fn(&mut Trainer, &StepReport)),
    /// After an evaluation between steps.
    Evaluation(fn(&mut Trainer)),
    /// After a checkpoint has been read.
    Loaded(fn(&mut Trainer)),
}

/// All there are.
pub const BUGS: &[Bug] = &[
    Bug {
        name: "norm-counts-experts-per-rank",
        what: "each rank clips by the norm of the experts it holds itself",
        needs: trained_experts,
        shows: &RANKS,
        plant: Plant::Norm(|trainer| Ok(squares(trainer).sqrt())),
    },
    Bug {
        name: "norm-counts-copies",
        what: "the norm that clipping goes by counts every weight once for each rank that holds it",
        needs: |_| None,
        shows: &RANKS,
        plant: Plant::Norm(|trainer| {
            let mut squares = [squares(trainer)];
            trainer.mesh.world.sum_f64(&mut squares)?;
            Ok(squares[0].sqrt())
        }),
    },
    Bug {
        name: "expert-gradient-divided-by-expert-data-size",
        what: "gradients of experts are averaged over the ranks that hold them",
        needs: trained_experts,
        shows: &SHARED_EXPERTS,
        plant: Plant::Gradients(|trainer| {
            let size = trainer.mesh.expert_data.size() as f32;
            scale(trainer, is_expert, 1.0 / size);
        }),
    },
    Bug {
        name: "router-gradient-lost",
        what: "the router gets no gradient",
        needs: trained_router,
        shows: &ANYWHERE,
        plant: Plant::Gradients(|trainer| scale(trainer, is_router, 0.0)),
    },
    Bug {
        name: "missing-expert-reduction",
        what: "gradients of experts are not summed over the ranks that hold them",
        needs: trained_experts,
        shows: &SHARED_EXPERTS,
        plant: Plant::Mesh(|mesh, _| mesh.expert_data = solo::world().named("expert_data")),
    },
    Bug {
        name: "aux-loss-scaled-by-ranks",
        what: "the balance loss counts once for every rank",
        needs: balance,
        shows: &RANKS,
        plant: Plant::Configuration(|config| scale_balance(config, config.parallel.ranks)),
    },
    Bug {
        name: "aux-loss-scaled-by-micro-batches",
        what: "the balance loss counts once for every micro-batch",
        needs: balance,
        shows: &MICRO_BATCHES,
        plant: Plant::Configuration(|config| {
            let rows = config.rows_per_step();
            scale_balance(config, rows / config.train.micro_batch.unwrap_or(rows));
        }),
    },
    Bug {
        name: "gradients-accumulate-in-bf16",
        what: "gradients of micro-batches are added up in bf16 where they should be in f32",
        needs: wide_gradients,
        shows: &MANY_SUMS,
        plant: Plant::Storage(|config| config.train.gradient_dtype = StorageType::Bf16),
    },
    Bug {
        name: "zero-row-rank-skips-collective",
        what: "a rank without rows for anyone takes no part in their exchange",
        needs: experts,
        shows: &IDLE_RANKS,
        plant: Plant::Mesh(|mesh, _| mesh.expert = Arc::new(Absent(mesh.expert.clone()))),
    },
    Bug {
        name: "partition-by-wrong-group",
        what: "with ZeRO, which share of an expert a rank keeps follows from its place in the data group",
        needs: trained_experts,
        shows: &OTHER_PLACES,
        plant: Plant::Mesh(|mesh, _| {
            let (group, elsewhere) = (mesh.expert_data.clone(), mesh.data.rank());
            mesh.expert_data = Arc::new(Misplaced { group, elsewhere });
        }),
    },
    Bug {
        name: "recompute-routes-again",
        what: "a block that runs again asks its gate again, which decides otherwise",
        needs: experts,
        shows: &CHOICES_AGAIN,
        plant: Plant::Trainer(|trainer| {
            trainer.recompute.keeps.retain(|what| *what != Kept::Decision);
            moe_layers(trainer).into_iter().for_each(|index| {
                let layer = trainer.model.moe_layer(index).expect("a MoE layer");
                layer.selector.gate = Arc::new(Forgetful::new(layer.selector.gate.clone()));
            });
        }),
    },
    Bug {
        name: "stale-duplicate",
        what: "experts learn from every token once for each rank of a tensor group, all of which hold it",
        needs: trained_experts,
        shows: &SLICES,
        plant: Plant::Gradients(|trainer| {
            let copies = trainer.mesh.tensor.size() as f32;
            scale(trainer, is_expert, copies);
        }),
    },
    Bug {
        name: "drops-tokens-silently",
        what: "experts on several ranks take half of what they may, or no more than an even share of the tokens",
        needs: experts,
        shows: &CHOICES_ON_RANKS,
        plant: Plant::Configuration(|config| {
            if let Some(moe) = &mut config.moe {
                // Experts that choose their tokens take an even share by themselves.
                let even = moe.chosen_per_token().map(|_| 1.0);
                moe.capacity_factor = Some(moe.capacity_factor.or(even).map_or(1.0, |factor| factor / 2.0));
            }
        }),
    },
    Bug {
        name: "member-takes-another-clusters-output",
        what: "a token that shares a row takes the result of another row",
        needs: alike,
        shows: &SHARED_ROWS,
        plant: Plant::Trainer(|trainer| {
            moe_layers(trainer).into_iter().for_each(|index| {
                let layer = trainer.model.moe_layer(index).expect("a MoE layer");
                layer.transport.rewrite = Some(take_others_results);
            });
        }),
    },
    Bug {
        name: "member-joins-another-cluster",
        what: "a token is told to share a row of a token that it is not similar to",
        needs: alike,
        shows: &CLUSTERS,
        plant: Plant::Trainer(|trainer| {
            moe_layers(trainer).into_iter().for_each(|index| {
                let layer = trainer.model.moe_layer(index).expect("a MoE layer");
                if let Some(condensation) = &mut layer.condensation {
                    condensation.policy = Some(Arc::new(Astray(condensation.policy_of(layer.is_causal))));
                }
            });
        }),
    },
    Bug {
        name: "target-stays-behind",
        what: "a sequence that moves to another rank finds the targets of one that was there before",
        needs: experts,
        shows: &MOVES,
        plant: Plant::Mesh(|mesh, config| {
            let (words, targets) = Rows::target_words(config.model.seq);
            leave_behind(mesh, &["parallel/migration.rs"], (words, targets));
        }),
    },
    Bug {
        name: "residual-stays-behind",
        what: "a sequence that moves to another rank goes on from the residual stream of one that was there before",
        needs: experts,
        shows: &MOVES,
        // Its rows, or, where results carry them, what they are rebuilt from.
        plant: Plant::Mesh(|mesh, _| leave_behind(mesh, &["model/block.rs", "moe/carrying.rs"], (1, 0..1))),
    },
    Bug {
        name: "bias-updated-twice",
        what: "the balancing bias moves twice a step",
        needs: bias,
        shows: &ANYWHERE,
        plant: Plant::Update(move_bias),
    },
    Bug {
        name: "bias-counts-recomputation",
        what: "the balancing bias moves once for every run of a block, of which recomputation makes two",
        needs: bias,
        shows: &BLOCKS_AGAIN,
        plant: Plant::Update(move_bias),
    },
    Bug {
        name: "bias-in-half-the-bits",
        what: "the balancing bias is stored in bf16",
        needs: bias,
        shows: &ANYWHERE,
        plant: Plant::Update(|trainer, _| {
            trainer.model.visit_buffers(&mut |buffer| {
                buffer.value = buffer.value.cast(Dtype::Bf16).to_f32();
            });
        }),
    },
    Bug {
        name: "bias-in-evaluation",
        what: "the balancing bias moves in evaluation too",
        needs: bias,
        shows: &EVALUATION,
        plant: Plant::Evaluation(|trainer| {
            let sizes = trainer.model.sizes().clone();
            let load = |experts: usize| (0..experts as u64).collect::<Vec<u64>>();
            sizes.moe_layers().for_each(|(layer, moe)| trainer.model.end_step(layer, &load(moe.experts)));
        }),
    },
    Bug {
        name: "bias-not-saved",
        what: "the balancing bias is not in checkpoints",
        needs: bias,
        shows: &CHECKPOINT,
        plant: Plant::Loaded(|trainer| trainer.model.visit_buffers(&mut |buffer| buffer.value.fill(0.0))),
    },
];

/// The bug of a name.
pub fn find(name: &str) -> Option<&'static Bug> {
    BUGS.iter().find(|bug| bug.name == name)
}

fn experts(config: &Config) -> Option<&'static str> {
    config.moe.is_none().then_some("the recipe has no experts: add a [moe] section")
}

fn trained_experts(config: &Config) -> Option<&'static str> {
    let [trains, _] = config.trains_experts_and_routers();
    experts(config).or((!trains).then_some("the recipe's experts are frozen: leave them out of train.freeze"))
}

fn trained_router(config: &Config) -> Option<&'static str> {
    let [_, trains] = config.trains_experts_and_routers();
    let remedy = "the recipe's routers are frozen: set train.only=all, and leave them out of train.freeze";
    experts(config).or((!trains).then_some(remedy))
}

fn balance(config: &Config) -> Option<&'static str> {
    let weight = config.moe.as_ref().map_or(0.0, |moe| moe.balance_weight);
    experts(config).or((weight == 0.0).then_some("the recipe has no balance loss: set moe.balance_weight above 0"))
}

fn bias(config: &Config) -> Option<&'static str> {
    let moves = config.moe.as_ref().is_some_and(|moe| moe.widest().selector().gate.bias_rate() > Some(0.0));
    let remedy = "no bias balances the recipe's experts: set moe.gate=sigmoid and moe.gate.bias_rate above 0";
    trained_router(config).or((!moves).then_some(remedy))
}

fn alike(config: &Config) -> Option<&'static str> {
    let compete = config.moe.as_ref().and_then(|moe| moe.rows_are_not_alike());
    experts(config).or(compete)
}

fn wide_gradients(config: &Config) -> Option<&'static str> {
    let asked = config.train.gradient_dtype == StorageType::Bf16;
    asked.then_some("the recipe adds gradients up in bf16 as it is: set train.gradient_dtype=f32")
}

fn is_expert(weight: &Weight) -> bool {
    matches!(weight.placement.spread, Spread::Expert(_) | Spread::ExpertTensor(_))
}

fn is_router(weight: &Weight) -> bool {
    weight.placement.pieces.iter().any(|piece| piece.name.contains(".gate."))
}

fn scale(trainer: &mut Trainer, which: fn(&Weight) -> bool, factor: f32) {
    let model = &mut trainer.model;
    model.visit_trained(&mut |weight| {
        let gradient = weight.parameter.gradient();
        if which(weight) {
            let held = gradient.held();
            let scaled: Vec<f32> = gradient.with_part(held.clone(), |part| part.iter().map(|x| x * factor).collect());
            let shape = if held.len() == gradient.len() { gradient.shape() } else { vec![held.len()] };
            let scaled = Tensor::from_slice(&gradient.device(), &shape, &scaled).cast(gradient.dtype());
            match held.len() == gradient.len() {
                true => gradient.put(scaled),
                false => gradient.put_part(held.start, scaled),
            }
        }
    });
}

/// Lets a part of every item stay behind that sequences take to other ranks, in the exchanges of some files.
fn leave_behind(mesh: &mut Mesh, asked_in: &'static [&'static str], (item, part): (usize, Range<usize>)) {
    mesh.expert = Arc::new(LeftBehind { group: mesh.expert.clone(), asked_in, item, part });
}

/// Of the gradients that this rank holds.
fn squares(trainer: &mut Trainer) -> f64 {
    let model = &mut trainer.model;
    let mut squares = 0.0;
    model.visit_trained(&mut |weight| {
        let gradient = weight.parameter.gradient();
        let own = |part: &[f32]| part.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>();
        squares += gradient.with_part(gradient.held(), own);
    });
    squares
}

fn scale_balance(config: &mut Config, factor: usize) {
    if let Some(moe) = &mut config.moe {
        moe.balance_weight *= factor as f32;
    }
}

fn move_bias(trainer: &mut Trainer, report: &StepReport) {
    report.moe.iter().for_each(|layer| trainer.model.end_step(layer.layer, &layer.load));
}

fn moe_layers(trainer: &Trainer) -> Vec<usize> {
    trainer.model.sizes().moe_layers().map(|(layer, _)| layer).collect()
}
