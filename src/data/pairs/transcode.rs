//! Bytes of any encoding read as UTF-8.

use std::io::{self, BufRead, BufReader, Read};

use encoding_rs::{CoderResult, Decoder, Encoding, UTF_8};

/// Where an XML declaration names an encoding, it does so within this many bytes.
const DECLARATION_BYTES: usize = 256;

/// A reader of UTF-8 over one of another encoding. What cannot be decoded becomes U+FFFD.
pub(super) struct Transcoded<R> {
    input: BufReader<R>,
    decoder: Decoder,
    ended: bool,
}

impl<R: Read> Transcoded<R> {
    /// By the byte order mark, else the XML declaration, else UTF-8. An unknown name is returned as the error.
    pub(super) fn xml(input: R) -> Result<io::Result<Self>, String> {
        let mut input = BufReader::with_capacity(1 << 16, input);
        let start = match input.fill_buf() {
            Ok(start) => &start[..start.len().min(DECLARATION_BYTES)],
            Err(error) => return Ok(Err(error)),
        };
        let encoding = match declared(start) {
            Some(name) => Encoding::for_label(name.as_bytes()).ok_or(name)?,
            None => UTF_8,
        };
        // The decoder heeds a byte order mark before the encoding it is made for.
        Ok(Ok(Self { decoder: encoding.new_decoder(), input, ended: false }))
    }
}

/// The encoding that an XML declaration in an ASCII-like encoding names.
fn declared(start: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(start);
    let declaration = text.trim_start_matches('\u{feff}').strip_prefix("<?xml")?.split_once("?>")?.0;
    let value = declaration.split_once("encoding")?.1.trim_start().strip_prefix('=')?.trim_start();
    let quote = value.chars().next().filter(|quote| matches!(quote, '"' | '\''))?;
    Some(value[1..].split_once(quote)?.0.to_owned())
}

impl<R: Read> Read for Transcoded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // One character needs up to four bytes; readers ask for thousands.
        if buffer.len() < 4 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the buffer holds no character"));
        }
        loop {
            if self.ended {
                return Ok(0);
            }
            let bytes = self.input.fill_buf()?;
            let last = bytes.is_empty();
            let (result, read, written, _) = self.decoder.decode_to_utf8(bytes, buffer, last);
            self.input.consume(read);
            self.ended = last && result == CoderResult::InputEmpty;
            if written > 0 {
                return Ok(written);
            }
        }
    }
}
