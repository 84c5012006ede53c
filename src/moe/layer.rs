//! The MoE layer on one page: routing, plan, dispatch, experts, combine, and the auxiliary losses of the routing.

use std::rc::Rc;
use std::sync::Arc;

use guildhall_comm::Communicator;
use guildhall_tensor::{Device, Dtype, Elements, Kept, Var, to_host};

use super::condensation::{Circumstances, ROWS_COMPETE};
use super::gates::{BalanceKind, Largest, Scope, Tokens};
use super::migration::FollowingWork;
use super::output_masking::masked;
use super::state::Known;
use super::transport::{Deciding, ExpertsOnTape, LayerPlan};
use super::{
    Activation, BalanceLoss, BalanceScope, Beside, Besides, CarriedRows, Condensation, Condensed, Counts, Error,
    Expert, Experts, ExpertsShape, GateState, History, Homes, Importance, LayerConfig, LossInputs, Peers, Proportions,
    ResidualStream, Router, Routing, Scores, Selector, SentRoutes, SharedGate, Site, StepFacts, Transport, combine,
    through_experts,
};
use crate::lora::AdapterSizes;
use crate::parallel::{Buffer, ExpertTable, Init, Mesh, Migration, Parameters, Rows, Spread, Stream, Weight};

/// A router, a gate, and this rank's part of the experts.
#[derive(Debug)]
pub struct MoeLayer {
    /// Distinguishes the layer's random draws from those of other layers.
    pub index: u32,
    /// Number of the layer's stack in the model.
    pub stack: u32,
    pub router: Router,
    pub selector: Selector,
    pub experts: Box<dyn Expert>,
    pub transport: Transport,
    pub condensation: Option<Condensation>,
    /// Whether no token may know of later ones.
    pub is_causal: bool,
    /// What the model does until the next MoE layer's results return.
    pub following: FollowingWork,
    pub beside: Beside,
    /// The share of results that is skipped in training.
    pub output_masking: f32,
    pub balance: BalanceKind,
    pub balance_scope: BalanceScope,
    pub state: GateState,
}

/// The sizes and initial values that a layer takes over from the model.
#[derive(Clone, Debug)]
pub struct LayerSizes {
    pub d_model: usize,
    /// Inner width of the dense feed-forward that the layer replaces.
    pub d_ff: usize,
    pub activation: Activation,
    /// Whether what shared experts give is multiplied by a learned sigmoid.
    pub gates_shared: bool,
    /// Whether the router has a bias.
    pub router_bias: bool,
    /// Storage type of the experts.
    pub dtype: Dtype,
    /// What the adapters of experts, and of a network beside them, are made from.
    pub adapters: Option<AdapterSizes>,
    /// Initial values of matrices in general, and of matrices whose products are added to the residual stream.
    pub inits: [Init; 2],
}

/// What a layer needs to know about a stream's tokens besides the stream's row table.
#[derive(Clone, Copy)]
pub struct Facts<'a> {
    pub importance: &'a Importance,
    /// Which rank has which tokens of the micro-batch, if tokens compete for experts, and which tokens are padding.
    pub homes: &'a Homes,
    /// The similarities of the tokens in the layer before.
    pub history: &'a History,
    pub step: &'a StepFacts,
}

/// The output of a MoE layer.
pub struct LayerOutput {
    /// `[T, D]`, for the stream's tokens or, after a migration, for the tokens of the new stream.
    pub y: Var,
    /// Whether the residual stream has been added to y.
    pub is_added: bool,
    pub losses: BalanceLoss,
    /// The counts of this rank's tokens.
    pub counts: Counts,
    /// Experts whose weights were copied to every rank of the expert group.
    pub shadowed: Vec<usize>,
    /// The migration from the input's stream to the stream of `y`.
    pub migration: Option<Rc<Migration>>,
}

