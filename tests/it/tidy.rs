//! The house in order: a test that reads the source tree and the documents, and holds what no compiler holds.
//!
//! Who may import whom, what no file may contain, how long files and functions may get, that links lead somewhere,
//! and that the documents say what the code does. Exceptions are listed here, each with its reason, and one that is
//! no longer needed fails too.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use guildhall::moe::{GateChoice, GateKind};

/// What each module of `src/` may import from the others. `ARCHITECTURE.md` has the same table.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("data", &["durable"]),
    ("parallel", &[]),
    ("metrics", &[]),
    ("durable", &[]),
    ("limits", &[]),
    ("score", &[]),
    ("lora", &["parallel"]),
    ("moe", &["limits", "lora", "parallel"]),
    ("model", &["data", "lora", "moe", "parallel"]),
    ("memory", &[]),
    ("plan", &["config", "data", "launch", "memory", "model", "moe", "optim", "parallel", "train"]),
    ("optim", &["parallel"]),
    ("checkpoint", &["durable", "optim", "parallel"]),
    ("report", &["metrics"]),
    ("launch", &["parallel"]),
    // Only the types in those modules' own config.rs; see `config_reads_only_configs`.
    ("config", &["data", "limits", "lora", "memory", "metrics", "model", "moe", "parallel"]),
    ("convert", &["checkpoint", "config", "data", "lora", "model", "moe", "parallel"]),
    (
        "train",
        &[
            "checkpoint",
            "config",
            "convert",
            "data",
            "launch",
            "lora",
            "memory",
            "metrics",
            "model",
            "moe",
            "optim",
            "parallel",
            "report",
        ],
    ),
    ("surgery", &["checkpoint", "config", "model", "moe", "parallel", "train"]),
    ("verify", &["checkpoint", "config", "data", "launch", "moe", "parallel", "train"]),
    ("cli", &[]),
    (
        "commands",
        &[
            "checkpoint",
            "cli",
            "config",
            "convert",
            "data",
            "launch",
            "lora",
            "memory",
            "metrics",
            "model",
            "moe",
            "optim",
            "parallel",
            "plan",
            "report",
            "score",
            "surgery",
            "train",
            "verify",
        ],
    ),
];

/// Files that may read environment variables.
const MAY_READ_ENVIRONMENT: &[&str] = &[
    // `~` and `${NAME}` in paths; nothing that changes the mathematics.
    "src/data/expand.rs",
    // What launchers tell the processes they start.
    "src/launch/launcher.rs",
    // A variable of NCCL that would have ranks wait for each other in it.
    "crates/tensor/src/gpu/cuda/nccl.rs",
];

const FILE_LINES_MAX: usize = 450;
const FUNCTION_LINES_MAX: usize = 70;

/// Longer files, and why they stay in one piece.
const LONG_FILES: &[&str] = &[];

/// Longer functions as `file: name`, and why they stay in one piece.
const LONG_FUNCTIONS: &[&str] = &[];

/// Names that several types have, and why they may.
const SHARED_TYPE_NAMES: &[(&str, &str)] = &[
    ("Error", "a module's own errors, written with its name outside of it"),
    ("Config", "a module's own section of a recipe, written likewise"),
];

/// What a newcomer types, word for word; README promises them and CI runs the second.
const RUN_COMMAND: &str = "cargo run --release -- train recipes/quickstart.toml";
const TEST_COMMAND: &str = "cargo test";

// --- the tree ---------------------------------------------------------------------------------------------------

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The files under a folder whose names end so, as paths from the root, sorted.
fn files(folder: &str, ending: &str) -> Vec<String> {
    let mut found = Vec::new();
    walk(&root().join(folder), &mut |path| {
        let relative = path.strip_prefix(root()).expect("found below the root");
        let relative = relative.to_str().expect("our own names are UTF-8").to_owned();
        if relative.ends_with(ending) {
            found.push(relative);
        }
    });
    found.sort();
    found
}

fn walk(folder: &Path, found: &mut dyn FnMut(&Path)) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() { walk(&path, found) } else { found(&path) }
    }
}

/// The program's own code: of the root package and of the crates, without tests and benches.
fn sources() -> Vec<String> {
    let all = files("src", ".rs").into_iter().chain(files("crates", ".rs"));
    all.filter(|path| path.starts_with("src/") || path.split('/').nth(2) == Some("src")).collect()
}

/// Every Rust file of the repository.
fn rust_files() -> Vec<String> {
    ["src", "crates", "tests", "benches", "examples"].iter().flat_map(|folder| files(folder, ".rs")).collect()
}

fn documents() -> Vec<String> {
    let top = fs::read_dir(root()).into_iter().flatten().flatten();
    let names = top.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| name.ends_with(".md"));
    let below = ["docs", "crates", "oracle", "src", "peers", "examples"].iter().flat_map(|folder| files(folder, ".md"));
    names.chain(below).collect()
}

