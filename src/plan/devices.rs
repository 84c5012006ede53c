//! What a rank may be: how much it holds, how fast it computes and talks. Public figures of one accelerator, from its
//! maker's data sheet; links and host memory are those of the usual node. `docs/memory.md` lists them. Others come from a
//! table of the user's own.

use guildhall_tensor::Dtype;
use serde::Serialize;

use super::layout::Layout;
use super::step::StepCost;
use crate::config::DeviceTable;
use crate::memory::Offload;
use crate::parallel::{LinkCost, MeshShape, Rates};

/// A link as a message sees it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LinkSpeed {
    /// Seconds of an operation, however little it sends.
    pub latency_s: f64,
    /// Seconds of each of its messages besides.
    pub message_s: f64,
    /// Bytes a second, each way.
    pub bandwidth: f64,
}

/// Where a figure of a machine is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum FigureOrigin {
    #[serde(rename = "measured")]
    Measured,
    #[serde(rename = "data sheet")]
    DataSheet,
    /// Of a node as such devices are sold in.
    #[serde(rename = "usual node")]
    UsualNode,
    /// Of the user's own.
    #[serde(rename = "table")]
    Table,
    #[serde(rename = "assumed")]
    Assumed,
}

impl FigureOrigin {
    pub fn name(self) -> &'static str {
        match self {
            FigureOrigin::Measured => "measured",
            FigureOrigin::DataSheet => "data sheet",
            FigureOrigin::UsualNode => "usual node",
            FigureOrigin::Table => "table",
            FigureOrigin::Assumed => "assumed",
        }
    }
}

/// Where the figures of a [`Machine`] are from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FigureOrigins {
    pub memory: FigureOrigin,
    pub flops: FigureOrigin,
    pub efficiency: FigureOrigin,
    pub bandwidth: FigureOrigin,
    /// Of links within nodes and between them.
    pub links: FigureOrigin,
    pub latencies: FigureOrigin,
    pub host: FigureOrigin,
    pub host_memory: FigureOrigin,
}

impl FigureOrigins {
    /// All of one origin.
    const fn all(of: FigureOrigin) -> FigureOrigins {
        FigureOrigins {
            memory: of,
            flops: of,
            efficiency: of,
            bandwidth: of,
            links: of,
            latencies: of,
            host: of,
            host_memory: of,
        }
    }

    const KNOWN: FigureOrigins = FigureOrigins {
        efficiency: FigureOrigin::Assumed,
        links: FigureOrigin::UsualNode,
        latencies: FigureOrigin::Assumed,
        host: FigureOrigin::UsualNode,
        host_memory: FigureOrigin::UsualNode,
        ..FigureOrigins::all(FigureOrigin::DataSheet)
    };

    /// Of what was measured on a device while the program ran. Messages are taken to go as fast as its copies.
    pub const MEASURED: FigureOrigins = FigureOrigins {
        links: FigureOrigin::Assumed,
        latencies: FigureOrigin::Assumed,
        host: FigureOrigin::Assumed,
        ..FigureOrigins::all(FigureOrigin::Measured)
    };
}

/// One rank's hardware.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    pub name: String,
    pub origins: FigureOrigins,
    /// Bytes.
    pub memory: u64,
    /// Of matrix products of f32 and of bf16, floating-point operations a second at best.
    pub flops: [f64; 2],
    /// Of which products reach this share.
    pub efficiency: f64,
    /// Bytes of memory a second.
    pub bandwidth: f64,
    pub ranks_per_node: usize,
    pub within: LinkSpeed,
    pub between: LinkSpeed,
    /// Bytes a second, each way, between a device and what is away from it.
    pub host: f64,
    /// Bytes of a node's host, for all of its ranks; absent where the device's memory is its host's: then only files are
    /// away from it.
    pub host_memory: Option<u64>,
    /// Most bytes that a rank's account may come to, if that is limited.
    pub budget: Option<u64>,
}

/// Share of the best rate that large products reach in training, an assumption.
const EFFICIENCY: f64 = 0.5;
/// Seconds a message takes however small it is, assumptions too.
const LATENCY_WITHIN: f64 = 5e-6;
const LATENCY_BETWEEN: f64 = 15e-6;

/// name, GB, TFLOP/s in f32 and in 16 bits, GB/s of memory, ranks a node, GB/s each way within nodes, a rank's share
/// between them, and to the host; GB of a node's host.
type KnownDevice = (&'static str, f64, [f64; 2], f64, usize, [f64; 3], f64);

const KNOWN: [KnownDevice; 6] = [
    // NVLink 2, two to each neighbour and to the POWER9; six to a node with two links of 100 Gbit/s, as in Summit.
    ("v100-16g", 16.0, [15.7, 125.0], 900.0, 6, [50.0, 25.0 / 6.0, 50.0], 512.0),
    // PCIe 3 x16; four to a node with one link of 100 Gbit/s, which is assumed.
    ("v100-16g-pcie", 16.0, [14.0, 112.0], 900.0, 4, [15.75, 12.5 / 4.0, 15.75], 256.0),
    // NVLink 3, PCIe 4 x16; eight to a node with a link of 200 Gbit/s each, as in DGX A100.
    ("a100-40g", 40.0, [19.5, 312.0], 1555.0, 8, [300.0, 25.0, 31.5], 1000.0),
    ("a100-80g", 80.0, [19.5, 312.0], 2039.0, 8, [300.0, 25.0, 31.5], 2000.0),
    // NVLink 4, PCIe 5 x16; eight to a node with a link of 400 Gbit/s each, as in DGX H100 and H200.
    ("h100", 80.0, [67.0, 989.0], 3350.0, 8, [450.0, 50.0, 63.0], 2000.0),
    ("h200", 141.0, [67.0, 989.0], 4800.0, 8, [450.0, 50.0, 63.0], 2000.0),
];

/// What [`Machine::known`] knows.
pub fn names() -> impl Iterator<Item = &'static str> {
    KNOWN.iter().map(|known| known.0)
}