impl MoeLayer {
    /// Layer `index` of a model, with its initial values; the names of its tensors begin with `name`. It is this rank's
    /// part of what a `[moe]` section says of the layer: the experts are distributed over the mesh's expert group.
    ///
    /// # Panics
    /// If the mesh's expert group does not divide the experts; the configuration is checked before.
    pub fn new(
        device: &Arc<Device>,
        (name, index): (&str, usize),
        config: LayerConfig,
        sizes: &LayerSizes,
        mesh: &Mesh,
    ) -> MoeLayer {
        let (d_model, d_expert) = (sizes.d_model, config.expert_width(sizes.d_ff));
        let (transport, partial) = (Transport::new(config, mesh), mesh.is_sequence_parallel());
        let experts = |part: &str, local, d_expert, (spread, slices): (Spread, &Arc<dyn Communicator>)| {
            let slice = (slices.rank(), slices.size());
            let shape = ExpertsShape { local, d_model, d_expert, activation: sizes.activation, spread, slice };
            let experts = Experts::new(device, &format!("{name}.{part}"), &shape, sizes.dtype, sizes.inits);
            match &sizes.adapters {
                Some(adapters) => Box::new(experts.adapted(device, &shape, adapters, slices)),
                None => Box::new(experts),
            }
        };
        let on_all_ranks = |part: &str, d_expert| experts(part, vec![0], d_expert, (Spread::Replicated, &mesh.tensor));
        let beside = if config.residual {
            let proportions = Proportions::new(device, &format!("{name}.coefficient"), d_model, sizes.inits[0]);
            Beside::Residual(on_all_ranks("mlp", d_expert), Box::new(proportions.partial(partial)))
        } else if config.shared_experts > 0 {
            let network = on_all_ranks("shared_experts", config.shared_experts * d_expert);
            let gate =
                || SharedGate::new(device, &format!("{name}.shared_expert_gate"), d_model, sizes.inits[0], partial);
            match sizes.gates_shared {
                true => Beside::GatedShared(network, Box::new(gate())),
                false => Beside::Shared(network),
            }
        } else {
            Beside::Nothing
        };
        let (selector, gate_name) = (config.selector(), format!("{name}.gate"));
        let gate = selector.gate.clone();
        let router = Router::new(device, &gate_name, (config.experts, d_model), sizes.inits[0], config.perturbation());
        let router = if sizes.router_bias { router.biased(device, &gate_name) } else { router };
        MoeLayer {
            index: index as u32,
            stack: 0,
            router: router.partial(partial),
            experts: experts(
                "experts",
                transport.table.of(mesh.expert.rank()).to_vec(),
                d_expert,
                (Spread::Expert(mesh.expert.size()), &mesh.expert_tensor),
            ),
            transport,
            condensation: config.condensation(),
            is_causal: true,
            following: FollowingWork::default(),
            beside,
            output_masking: config.output_masking,
            balance: config.balance(),
            balance_scope: config.scope(),
            state: GateState::new(device, &gate_name, config.experts, &*gate, config.scope()),
            selector,
        }
    }

    /// x `[T, D]` has the rows of this rank's tokens of the stream. Every rank of the tensor group computes the same
    /// routing of all tokens; with a split stream it dispatches and combines only its own tokens. Collective over the
    /// expert group of the layer's degree, and over the data group if a routing group lies on several of its ranks; T
    /// may be zero.
    ///
    /// # Errors
    /// Any error of a group's communicator; a gate that finds no routing; a recording that cannot be replayed or
    /// written.
    pub fn forward(&self, x: &Var, stream: &Stream, facts: &Facts, mesh: &Mesh) -> Result<LayerOutput, Error> {
        self.forward_around(x, None, stream, facts, mesh)
    }

