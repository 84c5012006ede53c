//! What the targets share: an input that stands for a folder of files, and the property that each of them holds: whatever
//! the bytes are, the parser answers with a value or an error. It does not panic, hang, or take more memory than its limit.
//!
//! ```text
//! === config.json            each file begins with a line of its name
//! {"model_type": "llama"}
//! === model.safetensors      a header as text, and how many bytes of data follow it: the length before it is made to fit
//! {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
//! --- 8
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

const FILE: &[u8] = b"=== ";
const DATA: &[u8] = b"--- ";

/// No input makes more files, or more data of one.
const FILES_MAX: usize = 16;
const DATA_BYTES_MAX: usize = 64 << 10;

/// A folder in memory where there is one, removed when it is dropped.
///
/// # Panics
/// If none can be made.
pub fn scratch() -> TempDir {
    let memory = Path::new("/dev/shm");
    let place = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    tempfile::tempdir_in(place).expect("a folder for the files of an input")
}

/// Writes the files of an input into a new folder.
///
/// # Panics
/// If they cannot be written.
pub fn unpack(input: &[u8]) -> TempDir {
    let folder = scratch();
    for file in files(input).into_iter().take(FILES_MAX) {
        let end = file.iter().position(|&byte| byte == b'\n').unwrap_or(file.len());
        let (name, content) = (&file[..end], &file[(end + 1).min(file.len())..]);
        if let Some(path) = place(folder.path(), name) {
            // A file may have the name of a folder, or a folder the file's.
            let _ = fs::create_dir_all(path.parent().expect("a file of the folder"));
            let _ = fs::write(&path, if is_tensors(&path) { with_length(content) } else { content.to_vec() });
        }
    }
    folder
}

/// What is behind each mark at the beginning of a line.
fn files(input: &[u8]) -> Vec<&[u8]> {
    let is_mark = |at: usize| input[at..].starts_with(FILE) && (at == 0 || input[at - 1] == b'\n');
    let marks: Vec<usize> = (0..input.len()).filter(|&at| is_mark(at)).collect();
    let ends = marks.iter().skip(1).copied().chain([input.len()]);
    marks.iter().zip(ends).map(|(&from, to)| &input[from + FILE.len()..to]).collect()
}

/// Where a file is written; nowhere if its name leads out of the folder.
fn place(folder: &Path, name: &[u8]) -> Option<PathBuf> {
    let name = std::str::from_utf8(name).ok()?;
    let is_plain = |part: &str| {
        let is_word = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        !part.is_empty() && part.len() < 64 && !part.starts_with("..") && part.chars().all(is_word)
    };
    name.split('/').all(is_plain).then(|| folder.join(name))
}

fn is_tensors(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "safetensors")
}

/// A tensor file of a header in text. Content without a line of data stays as it is.
fn with_length(content: &[u8]) -> Vec<u8> {
    let Some(at) = content.windows(DATA.len()).rposition(|window| window == DATA) else { return content.to_vec() };
    let (header, count) = (&content[..at], &content[at + DATA.len()..]);
    let count: usize = std::str::from_utf8(count).ok().and_then(|count| count.trim().parse().ok()).unwrap_or(0);
    let data = (0..count.min(DATA_BYTES_MAX)).map(|at| (at % 61) as u8);
    (header.len() as u64).to_le_bytes().into_iter().chain(header.iter().copied()).chain(data).collect()
}

/// A target: what is done with an input.
#[macro_export]
macro_rules! target {
    (|$input:ident| $body:expr) => {
        libfuzzer_sys::fuzz_target!(init: $crate::catch_own_panics(), |$input: &[u8]| $body);
    };
}

/// Lets panics that the program itself catches pass: libFuzzer would end the process at them. One that nobody catches
/// still ends it.
pub fn catch_own_panics() {
    drop(std::panic::take_hook());
}
