//! What the README shows is what the program does: its sample output has the words of a real run, numbers aside, its
//! terminal picture the sample's, and every command of its table of what works is one that the program takes.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::program::{Finished, PROGRAM, Workshop, ended};

/// How the README calls the program.
const SHOWN: &str = "target/release/guildhall";
const PNG_BYTES_MAX: u64 = 300_000;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The lines between the markers, without the fence.
fn sample() -> Vec<String> {
    let readme = read("README.md");
    let (_, rest) = readme.split_once("<!-- sample").expect("the sample's first marker");
    let (block, _) = rest.split_once("<!-- end of sample -->").expect("the sample's last marker");
    block.lines().skip(1).filter(|line| !line.starts_with("```")).map(str::to_owned).collect()
}

/// A line with `#` for every number, and no unit that depends on a number's size: `docs/pictures/make.sh` does the same.
fn shape(line: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in line.split(' ').map(masked) {
        let (bare, rest) = word.split_at(word.trim_end_matches([')', ',', ':', ';']).len());
        let prefix = bare.strip_suffix('B').unwrap_or(bare);
        let unit = !bare.is_empty() && ["", "k", "M", "G", "T"].contains(&prefix);
        match words.last_mut() {
            Some(number) if unit && number.ends_with('#') => number.push_str(rest),
            _ if ["#h", "#m", "#s", "#ms"].contains(&bare) => words.push(format!("#{rest}")),
            _ => words.push(word),
        }
    }
    words.join(" ")
}

fn masked(word: &str) -> String {
    let mut text = String::new();
    for letter in word.chars() {
        let goes_on = text.ends_with('#') && matches!(letter, '.' | ',');
        match letter {
            '0'..='9' if text.ends_with('#') => {}
            '0'..='9' => text.push('#'),
            _ if goes_on => {}
            _ => text.push(letter),
        }
    }
    text
}

/// The shapes of lines in the order in which they first come, without those of data being prepared, which depend on how
/// long that takes, and of products, which depend on the processor.
fn shapes<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut shapes = Vec::new();
    let is_alike = |line: &&str| match line.split_whitespace().next() {
        Some("data") => line.contains(" held out"),
        Some("products" | "...") => false,
        _ => true,
    };
    for line in lines.filter(is_alike) {
        let shape = shape(line);
        if !shapes.contains(&shape) {
            shapes.push(shape);
        }
    }
    shapes
}

#[test]
fn numbers_are_masked_and_words_are_not() {
    for (line, masked) in [
        (
            "step 1/320  loss 8.3495  1,199 tokens/s  hot L2 e1:23%  eta 18m",
            "step #/#  loss #  # tokens/s  hot L# e#:#%  eta #",
        ),
        ("memory   even 407 MB, skewed (other 908 B)", "memory   even #, skewed (other #)"),
        ("model    8.01 M parameters, 24.1 k active", "model    # parameters, # active"),
        ("rows     up to 1.55 times: --imbalance 1.55,2", "rows     up to # times: --imbalance #"),
    ] {
        assert_eq!(shape(line), masked);
    }
}

#[test]
fn the_sample_has_the_words_of_the_program() {
    // With wide experts a step needs most memory where the quickstart does: in backward, when gradients are alive.
    let options = "--ranks 2 --set parallel.expert=2 --set moe.d_expert=128 --set run.dir=runs/quickstart";
    let run = Workshop::new().train(options);
    let printed = run.err.replace(PROGRAM, SHOWN);
    assert_eq!(
        shapes(sample().iter().map(String::as_str)),
        shapes(printed.lines()),
        "README.md's sample (left) is not what the program prints (right): run docs/pictures/make.sh"
    );
}

#[test]
fn the_terminal_picture_shows_the_sample() {
    let picture = read("docs/pictures/terminal.svg");
    let texts = picture.split("</text>").filter_map(|part| Some(part.split_once("<text ")?.1.split_once('>')?.1));
    let drawn = texts.collect::<Vec<_>>().join(" ").replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(&drawn).contains(&words(&sample().join(" "))), "run docs/pictures/make.sh --draw");
}

#[test]
fn pictures_are_small() {
    for name in ["report", "experts"] {
        let path = root().join(format!("docs/pictures/{name}.png"));
        let bytes = fs::metadata(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).len();
        assert!(bytes < PNG_BYTES_MAX, "{name}.png has {bytes} bytes");
    }
}