    /// [`MoeLayer::forward`] where `residual` is the stream to which the output is added. If sequences move, results may
    /// carry it, and the layer adds it then ([`LayerOutput::is_added`]).
    ///
    /// # Errors
    /// As [`MoeLayer::forward`].
    pub fn forward_around(
        &self,
        x: &Var,
        residual: Option<&ResidualStream>,
        stream: &Stream,
        facts: &Facts,
        mesh: &Mesh,
    ) -> Result<LayerOutput, Error> {
        self.check_condensation(stream, facts.step)?;
        let (mesh, tape) = (&mesh.at(self.transport.table.ranks()), x.tape());
        let part = |part: &str| tape.set_scope(format!("layer {} {part}", self.index));
        part("routing");
        let scores = self.router.scores(x, &stream.numbers(), &facts.step.draws(self.index)).whole(stream)?;
        let decision = tape.keep(Kept::Decision, || self.decide(&scores, x, stream, facts, mesh).map(Rc::new))?;
        let Routed { routing, known, condensed } = &*decision;
        let weighting = self.selector.gate.weighting();
        let probabilities = weighting.probabilities(&scores.logits);
        let weighed = routing.weighed();
        let weights = weighting.weights(&scores.logits, &probabilities, &weighed, routing.k);

        let experts = ExpertsOnTape { experts: &*self.experts, weights: &self.experts.weights(tape) };
        let (site, routes) = (self.site(stream.rows(), facts), SentRoutes { routing, condensed: condensed.as_ref() });
        let plan = || {
            let deciding = Deciding {
                mesh,
                routings: &facts.step.routings,
                site,
                trains: facts.step.trains,
                rows_of_token: 1 + usize::from(!self.beside.is_nothing()),
                carried_bytes: self.carried_bytes(residual),
                following: self.following,
                competes: !facts.homes.is_empty(),
            };
            self.transport.plan(x, routes, stream, experts, &deciding).map(Rc::new)
        };
        let (planned, present) = (tape.keep(Kept::Decision, plan)?, facts.homes.present(&stream.rows().numbers()));
        let LayerPlan { plan, migration, .. } = &*planned;
        let kept = self.kept(&weights, stream.rows(), facts);
        let input = LayerInput { x, weights: &kept, residual, stream };
        let y = self.combined(&input, &planned, experts, mesh)?;
        part("routing");

        let inputs = LossInputs {
            scores: &scores,
            probabilities: &probabilities,
            weights: &weights,
            routing,
            importance: facts.importance,
            kind: self.balance,
            scope: self.balance_scope,
            previous_load: &known.previous_load,
        };
        let losses = BalanceLoss::new(&inputs, &mesh.data)?;
        let counts = self.counts((routes, present), &planned, mesh);
        let (shadowed, migration) = (plan.plan.shadowed.clone(), migration.clone());
        Ok(LayerOutput {
            y,
            is_added: residual.is_some() && plan.carrying().is_some(),
            losses,
            counts,
            shadowed,
            migration,
        })
    }

    /// Has the experts of another table from now on, as many on each rank: rows go to their new owners, and weights are
    /// named after the experts that are `rank`'s in the expert group. What the weights hold is not touched.
    ///
    /// # Panics
    /// If the experts, perhaps a user's, keep their names ([`Expert::rename`]).
    pub fn reassign(&mut self, table: ExpertTable, rank: usize) {
        assert!(
            self.experts.rename(table.of(rank)),
            "layer {}: experts that keep their names: {:?}",
            self.index,
            self.experts
        );
        self.transport.table = table;
    }

    /// Tokens may share rows only where what becomes of a row depends on that row alone. In training alone they do.
    fn check_condensation(&self, stream: &Stream, step: &StepFacts) -> Result<(), Error> {
        let refused = |because, instead| Err(Error::Condensation { layer: self.index, because, instead });
        match self.condensation.as_ref().filter(|_| step.trains) {
            Some(_) if self.selector.gate.scope() != Scope::Token => refused(ROWS_COMPETE, "a gate of Scope::Token"),
            Some(_) if !self.experts.is_of_the_row_alone() => refused(
                "its experts make of a row what depends on more than that row (Expert::is_of_the_row_alone): similar rows \
                 need not stand for each other",
                "experts whose results depend on nothing but the row",
            ),
            Some(_) if stream.is_split() => refused(
                "its tokens are split over the ranks of a tensor group, none of which can compare them",
                "a mesh that does not split them (parallel.sequence, Mesh::with_sequence)",
            ),
            _ => Ok(()),
        }
    }

