//! The real program in a folder of its own: a recipe so small that a run takes a fraction of a second, the text it
//! trains on, and ways to look at what the program left there.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::thread::{self, sleep, spawn};
use std::time::{Duration, Instant};
use std::{env, fs};

use rustix::fs::{CWD, RenameFlags};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_guildhall");
/// The folder of a run of the recipe as it is.
pub(crate) const RUN: &str = "runs/tiny";
pub(crate) const RECIPE: &str = "tiny.toml";
pub(crate) const TENSORS: [&str; 2] = ["model.safetensors", "optimizer.safetensors"];

const TEXT: &str = r#"
[train]
steps = 6
batch_tokens = 256
lr = 1e-2
eval_every = 3
eval_rows = 0
checkpoint_every = 2

[model]
vocab = 300
d_model = 16
layers = 2
heads = 2
seq = 32

[moe]
experts = 4
d_expert = 32

[data]
sources = ["corpus"]
held_out = 0.1
cache = "cache"
"#;

/// What no program takes here, however busy the machine: the longest takes a minute on two cores. Twice what ranks wait for each
/// other by default, so that one which waits can say for whom.
const LONGEST: Duration = Duration::from_secs(600);

const WORDS: &str = "the a one small old red cat bird hill rain tree sat saw fell on near over while and quiet green";

/// A temporary folder with a recipe and a corpus; the program runs in it.
pub(crate) struct Workshop {
    folder: TempDir,
}

/// A program that has ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Workshop {
    pub(crate) fn new() -> Workshop {
        let workshop = Workshop { folder: tempfile::tempdir().unwrap() };
        workshop.write(RECIPE, TEXT);
        for index in 0..40 {
            workshop.write(&format!("corpus/{index:02}.txt"), &sentences(index, 120));
        }
        workshop
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// The program with arguments separated by blanks; backtraces are asked for, so that none may come.
    pub(crate) fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(arguments.split_whitespace());
        self.prepared(command)
    }

    /// A shell's script, in which `$GUILDHALL` is the program.
    pub(crate) fn shell(&self, script: &str) -> Finished {
        ended(self.script(script))
    }

    fn script(&self, script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).env("GUILDHALL", PROGRAM);
        self.prepared(command)
    }

    fn prepared(&self, mut command: Command) -> Command {
        command.current_dir(self.folder.path()).env("TMPDIR", self.folder.path());
        command.env("RUST_BACKTRACE", "1");
        command
    }

    pub(crate) fn run(&self, arguments: &str) -> Finished {
        ended(self.command(arguments))
    }

    pub(crate) fn succeeds(&self, arguments: &str) -> Finished {
        let finished = self.run(arguments);
        assert_eq!(finished.code, Some(0), "{arguments}: {}", finished.err);
        assert!(!finished.err.contains("error:"), "{arguments}: {}", finished.err);
        finished
    }

    pub(crate) fn train(&self, options: &str) -> Finished {
        self.succeeds(&format!("train {RECIPE} {options}"))
    }

    /// The program must fail with `code` and one message that says all of `words`.
    pub(crate) fn fails(&self, arguments: &str, code: i32, words: &[&str]) {
        self.run(arguments).failed(code, words);
    }

    /// Starts the program and leaves it alone.
    pub(crate) fn start(&self, arguments: &str) -> Running {
        Running::of(self.command(arguments))
    }

    /// The same, but what it says on the way goes into a file.
    pub(crate) fn start_logged(&self, arguments: &str, log: &str) -> Running {
        let mut command = self.command(arguments);
        let log = fs::File::create(self.path(log)).unwrap();
        Running(Some(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).spawn().unwrap()))
    }

    /// Starts a shell's script and leaves it alone.
    pub(crate) fn start_shell(&self, script: &str) -> Running {
        Running::of(self.script(script))
    }

    /// Has a file stand where a run's checkpoints are until its log says `warning`.
    pub(crate) fn obstruct_checkpoints(&self, run: &str, log: &str, warning: &str) {
        let (checkpoints, other) = (self.path(run).join("checkpoints"), self.path(run).join("in-the-way"));
        fs::create_dir_all(&checkpoints).expect("a folder");
        fs::write(&other, "").expect("a file");
        // At once: a run takes many steps while files are created.
        let exchange = || rustix::fs::renameat_with(CWD, &checkpoints, CWD, &other, RenameFlags::EXCHANGE);
        exchange().expect("a file system that exchanges names: TMPDIR on one of this machine");
        wait_until("a warning", || self.read(log).contains(warning));
        exchange().expect("the same again");
        fs::remove_file(other).expect("a file");
    }

    /// The lines of a run's metrics, without a torn last one.
    pub(crate) fn metrics(&self, run: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// A field of every line of a run's metrics.
    pub(crate) fn series(&self, run: &str, field: &str) -> Vec<Value> {
        self.metrics(run).iter().map(|line| line[field].clone()).collect()
    }

    /// What a run's two MoE layers of four experts did in every step, and how often each two experts were chosen together
    /// over all steps: which lines say so depends on where a run was interrupted.
    pub(crate) fn routed(&self, run: &str) -> (Vec<Value>, [[u64; 6]; 2]) {
        let (mut steps, mut pairs) = (self.series(run, "moe"), [[0; 6]; 2]);
        for moe in &mut steps {
            for (layer, sums) in moe.as_array_mut().unwrap().iter_mut().zip(&mut pairs) {
                let told = layer.as_object_mut().unwrap().remove("co_activation").unwrap_or_default();
                let told = told.as_array().into_iter().flatten();
                sums.iter_mut().zip(told).for_each(|(sum, n)| *sum += n.as_u64().unwrap());
            }
        }
        (steps, pairs)
    }

    pub(crate) fn summary(&self, run: &str) -> Value {
        serde_json::from_str(&self.read(&format!("{run}/summary.json"))).unwrap()
    }

    pub(crate) fn checkpoint(&self, run: &str, step: u64) -> PathBuf {
        self.path(run).join(format!("checkpoints/step-{step:06}"))
    }

    /// The tensor files of a checkpoint.
    pub(crate) fn tensors(&self, run: &str, step: u64) -> Vec<Vec<u8>> {
        TENSORS.iter().map(|name| fs::read(self.checkpoint(run, step).join(name)).unwrap()).collect()
    }
}

