//! From tokens to experts and back: how a layer's plan is made, and the one pipeline that executes every plan.

use std::rc::Rc;
use std::sync::Arc;

use guildhall_comm::Communicator;
use guildhall_tensor::Var;

use super::deliveries::{WAY_BYTES, route_bytes};
use super::migration::{FollowingWork, MovedSequences, ResultPlaces, RowCopies, RowPrices, SequenceRows, exchanges};
use super::plan::RowRun;
use super::rewrites::condensation::condense;
use super::rewrites::duplicates::deal;
use super::rewrites::migration::deliver;
use super::rewrites::schedule::in_steps;
use super::rewrites::shadowing::{Cost, by_owner, hottest, shadow, worthwhile};
use super::{
    CarriedRows, Clusters, CondenseGradient, Condensed, Error, Expert, ExpertPlan, Lanes, LayerConfig, Outgoing, Plan,
    Routing, Routings, Schedule, Shadowing, Share, Site, Sorting, dispatch, send_home, send_on,
};
use crate::parallel::collectives::{Underway, start_gather_parts};
use crate::parallel::operands::{parts_to_split, parts_to_whole, split_to_parts, whole_to_parts};
use crate::parallel::{Exchange, ExpertTable, Hosts, Mesh, Migration, Rows, Stream};

/// Which rank holds which expert, the number of steps, how experts to shadow are chosen, and how lanes divide the
/// routes.
#[derive(Clone, Debug)]
pub struct Transport {
    pub table: ExpertTable,
    /// Number of groups of ranks, hence of steps; 1 sends all rows at once.
    pub groups: usize,
    pub shadowing: Shadowing,
    pub lanes: Lanes,
    /// A rewrite of a program's own, of plans in which routes may share rows already and nothing else is rewritten.
    pub rewrite: Option<fn(Plan) -> Plan>,
}

impl Transport {
    /// The transport that a `[moe]` section and the mesh's exchange configure for a layer.
    pub fn new(config: LayerConfig, mesh: &Mesh) -> Transport {
        Transport {
            table: mesh.expert_table(config.experts),
            groups: config.schedule_groups(mesh.expert.size()),
            shadowing: match mesh.exchange() {
                Exchange::Tokens => config.shadowing(),
                Exchange::Experts => Shadowing::All,
            },
            lanes: lanes(config.drop_duplicates, mesh),
            rewrite: None,
        }
    }

    /// All rows in one step, no shadowing, no duplicates.
    pub fn plain(experts: usize, mesh: &Mesh) -> Transport {
        let (table, lanes) = (mesh.expert_table(experts), lanes(true, mesh));
        Transport { table, groups: 1, shadowing: Shadowing::Off, lanes, rewrite: None }
    }

    /// Makes the plan of a routing of the stream's tokens; x `[T, D]` has the rows of this rank's tokens. Collective
    /// over the expert group.
    ///
    /// # Errors
    /// Any error of the group's communicator; experts whose slices do not match the mesh; shadowing that is not
    /// possible.
    pub fn plan(
        &self,
        x: &Var,
        routes: SentRoutes,
        stream: &Stream,
        experts: ExpertsOnTape,
        deciding: &Deciding,
    ) -> Result<LayerPlan, Error> {
        let mesh = deciding.mesh;
        let (held, slices) = (experts.experts.slices(), mesh.expert_tensor.size());
        if held != slices {
            return Err(Error::Slices { held, slices });
        }
        let shadowed = self.visitors(x, routes, experts, deciding)?;
        let plan = x.device().timed("plan_routes", || self.rewritten(routes, stream, shadowed.clone(), mesh));
        let whole =
            || if stream.is_split() { self.undivided(routes.routing, routes, shadowed, mesh) } else { plan.clone() };
        let exchanges = exchanges(plan.schedule.steps(), !plan.shadowed.is_empty());
        let (migration, moved) = deciding.moving(x, stream, exchanges, whole)?.unzip();
        let homes = migration.as_ref().map(|migration| migration.destinations().to_vec());
        let plan = deliver(plan, homes)?.exchange(mesh)?;
        let plan = match &migration {
            Some(migration) => plan.delivering(migration, deciding.carried_bytes.is_some())?,
            None => plan,
        };
        Ok(LayerPlan { plan, migration, moved })
    }