    /// What is counted of this rank's plan.
    fn counts(
        &self,
        (routes, present): (SentRoutes, usize),
        LayerPlan { plan, moved, .. }: &LayerPlan,
        mesh: &Mesh,
    ) -> Counts {
        let computed = plan.received() + plan.stay().len();
        let ranks: Vec<usize> = match plan.plan.lanes.sharing() {
            1 => vec![mesh.expert.rank()],
            lanes => (0..lanes).map(|lane| mesh.expert_rank_of_peer(lane)).collect(),
        };
        let counts =
            Counts::new((routes.routing, present), &*self.selector.gate, &plan.sent(mesh.expert.rank()), computed);
        Counts { moved: moved.unwrap_or_default(), condensed: plan.condensed(routes, &ranks), ..counts }
    }

    /// The sums of the results of the layer's tokens, weighted, where their sequences go on; with the residual stream if
    /// results carry it, and with what they get besides.
    fn combined(
        &self,
        &LayerInput { x, weights, residual, stream }: &LayerInput,
        LayerPlan { plan, migration, .. }: &LayerPlan,
        experts: ExpertsOnTape,
        mesh: &Mesh,
    ) -> Result<Var, Error> {
        let part = |part: &str| x.tape().set_scope(format!("layer {} {part}", self.index));
        part("experts");
        let own = stream.tokens();
        let here =
            if stream.is_split() { weights.gather_rows(own.start as u32..own.end as u32) } else { weights.clone() };
        let carrying = residual.zip(plan.carrying());
        let rows = carrying.map(|(residual, carrying)| CarriedRows::new(residual, carrying, &here, &mesh.tensor));
        let beside = || {
            part("feed-forward");
            let beside = self.beside.of(x, stream, migration.as_deref())?;
            part("experts");
            Ok(beside)
        };
        let meanwhile = || if migration.is_none() { beside() } else { Ok(None) };
        let (home, early) = through_experts(x, plan, experts, rows.transpose()?.as_ref(), mesh, meanwhile)?;
        let beside = if migration.is_some() { beside()? } else { early };
        part("routing");
        let there = migration.as_ref().map(|migration| migration.carry(&here)).transpose()?.unwrap_or(here);
        let there = carrying.map_or_else(|| there.clone(), |(_, carrying)| carrying.weights(&there));
        let combined = combine(home, plan, &there, &mesh.tensor)?;
        part("feed-forward");
        let combined = match carrying {
            Some((residual, carrying)) => carrying.add_rows_alone(&residual.x, &combined, &mesh.expert)?,
            None => combined,
        };
        let routed = if let Some(migration) = migration { migration.settle(combined)? } else { combined };
        Ok(Besides::join(beside, routed))
    }

    /// By what results are summed, of all tokens, from the gate's weights.
    fn kept(&self, weights: &Var, rows: &Rows, facts: &Facts) -> Var {
        masked(weights, self.output_masking, &rows.numbers(), &facts.step.draws(self.index))
    }

    /// What is sent along with a result that carries a row of the residual stream; `None` if none can.
    fn carried_bytes(&self, residual: Option<&ResidualStream>) -> Option<u64> {
        let may = self.beside.is_nothing();
        residual.filter(|residual| may && residual.can_be_rebuilt()).map(ResidualStream::bytes_per_row)
    }
}

/// What goes through a layer's experts.
struct LayerInput<'a> {
    x: &'a Var,
    /// By what results are summed, of all tokens, `[T, K]`.
    weights: &'a Var,
    residual: Option<&'a ResidualStream>,
    stream: &'a Stream,
}

/// A routing, what it condenses, and the values of the layer's state from which it and the losses are computed.
struct Routed {
    routing: Routing,
    known: Known,
    /// Present if this layer condenses.
    condensed: Option<Condensed>,
}

