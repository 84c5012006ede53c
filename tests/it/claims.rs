//! Tables of documents whose rows are commands: every figure is what `guildhall plan` says, or what a formula gives.
//!
//! A table is read if a command that ends in dots stands above it. In place of the dots a row sets what it has in its
//! column `with`.

use std::path::Path;
use std::process::Command;

use guildhall::config::{Config, load};
use serde_json::Value;

use crate::program::{PROGRAM, ended};

/// A table of a document, its cells as they stand there.
struct Table {
    /// Arguments of the command for all rows.
    arguments: Vec<String>,
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

fn cells(line: &str) -> Vec<String> {
    line.trim().trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
}

fn tables(text: &str) -> Vec<Table> {
    let of = |part: &str| {
        let (command, rest) = part.split_once("...\n```\n")?;
        let mut lines = rest.lines().skip_while(|line| line.is_empty()).take_while(|line| line.starts_with('|'));
        let columns = cells(lines.next().unwrap_or_else(|| panic!("no table after {command}")));
        let rows: Vec<_> = lines.skip(1).map(cells).collect();
        assert!(rows.iter().all(|row| row.len() == columns.len()), "a ragged table: {command}");
        let words = command.split_whitespace().filter(|word| *word != "\\");
        Some(Table { arguments: words.map(str::to_owned).collect(), columns, rows })
    };
    text.split("```\nguildhall plan ").skip(1).filter_map(of).collect()
}

/// What the program says of a recipe with something set.
struct Planned {
    plan: Value,
    config: Config,
}

impl Planned {
    fn new(arguments: &[String], sets: &[String]) -> Planned {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut command = Command::new(PROGRAM);
        command.current_dir(root).arg("plan").args(arguments).arg("--json");
        command.args(sets.iter().flat_map(|set| ["--set", set]));
        let planned = ended(command);
        assert_eq!(planned.code, Some(0), "{arguments:?} {sets:?}: {}", planned.err);
        let given = arguments.windows(2).filter(|pair| pair[0] == "--set").map(|pair| pair[1].clone());
        let given: Vec<String> = given.chain(sets.iter().cloned()).collect();
        let config = load(&root.join(&arguments[0]), &given, None).unwrap().config;
        Planned { plan: serde_json::from_str(&planned.out).unwrap(), config }
    }

    fn number(&self, path: &str) -> f64 {
        self.plan.pointer(path).and_then(Value::as_f64).unwrap_or(0.0)
    }

    fn fits(&self) -> bool {
        self.plan["fits"].as_bool().unwrap()
    }

    /// Seconds of the messages of some groups and collectives.
    fn messages(&self, counts: impl Fn(&str, &str) -> bool) -> f64 {
        let all = self.plan["traffic"].as_array().unwrap().iter();
        let counted = all.filter(|kind| counts(kind["group"].as_str().unwrap(), kind["collective"].as_str().unwrap()));
        counted.map(|kind| kind["seconds"].as_f64().unwrap()).sum()
    }

    fn computing(&self) -> f64 {
        self.plan["seconds"]["parts"].as_object().unwrap().values().map(|part| part.as_f64().unwrap()).sum()
    }

    fn rows(&self) -> f64 {
        self.messages(|_, collective| collective == "all_to_all")
    }

    /// Sums and gatherings of activations.
    fn sums(&self) -> f64 {
        self.messages(|group, collective| group.ends_with("tensor") && collective != "all_to_all")
    }

    fn sizes(&self) -> Sizes {
        let (model, parallel) = (&self.config.model, &self.config.parallel);
        let of = |n: usize| n as f64;
        Sizes {
            layers: of(model.layers),
            width: of(model.d_model),
            experts: of(self.config.moe.as_ref().unwrap().experts.largest()),
            tables: of((model.vocab + model.seq) * model.d_model),
            ranks: of(parallel.ranks),
            tensor: of(parallel.tensor),
            expert: of(parallel.expert.largest()),
        }
    }
}

/// The letters of the papers' formulas.
struct Sizes {
    layers: f64,
    width: f64,
    experts: f64,
    tables: f64,
    ranks: f64,
    tensor: f64,
    expert: f64,
}

impl Sizes {
    /// Parameters of the dense base.
    fn base(&self) -> f64 {
        12.0 * self.layers * self.width.powi(2)
    }

