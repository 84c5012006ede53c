//! The tables of `docs/zero.md`, held against accounts of real steps.

use std::fs;
use std::path::Path;

use guildhall::config::{self, Config};
use guildhall::launch;
use guildhall::model::Sizes;
use guildhall::optim::OffloadTarget;
use guildhall::parallel::{Parameters, Zero};
use guildhall::train::{self, Error};
use guildhall_tensor::{Cause, Dtype};

use super::bytes::{Elements, formula};
use super::{Keeping, keeping};
use crate::tiny::{Recipe, mixtral};
use crate::world::{ONE, on_mesh};

/// The rows of the table of a document that has this header; blanks within numbers are left out.
fn table(header: &str) -> Vec<Vec<String>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("docs/zero.md")).unwrap();
    let below = text.lines().skip_while(|line| *line != header).skip(2);
    let cells = |row: &str| row.trim_matches('|').split('|').map(cell).collect();
    below.take_while(|line| line.starts_with('|')).map(cells).collect()
}

fn cell(text: &str) -> String {
    let text = text.trim();
    let is_number = text.starts_with(|c: char| c.is_ascii_digit());
    if is_number { text.replace(' ', "") } else { text.to_owned() }
}

/// The table as it would be right, for whoever has to mend it.
fn told(rows: &[Vec<String>]) -> String {
    rows.iter().map(|row| format!("| {} |\n", row.join(" | "))).collect()
}

#[track_caller]
fn same(header: &str, measured: &[Vec<String>]) {
    let rows = table(header);
    assert!(rows == measured, "docs/zero.md says\n{}measured\n{}", told(&rows), told(measured));
}

// --- the six modes ----------------------------------------------------------------------------------------------

const MODES: [(&str, &str); 6] =
    [("E", "e"), ("E+D", "e_d"), ("E+D+M", "e_d_m"), ("E+Z", "e_z"), ("E+D+Z", "e_d_z"), ("E+Z-Off+M", "e_z_off_m")];

/// A mode's recipe with rows so short that a step takes no time; nothing that is counted here depends on them.
fn mode(name: &str, overrides: &[&str]) -> Config {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/modes").join(name).with_extension("toml");
    let short = ["model.seq=8", "train.batch_tokens=64", "parallel.threads=1"];
    let overrides: Vec<String> = short.iter().chain(overrides).map(|text| (*text).to_owned()).collect();
    config::load(&path, &overrides, None).unwrap().config
}

fn recipe(config: &Config) -> Recipe {
    Recipe { sizes: train::sizes(config), rows: 8, micro_batch: 8 }
}

/// Bytes of weights, of gradients after their sum, and of state on the device and of both elsewhere, on every rank alike.
fn held(config: &Config) -> [u64; 4] {
    let results = launch::run(&config.parallel, |rank| {
        let mut trainer = train::trainer(&rank, config)?;
        let batches = recipe(config).batches(&trainer.mesh, 1);
        let sums = trainer.gradients(&batches, 1)?;
        let live = |cause| rank.device.account().live(cause);
        let (weights, gradients) = (live(Cause::Parameters), live(Cause::Gradients));
        trainer.update(sums)?;
        let elsewhere = trainer.optimizer.host().map_or(0, |host| host.live_total());
        Ok::<_, Error>([weights, gradients, live(Cause::Optimizer), elsewhere])
    });
    let held: Vec<[u64; 4]> = results.into_iter().map(|result| result.expect("a step")).collect();
    assert!(held.iter().all(|rank| *rank == held[0]), "{held:?}");
    held[0]
}

#[test]
fn six_modes_hold_what_the_formulas_say() {
    let one = mode("e", &["parallel.ranks=1", "parallel.expert=1"]);
    let results =
        launch::run(&one.parallel, |rank| Ok::<_, Error>(Elements::of(&mut train::trainer(&rank, &one)?.model)));
    let all = results.into_iter().next().and_then(Result::ok).expect("a model");
    let elements = [all.cut, all.norms, all.routers, all.experts].map(|n| n.to_string()).to_vec();
    same("| cut by tensor ranks | norms | routers | experts |", &[elements]);

    let mut measured = Vec::new();
    for (mode_name, file) in MODES {
        for (dtype, w) in [("f32", 4), ("bf16", 2)] {
            let stored = format!("train.dtype={dtype}");
            let half = ["train.gradient_dtype=bf16", &stored];
            let config = mode(file, if w == 2 { &half } else { &half[1..] });
            let held = held(&config);
            let parallel = &config.parallel;
            let [weights, gradients, state] =
                formula(all, (parallel.shape(), parallel.sequence), [w; 2], Zero::ALL[parallel.zero]);
            // Elsewhere sums are f32, those of routers as those of the rest.
            let [_, sums, _] = formula(all, (parallel.shape(), parallel.sequence), [w, 4], Zero::ALL[parallel.zero]);
            let away = [weights, 0, 0, state + sums];
            let want = if file == "e_z_off_m" { away } else { [weights, gradients, state, 0] };
            assert_eq!(held, want, "{mode_name} in {dtype}");
            let names = [mode_name, dtype].map(str::to_owned);
            measured.push(names.into_iter().chain(held.map(|bytes| bytes.to_string())).collect());
        }
    }
    same("| mode | stored in | weights | gradients | state | in host memory |", &measured);
}

// --- tiles ------------------------------------------------------------------------------------------------------

const TILE: usize = 1000;

/// A model's elements, and what an update takes besides the state that is always there.
fn temporary(width: usize, tile: Option<usize>, offload: OffloadTarget) -> [u64; 2] {
    let mut sizes = Sizes { dtype: Dtype::Bf16, gradients: Dtype::Bf16, ..mixtral() };
    sizes.moe.as_mut().expect("experts").d_expert = Some(width);
    let recipe = Recipe { sizes, rows: 2, micro_batch: 2 };
    on_mesh(ONE, |rank, mesh| {
        let keeping = Keeping { tile, offload: offload.clone(), ..keeping(Zero::Off) };
        let mut trainer = keeping.trainer(&recipe, rank, mesh);
        recipe.train(&mut trainer, 1..=1);
        let mut elements = 0;
        trainer.model.visit(&mut |weight| elements += weight.parameter.len() as u64);
        let account = rank.device.account();
        [elements, account.peak(Cause::Optimizer) - account.live(Cause::Optimizer)]
    })[0]
}

/// With tiles what an update takes is flat, without it grows with the largest weight.
#[test]
fn temporaries_are_of_a_tiles_size() {
    let mut measured = Vec::new();
    for width in [16, 64, 256, 1024] {
        let ways = [
            (None, OffloadTarget::None),
            (Some(TILE), OffloadTarget::None),
            (None, OffloadTarget::Host),
            (Some(TILE), OffloadTarget::Host),
        ];
        let each = ways.map(|(tile, offload)| temporary(width, tile, offload));
        // The first matrices of four experts, 16 wide, gate and up.
        let (largest, tile) = (4 * 2 * 16 * width as u64, TILE as u64);
        let expected = [4 * largest, 4 * tile, 3 * 16 * largest, 3 * 16 * tile];
        assert_eq!(each.map(|[_, bytes]| bytes), expected, "experts of {width}");
        let numbers = [width as u64, each[0][0]].into_iter().chain(expected);
        measured.push(numbers.map(|n| n.to_string()).collect());
    }
    same(
        "| width of an expert | parameters | on the device | in tiles | in host memory | there, in tiles |",
        &measured,
    );
}