/// Fails with all violations at once.
#[track_caller]
fn expect_none(rule: &str, violations: impl IntoIterator<Item = String>) {
    let violations: Vec<String> = violations.into_iter().collect();
    assert!(violations.is_empty(), "{rule}:\n  {}", violations.join("\n  "));
}

// --- reading Rust -----------------------------------------------------------------------------------------------

/// A file's text with comments, strings and character literals blanked out: what remains is code, line by line.
fn code_of(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = String::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let rest = text.get(at..).unwrap_or_default();
        let length = literal_length(rest, at > 0 && is_word(bytes[at - 1]));
        if length == 0 {
            code.push(if bytes[at].is_ascii() { bytes[at] as char } else { '_' });
            at += 1;
            continue;
        }
        let blank = |byte: u8| if byte == b'\n' { '\n' } else { ' ' };
        code.extend(bytes[at..at + length].iter().map(|&byte| blank(byte)));
        at += length;
    }
    code
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii()
}

/// Bytes of the comment or literal that `rest` begins with, 0 if it begins with code.
fn literal_length(rest: &str, after_word: bool) -> usize {
    let bytes = rest.as_bytes();
    match bytes.first().copied().unwrap_or_default() {
        b'/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
        b'/' if rest.starts_with("/*") => block_comment_length(bytes),
        b'"' => quoted_length(bytes, b'"'),
        b'\'' => char_length(rest),
        b'r' | b'b' if !after_word => {
            let prefix = bytes.iter().take_while(|byte| matches!(byte, b'r' | b'b')).count();
            let hashes = bytes[prefix..].iter().take_while(|&&byte| byte == b'#').count();
            match bytes.get(prefix + hashes) {
                Some(b'"') if rest[..prefix].contains('r') => {
                    let close = format!("\"{}", "#".repeat(hashes));
                    let body = prefix + hashes + 1;
                    rest[body..].find(&close).map_or(rest.len(), |end| body + end + close.len())
                }
                Some(b'"') if hashes == 0 => prefix + quoted_length(&bytes[prefix..], b'"'),
                Some(b'\'') if hashes == 0 && prefix == 1 => 1 + char_length(&rest[1..]),
                _ => 0,
            }
        }
        _ => 0,
    }
}

fn block_comment_length(bytes: &[u8]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at + 1 < bytes.len() {
        match &bytes[at..at + 2] {
            b"/*" => (depth, at) = (depth + 1, at + 2),
            b"*/" => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    bytes.len()
}

fn quoted_length(bytes: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < bytes.len() && bytes[at] != quote {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

/// A character literal; a lifetime is code.
fn char_length(rest: &str) -> usize {
    let mut letters = rest.char_indices().skip(1);
    match (letters.next(), letters.next()) {
        (Some((_, '\\')), _) => quoted_length(rest.as_bytes(), b'\''),
        (Some(_), Some((end, '\''))) => end + 1,
        _ => 0,
    }
}

/// The first identifiers after every `prefix` in some code, groups in braces opened: `crate::{a::b, c}` gives a and c.
fn heads_after(code: &str, prefix: &str) -> Vec<String> {
    let boundary = |at: usize| at == 0 || !(is_word(code.as_bytes()[at - 1]) || code.as_bytes()[at - 1] == b'$');
    let starts = code.match_indices(prefix).map(|(at, _)| at).filter(|&at| boundary(at));
    starts.flat_map(|at| heads(&code[at + prefix.len()..])).collect()
}

fn heads(rest: &str) -> Vec<String> {
    let Some(group) = rest.strip_prefix('{') else {
        return vec![word(rest).to_owned()];
    };
    let (mut depth, mut fresh, mut found) = (0, true, Vec::new());
    for (at, letter) in group.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => fresh = true,
            _ if fresh && !letter.is_whitespace() => {
                found.push(word(&group[at..]).to_owned());
                fresh = false;
            }
            _ => {}
        }
    }
    found
}

/// The identifier that `rest` begins with.
fn word(rest: &str) -> &str {
    let end = rest.bytes().position(|byte| !is_word(byte)).unwrap_or(rest.len());
    &rest[..end]
}

/// Every function of some code: its name, its first line (from 1) and its number of lines.
fn functions(code: &str) -> Vec<(String, usize, usize)> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        let name = word(&code[at + 3..]);
        if name.is_empty() || (at > 0 && is_word(code.as_bytes()[at - 1])) {
            continue;
        }
        let body = body_start(&code[at..]);
        let (mut depth, mut end) = (0usize, at + body);
        for (offset, byte) in code[at + body..].bytes().enumerate() {
            match byte {
                b'{' => depth += 1,
                b'}' => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                end = at + body + offset;
                break;
            }
        }
        let line = code[..at].matches('\n').count() + 1;
        found.push((name.to_owned(), line, code[at..end].matches('\n').count() + 1));
    }
    found
}