    /// The plan of a routing, of all tokens or some, before lanes divide its rows.
    fn undivided(&self, routing: &Routing, routes: SentRoutes, shadowed: Vec<usize>, mesh: &Mesh) -> Plan {
        let plan = Plan::new(routing, self.table.clone(), mesh.expert.rank());
        let plan = match routes.clusters() {
            Some((clusters, gradient)) => condense(plan, clusters, gradient),
            None => plan,
        };
        let plan = match self.rewrite {
            Some(rewrite) => rewrite(plan),
            None => plan,
        };
        shadow(plan, shadowed)
    }

    /// The plan of the routing, or, if the stream is split, of the routing of this rank's tokens, after the rewrites for
    /// condensation, shadowing, lanes and steps.
    fn rewritten(&self, routes: SentRoutes, stream: &Stream, shadowed: Vec<usize>, mesh: &Mesh) -> Plan {
        let group = &mesh.expert;
        let (plan, share) = match stream.is_split() {
            true => {
                let own = routes.routing.of_tokens(stream.tokens());
                (self.undivided(&own, routes, shadowed, mesh), Share::Tokens)
            }
            false => (self.undivided(routes.routing, routes, shadowed, mesh), self.lanes.share),
        };
        let lanes = Lanes { share, ..self.lanes };
        let schedule = |rank: usize| Schedule::new(rank, group.size(), self.groups);
        let schedules: Vec<Schedule> = match lanes.sharing() {
            1 => vec![schedule(group.rank())],
            sharing => (0..sharing).map(|lane| schedule(mesh.expert_rank_of_peer(lane))).collect(),
        };
        let plan = deal(plan, lanes);
        in_steps(plan, &schedules)
    }

    /// The experts to shadow. Hot ones are shadowed only in training, because without a backward shadowing saves no
    /// time. All are shadowed in evaluation too, but for those that every rank has. Collective over the expert group if
    /// row counts decide.
    fn visitors(
        &self,
        x: &Var,
        routes: SentRoutes,
        experts: ExpertsOnTape,
        deciding: &Deciding,
    ) -> Result<Vec<usize>, Error> {
        let none = match self.shadowing {
            Shadowing::Off => true,
            Shadowing::Auto | Shadowing::Force(_) => !deciding.trains,
            Shadowing::All => self.table.ranks() == 1,
        };
        if none {
            return Ok(Vec::new());
        }
        let all = self.shadowing == Shadowing::All;
        if !experts.experts.are_alike() {
            let key = if all { "parallel.exchange" } else { "moe.shadowing" };
            return Err(Error::Shadowing { key, why: "its experts are not all of one kind" });
        }
        let rows = if all { Vec::new() } else { self.rows_of_all(routes, deciding.mesh)? };
        let decide = || match self.shadowing {
            Shadowing::Off => Ok(Vec::new()),
            Shadowing::All => Ok((0..self.table.experts()).collect()),
            Shadowing::Force(n) => Ok(hottest(&rows, n)),
            Shadowing::Auto => {
                let why = "the mesh has not been measured (Mesh::measured)";
                let unmeasured = Error::Shadowing { key: "moe.shadowing", why };
                let rates = deciding.mesh.rates().ok_or(unmeasured)?;
                let elements = experts.weights.iter().map(|weight| weight.shape()[1..].iter().product::<usize>()).sum();
                Ok(worthwhile(&rows, &self.table, &Cost::new(rates, elements, x.value().cols(), x.dtype())))
            }
        };
        Ok(by_owner(&deciding.routings.shadowed(&deciding.site, deciding.mesh, decide)?, &self.table))
    }