impl Finished {
    /// Checks what holds of every failure: the exit code, one error that says all of `words`, and nothing but words
    /// for the user.
    pub(crate) fn failed(&self, code: i32, words: &[&str]) {
        let Finished { out, err, .. } = self;
        assert_eq!(self.code, Some(code), "{err}");
        assert_eq!(err.lines().filter(|line| line.starts_with("error:")).count(), 1, "{err}");
        assert_eq!(out, "", "a failure has no result");
        let message = &err[err.find("error:").unwrap()..];
        words.iter().for_each(|word| assert!(message.contains(word), "no {word:?} in: {message}"));
        ["panicked", "backtrace", "BACKTRACE", "Os {", "Error("]
            .iter()
            .for_each(|word| assert!(!err.contains(word), "{word} in: {err}"));
    }
}

/// Sends a signal by its name.
pub(crate) fn send_signal(name: &str, pid: &str) {
    assert!(Command::new("kill").args(["-s", name, pid]).status().unwrap().success());
}

/// A process and all that it has started, and what they have.
fn family(pid: &str) -> Vec<String> {
    let mut all = vec![pid.to_owned()];
    let mut next = 0;
    while let Some(parent) = all.get(next) {
        let threads = fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
        let children = threads.flat_map(|thread| fs::read_to_string(thread.path().join("children")));
        let children: Vec<String> =
            children.flat_map(|pids| pids.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).collect();
        all.extend(children);
        next += 1;
    }
    all
}

/// What hangs is killed with what it has started, and what it has said is told.
#[test]
fn a_program_that_hangs_is_killed() {
    let shop = Workshop::new();
    let hanging = shop.start_shell("echo begun; sleep 4321 & echo $! > child; wait");
    wait_until("a child", || fs::read_to_string(shop.path("child")).is_ok_and(|pid| pid.ends_with('\n')));
    let child = shop.read("child");
    let told = std::panic::catch_unwind(|| hanging.wait_for(Duration::from_millis(10))).expect_err("it hangs");
    let told = told.downcast_ref::<String>().expect("a message");
    assert!(told.contains("did not end in 10ms") && told.contains("begun"), "{told}");
    wait_until("the child's end", || !Path::new(&format!("/proc/{}", child.trim())).exists());
}

/// A program that runs; killed when forgotten.
pub(crate) struct Running(Option<Child>);

impl Running {
    pub(crate) fn is_running(&mut self) -> bool {
        self.0.as_mut().unwrap().try_wait().unwrap().is_none()
    }

    pub(crate) fn pid(&self) -> String {
        self.0.as_ref().unwrap().id().to_string()
    }

    pub(crate) fn signal(&self, name: &str) {
        send_signal(name, &self.pid());
    }