/// Where a function's body begins, or its declaration ends; an array's type in the signature has a semicolon too.
fn body_start(declaration: &str) -> usize {
    let mut depth = 0usize;
    let ends = |byte: u8| {
        match byte {
            b'[' | b'(' => depth += 1,
            b']' | b')' => depth -= 1,
            _ => {}
        }
        depth == 0 && matches!(byte, b'{' | b';')
    };
    declaration.bytes().position(ends).unwrap_or(0)
}

#[test]
fn the_reader_tells_code_from_text() {
    let text =
        "a(\"x // y\\\"\"); // crate::no\n/* { /* */ { */ b('{', '\\'', r#\"\"{\"#, b\"{\", b'{'); fn f<'a>() {}";
    let code = code_of(text);
    assert_eq!(code.split_whitespace().collect::<String>(), "a();b(,,,,);fnf<'a>(){}");
    assert_eq!(code.len(), text.len());
    let code = "use crate::{a::{b, c}, d}; crate::e::f(); $crate::g; pub(crate) x; mycrate::h";
    assert_eq!(heads_after(code, "crate::"), ["a", "d", "e"]);
    let code = "trait T { fn a(); }\nfn b(x: [u8; 2]) {\n if x {\n }\n}\nlet f: fn(u8) = c;";
    assert_eq!(functions(code), [("a".to_owned(), 1, 1), ("b".to_owned(), 2, 4)]);
}

// --- who knows whom ---------------------------------------------------------------------------------------------

/// The module of `src/` that a file belongs to; none for `lib.rs` and `main.rs`, which name everything.
fn module_of(path: &str) -> Option<&str> {
    let name = path.strip_prefix("src/")?.split('/').next()?;
    Some(name.strip_suffix(".rs").unwrap_or(name)).filter(|name| !matches!(*name, "lib" | "main"))
}

fn allowed() -> BTreeMap<&'static str, BTreeSet<&'static str>> {
    MAY_IMPORT.iter().map(|(module, others)| (*module, others.iter().copied().collect())).collect()
}

#[test]
fn imports_go_one_way() {
    let allowed = allowed();
    let mut violations = Vec::new();
    for path in files("src", ".rs") {
        let Some(module) = module_of(&path) else { continue };
        let Some(others) = allowed.get(module) else {
            violations.push(format!("{path}: say in tidy.rs what the module `{module}` may import"));
            continue;
        };
        let code = code_of(&read(&path));
        for head in heads_after(&code, "crate::") {
            if head != module && !others.contains(head.as_str()) {
                violations.push(format!("{path}: `{module}` must not import `{head}`"));
            }
        }
        if climbs_out(&path, &code) {
            violations.push(format!("{path}: `super` leads out of the module; write `crate::`"));
        }
    }
    expect_none("modules import only what they may know", violations);
}

/// No module may import one that imports it, directly or through others.
#[test]
fn no_imports_run_in_a_circle() {
    let allowed = allowed();
    let reached = |module: &'static str| {
        let (mut found, mut open) = (BTreeSet::new(), vec![module]);
        while let Some(next) = open.pop() {
            open.extend(allowed[next].iter().filter(|other| found.insert(**other)));
        }
        found
    };
    let circles = allowed.keys().filter(|module| reached(module).contains(**module));
    expect_none("imports do not come back", circles.map(|module| format!("`{module}` reaches itself")));
}

/// Whether a chain of `super::` reaches the crate's root, where the imports above would not see it.
fn climbs_out(path: &str, code: &str) -> bool {
    let names = path.split('/').count() - 2;
    let depth = if path.ends_with("/mod.rs") { names - 1 } else { names };
    let (outer, inner) = code.split_at(code.find("#[cfg(test)]").unwrap_or(code.len()));
    outer.contains(&"super::".repeat(depth + 1)) || inner.contains(&"super::".repeat(depth + 2))
}

#[test]
fn the_table_of_imports_names_the_modules_there_are() {
    let listed: BTreeSet<String> = MAY_IMPORT.iter().map(|(module, _)| (*module).to_owned()).collect();
    let declared = code_of(&read("src/lib.rs"));
    let declared: BTreeSet<String> =
        declared.match_indices("mod ").map(|(at, _)| word(&declared[at + 4..]).to_owned()).collect();
    assert_eq!(listed, declared);
}

/// `config` joins the sections of a recipe; of the modules they belong to it may know the sections' types alone.
#[test]
fn config_reads_only_configs() {
    let modules = &allowed()["config"];
    let mut violations = Vec::new();
    for path in files("src/config", ".rs") {
        let code = code_of(&read(&path));
        for module in modules.iter().filter(|module| **module != "limits") {
            let types = public_types(&read(&format!("src/{module}/config.rs")));
            let used = heads_after(&code, &format!("{module}::")).into_iter();
            let strangers = used.filter(|name| !types.contains(name));
            violations.extend(strangers.map(|name| format!("{path}: {module}::{name} is not of {module}/config.rs")));
        }
    }
    expect_none("config knows only the sections' types", violations);
}

