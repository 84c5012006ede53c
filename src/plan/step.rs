//! One training step of one rank, walked: the real [`Trainer`] on a device and in a world that know sizes alone.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use guildhall_comm::sizes::{self, GroupView};
use guildhall_comm::{Communicator, Operation};
use guildhall_tensor::{Cause, Device, Phase, Work};

use super::books::{Bytes, Messages, ModelPart, PlannedTraffic, traffic};
use super::layout::{Layout, Load, Task};
use super::script::Loads;
use super::sent::Sent;
use crate::data::{Batch, BatchPlan, Counted, StepBatches};
use crate::memory::Offload;
use crate::moe::Routings;
use crate::optim::{self, Decay, Hyper, LearningRate};
use crate::parallel::{Axis, Mesh, Parameters, Zero};
use crate::train::{Error, RowSums, Trainer};

/// What one step costs one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct StepCost {
    /// What is alive when the most is.
    pub at_peak: Bytes,
    /// The most of each cause by itself.
    pub peaks: Bytes,
    /// Optimizer state and sums of gradients that are not on the device.
    pub offloaded: u64,
    /// Of these, the sums, which are kept in f32.
    pub offloaded_sums: u64,
    /// What crosses when all sums leave once, while backward goes on: they travel as gradients are stored.
    pub leaving_sums: u64,
    /// The most that the update takes for a moment, besides the state.
    pub update: u64,
    pub messages: Messages,
    pub work: BTreeMap<(Phase, ModelPart), Work>,
    /// Weights held by this rank, elements.
    pub elements: u64,
}

impl StepCost {
    /// This and so many times what `longer` has more.
    fn extended(&self, longer: &StepCost, times: i128) -> StepCost {
        let number = |a: u64, b: u64| {
            let sum = i128::from(a) + (i128::from(b) - i128::from(a)) * times;
            u64::try_from(sum.max(0)).unwrap_or(u64::MAX)
        };
        let traffic = |a: PlannedTraffic, b: PlannedTraffic| PlannedTraffic {
            calls: number(a.calls, b.calls),
            messages: number(a.messages, b.messages),
            bytes: number(a.bytes, b.bytes),
        };
        let work = |a: Work, b: Work| Work {
            multiply_adds: number(a.multiply_adds, b.multiply_adds),
            product_bytes: number(a.product_bytes, b.product_bytes),
            other_bytes: number(a.other_bytes, b.other_bytes),
        };
        StepCost {
            at_peak: self.at_peak.with(longer.at_peak, number),
            peaks: self.peaks.with(longer.peaks, number),
            offloaded: number(self.offloaded, longer.offloaded),
            offloaded_sums: number(self.offloaded_sums, longer.offloaded_sums),
            leaving_sums: number(self.leaving_sums, longer.leaving_sums),
            update: number(self.update, longer.update),
            messages: by_key(&self.messages, &longer.messages, traffic),
            work: by_key(&self.work, &longer.work, work),
            elements: number(self.elements, longer.elements),
        }
    }
}

fn by_key<K: Ord + Copy, V: Copy + Default>(
    a: &BTreeMap<K, V>,
    b: &BTreeMap<K, V>,
    f: impl Fn(V, V) -> V,
) -> BTreeMap<K, V> {
    let value = |map: &BTreeMap<K, V>, key: &K| map.get(key).copied().unwrap_or_default();
    a.keys().chain(b.keys()).map(|key| (*key, f(value(a, key), value(b, key)))).collect()
}

/// Walks one step of `task` on a rank.
pub fn step(task: &Task, rank: usize, load: &Load) -> StepCost {
    step_of(task, rank, load, |_| ())
}

/// Of what a load may come to, what the case costs that takes most memory.
fn heaviest(task: &Task, load: &Load, cost: impl Fn(&Load) -> StepCost) -> StepCost {
    let costs = task.cases(load).into_iter().map(|case| cost(&case));
    costs.max_by_key(|cost| cost.at_peak.total()).expect("a load comes to something")
}