impl Machine {
    pub fn known(name: &str) -> Option<Machine> {
        let &(name, gb, flops, bandwidth, ranks_per_node, [within, between, host], host_gb) =
            KNOWN.iter().find(|k| k.0 == name)?;
        let wire = |latency_s, gbytes: f64| LinkSpeed { latency_s, message_s: 0.0, bandwidth: gbytes * 1e9 };
        Some(Machine {
            name: name.to_owned(),
            origins: FigureOrigins::KNOWN,
            memory: (gb * 1e9) as u64,
            flops: flops.map(|tflops| tflops * 1e12),
            efficiency: EFFICIENCY,
            bandwidth: bandwidth * 1e9,
            ranks_per_node,
            within: wire(LATENCY_WITHIN, within),
            between: wire(LATENCY_BETWEEN, between),
            host: host * 1e9,
            host_memory: Some((host_gb * 1e9) as u64),
            budget: None,
        })
    }

    /// The user's own, called `name` unless the table says how.
    pub fn of(table: &DeviceTable, name: &str) -> Machine {
        let wire = |link: LinkCost| LinkSpeed {
            latency_s: link.latency_us * 1e-6,
            message_s: link.message_us * 1e-6,
            bandwidth: link.gbytes_per_s * 1e9,
        };
        let bytes = |gb: f64| (gb * 1e9) as u64;
        Machine {
            name: table.name.as_deref().unwrap_or(name).to_owned(),
            origins: FigureOrigins::all(FigureOrigin::Table),
            memory: bytes(table.memory_gb),
            flops: [table.f32_tflops, table.bf16_tflops].map(|tflops| tflops * 1e12),
            efficiency: table.efficiency,
            bandwidth: table.memory_gbytes_per_s * 1e9,
            ranks_per_node: table.ranks_per_node,
            within: wire(table.within),
            between: wire(table.between),
            host: table.host_gbytes_per_s * 1e9,
            host_memory: Some(bytes(table.host_memory_gb)),
            budget: None,
        }
    }

    /// How fast ranks of a mesh compute on tensors of this type, and talk within their expert groups.
    pub fn rates(&self, dtype: Dtype, mesh: &MeshShape) -> Rates {
        let wire = if mesh.ranks > self.ranks_per_node { self.between } else { self.within };
        let flops = self.efficiency * self.flops[usize::from(dtype == Dtype::Bf16)];
        Rates { flops, bandwidth: wire.bandwidth, latency: wire.latency_s, memory: self.bandwidth }
    }

    /// Whether ranks have memory of their own, as an accelerator's are taken to.
    pub fn is_accelerator(&self) -> bool {
        self.host_memory.is_some()
    }

    /// What a rank may use of it: an eighth is left to spare. A budget is used in full.
    pub fn usable(&self) -> u64 {
        (self.memory - self.memory / 8).min(self.budget.unwrap_or(u64::MAX))
    }

    /// What a rank needs of its memory, with state kept there or elsewhere.
    pub fn needs(&self, offload: Offload, cost: &StepCost) -> u64 {
        let beside = if self.host_memory.is_none() && offload == Offload::Host { cost.offloaded } else { 0 };
        cost.at_peak.total().saturating_add(beside)
    }

    /// Whether a rank's memory and that of its node's host hold a step.
    pub fn holds(&self, layout: &Layout, cost: &StepCost) -> bool {
        self.rank_holds(layout.offload, cost) && self.host_holds(layout, cost)
    }

    pub fn rank_holds(&self, offload: Offload, cost: &StepCost) -> bool {
        let fits = self.budget.is_none_or(|budget| cost.at_peak.total() <= budget);
        fits && self.needs(offload, cost) <= self.memory - self.memory / 8
    }

    /// Whether a node's host holds what its ranks keep there, with an eighth to spare.
    pub fn host_holds(&self, layout: &Layout, cost: &StepCost) -> bool {
        self.host_memory.is_none_or(|memory| self.of_host(layout, cost) <= memory - memory / 8)
    }

    /// Bytes of a node's host, if every rank of the node keeps as much there.
    pub fn of_host(&self, layout: &Layout, cost: &StepCost) -> u64 {
        let away = if layout.offload == Offload::Host { cost.offloaded } else { 0 };
        away.saturating_mul(self.neighbours(layout) as u64)
    }

    /// Ranks of a full node.
    pub fn neighbours(&self, layout: &Layout) -> usize {
        layout.mesh.ranks.min(self.ranks_per_node)
    }
}