    /// For each rank of the group and each expert, the number of rows. Collective over the expert group.
    fn rows_of_all(&self, routes: SentRoutes, mesh: &Mesh) -> Result<Vec<Vec<u64>>, Error> {
        let own: Vec<u64> = routes.rows().iter().map(|&n| n as u64).collect();
        let rows = mesh.expert.all_gather_u64(&own)?;
        Ok(rows.chunks(self.table.experts()).map(<[u64]>::to_vec).collect())
    }
}

/// The routing of a stream's tokens, and which routes share rows.
#[derive(Clone, Copy)]
pub struct SentRoutes<'a> {
    pub routing: &'a Routing,
    /// Present if the layer condenses.
    pub condensed: Option<&'a Condensed>,
}

impl<'a> SentRoutes<'a> {
    /// The clusters, if any route shares another's row, and which tokens receive the gradient of a shared row.
    fn clusters(&self) -> Option<(&'a Clusters, CondenseGradient)> {
        let condensed = self.condensed?;
        Some((condensed.clusters.as_ref()?, condensed.gradient))
    }

    /// By expert, the rows of these routes.
    pub fn rows(&self) -> Vec<usize> {
        self.clusters().map_or_else(|| self.routing.rows(), |(clusters, _)| clusters.rows(self.routing))
    }
}

/// This rank's experts, and their weights on the tape.
#[derive(Clone, Copy)]
pub struct ExpertsOnTape<'a> {
    pub experts: &'a dyn Expert,
    pub weights: &'a [Var],
}

/// The plan of one layer, and the migration of sequences that happens in it, if any.
pub struct LayerPlan {
    pub plan: ExpertPlan,
    /// The migration of the layer's stream, and of what belongs to its routes.
    pub migration: Option<Rc<Migration>>,
    pub moved: Option<MovedSequences>,
}

/// What decides about a layer's plan besides its gate, and the layer's site in the run.
pub struct Deciding<'a> {
    pub mesh: &'a Mesh,
    pub routings: &'a Routings,
    pub site: Site,
    pub trains: bool,
    /// Rows that follow a token to its sequence's new host: the residual stream's, and its input to the layer if that is
    /// needed there.
    pub rows_of_token: usize,
    /// Bytes that are sent along with a result that carries the residual row; `None` if no result can.
    pub carried_bytes: Option<u64>,
    /// What the ranks do with their tokens until the next MoE layer's results return.
    pub following: FollowingWork,
    /// Whether tokens of several ranks compete for places in any layer.
    pub competes: bool,
}