impl MoeLayer {
    /// Decides who goes where, and who shares a row. Collective as [`MoeLayer::forward`] says.
    fn decide(&self, scores: &Scores, x: &Var, stream: &Stream, facts: &Facts, mesh: &Mesh) -> Result<Routed, Error> {
        let (routing, known) = self.routing(scores, stream.rows(), facts, mesh)?;
        let condensed = match &self.condensation {
            Some(condensation) if facts.step.trains => {
                Some(self.condense(condensation, (x, stream), &routing, facts)?)
            }
            _ => None,
        };
        Ok(Routed { routing, known, condensed })
    }

    /// Gates decide on the host: by all logits, or by where the largest are, which is far less to bring there.
    fn routing(&self, scores: &Scores, rows: &Rows, facts: &Facts, mesh: &Mesh) -> Result<(Routing, Known), Error> {
        let (logits, routings) = (scores.logits.value().to_f32(), &facts.step.routings);
        let peers = Peers { group: &mesh.data, homes: facts.homes, device: logits.device() };
        let selector = if facts.step.unlimited { &self.selector.unlimited() } else { &self.selector };
        let k = selector.gate.slots();
        let largest = (selector.goes_by_largest() && routings.decisions.is_none()).then(|| logits.top_k(k));
        if let Some(script) = &routings.script {
            self.selector.rehearse(logits.cols(), &peers)?;
            let routing = script.routing(&self.site(rows, facts), rows, k)?;
            return Ok((routing, Known::default()));
        }
        let shown = largest.as_ref().unwrap_or(&logits);
        let mut elements = to_host(&[shown].into_iter().chain(self.state.tensors()).collect::<Vec<_>>()).into_iter();
        let values = elements.next().expect("what is shown of the scores is first");
        let known = self.state.known(elements.map(Elements::into_f32s).collect());
        let (scores, experts) = match values {
            Elements::U32(experts) => (Vec::new(), experts),
            values => (values.into_f32s(), Vec::new()),
        };
        let tokens = Tokens {
            logits: &scores,
            largest: largest.is_some().then_some(Largest { experts: &experts, k }),
            experts: logits.cols(),
            first: 0,
            ids: &rows.ids,
            bias: &known.bias,
            padding: facts.homes.padding(),
            draws: facts.step.draws(self.index),
        };
        let runs = tokens.runs(&rows.numbers());
        Ok((routings.of(&runs, || selector.route(&runs, &peers))?, known))
    }

    /// Which routes share a row.
    fn condense(
        &self,
        condensation: &Condensation,
        (x, stream): (&Var, &Stream),
        routing: &Routing,
        facts: &Facts,
    ) -> Result<Condensed, Error> {
        let (rows, StepFacts { step, trend, routings, .. }) = (stream.rows(), facts.step);
        let at = Circumstances { step: *step, trend: *trend, is_causal: self.is_causal, history: facts.history };
        let site = self.site(rows, facts);
        let decide = || {
            let x = x.value();
            Ok(match &routings.script {
                Some(script) => {
                    let compared = script.compared(&site).unwrap_or_else(|| condensation.compared(routing, rows));
                    let clusters = script.condensed(&site, (rows, routing))?;
                    (condensation.rehearsed(x, &compared, facts.history, clusters), None)
                }
                None => {
                    let (condensed, similarities) =
                        condensation.decide(x, routing, rows, (&at, routings.decisions.is_some()));
                    (condensed, Some(similarities))
                }
            })
        };
        routings.clusters(&site, (rows, routing), condensation, decide)
    }

    fn site(&self, rows: &Rows, facts: &Facts) -> Site {
        let (step, micro_batch) = (facts.step.step, rows.micro_batch);
        Site { step, micro_batch, stack: self.stack, layer: self.index, call: 0 }
    }
}

impl Parameters for MoeLayer {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.router.visit(f);
        self.experts.visit(f);
        self.beside.visit(f);
    }

    fn visit_buffers(&mut self, f: &mut dyn FnMut(&mut Buffer)) {
        self.state.visit_buffers(f);
    }
}
