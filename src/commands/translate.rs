//! `guildhall translate`: lines of one language become lines of another, by a checkpoint's encoder and decoder.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::sync::Mutex;

use super::decoding::{DecodeOptions, TextDecoder, check_beams, one_line};
use super::trained::Trained;
use super::{CommandFailure, print, say};
use crate::cli::TranslateArgs;
use crate::data::Tokenizer;
use crate::model::Translator;
use crate::train::Error;

/// InputLines whose end was cut off are named up to this many, and then counted.
const TOLD: u64 = 5;

pub(super) fn run(arguments: TranslateArgs) -> Result<(), CommandFailure> {
    check(&arguments)?;
    // One rank: a single line has no batch to spread.
    let trained = Trained::open(&arguments.checkpoint, &arguments.backend.with(&[]), Some(1))?;
    if trained.config.model.stack_layers().is_none() {
        return Err(CommandFailure::Request(anyhow::anyhow!(
            "{} holds a model of the family {:?}, which has one stack and reads no other text than it writes: continue a \
             text with `guildhall generate`",
            arguments.checkpoint.display(),
            trained.config.model.family.name()
        )));
    }
    let tags = [tag(&trained.tokenizer, "--from", &arguments.from)?, tag(&trained.tokenizer, "--to", &arguments.to)?];
    let lines = Mutex::new(InputLines::open(arguments.file.as_deref())?);
    let cut = trained.run(|model, mesh, rank| {
        let translator = Translator::new(model, &rank.device, mesh);
        let &TranslateArgs { beams, length_penalty, max_tokens, .. } = &arguments;
        let decoder = TextDecoder::new(&translator, &trained, DecodeOptions { beams, length_penalty, max_tokens });
        let work = LineTranslator { decoder, tags, longest: trained.config.model.row_lengths()[0] };
        // One rank runs this, once.
        let mut lines = lines.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        work.all(&mut lines)
    })?;
    let cut = cut?;
    if cut > TOLD {
        say(&format!("note: {cut} lines were longer than the model reads, and were translated from their beginning"));
    }
    Ok(())
}

fn check(arguments: &TranslateArgs) -> Result<(), CommandFailure> {
    let wrong = |text: String| Err(CommandFailure::Request(anyhow::anyhow!(text)));
    check_beams(arguments.beams)?;
    if !arguments.length_penalty.is_finite() {
        return wrong(format!("--length-penalty {}: use a number; 1 is usual", arguments.length_penalty));
    }
    if arguments.max_tokens == Some(0) {
        return wrong("--max-tokens 0: nothing could be written; use 1 or more".to_owned());
    }
    Ok(())
}

fn tag(tokenizer: &Tokenizer, option: &str, language: &str) -> Result<u32, CommandFailure> {
    tokenizer.tag(language).ok_or_else(|| {
        let tags = tokenizer.tags();
        let known = if tags.is_empty() { "no language".to_owned() } else { tags.join(", ") };
        CommandFailure::Request(anyhow::anyhow!(
            "{option} {language}: the checkpoint's tokenizer has no such tag; it has {known}"
        ))
    })
}

/// InputLines of a file or of standard input, as they come.
struct InputLines {
    name: String,
    reader: Box<dyn BufRead + Send>,
    number: u64,
}

impl InputLines {
    fn open(path: Option<&Path>) -> Result<InputLines, CommandFailure> {
        let (name, reader): (String, Box<dyn BufRead + Send>) = match path {
            None => ("standard input".to_owned(), Box::new(BufReader::new(io::stdin()))),
            Some(path) => {
                let name = path.display().to_string();
                let file = File::open(path);
                let file =
                    file.map_err(|error| CommandFailure::Request(anyhow::anyhow!("could not read {name}: {error}")))?;
                (name, Box::new(BufReader::new(file)))
            }
        };
        Ok(InputLines { name, reader, number: 0 })
    }

    fn next(&mut self) -> Result<Option<String>, CommandFailure> {
        let (mut bytes, name) = (Vec::new(), &self.name);
        let read = self.reader.read_until(b'\n', &mut bytes);
        let read = read.map_err(|error| CommandFailure::Request(anyhow::anyhow!("could not read {name}: {error}")))?;
        self.number += 1;
        if read == 0 {
            return Ok(None);
        }
        String::from_utf8(bytes).map(Some).map_err(|_| {
            let number = self.number;
            CommandFailure::Request(anyhow::anyhow!("{name}:{number}: not UTF-8 text: convert it to UTF-8"))
        })
    }
}

/// Translates line by line.
struct LineTranslator<'a> {
    decoder: TextDecoder<'a>,
    tags: [u32; 2],
    /// Tokens of a text that the encoder reads.
    longest: usize,
}

impl LineTranslator<'_> {
    /// Prints a line for each line, and returns how many were longer than the model reads.
    fn all(&self, lines: &mut InputLines) -> Result<Result<u64, CommandFailure>, Error> {
        let mut cut = 0;
        loop {
            let line = match lines.next() {
                Ok(Some(line)) => line,
                Ok(None) => return Ok(Ok(cut)),
                Err(failure) => return Ok(Err(failure)),
            };
            let (text, is_cut) = self.line(&line)?;
            cut += u64::from(is_cut);
            if is_cut && cut <= TOLD {
                let (name, number, longest) = (&lines.name, lines.number, self.longest);
                say(&format!(
                    "note: {name}:{number} is longer than the {longest} tokens that the model reads: only its beginning is translated"
                ));
            }
            if let Err(failure) = print(&format!("{text}\n")) {
                return Ok(Err(failure));
            }
        }
    }

    /// The translation, and whether the line was too long.
    fn line(&self, line: &str) -> Result<(String, bool), Error> {
        let line = one_line(line);
        if line.is_empty() {
            return Ok((String::new(), false));
        }
        let mut text = self.decoder.tokenizer.encode(&line)?;
        let room = self.longest.saturating_sub(2);
        let is_cut = text.len() > room;
        text.truncate(room);
        let source = [&[self.tags[0]], &text[..], &[self.decoder.end()]].concat();
        Ok((self.decoder.text(&source, self.tags[1])?, is_cut))
    }
}