fn public_types(text: &str) -> BTreeSet<String> {
    let code = code_of(text);
    let after = |keyword: &str| heads_after(&code, keyword);
    after("pub struct ").into_iter().chain(after("pub enum ")).collect()
}

/// What ranks are is known to `launch` alone; tests inside of modules may make worlds.
#[test]
fn nothing_but_launch_names_threads() {
    let product = files("src", ".rs").into_iter().filter(|path| !path.starts_with("src/launch/"));
    let names = |path: &String| {
        let code = code_of(&read(path));
        code.split("#[cfg(test)]").next().is_some_and(|code| code.contains("threads::"))
    };
    expect_none("threads are named in launch alone", product.filter(names));
}

#[test]
fn the_crates_do_not_know_each_other() {
    let knows = |folder: &str, stranger: &str| {
        let all = files(folder, ".rs").into_iter().chain(files(folder, "Cargo.toml"));
        all.filter(|path| read(path).contains(stranger)).map(|path| format!("{path}: {stranger}")).collect::<Vec<_>>()
    };
    let strangers = [
        ("crates/comm", ["guildhall_tensor", "guildhall-tensor"]),
        ("crates/tensor", ["guildhall_comm", "guildhall-comm"]),
    ];
    let found = strangers.iter().flat_map(|(folder, names)| names.iter().flat_map(|name| knows(folder, name)));
    expect_none("comm knows no tensors and tensor knows one rank", found);
}

/// The rows of ARCHITECTURE.md's code map: module, and the modules it may import.
#[test]
fn architecture_has_the_same_table() {
    let text = read("ARCHITECTURE.md");
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `src/"));
    let told: BTreeMap<String, BTreeSet<String>> = rows
        .map(|row| {
            let name = row.split(['/', '.', '`']).next().unwrap_or_default().to_owned();
            let last = row.trim_end_matches([' ', '|']).rsplit('|').next().unwrap_or_default();
            let names = last.split(',').map(|name| name.trim().trim_matches('`').to_owned());
            (name, names.filter(|name| name != "nothing").collect())
        })
        .collect();
    let held = allowed().into_iter().map(|(module, others)| {
        (module.to_owned(), others.into_iter().map(str::to_owned).collect::<BTreeSet<String>>())
    });
    assert_eq!(told, held.collect());
}

// --- what files contain -----------------------------------------------------------------------------------------

#[test]
fn the_root_package_forbids_unsafe_code() {
    let without = ["src/lib.rs", "src/main.rs"].into_iter().filter(|path| {
        let code = code_of(&read(path));
        !code.contains("#![forbid(unsafe_code)]")
    });
    expect_none("all `unsafe` is in the crates", without.map(str::to_owned));
}

/// What a family means is said once; all else reads the blueprint.
#[test]
fn families_are_read_in_one_place() {
    const MAY_NAME: &[&str] = &["src/model/config.rs", "src/model/blueprint/families.rs"];
    let names = |path: &String| code_of(&read(path)).contains("Family::");
    let readers = files("src", ".rs").into_iter().filter(names);
    let strangers: Vec<String> = readers.filter(|path| !MAY_NAME.contains(&path.as_str())).collect();
    expect_none("only a blueprint reads the family", strangers);
    let code = code_of(&read(MAY_NAME[0]));
    let variants = code.split_once("pub enum Family {").and_then(|(_, rest)| rest.split_once('}'));
    let variants = variants.map_or(0, |(body, _)| body.matches(',').count());
    assert_eq!(guildhall::model::Family::ALL.len(), variants, "Family::ALL has all families");
    // A wildcard would give a new family the parts of another.
    let code = code_of(&read(MAY_NAME[1]));
    let (_, body) = code.split_once("match model.family {").expect("one match on the family");
    let arms = body.split_once("\n        }").expect("the end of the match").0;
    let wild = arms.lines().any(|line| line.trim_start().starts_with("_ "));
    assert!(!wild && code.matches("match model.family").count() == 1, "the match on the family is exhaustive");
}

/// Ops are above the kernel boundary: they know tensors, and no elements.
#[test]
fn ops_speak_kernels() {
    let reaches = |path: &String| {
        let code = code_of(&read(path));
        [".f32s", ".bf16s", ".u32s", "for_rows"].iter().any(|word| code.contains(word))
    };
    let above = files("crates/tensor/src/ops", ".rs").into_iter();
    expect_none("loops over elements are in crates/tensor/src/cpu", above.filter(reaches));
}