/// [`step`] for a search among many layouts: of a model whose layers repeat, two shorter ones are walked, and what a
/// repetition adds is taken to be what the others add. Exact but for messages that gather gradients of several layers.
pub(super) fn estimate(task: &Task, rank: usize, load: &Load) -> StepCost {
    let Some((short, period)) = task.shortened() else { return step(task, rank, load) };
    let layers = task.sizes.model.layers;
    let repetitions = ((layers - short) / period) as i128;
    let walked = |layers: usize, load: &Load| {
        let mut task = task.clone();
        task.sizes.model.layers = layers;
        step(&task, rank, load)
    };
    heaviest(task, load, |load| {
        // The last layer with experts is the last of the shorter model's, too.
        let last = task.moe_layers().last();
        let in_short = |layers_less: usize| match load {
            &Load::Peaked { layer, most, others, hot } if Some(layer) == last => {
                Load::Peaked { layer: layer - layers_less, most, others, hot }
            }
            other => other.clone(),
        };
        let [one, two] = [short, short + period].map(|shorter| walked(shorter, &in_short(layers - shorter)));
        one.extended(&two, repetitions)
    })
}

/// [`step`] of a model that `change` has changed: with experts or gates of the user's own.
pub fn step_of(task: &Task, rank: usize, load: &Load, change: impl Fn(&mut Trainer)) -> StepCost {
    let walk = |task: &Task, load: &Load| {
        let walked = Walked::alone(task, rank, load);
        let mut trainer = walked.trainer();
        change(&mut trainer);
        walked.cost(&mut trainer, &walked.batches()).expect(NOBODY_FAILS)
    };
    let cost = heaviest(task, load, |load| walk(task, load));
    // Sequences that migrate take memory where they come to; what is sent is counted with all at home.
    let Some((crowded, times)) = task.crowded(load) else { return cost };
    let at_worst = heaviest(&crowded, load, |load| walk(&crowded, &load.of_larger_shares(times)));
    StepCost { at_peak: at_worst.at_peak, peaks: at_worst.peaks.with(cost.peaks, u64::max), ..cost }
}

/// What a rank sends where the ranks add up which experts are chosen together: not a part of every step.
pub fn pairs(task: &Task, rank: usize) -> PlannedTraffic {
    let walked = Walked::alone(task, rank, &Load::Even { imbalance: 1.0 });
    let mut trainer = walked.trainer();
    trainer.sum_pairs().expect(NOBODY_FAILS);
    traffic(&walked.sent.messages()).into_values().next().unwrap_or_default()
}

const NOBODY_FAILS: &str = "nobody fails in a world of sizes";

/// What the task's ranks compute on, without elements.
fn sizes_of(task: &Task) -> Arc<Device> {
    Device::sizes_of(1, task.layout.on_accelerators)
}

/// A rank without data.
pub(super) struct Walked<'a> {
    task: &'a Task,
    rank: usize,
    device: Arc<Device>,
    world: Arc<dyn Communicator>,
    routings: Routings,
    sent: Arc<Sent>,
}

