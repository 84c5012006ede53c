//! A whole file as one document, of whatever length.

use std::io::Read;
use std::ops::ControlFlow;
use std::str;

use super::{DocumentPart, Flow, Sink, cut_point};
use crate::data::error::Error;
use crate::data::sources::SourceFile;

/// Streams one file as one document; at no time is more than a part and a block in memory.
pub(super) fn read(
    file: &SourceFile,
    mut input: impl Read,
    part_bytes: usize,
    empty: &mut u64,
    sink: &mut Sink,
) -> Flow {
    let mut text = TextWindow::new(file, part_bytes);
    let mut sent = false;
    loop {
        let ended = text.fill(&mut input)?;
        // A cut is judged by the byte after it, which must have been read.
        while text.valid.saturating_sub(if ended { 0 } else { 1 }) > part_bytes {
            let valid = text.valid();
            let cut = cut_point(valid, part_bytes);
            if sink(DocumentPart { text: &valid[..cut], last: false, place: 1 })?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
            text.consume(cut);
            sent = true;
        }
        if ended {
            break;
        }
    }
    if text.valid().is_empty() && !sent {
        *empty += 1;
        return Ok(ControlFlow::Continue(()));
    }
    sink(DocumentPart { text: text.valid(), last: true, place: 1 })
}

/// The bytes of a plain file that have been read and not yet sent, of which a prefix is known to be UTF-8.
struct TextWindow<'a> {
    file: &'a SourceFile,
    block: usize,
    bytes: Vec<u8>,
    valid: usize,
    /// Bytes of the file before the window.
    consumed: u64,
    started: bool,
}

impl<'a> TextWindow<'a> {
    fn new(file: &'a SourceFile, part_bytes: usize) -> Self {
        let block = part_bytes + 8;
        Self { file, block, bytes: Vec::new(), valid: 0, consumed: 0, started: false }
    }

    /// Reads another block and checks it; true at the end of the file.
    fn fill(&mut self, input: &mut impl Read) -> Result<bool, Error> {
        let before = self.bytes.len();
        let wanted = self.block as u64;
        let read = input.by_ref().take(wanted).read_to_end(&mut self.bytes);
        let ended = (read.map_err(Error::io("read", &self.file.path))? as u64) < wanted;
        if !self.started {
            self.started = true;
            self.drop_byte_order_mark();
        }
        if !self.file.named
            && let Some(at) = self.bytes[before.min(self.bytes.len())..].iter().position(|&byte| byte == 0)
        {
            return Err(self.not_text(before + at, "NUL byte"));
        }
        match str::from_utf8(&self.bytes[self.valid..]) {
            Ok(_) => self.valid = self.bytes.len(),
            Err(error) => {
                self.valid += error.valid_up_to();
                if ended || error.error_len().is_some() {
                    return Err(self.not_text(self.valid, "invalid UTF-8"));
                }
            }
        }
        Ok(ended)
    }

    fn drop_byte_order_mark(&mut self) {
        if self.bytes.starts_with("\u{feff}".as_bytes()) {
            self.bytes.drain(..3);
            self.consumed += 3;
        }
    }

    fn valid(&self) -> &str {
        // Checked twice, at a hundredth of the cost of tokenising, because the unchecked view is unsafe.
        str::from_utf8(&self.bytes[..self.valid]).unwrap_or_default()
    }

    fn consume(&mut self, count: usize) {
        self.bytes.drain(..count);
        self.valid -= count;
        self.consumed += count as u64;
    }

    fn not_text(&self, at: usize, what: &'static str) -> Error {
        Error::NotText { path: self.file.path.clone(), byte: self.consumed + at as u64 + 1, what }
    }
}