#[test]
fn no_file_holds_what_none_should() {
    let mut violations = Vec::new();
    for path in rust_files() {
        let code = code_of(&read(&path));
        let unfinished = ["todo!", "unimplemented!", "dbg!"];
        violations.extend(unfinished.iter().filter(|word| code.contains(*word)).map(|word| format!("{path}: {word}")));
    }
    for path in sources() {
        let code = code_of(&read(&path));
        let prints = ["println!", "eprintln!", "print!", "eprint!"];
        let found = prints.iter().find(|word| !heads_before(&code, word).is_empty());
        violations.extend(found.map(|word| format!("{path}: {word}; commands have `say` and `print`")));
        let reads = code.contains("env::var");
        let may = MAY_READ_ENVIRONMENT.contains(&path.as_str());
        if reads != may {
            let wrong = if reads { "reads the environment" } else { "no longer reads the environment: drop it here" };
            violations.push(format!("{path}: {wrong}"));
        }
    }
    expect_none("forbidden contents", violations);
}

/// Places where a macro is called by exactly this name.
fn heads_before(code: &str, name: &str) -> Vec<usize> {
    let places = code.match_indices(name).map(|(at, _)| at);
    places.filter(|&at| at == 0 || !is_word(code.as_bytes()[at - 1])).collect()
}

#[test]
fn every_file_says_what_it_is() {
    let silent = rust_files().into_iter().filter(|path| !read(path).starts_with("//!"));
    expect_none("a file begins with //!", silent);
}

#[test]
fn files_and_functions_are_of_readable_size() {
    let (mut files, mut all) = (BTreeSet::new(), BTreeSet::new());
    let mut violations = Vec::new();
    for path in sources() {
        let text = read(&path);
        let lines = text.lines().count();
        if lines > FILE_LINES_MAX {
            files.insert(path.clone());
            if !LONG_FILES.contains(&path.as_str()) {
                violations.push(format!("{path}: {lines} lines, at most {FILE_LINES_MAX}"));
            }
        }
        for (name, line, lines) in functions(&code_of(&text)) {
            let key = format!("{path}: {name}");
            if lines > FUNCTION_LINES_MAX {
                if !LONG_FUNCTIONS.contains(&key.as_str()) {
                    violations.push(format!("{path}:{line}: {name} has {lines} lines, at most {FUNCTION_LINES_MAX}"));
                }
                all.insert(key);
            }
        }
    }
    let idle_files = LONG_FILES.iter().filter(|path| !files.contains(**path));
    let idle_functions = LONG_FUNCTIONS.iter().filter(|key| !all.contains(**key));
    violations.extend(idle_files.chain(idle_functions).map(|key| format!("{key}: no longer long, drop it here")));
    expect_none("files and functions one can take in", violations);
}

/// The structs, enums, traits and aliases that some code declares. A `type` within an `impl` or a trait is no alias.
fn declared_types(code: &str) -> Vec<String> {
    let name = |line: &str| {
        let nested = line.starts_with(' ');
        let mut words = line.split_whitespace().skip_while(|word| *word == "unsafe" || word.starts_with("pub"));
        let declares = match words.next()? {
            "struct" | "enum" | "trait" => true,
            "type" => !nested,
            _ => false,
        };
        declares.then(|| words.next().map(|rest| word(rest).to_owned()))?
    };
    code.lines().filter_map(name).filter(|name| !name.is_empty()).collect()
}

#[test]
fn a_declaration_is_known_by_its_line() {
    let code =
        "pub(super) struct A<T>;\n    enum B {\ntype C = A;\n    type D = A;\nlet e: A;\npub unsafe trait F {}\n";
    assert_eq!(declared_types(code), ["A", "B", "C", "F"]);
}

#[test]
fn each_type_has_a_name_of_its_own() {
    let mut declared = BTreeMap::<String, Vec<String>>::new();
    for path in sources() {
        for name in declared_types(&code_of(&read(&path))) {
            declared.entry(name).or_default().push(path.clone());
        }
    }
    let is_shared = |name: &str| declared.get(name).is_some_and(|paths| paths.len() > 1);
    let idle = SHARED_TYPE_NAMES.iter().filter(|(name, _)| !is_shared(name));
    let idle = idle.map(|(name, _)| format!("{name}: no longer shared, drop it here"));
    let may = |name: &str| SHARED_TYPE_NAMES.iter().any(|(shared, _)| *shared == name);
    let stray = declared.iter().filter(|(name, _)| is_shared(name) && !may(name));
    let stray = stray.map(|(name, paths)| format!("{name}: {}", paths.join(", ")));
    expect_none("a type's name is declared once in the workspace", stray.chain(idle));
}

#[test]
fn no_code_is_commented_out() {
    let mut violations = Vec::new();
    for path in rust_files() {
        for (number, line) in read(&path).lines().enumerate() {
            let comment = line.trim().strip_prefix("// ").unwrap_or_default();
            if looks_like_code(comment) {
                violations.push(format!("{path}:{}: {comment}", number + 1));
            }
        }
    }
    expect_none("code is deleted, not commented out", violations);
}

