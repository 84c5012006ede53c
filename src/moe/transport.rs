//! From tokens to experts and back: how a layer's plan is laid out, and the one pipeline that executes every plan.

use std::sync::Arc;

use guildhall_comm::Communicator;
use guildhall_tensor::Var;

use super::plan::Layout;
use super::shadowing::{Cost, by_owner, hottest, worthwhile};
use super::{Config, Error, Expert, ExpertPlan, Plan, Routing, Schedule, Shadowing, dispatch, send_home};
use crate::parallel::collectives::{Underway, start_gather_parts};
use crate::parallel::{ExpertTable, Mesh};

/// Who holds which expert, in how many steps rows travel, and who is shadowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transport {
    pub table: ExpertTable,
    /// Groups of ranks, hence steps; 1 sends everything at once.
    pub groups: usize,
    pub shadowing: Shadowing,
}

impl Transport {
    /// What a `[moe]` section asks for on this mesh.
    pub fn new(config: &Config, mesh: &Mesh) -> Transport {
        Transport {
            table: mesh.expert_table(config.experts),
            groups: config.schedule_groups(mesh.expert.size()),
            shadowing: config.shadowing(),
        }
    }

    /// Everything at once, no shadows.
    pub fn plain(experts: usize, mesh: &Mesh) -> Transport {
        Transport { table: mesh.expert_table(experts), groups: 1, shadowing: Shadowing::Off }
    }

    /// The plan of a routing of x `[T, D]` for these experts, whose `weights` are on the tape. Collective over the expert group. What
    /// does not train is not shadowed: it has no way back on which to save.
    ///
    /// # Errors
    /// What the group reports; shadowing that cannot be.
    pub fn plan(
        &self,
        (x, routing): (&Var, &Routing),
        (experts, weights): (&dyn Expert, &[Var]),
        (mesh, trains): (&Mesh, bool),
    ) -> Result<ExpertPlan, Error> {
        let group = &mesh.expert;
        let schedule = Schedule::new(group.rank(), group.size(), self.groups);
        let shadowed = match self.shadowing {
            Shadowing::Off => Vec::new(),
            _ if !trains => Vec::new(),
            _ if !experts.are_alike() => return Err(Error::Shadowing("its experts are not all of one kind")),
            shadowing => {
                let rows = group.all_gather_u64(&routing.rows().iter().map(|&n| n as u64).collect::<Vec<_>>())?;
                let rows: Vec<Vec<u64>> = rows.chunks(self.table.experts()).map(<[u64]>::to_vec).collect();
                by_owner(&self.shadowed(shadowing, &rows, (weights, x.value().cols()), mesh)?, &self.table)
            }
        };
        let layout = Layout { table: self.table.clone(), schedule, shadowed };
        Ok(Plan::new(routing, layout).exchange(group)?)
    }

    fn shadowed(
        &self,
        shadowing: Shadowing,
        rows: &[Vec<u64>],
        (weights, width): (&[Var], usize),
        mesh: &Mesh,
    ) -> Result<Vec<usize>, Error> {
        match shadowing {
            Shadowing::Off => Ok(Vec::new()),
            Shadowing::Force(n) => Ok(hottest(rows, n)),
            Shadowing::Auto => {
                let unmeasured = Error::Shadowing("the mesh has not been measured (Mesh::measured)");
                let rates = mesh.rates().ok_or(unmeasured)?;
                let elements = weights.iter().map(|weight| weight.shape()[1..].iter().product::<usize>()).sum();
                Ok(worthwhile(rows, &self.table, &Cost::new(rates, elements, width)))
            }
        }
    }
}

/// Sends the rows of x `[T, D]` to their experts step by step, computes on what has arrived while the rest travels, and
/// brings the results home: the rows of every step, then those that stayed, in the order of the plan.
///
/// # Errors
/// What the group reports.
pub fn through_experts(
    x: &Var,
    plan: &ExpertPlan,
    (experts, weights): (&dyn Expert, &[Var]),
    group: &Arc<dyn Communicator>,
) -> Result<Vec<Var>, Error> {
    let arriving = dispatch(x, plan, group)?;
    let visitors = start_visits(plan, weights, group)?;
    let mut returning = Vec::with_capacity(plan.steps.len());
    for (rows, step) in arriving.into_iter().zip(&plan.steps) {
        let rows = experts.apply(weights, &rows.sorted()?, &step.rows_per_local_expert);
        returning.push(send_home(rows, step, group)?);
    }
    let (tokens, counts) = plan.plan.staying();
    let stayed = if counts.is_empty() {
        None
    } else {
        let visitors = visitors.into_iter().map(Underway::finish).collect::<Result<Vec<_>, _>>()?;
        Some(experts.apply(&visitors, &x.gather_rows(tokens), &counts))
    };
    let mut home = returning.into_iter().map(Underway::finish).collect::<Result<Vec<_>, _>>()?;
    home.extend(stayed);
    Ok(home)
}

/// The weights of shadowed experts, on their way from their owners to every rank of the group.
fn start_visits(plan: &ExpertPlan, weights: &[Var], group: &Arc<dyn Communicator>) -> Result<Vec<Underway>, Error> {
    let Layout { table, shadowed, .. } = &plan.plan.layout;
    if shadowed.is_empty() {
        return Ok(Vec::new());
    }
    let local = table.of(group.rank());
    let own: Vec<usize> = (0..local.len()).filter(|&i| shadowed.contains(&local[i])).collect();
    let of_rank = |rank| table.of(rank).iter().filter(|expert| shadowed.contains(expert)).count();
    let counts: Vec<usize> = (0..table.ranks()).map(of_rank).collect();
    weights.iter().map(|weight| Ok(start_gather_parts(weight, &own, &counts, group)?)).collect()
}