impl<'a> Walked<'a> {
    /// In a world in which others are not there: they tell what `load` says.
    fn alone(task: &'a Task, rank: usize, load: &Load) -> Walked<'a> {
        let (device, loads) = (sizes_of(task), Arc::new(Loads::new(task, rank, load)));
        let sent = Arc::new(Sent::new(device.clone(), &task.layout));
        let routings = Routings { script: Some(loads.clone()), ..Routings::NONE };
        let counted = sent.clone();
        let watch = move |group: GroupView, operation: &Operation| counted.count(group, operation);
        let answers = move |group: GroupView, operation: &Operation| loads.answer(group, operation);
        let world = sizes::world(rank, task.layout.mesh.ranks, Arc::new(watch), Arc::new(answers));
        Walked { task, rank, device, world, routings, sent }
    }

    /// One of a world whose ranks are all walked.
    pub(super) fn among(task: &'a Task, inner: Arc<dyn Communicator>, routings: Routings) -> Walked<'a> {
        let (device, rank) = (sizes_of(task), inner.rank());
        let sent = Arc::new(Sent::new(device.clone(), &task.layout));
        let counted = sent.clone();
        let world = sizes::among(inner, Arc::new(move |group, operation| counted.count(group, operation)));
        Walked { task, rank, device, world, routings, sent }
    }

    pub(super) fn trainer(&self) -> Trainer {
        let (layout, mut sizes) = (&self.task.layout, self.task.sizes.clone());
        sizes.moe.iter_mut().for_each(|moe| moe.drop_duplicates = layout.drop_duplicates);
        let settings =
            optim::Settings { hyper: HYPER, tile: layout.tile.map(|tile| tile as usize), offload: away(layout) };
        let mesh = self.mesh();
        let made = Trainer::new(&self.device, mesh, &sizes, settings, RATE, 1.0, layout.bucketing);
        let mut trainer = made.expect("there is nothing that could fail");
        trainer.recompute = layout.recompute.segments();
        // What reads a source learns tasks, and tells the losses of their parts.
        if sizes.blueprint().reads_a_source() {
            trainer.rows = RowSums::of_steps(self.task.rows_per_step);
        }
        trainer.routings = Arc::new(self.routings.clone());
        trainer
    }

    fn mesh(&self) -> Mesh {
        let layout = &self.task.layout;
        let mesh = Mesh::of_degrees(self.world.clone(), layout.mesh, layout.degrees.clone()).expect("groups of sizes");
        let mesh = mesh.with_sequence(layout.sequence).with_zero(Zero::ALL[usize::from(layout.zero)]);
        let mesh = mesh.with_exchange(layout.exchange).with_rates(layout.rates);
        let mesh = mesh.on_nodes(layout.nodes.clone()).with_way(layout.way).expect("groups of sizes");
        match &layout.owners {
            Some(owners) => mesh.with_owners(owners),
            None => mesh,
        }
    }

    /// This rank's micro-batches if those before the last are alike; from the second on there are gradients to add to.
    fn batches(&self) -> StepBatches {
        let micro_batches = self.task.micro_batches();
        let before = (micro_batches > 1).then(|| self.batch(0, micro_batches as u64 - 1));
        StepBatches { step: 1, micro: before.into_iter().chain([self.batch(micro_batches - 1, 1)]).collect() }
    }

    /// The same one by one.
    pub(super) fn each_batch(&self, step: u64) -> StepBatches {
        StepBatches { step, micro: (0..self.task.micro_batches()).map(|micro| self.batch(micro, 1)).collect() }
    }

    fn batch(&self, micro: usize, alike: u64) -> Batch {
        let Task { rows_per_step, micro_batch, .. } = *self.task;
        let (rank, ranks) = self.task.place(Axis::Data, self.rank);
        let plan = BatchPlan { seed: 0, rows_per_step, micro_batch, rank, ranks };
        let rows = plan.share(micro);
        let of_length = |seq: usize| {
            let valid = ((rows.len() * seq) as f64 * self.task.predicted).ceil() as usize;
            let counted = Some(Counted { valid, alike });
            let empty = Batch::empty(seq, rows.start as u64);
            Batch { rows: rows.len(), micro_batch: micro as u32, counted, ..empty }
        };
        let texts = self.task.sizes.model.row_lengths().into_iter().map(of_length);
        texts.reduce(|source, batch| batch.reading(source)).expect("a stack reads rows")
    }

    /// Walks the step of these batches.
    ///
    /// # Errors
    /// A recording that cannot be followed.
    pub(super) fn cost(&self, trainer: &mut Trainer, batches: &StepBatches) -> Result<StepCost, Error> {
        let (account, books) = (self.device.account(), self.device.books().expect("a device of sizes keeps books"));
        // Of the step before, still being written: the most that is held of it at any time of this one.
        let copied = self.task.layout.copies_state.then(|| trainer.copied_bytes());
        let _copy = copied.map(|bytes| self.device.hold(Cause::Checkpoint, bytes));
        let sums = trainer.gradients(batches, batches.step)?;
        books.set_phase(Phase::Update);
        let [before, peaks] = [Bytes::at_peak(account), Bytes::peaks(account)];
        account.restart_peaks();
        let state = account.live(Cause::Optimizer);
        trainer.update(sums)?;
        let [after, update] = [Bytes::at_peak(account), Bytes::peaks(account)];
        let mut work = BTreeMap::<_, Work>::new();
        for ((scope, phase), more) in books.work() {
            let sum = work.entry((phase, ModelPart::of(&scope, phase))).or_default();
            sum.multiply_adds += more.multiply_adds;
            sum.product_bytes += more.product_bytes;
            sum.other_bytes += more.other_bytes;
        }
        let (mut elements, mut widths) = (0, Vec::new());
        trainer.model.visit(&mut |weight| elements += weight.parameter.len() as u64);
        trainer.model.visit_trained(&mut |weight| widths.push(weight.parameter.gradient().dtype().bytes() as u64));
        let away = self.task.layout.offload != Offload::None;
        let of_shards = |of: &dyn Fn(u64, u64, u64) -> u64| -> u64 {
            let shards = trainer.optimizer.shards().iter().zip(&widths).filter(|_| away);
            shards.map(|(shard, width)| of(shard.range.len() as u64, shard.strips as u64, *width)).sum()
        };
        // It is there from the first step on.
        let workspace = self.sent.workspace();
        let at_peak = if before.total() > after.total() { before } else { after };
        Ok(StepCost {
            at_peak: at_peak.and(Cause::Communication, workspace),
            peaks: peaks.with(update, u64::max).and(Cause::Communication, workspace),
            offloaded: of_shards(&|len, strips, _| len * (strips + 1) * 4),
            offloaded_sums: of_shards(&|len, _, _| len * 4),
            leaving_sums: of_shards(&|len, _, width| len * width),
            update: update.of(Cause::Optimizer) - state,
            messages: self.sent.messages(),
            work,
            elements,
        })
    }
}

/// Where state is; no folder is looked at.
fn away(layout: &Layout) -> optim::OffloadTarget {
    match layout.offload {
        Offload::None => optim::OffloadTarget::None,
        Offload::Host => optim::OffloadTarget::Host,
        Offload::File => optim::OffloadTarget::File(PathBuf::new()),
    }
}

/// What an update multiplies with costs nothing.
const HYPER: Hyper = Hyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
const RATE: LearningRate = LearningRate { peak: 1.0, decay: Decay::Constant, warmup_steps: 0, steps: 1, end: 1.0 };

#[cfg(test)]
mod tests {
    use guildhall_comm::Collective;

    use super::super::books::When;
    use super::super::recipe::task;
    use super::*;

    /// Of deep models, with rows even and skewed, kept and made again, of experts in all layers and in every other.
    #[test]
    fn what_layers_repeat_is_estimated_as_it_is_walked() {
        let deep = ["model.layers=13", "parallel.bucket_bytes=1"];
        let more: [&[&str]; 6] = [
            &[],
            &["memory.recompute=block"],
            &["moe.layers={ every = 2 }", "parallel.zero=3"],
            &["moe.layers={ every = 3 }", "memory.offload=host", "parallel.zero=2"],
            &["moe.shadowing=force:1", "train.micro_batch=4"],
            &["parallel.backend=simulated", "parallel.zero=2", "parallel.ranks=2"],
        ];
        for more in more {
            let task = task("quickstart.toml", &[&deep, more].concat());
            assert!(task.shortened().is_some(), "{more:?}: nothing is shortened");
            for load in
                [Load::Even { imbalance: 1.0 }, Load::Skewed { mean: 1.2, most: 1.9 }, Load::Zipf { exponent: 1.0 }]
            {
                let [estimated, walked] = [estimate(&task, task.fullest(), &load), step(&task, task.fullest(), &load)];
                assert_eq!(estimated, walked, "{more:?}, {load:?}");
            }
        }
    }

    /// Which messages are waited for, and what computes meanwhile.
    #[test]
    fn messages_leave_when_they_can() {
        let whens = |set: &[&str]| {
            let task = task("quickstart.toml", set);
            let messages = step(&task, 0, &Load::Even { imbalance: 1.0 }).messages;
            let all = |wanted: When| messages.iter().filter(move |(key, sent)| key.2 == wanted && sent.bytes > 0);
            let of =
                |wanted| all(wanted).map(|((axis, collective, _), _)| (axis.name(), *collective)).collect::<Vec<_>>();
            [of(When::Behind), of(When::Ahead)]
        };
        let reduce = |collective| vec![("data", collective)];
        let [behind, ahead] = whens(&["parallel.ranks=2", "parallel.expert=2"]);
        assert_eq!((behind, ahead), (reduce(Collective::AllReduce), Vec::new()));
        let [behind, ahead] = whens(&["parallel.ranks=2", "parallel.expert=2", "parallel.zero=2"]);
        assert_eq!((behind, ahead), (reduce(Collective::ReduceScatter), Vec::new()));
        let [behind, ahead] = whens(&["parallel.ranks=2", "parallel.expert=2", "parallel.zero=3"]);
        assert_eq!((behind, ahead), (reduce(Collective::ReduceScatter), reduce(Collective::AllGather)));
        // What a tensor group sums is an operand of what comes next.
        let [behind, ahead] = whens(&["parallel.ranks=2", "parallel.expert=1", "parallel.tensor=2"]);
        assert_eq!((behind, ahead), (Vec::new(), Vec::new()));
    }

    /// A plan is that of one rank: of ways between nodes, where these are alike, of one that sends as much to others as any.
    #[test]
    fn nobody_sends_more_between_like_nodes_than_the_fullest_rank() {
        for (ranks, per_node) in [(4, 2), (8, 2), (8, 4)] {
            for way in ["direct", "two_level", "two_d"] {
                let mesh = ["parallel.ranks", "parallel.expert", "moe.experts"].map(|key| format!("{key}={ranks}"));
                let link = format!("parallel.node_link={{ranks_per_node={per_node},latency_us=1,gbytes_per_s=1}}");
                let way = format!("parallel.all_to_all={way}");
                let set: Vec<&str> = mesh.iter().chain([&link, &way]).map(String::as_str).collect();
                let task = task("quickstart.toml", &set);
                let crossing = |rank: usize| {
                    let sent = traffic(&step(&task, rank, &Load::Even { imbalance: 1.0 }).messages);
                    let rows =
                        |(axis, collective): &(Axis, _)| (axis.name(), *collective) == ("expert", Collective::AllToAll);
                    sent.iter().filter(|(key, _)| rows(key)).map(|(_, sent)| sent.bytes).sum::<u64>()
                };
                let (all, most): (Vec<u64>, _) = ((0..ranks).map(crossing).collect(), crossing(task.fullest()));
                assert!(most > 0 && all.iter().all(|&sent| sent <= most), "{set:?}: {all:?}");
            }
        }
    }

    /// Each part of the model has its own arithmetic: by hand, of a decoder of known sizes.
    #[test]
    fn work_is_booked_to_the_part_that_does_it() {
        let task = task("quickstart.toml", &["parallel.ranks=1", "parallel.expert=1", "moe.layers={ every = 2 }"]);
        let (model, moe) = (&task.sizes.model, task.sizes.moe.as_ref().expect("experts"));
        let cost = step(&task, 0, &Load::Even { imbalance: 1.0 });
        let forward = |part| cost.work.get(&(Phase::Forward, part)).map_or(0, |work| work.multiply_adds);
        let (tokens, d, layers) = (task.rows_per_step * model.seq, model.d_model, task.moe_layers().count());
        let head = model.d_model / model.heads;
        let kv = model.kv_heads.unwrap_or(model.heads) * head;
        // Projections of all, and of each token the scores of those before it and their sum.
        let projections = tokens * (2 * d * d + 2 * d * kv) * model.layers;
        let pairs = task.rows_per_step * model.seq * (model.seq + 1) / 2;
        let attention = forward(ModelPart::Attention) as usize;
        assert!(attention >= projections + 2 * pairs * d * model.layers, "{attention}");
        assert!(attention <= projections + 4 * 2 * pairs * d * model.layers, "{attention}");
        assert_eq!(forward(ModelPart::Routing) as usize, tokens * d * moe.experts.largest() * layers);
        let d_expert = moe.d_expert.or(model.d_ff).unwrap_or(4 * d);
        assert_eq!(forward(ModelPart::Experts) as usize, tokens * moe.top_k * 3 * d * d_expert * layers);
        // Whose gradients are made with the loss.
        assert_eq!(forward(ModelPart::Head) as usize, 3 * tokens * d * model.vocab);
        let d_ff = model.d_ff.unwrap_or(4 * d);
        assert_eq!(forward(ModelPart::FeedForward) as usize, tokens * 3 * d * d_ff * (model.layers - layers));
        assert!(layers > 0 && layers < model.layers);
        assert_eq!(forward(ModelPart::Embedding), 0);
        let updates = cost.work.keys().filter(|(phase, _)| *phase == Phase::Update);
        assert!(updates.clone().count() == 1 && updates.clone().all(|(_, part)| *part == ModelPart::Optimizer));
    }

    /// An uneven table: the rank with most experts, of several the last; the one with fewest, of several the first.
    #[test]
    fn the_fullest_rank_holds_most_experts() {
        let mut task = task("quickstart.toml", &["parallel.ranks=4", "parallel.expert=4"]);
        assert_eq!((task.fullest(), task.emptiest()), (3, 0));
        let experts = task.experts(0);
        // One each on ranks 0 and 3, two on 1, the others on 2.
        let owners = [0, 3, 1, 1].into_iter().chain(std::iter::repeat(2)).take(experts).collect();
        task.layout.owners = Some(owners);
        assert_eq!((task.fullest(), task.emptiest()), (2, 0));
    }
}