impl Deciding<'_> {
    /// The migration that the policy chooses, and what of this host moves, if there is a policy; then collective over the
    /// expert group. `whole` is the plan of all rows of the tensor group; `exchanges` are those that a migration adds. If
    /// nothing moves, there is no migration.
    fn moving(
        &self,
        x: &Var,
        stream: &Stream,
        exchanges: usize,
        whole: impl FnOnce() -> Plan,
    ) -> Result<Option<(Rc<Migration>, MovedSequences)>, Error> {
        if self.routings.migration.is_none() {
            return Ok(None);
        }
        let (hosts, plan, carries) = (self.mesh.hosts(), whole(), self.carried_bytes.is_some());
        let (all, lanes) = (stream.rows().len(), self.mesh.tensor.size());
        // A split stream's lanes send the rows of their own tokens.
        let of_token =
            |run: &RowRun, token: usize| if stream.is_split() { lane_of(token, all, lanes) } else { run.lane };
        let ranks = self.mesh.host_ranks();
        let places = ResultPlaces { plan: &plan, ranks: &ranks, lane: &of_token, own: hosts.own, carries };
        let terms = (self.prices(x, stream, &plan), self.following, exchanges);
        let (held, rows) = SequenceRows::gather(&hosts, stream.rows(), &places, terms, self.mesh.rates())?;
        let Some(to) = self.routings.hosts(&self.site, &hosts, &held, &rows)? else { return Ok(None) };
        let stays = to.iter().enumerate().all(|(host, to)| to.iter().all(|to| *to == host));
        if stays && self.all_know(&hosts) {
            return Ok(None);
        }
        let moved = rows.moved(hosts.own, &to);
        Ok(Some((Rc::new(Migration::new(stream, hosts, &held, &to)?), moved)))
    }

    /// Whether all ranks that would take part in what follows a migration can tell that there is none. Other ranks of the
    /// expert group can if they have the same hosts. If tokens compete for places, those of all ranks tell each other
    /// where they are then, and ranks of other expert groups cannot tell.
    fn all_know(&self, hosts: &Hosts) -> bool {
        let shape = self.mesh.shape();
        shape.meets_hosts_only(self.mesh.world.rank()) && (!self.competes || hosts.ranks.len() == self.mesh.data.size())
    }

    /// Bytes forward and backward over all lanes: of rows, of the residual stream, of the weights of routes, and of
    /// integers, which travel once. Every lane has all metadata, whichever tokens it has.
    fn prices(&self, x: &Var, stream: &Stream, plan: &Plan) -> RowPrices {
        let (lanes, row) = (self.mesh.tensor.size() as u64, 2 * (x.value().cols() * x.dtype().bytes()) as u64);
        let copies = if stream.is_split() { 1 } else { lanes };
        let sends_all = plan.lanes.share == Share::Every && !stream.is_split();
        let weights = 2 * (plan.slots * size_of::<f32>()) as u64;
        let integers = lanes * (Rows::WORDS_PER_TOKEN * size_of::<u32>()) as u64;
        let of_rows = if sends_all { lanes } else { 1 };
        RowPrices {
            row: of_rows * row,
            token: copies * (weights + route_bytes(plan.slots)) + integers,
            residual: copies * row * self.rows_of_token as u64,
            carried: of_rows * 2 * self.carried_bytes.unwrap_or_default(),
            way: of_rows * WAY_BYTES,
            home: copies * row + integers,
            copies: RowCopies::of_rows(x.value().cols(), x.dtype()).times(of_rows, copies),
        }
    }
}

/// The lane that has a token of `tokens` that are split among `lanes`.
fn lane_of(token: usize, tokens: usize, lanes: usize) -> usize {
    (0..lanes).rfind(|lane| tokens * lane / lanes <= token).expect("the first lane begins with token 0")
}

/// The lanes of a mesh's tensor group.
fn lanes(drop_duplicates: bool, mesh: &Mesh) -> Lanes {
    Lanes::new(mesh.tensor.rank(), mesh.tensor.size(), mesh.expert_tensor.size() > 1, drop_duplicates)
}