/// Last cells of the table of what works.
fn shown_by() -> Vec<String> {
    let readme = read("README.md");
    let (_, rest) = readme.split_once("\n## What works today, and what does not\n").expect("the section");
    let rows = rest.split("\n## ").next().unwrap().lines().filter(|line| line.starts_with("| "));
    let last = rows.skip(1).map(|row| row.trim_end_matches([' ', '|']).rsplit(" | ").next().unwrap().to_owned());
    last.filter(|cell| !cell.starts_with("| **")).collect()
}

/// Why a command of the table is none; nothing if it is one.
fn wrong(command: &str) -> Option<String> {
    let words: Vec<&str> = command.split_whitespace().collect();
    match words[..] {
        ["cargo", "run", "--release", "--example", name] => {
            (!root().join(format!("examples/{name}.rs")).is_file()).then(|| format!("no example {name}"))
        }
        ["cargo", "test", "-p", _, "--test", name] => {
            let found = ["crates/comm", "crates/tensor"].map(|part| root().join(part).join(format!("tests/{name}.rs")));
            (!found.iter().any(|path| path.is_file())).then(|| format!("no test {name}"))
        }
        ["mpirun", "-n", _, "guildhall", "train", ..] => wrong(&words[3..].join(" ")),
        ["guildhall", verb, ..] => unknown_option(verb, &words).or_else(|| match verb {
            "train" | "plan" => refused(command.strip_prefix("guildhall ").unwrap()),
            "verify" => refused(&format!("verify {}", words[2])).or_else(|| unknown_bug(&words)),
            _ => None,
        }),
        _ => Some("neither the program's nor cargo's".to_owned()),
    }
}

fn unknown_option(verb: &str, words: &[&str]) -> Option<String> {
    let names = if verb == "surgery" { &words[1..3] } else { &words[1..2] };
    let mut help = Command::new(PROGRAM);
    help.args(names).arg("--help");
    let Finished { code: Some(0), out: help, .. } = ended(help) else { return Some(format!("no command {verb}")) };
    let known: Vec<&str> = help.split(|letter: char| !letter.is_alphanumeric() && letter != '-').collect();
    let mut options = words.iter().filter(|word| word.starts_with("--"));
    options.find(|word| !known.contains(*word)).map(|word| format!("no option {word}"))
}

/// What `guildhall plan` says against a recipe and what is set; on a device with a name, so that nothing is measured.
fn refused(arguments: &str) -> Option<String> {
    let (_, recipe) = arguments.split_once(' ')?;
    let device = if recipe.contains("--device") { "" } else { " --device h100" };
    let script =
        format!("\"$GUILDHALL\" plan {}{device}", recipe.replace(" --resume", "").replace(" --restarts 3", ""));
    let mut plan = Command::new("sh");
    plan.args(["-c", &script]).env("GUILDHALL", PROGRAM).current_dir(root());
    let Finished { code, err: said, .. } = ended(plan);
    // Of a mode in which experts have one holder each, that is the point.
    let idle = said.lines().any(|line| line.contains("nothing") && !line.contains("saves nothing on experts"));
    (code != Some(0) || idle).then_some(said)
}

fn unknown_bug(words: &[&str]) -> Option<String> {
    let bug = words.windows(2).find(|pair| pair[0] == "--inject")?[1];
    (!read("docs/verify.md").contains(&format!("| `{bug}` |"))).then(|| format!("no bug {bug}"))
}

#[test]
fn every_command_of_the_table_is_one() {
    let cells = shown_by();
    let mut violations = Vec::new();
    let mut commands = 0;
    for cell in &cells {
        let quoted: Vec<&str> = cell.split('`').skip(1).step_by(2).collect();
        if quoted.is_empty() && !cell.starts_with("absent") {
            violations.push(format!("{cell}: no command, and not absent"));
        }
        commands += quoted.len();
        violations.extend(quoted.iter().filter_map(|command| Some(format!("{command}: {}", wrong(command)?))));
    }
    assert!(commands > 20, "{commands} commands in {cells:?}");
    assert!(violations.is_empty(), "README.md:\n  {}", violations.join("\n  "));
}