/// Sentences end in letters or full stops; statements do not.
fn looks_like_code(comment: &str) -> bool {
    let statement = comment.ends_with(';') && (comment.contains('(') || comment.contains(" = "));
    let opens = comment.ends_with('{') || comment.starts_with("} ") || comment == "}";
    let declares = ["use ", "pub fn ", "fn ", "let mut ", "#["].iter().any(|word| comment.starts_with(word));
    statement || opens || (declares && comment.ends_with([';', '{', ',', ']']))
}

#[test]
fn the_heuristic_knows_code_from_sentences() {
    for code in ["let x = f(y);", "if x {", "}", "} else {", "use std::fs;", "#[test]", "f(x);"] {
        assert!(looks_like_code(code), "{code}");
    }
    for sentence in ["Safe: f(x) never fails.", "use it with care", "one, two; (three)", "a block {x} of B"] {
        assert!(!looks_like_code(sentence), "{sentence}");
    }
}

// --- documents --------------------------------------------------------------------------------------------------

/// The lines of a document outside fenced blocks, with inline code blanked out.
fn prose(text: &str) -> Vec<String> {
    let mut fenced = false;
    let mut lines = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            let parts = line.split('`').enumerate();
            lines.push(parts.map(|(index, part)| if index % 2 == 0 { part } else { "" }).collect());
        }
    }
    lines
}

fn links(text: &str) -> Vec<String> {
    let target = |(at, _): (usize, &str), line: &str| line[at + 2..].split(')').next().map(str::to_owned);
    prose(text).iter().flat_map(|line| line.match_indices("](").filter_map(|found| target(found, line))).collect()
}

/// A heading as a link names it: lower case, spaces as hyphens, other signs left out.
fn anchor(heading: &str) -> String {
    let kept = heading.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
    kept.chars().filter(|letter| letter.is_alphanumeric() || matches!(letter, '-' | '_')).collect()
}

#[test]
fn links_lead_somewhere() {
    let mut violations = Vec::new();
    for path in documents() {
        let folder = Path::new(&path).parent().map(Path::to_owned).unwrap_or_default();
        for link in links(&read(&path)) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (file, section) = link.split_once('#').unwrap_or((&link, ""));
            let target = if file.is_empty() { PathBuf::from(&path) } else { folder.join(file) };
            let full = root().join(&target);
            if !full.exists() {
                violations.push(format!("{path}: {link} does not exist"));
            } else if !section.is_empty() {
                let text = fs::read_to_string(&full).unwrap_or_default();
                let found = text.lines().any(|line| line.starts_with('#') && anchor(line) == section);
                violations.extend((!found).then(|| format!("{path}: {link} names no heading")));
            }
        }
    }
    expect_none("relative links", violations);
}

/// The contents of the fenced blocks of one language.
fn blocks(text: &str, language: &str) -> Vec<String> {
    let open = format!("```{language}\n");
    let after = text.split(&open).skip(1);
    after.filter_map(|rest| rest.split("\n```").next()).map(|block| format!("{block}\n")).collect()
}

#[test]
fn the_readme_shows_the_two_commands_and_ci_runs_the_tests_so() {
    let readme = read("README.md");
    for command in [RUN_COMMAND, TEST_COMMAND] {
        assert!(readme.lines().any(|line| line.trim() == command), "README.md has no line `{command}`");
    }
    let ci = read(".ci/run");
    assert!(ci.lines().any(|line| line.trim_end().ends_with(TEST_COMMAND)), ".ci/run has no line `{TEST_COMMAND}`");
}

/// One row of a table in docs/configuration.md: `section.key`, and what stands under "default".
fn documented_keys() -> BTreeMap<String, String> {
    let text = read("docs/configuration.md");
    let (mut section, mut keys) = (String::new(), BTreeMap::new());
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            let name = heading.trim_matches('`').trim_start_matches('[').trim_end_matches(']');
            section = if heading.contains('[') { name.to_owned() } else { String::new() };
        }
        let cells: Vec<&str> = line.split(" | ").collect();
        let key = cells[0].strip_prefix("| `").and_then(|key| key.strip_suffix('`'));
        if let (Some(key), false, Some(default)) = (key, section.is_empty(), cells.get(2)) {
            keys.insert(format!("{section}.{key}"), default.trim().to_owned());
        }
    }
    keys
}

/// Every field of the sections' structs as `section.key`, read from their sources.
fn declared_keys() -> BTreeSet<String> {
    let sections = [
        ("run", "config/training", "Run"),
        ("train", "config/training", "Training"),
        ("parallel", "parallel/config", "Config"),
        ("memory", "memory/config", "Config"),
        ("model", "model/config", "Config"),
        ("moe", "moe/config", "Config"),
        ("lora", "lora/config", "Config"),
        ("data", "data/config", "Config"),
        ("metrics", "metrics/config", "Config"),
    ];
    let keys = sections.into_iter().flat_map(|(section, file, name)| {
        let code = code_of(&read(&format!("src/{file}.rs")));
        let start = code.find(&format!("pub struct {name} {{")).expect("the section's struct is in that file");
        let body = code[start..].split('}').next().unwrap_or_default().to_owned();
        let fields = body.lines().filter_map(|line| line.trim().strip_prefix("pub ")?.split_once(": "));
        fields.map(|(field, _)| format!("{section}.{field}")).filter(|key| !key.contains(' ')).collect::<Vec<_>>()
    });
    keys.chain(gate_keys().into_keys()).collect()
}