/// Sends the rows of x `[T, D]` to their experts step by step, computes on the rows of one step while those of later
/// steps are in flight, and returns the results. These are the rows of every step, then those that stayed, in the order
/// of the plan or of its deliveries. If some of them carry the residual stream, `carried` is what they need for it.
///
/// `meanwhile` is called when all rows are on their way and before this rank waits for any; its result is returned
/// beside the experts'. In backward, its adjoint runs while the gradients of these rows are on their way back.
///
/// # Errors
/// Any error of a group's communicator; those of `meanwhile`.
pub fn through_experts<T>(
    x: &Var,
    plan: &ExpertPlan,
    ExpertsOnTape { experts, weights }: ExpertsOnTape,
    carried: Option<&CarriedRows>,
    mesh: &Mesh,
    meanwhile: impl FnOnce() -> Result<T, Error>,
) -> Result<(Vec<Var>, T), Error> {
    let (group, lanes) = (&mesh.expert, &plan.plan.lanes);
    let rows = Outgoing::new(x, &plan.plan, &mesh.tensor);
    let arriving = dispatch(&rows, plan, group)?;
    let numbers = start_numbers(plan, carried, group)?;
    let visitors = start_visits(plan, weights, group)?;
    let beside = meanwhile()?;
    let mut returning = Vec::with_capacity(plan.steps.len());
    for ((arrived, numbers), step) in arriving.into_iter().zip(numbers).zip(&plan.steps) {
        let (rows, delivery) = (arrived.finish()?, plan.delivery(returning.len()));
        let sent = carried.map(|_| rows.clone());
        let results = in_slices(rows, &step.sorting, lanes, &mesh.expert_tensor, |rows, counts| {
            experts.apply(weights, rows, counts)
        })?;
        returning.push(match delivery {
            None => send_home(results, step, group)?,
            Some(delivery) => {
                let numbers = numbers.map(Underway::finish).transpose()?;
                let load = carried.zip(sent.zip(numbers).map(<[Var; 2]>::from));
                send_on(results, delivery, load, group)?
            }
        });
    }
    let stayed = if visitors.is_empty() {
        None
    } else {
        let visitors = visitors.into_iter().map(Underway::finish).collect::<Result<Vec<_>, _>>()?;
        let apply = |rows: &Var, counts: &[usize]| experts.apply(&visitors, rows, counts);
        let rows = rows.of(plan.stay());
        let results = in_slices(rows.clone(), &plan.staying, lanes, &mesh.expert_tensor, apply)?;
        Some(match plan.deliveries.as_ref().map(|to| &to.stayed) {
            None => results,
            Some(stayed) => {
                let load = carried.map(|carried| (carried, [rows, carried.of(&stayed.carrying)]));
                send_on(results, stayed, load, group)?.finish()?
            }
        })
    };
    let mut home = returning.into_iter().map(Underway::finish).collect::<Result<Vec<_>, _>>()?;
    home.extend(stayed);
    Ok((home, beside))
}

/// For each step, starts to send what its carrying rows need besides, if any may carry.
fn start_numbers(
    plan: &ExpertPlan,
    carried: Option<&CarriedRows>,
    group: &Arc<dyn Communicator>,
) -> Result<Vec<Option<Underway>>, Error> {
    let of_step = |step: usize| match carried.zip(plan.delivery(step)) {
        Some((carried, delivery)) => Ok(Some(carried.start(&delivery.carrying, group)?)),
        None => Ok(None),
    };
    (0..plan.steps.len()).map(of_step).collect()
}

/// Applies the experts, or all slices of them, to received rows; the results are in the order of the rows.
fn in_slices(
    rows: Var,
    sorting: &Sorting,
    lanes: &Lanes,
    slices: &Arc<dyn Communicator>,
    apply: impl FnOnce(&Var, &[usize]) -> Var,
) -> Result<Var, Error> {
    let apply = |rows: Var| sorting.unsort(apply(&sorting.sort(rows), &sorting.rows_per_expert));
    Ok(match (lanes.sliced, lanes.gathers()) {
        (false, _) => apply(rows),
        (true, false) => parts_to_whole(apply(whole_to_parts(rows, slices)?), slices)?,
        (true, true) => parts_to_split(apply(split_to_parts(rows, &sorting.lanes, slices)?), &sorting.lanes, slices)?,
    })
}

/// Starts the all-gather of the shadowed experts' weights, from their owners to every rank of the group.
fn start_visits(plan: &ExpertPlan, weights: &[Var], group: &Arc<dyn Communicator>) -> Result<Vec<Underway>, Error> {
    let Plan { table, shadowed, .. } = &plan.plan;
    if shadowed.is_empty() {
        return Ok(Vec::new());
    }
    let local = table.of(group.rank());
    let own: Vec<usize> = (0..local.len()).filter(|&i| shadowed.contains(&local[i])).collect();
    let of_rank = |rank| table.of(rank).iter().filter(|expert| shadowed.contains(expert)).count();
    let counts: Vec<usize> = (0..table.ranks()).map(of_rank).collect();
    weights.iter().map(|weight| Ok(start_gather_parts(weight, &own, &counts, group)?)).collect()
}
