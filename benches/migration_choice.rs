//! How long the choice of hosts takes that every rank makes behind every MoE layer (`moe::migration::paying`).
//!
//! ```text
//! cargo bench --bench migration_choice -- [--sequences 1024] [--hosts 16] [--rounds 5]
//! ```

#![allow(clippy::print_stdout)]

#[allow(dead_code, reason = "not every benchmark uses all of it")]
mod common;

use std::hint::black_box;
use std::time::Instant;

use common::{Flags, median};
use guildhall::moe::migration::{
    AssignmentTerms, AttentionCost, FollowingWork, MigrationSpeeds, MigrationUnit, paying,
};
use guildhall_tensor::{Draws, Purpose};

fn main() {
    let flags = Flags::read();
    let (sequences, hosts): (usize, usize) = (flags.get("--sequences", 1024), flags.get("--hosts", 16));
    let unit = |sequence: usize| {
        let draws = Draws::new(1, Purpose::Test, sequence as u64, 0);
        let host = sequence * hosts / sequences;
        let results = (0..hosts).map(|host| 4096 * u64::from(64 + draws.bits(host as u64) % 64)).collect();
        MigrationUnit {
            host,
            home: Some(host),
            lengths: vec![512],
            results,
            moving: 32_768,
            ..MigrationUnit::default()
        }
    };
    let units: Vec<MigrationUnit> = (0..sequences).map(unit).collect();
    let terms = AssignmentTerms {
        hosts,
        candidates: hosts,
        slack: 0.25,
        attention: AttentionCost::Spans,
        following: FollowingWork::of_attention(1024),
        exchanged: 8192,
        ways: vec![4096; hosts],
        speeds: Some(MigrationSpeeds { flops: 1e13, bandwidth: 5e9, memory: 1e11, besides: 1e-4 }),
    };
    let mut milliseconds = Vec::new();
    let mut moved = 0;
    for _ in 0..flags.get("--rounds", 5) {
        let begun = Instant::now();
        let hosts = paying(black_box(&units), &terms);
        milliseconds.push(begun.elapsed().as_secs_f64() * 1e3);
        moved = hosts.iter().zip(&units).filter(|(to, unit)| **to != unit.host).count();
    }
    println!("{sequences} sequences on {hosts} hosts: {:.2} ms, {moved} move", median(&milliseconds));
}