/// The keys of all gates as `moe.gate.key`, with their defaults.
fn gate_keys() -> BTreeMap<String, String> {
    let of = |kind: &GateKind| match toml::Value::try_from(GateChoice::from(*kind)).expect("a gate is TOML") {
        toml::Value::Table(keys) => keys,
        _ => toml::Table::new(),
    };
    let keys = GateKind::ALL.iter().flat_map(of).filter(|(key, _)| key != "kind");
    keys.map(|(key, value)| (format!("moe.gate.{key}"), value.to_string())).collect()
}

#[test]
fn every_key_is_documented_and_no_other() {
    let (documented, declared) = (documented_keys(), declared_keys());
    let unknown = documented.keys().filter(|key| !declared.contains(*key)).map(|key| format!("{key}: no such key"));
    let missing = declared.iter().filter(|key| !documented.contains_key(*key)).map(|key| format!("{key}: missing"));
    expect_none("docs/configuration.md", unknown.chain(missing));
}

/// The README's recipe for one's own files is loaded as it stands, and every default that docs/configuration.md
/// gives as a value is what the program fills in for it.
#[test]
fn documented_recipes_load_and_documented_defaults_are_true() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("recipe.toml");
    for recipe in blocks(&read("README.md"), "toml") {
        fs::write(&path, recipe).expect("a recipe is written");
        let loaded = guildhall::config::load(&path, &[], None).unwrap_or_else(|problems| panic!("README: {problems}"));
        assert_eq!(loaded.notices, Vec::<String>::new(), "README");
    }
    let least = "[train]\nsteps = 9\nbatch_tokens = 64\nlr = 1e-3\n[model]\nvocab = 300\nd_model = 32\nlayers = 2\n\
                 heads = 2\nseq = 32\n[moe]\nexperts = 4\n[lora]\nrank = 8\n[data]\nsources = [\"text\"]\n";
    fs::write(&path, least).expect("a recipe is written");
    let loaded = guildhall::config::load(&path, &[], None).unwrap_or_else(|problems| panic!("{problems}"));
    let resolved: toml::Table = loaded.config.to_toml().parse().expect("a resolved recipe is TOML");
    let mut violations = Vec::new();
    for (key, default) in documented_keys() {
        let Some(told) = default.strip_prefix('`').and_then(|told| told.strip_suffix('`')) else { continue };
        let (section, name) = key.split_once('.').expect("keys have sections");
        let of_gates = gate_keys().remove(&key);
        let held = of_gates.or_else(|| resolved[section].get(name).map(ToString::to_string));
        let told = told.parse::<toml::Value>().map(|told| told.to_string());
        if held.as_deref() != told.as_deref().ok() {
            violations.push(format!("{key}: documented {told:?}, filled in {held:?}"));
        }
    }
    expect_none("defaults", violations);
}

// --- additions --------------------------------------------------------------------------------------------------

/// Ops that no test of the crate calls, with their reasons.
const OPS_TESTED_ELSEWHERE: &[(&str, &str)] =
    &[("gather_rows_in_part", "its backward sends: tests/it/duplicates.rs and tests/it/adjoint.rs")];

/// Ops that take no part in the comparison of devices, with their reasons.
const OPS_COMPARED_ELSEWHERE: &[(&str, &str)] = &[
    ("embed_part", "of a tensor group: tests/it/plan.rs compares whole steps"),
    ("gather_rows_in_part", "likewise"),
    ("sliced_linear_cross_entropy", "likewise"),
    ("logits", "of generation, which is not planned"),
];

/// The public methods of `Var` in the ops' files.
fn ops() -> Vec<String> {
    let of_file = |path: String| {
        let code = code_of(&read(&path));
        let of_var = code.split("\nimpl Var {").skip(1).filter_map(|rest| rest.split("\n}").next());
        of_var.flat_map(|body| heads_after(body, "pub fn ")).collect::<Vec<_>>()
    };
    files("crates/tensor/src/ops", ".rs").into_iter().flat_map(of_file).collect()
}