    /// Bytes a rank, of one parameter of the base: DeepSpeed-TED's memory model.
    fn bytes_of_ted(&self) -> f64 {
        4.0 * (1.0 / self.tensor + (self.experts + 2.0) / self.ranks)
    }

    /// Weights, gradients and optimizer state on the device, 16 bytes a parameter: what ZeRO and offload leave of them.
    fn state(&self, config: &Config) -> f64 {
        let shared = self.base() * 2.0 / 3.0 + self.tables;
        let experts = self.base() / 3.0 * self.experts;
        let data = self.ranks / self.tensor;
        let of = |own: f64, holders: f64| {
            let shares = |from: usize| if config.parallel.zero >= from { own / holders } else { own };
            match config.memory.offload {
                guildhall::memory::Offload::None => 2.0 * shares(3) + 2.0 * shares(2) + 12.0 * shares(1),
                _ => 2.0 * shares(3),
            }
        };
        of(shared / self.tensor, data) + of(experts / (self.expert * self.tensor), data / self.expert)
    }
}

/// Share of the ranks' best rate, by the operations that are usually counted for a model whose blocks run twice (Narayanan
/// et al. 2021).
fn of_peak(row: &Planned) -> f64 {
    let (sizes, model) = (row.sizes(), &row.config.model);
    let (seq, vocab) = (model.seq as f64, model.vocab as f64);
    let more = 1.0 + seq / (6.0 * sizes.width) + vocab / (16.0 * sizes.layers * sizes.width);
    let operations = 96.0 * row.config.train.batch_tokens as f64 * sizes.layers * sizes.width.powi(2) * more;
    operations / (row.number("/seconds_total") * sizes.ranks * row.number("/device/flops/1"))
}

/// Three digits.
fn three(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let digits = (2.0 - value.abs().log10().floor()).max(0.0) as usize;
    format!("{value:.digits$}")
}

fn giga(bytes: f64) -> String {
    three(bytes / 1e9)
}

/// Change against the first row, in percent.
fn change(now: f64, first: f64) -> String {
    let percent = ((now / first - 1.0) * 100.0).round();
    if percent == 0.0 { "0".to_owned() } else { format!("{percent:+.0}") }
}

/// What a cell should say; nothing where it is not for the program to say.
fn figure(column: &str, row: &Planned, first: &Planned) -> Option<String> {
    let bytes = |cause: &str| row.number(&format!("/bytes/{cause}"));
    let sizes = row.sizes();
    let state = ["parameters", "gradients", "optimizer"].map(bytes).iter().sum::<f64>();
    let usable = row.number("/device/memory") * 7.0 / 8.0;
    let messages = |planned: &Planned| planned.messages(|_, _| true);
    Some(match column {
        "what" | "paper" | "with" => return None,
        "base, B" => giga(sizes.base()),
        "parameters, B" => giga(row.number("/parameters/total")),
        "weights, GB" => giga(bytes("parameters")),
        "gradients, GB" => giga(bytes("gradients")),
        "optimizer, GB" => giga(bytes("optimizer")),
        "state, GB" => giga(state),
        "formula, GB" => giga(sizes.state(&row.config)),
        "activations, GB" => giga(bytes("activations") + bytes("communication")),
        "together, GB" => giga(row.number("/bytes_total")),
        "host memory, GB" => giga(row.number("/bytes_offloaded")),
        "fits" => if row.fits() { "yes" } else { "no" }.to_owned(),
        "base by formula, B" => giga(usable / sizes.bytes_of_ted()),
        "times" => three(sizes.base() / first.sizes().base()),
        "times by formula" => three(first.sizes().bytes_of_ted() / sizes.bytes_of_ted()),
        "copy of all, MB" => three(16.0 * sizes.experts * sizes.layers * sizes.width.powi(2) / sizes.ranks / 1e6),
        "ours, MB" => three(row.number("/bytes_update") / 1e6),
        "computing, s" => three(row.computing()),
        "all-to-all, s" => three(row.rows()),
        "sums, s" => three(row.sums()),
        "copies, s" => three(row.messages(|group, _| group.ends_with("data"))),
        "step, s" => three(row.number("/seconds_total")),
        "all-to-all, %" => change(row.rows(), first.rows()),
        "sums, %" => change(row.sums(), first.sums()),
        "messages, %" => change(messages(row), messages(first)),
        "step, %" => change(row.number("/seconds_total"), first.number("/seconds_total")),
        "of peak, %" => format!("{:.0}", 100.0 * of_peak(row)),
        "faster, %" => change(first.number("/seconds_total"), row.number("/seconds_total")),
        column => panic!("nobody knows what stands below {column:?}"),
    })
}

/// The rows as they should be, where they are not.
fn wrong_rows(table: &Table) -> Vec<String> {
    let with = table.columns.iter().position(|column| column == "with").expect("a column of what is set");
    let sets = |row: &Vec<String>| -> Vec<String> {
        row[with].trim_matches('`').split_whitespace().map(str::to_owned).collect()
    };
    let planned: Vec<Planned> = table.rows.iter().map(|row| Planned::new(&table.arguments, &sets(row))).collect();
    let right = |(row, of): (&Vec<String>, &Planned)| {
        let cell = |(column, cell): (&String, &String)| figure(column, of, &planned[0]).unwrap_or_else(|| cell.clone());
        (row.clone(), table.columns.iter().zip(row).map(cell).collect::<Vec<_>>())
    };
    let both = table.rows.iter().zip(&planned).map(right);
    both.filter(|(is, should)| is != should).map(|(_, should)| format!("| {} |", should.join(" | "))).collect()
}

#[test]
fn every_row_of_a_table_is_what_its_command_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (page, count) in [("docs/memory.md", 7), ("docs/parallelism.md", 1)] {
        let tables = tables(&std::fs::read_to_string(root.join(page)).unwrap());
        assert_eq!(tables.len(), count, "{page}: tables with commands");
        let wrong: Vec<String> = tables.iter().flat_map(wrong_rows).collect();
        assert!(wrong.is_empty(), "{page}: these rows should be\n{}", wrong.join("\n"));
    }
}