    fn of(mut command: Command) -> Running {
        Running(Some(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()))
    }

    /// When the program has ended, which it must within [`LONGEST`].
    pub(crate) fn wait(self) -> Finished {
        self.wait_for(LONGEST)
    }

    fn wait_for(mut self, longest: Duration) -> Finished {
        let child = self.0.take().unwrap();
        let pid = child.id().to_string();
        let (send, ended) = mpsc::channel();
        spawn(move || send.send(child.wait_with_output()));
        if let Ok(output) = ended.recv_timeout(longest) {
            return finished(output.unwrap());
        }
        let _ = Command::new("kill").args(["-s", "KILL"]).args(family(&pid)).status();
        let said = ended.recv_timeout(Duration::from_secs(5)).map(|output| finished(output.unwrap()));
        panic!("a program that did not end in {longest:?}: {said:?}");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What a program has said when it has ended.
pub(crate) fn ended(command: Command) -> Finished {
    Running::of(command).wait()
}

fn finished(output: Output) -> Finished {
    let text = |bytes| String::from_utf8(bytes).expect("the program writes UTF-8");
    Finished { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// Waits until something is so, a minute at most.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "waited too long for {what}");
        sleep(Duration::from_micros(200));
    }
}

/// Says why a test checks nothing here, past what captures a test's output. Where CI runs as root, all that tests need is
/// there: it fails.
pub(crate) fn skipped(why: &str) {
    let must_run = env::var("CI").is_ok_and(|ci| ci == "true") && rustix::process::geteuid().is_root();
    assert!(!must_run, "nothing is tested: {why}");
    let test = thread::current().name().unwrap_or_default().to_owned();
    writeln!(io::stderr(), "{test} tests nothing: {why}").expect("stderr");
}

/// Why a checkpoint's folder is not whole, by its manifest alone.
pub(crate) fn damage(folder: &Path) -> Option<String> {
    let text = match fs::read(folder.join("manifest.json")) {
        Ok(text) => text,
        Err(error) => return Some(format!("{}: {error}", folder.display())),
    };
    let manifest: Value = serde_json::from_slice(&text).unwrap();
    let files = manifest["files"].as_object().unwrap();
    let is_listed = |name: &&str| files.contains_key(*name) || files.contains_key(&format!("{name}.index.json"));
    assert!(TENSORS.iter().all(is_listed), "{manifest}");
    let differs = |(name, hash): &(&String, &Value)| {
        let bytes = fs::read(folder.join(name)).unwrap_or_default();
        hash.as_str() != Some(&hexadecimal(&Sha256::digest(bytes)))
    };
    files.iter().find(differs).map(|(name, _)| format!("{}/{name}", folder.display()))
}

/// Makes the checksums of a checkpoint fit what is in it now.
pub(crate) fn reseal(folder: &Path) {
    let path = folder.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (name, hash) in manifest["files"].as_object_mut().unwrap() {
        if let Ok(bytes) = fs::read(folder.join(name)) {
            *hash = hexadecimal(&Sha256::digest(bytes)).into();
        }
    }
    fs::write(path, sealed(manifest)).unwrap();
}

/// A manifest with the checksum that fits it.
pub(crate) fn sealed(mut manifest: Value) -> String {
    manifest["sha256"] = "".into();
    let digits = hexadecimal(&Sha256::digest(serde_json::to_string(&manifest).unwrap()));
    manifest["sha256"] = digits.into();
    manifest.to_string()
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Changes one byte of a file.
pub(crate) fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// By how much numbers of a step differ that are sums of another order: by ranks, or by kernels of another backend.
pub(crate) const ROUNDING: f64 = 1e-5;

/// Losses and gradient norms of a run.
pub(crate) fn numbers(shop: &Workshop, run: &str) -> Vec<f64> {
    let all = ["loss", "grad_norm"].map(|field| shop.series(run, field)).concat();
    all.iter().map(|number| number.as_f64().expect("a number")).collect()
}

#[track_caller]
pub(crate) fn assert_near(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    let is_near = got.iter().zip(want).all(|(got, want)| (got - want).abs() <= tolerance * want.abs());
    assert!(is_near && got.len() == want.len() && !got.is_empty(), "{what}: {got:?} instead of {want:?}");
}

/// Text of `count` words, another for every `seed`.
fn sentences(seed: u64, count: usize) -> String {
    let words: Vec<&str> = WORDS.split(' ').collect();
    let mut state = seed + 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        words[(state >> 33) as usize % words.len()]
    };
    (0..count).map(|_| next()).collect::<Vec<_>>().join(" ")
}