#[test]
fn every_op_is_tested() {
    const SIZES: &str = "crates/tensor/tests/sizes.rs";
    let ops = ops();
    assert!(ops.len() > 30, "the ops are found: {ops:?}");
    let tests: Vec<String> = files("crates/tensor/tests", ".rs").into_iter().filter(|path| path != SIZES).collect();
    let tests: String = tests.iter().map(|path| code_of(&read(path))).collect();
    let mut violations = Vec::new();
    for (code, place, exceptions) in [
        (tests, "crates/tensor/tests/suite/mod.rs", OPS_TESTED_ELSEWHERE),
        (code_of(&read(SIZES)), SIZES, OPS_COMPARED_ELSEWHERE),
    ] {
        for op in &ops {
            let is_called = code.contains(&format!(".{op}(")) || code.contains(&format!("Var::{op}("));
            match (is_called, exceptions.iter().any(|(name, _)| name == op)) {
                (false, false) => violations.push(format!("{op} is not called in {place}")),
                (true, true) => violations.push(format!("{op} is called in {place}: drop it here")),
                _ => {}
            }
        }
    }
    expect_none("every op is held against a loop, and its sizes against the host", violations);
}

/// The lines of a document under a heading, up to the next of its level.
fn section<'a>(text: &'a str, heading: &str) -> &'a str {
    let (_, rest) = text.split_once(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("no {heading}"));
    rest.split("\n## ").next().unwrap_or_default()
}

#[test]
fn every_gate_is_documented() {
    let (gates, keys) = (read("docs/gates.md"), read("docs/configuration.md"));
    let defined = section(&gates, "## The gates");
    let named = section(&keys, "## `[moe]`").lines().find(|line| line.starts_with("| `gate` |")).expect("the key");
    let mut violations = Vec::new();
    for name in GateKind::ALL.iter().map(|kind| kind.name()) {
        if !defined.contains(&format!("\n| `{name}` |")) {
            violations.push(format!("{name}: no row in docs/gates.md under \"The gates\""));
        }
        if !named.contains(&format!("`{name}`")) {
            violations.push(format!("{name}: not in the row of `gate` in docs/configuration.md"));
        }
    }
    expect_none("gates have definitions", violations);
}

#[test]
fn every_family_is_documented() {
    let keys = read("docs/configuration.md");
    let row = section(&keys, "## `[model]`").lines().find(|line| line.starts_with("| `family` |")).expect("the key");
    let names = guildhall::model::Family::ALL.map(guildhall::model::Family::name).into_iter();
    let missing = names.filter(|name| !row.contains(&format!("`{name}`")));
    expect_none("the row of `family` in docs/configuration.md names all", missing.map(str::to_owned));
}

const EXTENDING: &str = "docs/extending.md";

/// The fenced blocks of a document: the nearest line of text above, the words behind the fence, the contents.
fn fenced(text: &str) -> Vec<[String; 3]> {
    let (mut found, mut above) = (Vec::new(), String::new());
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(words) = line.trim_start().strip_prefix("```") {
            let body: Vec<&str> = lines.by_ref().take_while(|line| line.trim_start() != "```").collect();
            found.push([above.clone(), words.to_owned(), body.join("\n")]);
        } else if !line.trim().is_empty() {
            line.clone_into(&mut above);
        }
    }
    found
}

/// Code on the page is a documentation test, or stands so in the file that the line above it names.
#[test]
fn quotations_are_of_their_files() {
    let text = read(EXTENDING);
    let (mut quoted, mut compiled, mut violations) = (0, 0, Vec::new());
    for [above, words, body] in fenced(&text) {
        match words.as_str() {
            "rust" => compiled += 1,
            "text" => {}
            "rust,ignore" | "cuda" => {
                quoted += 1;
                let path = links(&above).first().and_then(|link| link.strip_prefix("../").map(str::to_owned));
                let Some(path) = path.filter(|path| root().join(path).is_file()) else {
                    violations.push(format!("no file is named above:\n{body}"));
                    continue;
                };
                if body.is_empty() || !format!("\n{}", read(&path)).contains(&format!("\n{body}\n")) {
                    violations.push(format!("{path} does not have:\n{body}"));
                }
            }
            words => violations.push(format!("a block of {words:?} is nothing that a test could hold:\n{body}")),
        }
    }
    assert!(quoted >= 15 && compiled >= 6, "{quoted} quotations, {compiled} examples");
    expect_none(EXTENDING, violations);
}

/// A test that the page names as `file::function` is there.
#[test]
fn tests_that_are_named_exist() {
    let text = read(EXTENDING);
    let outside: Vec<&str> = text.split("\n```").step_by(2).collect();
    let spans = outside.iter().flat_map(|part| part.split('`').skip(1).step_by(2));
    let named: Vec<(&str, &str)> = spans.filter_map(|span| span.split_once(".rs::")).collect();
    assert!(named.len() > 20, "the page names tests: {named:?}");
    let has = |(file, test): &&(&str, &str)| {
        let path = format!("{file}.rs");
        root().join(&path).is_file() && code_of(&read(&path)).contains(&format!("fn {test}("))
    };
    let missing = named.iter().filter(|named| !has(named));
    expect_none(EXTENDING, missing.map(|(file, test)| format!("{file}.rs has no test {test}")));
}
