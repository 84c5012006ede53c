//! Worlds for tests: a closure on N ranks that are threads, made as the program makes them, one compute thread each.

use guildhall::launch::{self, Rank};
use guildhall::parallel::{self, Backend, Mesh, Order};

pub(crate) use guildhall::parallel::MeshShape as Shape;

/// `shape(4, 2)`: four ranks, two sets of experts.
pub(crate) const fn shape(ranks: usize, expert: usize) -> Shape {
    Shape { ranks, tensor: 1, expert, expert_tensor: 1, order: Order::ExpertData }
}

/// The same with everything cut into `tensor` slices.
pub(crate) const fn sliced(ranks: usize, tensor: usize, expert: usize) -> Shape {
    Shape { tensor, expert_tensor: tensor, ..shape(ranks, expert) }
}

pub(crate) const ONE: Shape = shape(1, 1);

/// Every way to spread up to four experts over 1, 2 and 4 ranks.
pub(crate) const MESHES: [Shape; 6] = [ONE, shape(2, 1), shape(2, 2), shape(4, 1), shape(4, 2), shape(4, 4)];

/// The same with whole experts.
pub(crate) const fn whole_experts(ranks: usize, tensor: usize, expert: usize) -> Shape {
    Shape { tensor, ..shape(ranks, expert) }
}

/// Meshes with slices, with whole experts beside slices, and of the other order.
pub(crate) const SLICED: [Shape; 8] = [
    whole_experts(2, 2, 1),
    whole_experts(4, 2, 4),
    Shape { order: Order::DataExpert, ..whole_experts(8, 2, 2) },
    sliced(2, 2, 1),
    sliced(4, 4, 1),
    sliced(4, 2, 2),
    sliced(8, 2, 2),
    Shape { order: Order::DataExpert, ..sliced(8, 2, 2) },
];

/// Long for a test of milliseconds, on a machine that does other things too.
const TIMEOUT_S: u64 = 120;

/// The results of all ranks, in their order. A rank that panics ends the others; the panic here names all.
#[track_caller]
pub(crate) fn on_mesh<T: Send>(shape: Shape, f: impl Fn(&Rank, &Mesh) -> T + Sync) -> Vec<T> {
    on_backend(Backend::Cpu, shape, f)
}

/// The same of ranks that compute on `backend`.
#[track_caller]
pub(crate) fn on_backend<T: Send>(backend: Backend, shape: Shape, f: impl Fn(&Rank, &Mesh) -> T + Sync) -> Vec<T> {
    let defaults = parallel::Config::of(shape.ranks, shape.expert);
    let config = parallel::Config { backend, threads: Some(1), timeout_s: TIMEOUT_S, ..defaults };
    let results = launch::run(&config, |rank| {
        let mesh = Mesh::of(rank.world.clone(), shape)?;
        Ok::<_, guildhall_comm::Error>(f(&rank, &mesh))
    });
    let failures: Vec<String> = results.iter().filter_map(|r| r.as_ref().err()).map(ToString::to_string).collect();
    assert!(failures.is_empty(), "{shape:?}:\n{}", failures.join("\n"));
    results.into_iter().flatten().collect()
}
