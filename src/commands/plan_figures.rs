//! What `plan` takes a device for, and where each figure is from.

use std::fmt::Write;

use super::{bytes, duration, short};
use crate::plan::{FigureOrigin, FigureOrigins, LinkSpeed, Machine};

pub(super) fn figures(out: &mut String, machine: &Machine) {
    let _ = writeln!(out, "device   {}", machine.name);
    let FigureOrigins { memory, flops, efficiency, bandwidth, links, latencies, host, host_memory } = machine.origins;
    let rate = |of: f64, unit: &str| format!("{}{unit}/s", short(of as u64));
    let mut line = |what: &str, figure: String, origin: FigureOrigin| {
        let _ = writeln!(out, "  {what:<32}{figure:>14}  {}", origin.name());
    };
    line("memory", bytes(machine.memory), memory);
    line("products in f32", rate(machine.flops[0], "FLOP"), flops);
    line("products in bf16", rate(machine.flops[1], "FLOP"), flops);
    line("of which are reached", format!("{:.0} %", 100.0 * machine.efficiency), efficiency);
    line("copies", rate(machine.bandwidth, "B"), bandwidth);
    for (what, LinkSpeed { latency_s, message_s, bandwidth }) in
        [("within", machine.within), ("between", machine.between)]
    {
        line(&format!("link {what} nodes"), rate(bandwidth, "B"), links);
        line(&format!("latency {what} nodes"), duration(latency_s), latencies);
        if message_s > 0.0 {
            line("of each message besides", duration(message_s), latencies);
        }
    }
    line("to host or file", rate(machine.host, "B"), host);
    if let Some(memory) = machine.host_memory {
        line("memory of a node's host", bytes(memory), host_memory);
    }
}