/// Groups that the page draws are those that the program lists for the command above them.
#[test]
fn groups_are_drawn_as_they_are() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("docs/parallelism.md")).unwrap();
    let drawings: Vec<&str> = page.split("```\n$ guildhall ").skip(1).collect();
    assert_eq!(drawings.len(), 3);
    for drawing in drawings {
        let (command, rest) = drawing.split_once('\n').unwrap();
        let drawn = rest.split("```").next().unwrap();
        let mut program = Command::new(PROGRAM);
        program.current_dir(root).args(command.split(' ')).args(["--device", "h100"]);
        let said = ended(program).out;
        let (_, groups) = said.split_once("groups   of 8 ranks\n").unwrap_or_else(|| panic!("{command}: {said}"));
        assert_eq!(groups, drawn, "{command}");
    }
}

/// Two layers more than a row that is called the largest has do not fit.
#[test]
fn the_largest_are_the_largest() {
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/memory.md")).unwrap();
    let mut largest = 0;
    for table in tables(&page) {
        for row in table.rows.iter().filter(|row| row[0].contains("largest")) {
            let with = table.columns.iter().position(|column| column == "with").unwrap();
            let sets: Vec<String> = row[with].trim_matches('`').split_whitespace().map(str::to_owned).collect();
            let planned = Planned::new(&table.arguments, &sets);
            let more = format!("model.layers={}", planned.config.model.layers + 2);
            assert!(planned.fits(), "{row:?} does not fit");
            let sets: Vec<String> = sets.into_iter().chain([more]).collect();
            assert!(!Planned::new(&table.arguments, &sets).fits(), "{row:?} is not the largest");
            largest += 1;
        }
    }
    assert!(largest >= 6, "{largest} rows are called the largest");
}
