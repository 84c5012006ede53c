//! Catalogues as translators edit them: entries of keywords with strings in the notation of C, and comments.
//!
//! Our own, because the parsers on crates.io know UTF-8 alone, cannot name the line of a mistake, and reserve as many
//! plural forms as a file asks for.

use std::path::Path;

use super::header::CatalogueHeader;
use super::{Catalogue, CatalogueEntry, decoded};
use crate::data::error::Error;
use crate::data::pairs::skips::SkipReason;

/// The largest number of a plural form.
const FORM_MAX: usize = 31;

/// Where the header's encoding is looked for.
const HEADER_BYTES: usize = 1 << 16;

pub(super) fn parse(bytes: &[u8], path: &Path) -> Result<Catalogue, Error> {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let encoding = CatalogueHeader::parse(&unquoted_header(bytes), path)?.encoding;
    let mut parser = PoParser::default();
    for (number, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
        let place = |message| Error::CatalogueLine { path: path.to_owned(), line: number as u64 + 1, message };
        let text = decoded(line, encoding);
        // A line that cannot be decoded spoils its entry alone.
        let spoils = text.is_err() && !line.trim_ascii_start().starts_with(b"#");
        let text = text.unwrap_or_else(|_| encoding.decode_without_bom_handling(line).0.into_owned());
        parser.line(text.trim()).map_err(place)?;
        parser.spoilt |= spoils;
    }
    parser.finish();
    let header = CatalogueHeader { encoding, ..CatalogueHeader::parse(parser.header.as_bytes(), path)? };
    Ok(Catalogue { header, entries: parser.entries })
}

/// The header's lines, good enough to find its encoding before there is one to read with.
fn unquoted_header(bytes: &[u8]) -> Vec<u8> {
    let start = String::from_utf8_lossy(&bytes[..bytes.len().min(HEADER_BYTES)]);
    let lines = start.lines().map(str::trim).filter_map(|line| line.strip_prefix('"')?.strip_suffix('"'));
    lines.map(|line| line.strip_suffix("\\n").unwrap_or(line)).flat_map(|line| [line, "\n"]).collect::<String>().into()
}

/// What a string belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PoPart {
    Context,
    Id,
    PluralId,
    Text(usize),
}

#[derive(Debug, Default)]
struct PoParser {
    entries: Vec<Result<CatalogueEntry, SkipReason>>,
    header: String,
    current: CatalogueEntry,
    /// The part that a string on a line of its own goes on with.
    part: Option<PoPart>,
    has_id: bool,
    /// Whether something of the entry could not be decoded.
    spoilt: bool,
}

impl PoParser {
    fn line(&mut self, line: &str) -> Result<(), String> {
        if let Some(comment) = line.strip_prefix('#') {
            return self.comment(comment);
        }
        self.statement(line, false)
    }

    fn comment(&mut self, comment: &str) -> Result<(), String> {
        if let Some(obsolete) = comment.strip_prefix('~') {
            // `#~|` has a message as it was.
            return if obsolete.starts_with('|') { Ok(()) } else { self.statement(obsolete.trim_start(), true) };
        }
        // Comments stand before their entry.
        if matches!(self.part, Some(PoPart::Text(_))) {
            self.finish();
        }
        if let Some(flags) = comment.strip_prefix(',') {
            self.current.fuzzy |= flags.split(',').any(|flag| flag.trim() == "fuzzy");
        }
        Ok(())
    }

    fn statement(&mut self, line: &str, obsolete: bool) -> Result<(), String> {
        if line.is_empty() {
            return Ok(());
        }
        let quote = line.find('"').unwrap_or(line.len());
        let (keyword, strings) = (line[..quote].trim_end(), &line[quote..]);
        if !keyword.is_empty() {
            let Some(part) = part(keyword)? else { return Ok(()) };
            self.begin(part)?;
            self.current.obsolete |= obsolete;
        }
        let part = self.part.ok_or("a string before any keyword")?;
        if strings.is_empty() {
            return Err(format!("`{keyword}` without a string in quotes"));
        }
        let text = unquoted(strings)?;
        self.text(part).push_str(&text);
        Ok(())
    }

    /// Begins a part, and an entry where the part cannot go on with the one before.
    fn begin(&mut self, part: PoPart) -> Result<(), String> {
        if matches!(self.part, Some(PoPart::Text(_))) && matches!(part, PoPart::Context | PoPart::Id) {
            self.finish();
        }
        match (part, self.part) {
            (PoPart::Context, None)
            | (PoPart::Id, None | Some(PoPart::Context))
            | (PoPart::PluralId, Some(PoPart::Id)) => {}
            (PoPart::Text(0), Some(PoPart::Id | PoPart::PluralId)) => {}
            (PoPart::Text(form), Some(PoPart::Text(before)))
                if form == before + 1 && self.current.plural_id.is_some() => {}
            _ => return Err("a keyword out of order, or an entry without msgid or msgstr".to_owned()),
        }
        self.has_id |= part == PoPart::Id;
        self.part = Some(part);
        self.text(part);
        Ok(())
    }

    fn text(&mut self, part: PoPart) -> &mut String {
        match part {
            PoPart::Context => self.current.context.get_or_insert_default(),
            PoPart::Id => &mut self.current.id,
            PoPart::PluralId => self.current.plural_id.get_or_insert_default(),
            PoPart::Text(form) => {
                let texts = &mut self.current.texts;
                texts.resize(texts.len().max(form + 1), String::new());
                &mut texts[form]
            }
        }
    }

    fn finish(&mut self) {
        let entry = std::mem::take(&mut self.current);
        let (has_id, spoilt) = (std::mem::take(&mut self.has_id), std::mem::take(&mut self.spoilt));
        let complete = matches!(self.part.take(), Some(PoPart::Text(_)));
        if !has_id {
            // Comments at the end of the file, or a line that only spoilt a comment.
        } else if entry.id.is_empty() && entry.context.is_none() {
            self.header = entry.texts.into_iter().next().unwrap_or_default();
        } else if spoilt {
            self.entries.push(Err(SkipReason::WrongEncoding));
        } else if complete {
            self.entries.push(Ok(entry));
        } else {
            self.entries.push(Err(SkipReason::Untranslated));
        }
    }
}

/// The part that a keyword begins; none for `domain`, which says nothing of an entry.
fn part(keyword: &str) -> Result<Option<PoPart>, String> {
    Ok(Some(match keyword {
        "msgctxt" => PoPart::Context,
        "msgid" => PoPart::Id,
        "msgid_plural" => PoPart::PluralId,
        "msgstr" => PoPart::Text(0),
        "domain" => return Ok(None),
        _ => {
            let form = keyword.strip_prefix("msgstr").map(str::trim_start);
            let form = form.and_then(|form| form.strip_prefix('[')?.strip_suffix(']')?.trim().parse().ok());
            let form =
                form.ok_or_else(|| format!("unknown keyword `{}`", keyword.chars().take(30).collect::<String>()))?;
            if form > FORM_MAX {
                return Err(format!("plural form {form}, more than {FORM_MAX}"));
            }
            PoPart::Text(form)
        }
    }))
}

/// The text of strings in quotes, one after the other.
fn unquoted(mut rest: &str) -> Result<String, String> {
    let mut text = String::new();
    loop {
        rest = rest.trim_start();
        let Some(body) = rest.strip_prefix('"') else { break };
        let end = closing(body).ok_or("a string without its closing quote")?;
        unescape(&body[..end], &mut text)?;
        rest = &body[end + 1..];
    }
    if rest.is_empty() { Ok(text) } else { Err("something behind the closing quote".to_owned()) }
}

fn closing(body: &str) -> Option<usize> {
    let mut escaped = false;
    body.bytes().position(|byte| {
        let closes = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        closes
    })
}

/// Escapes of C. Those in octal and hexadecimal digits are characters here, not bytes: in files that are not ASCII they
/// stand for control characters alone.
fn unescape(body: &str, text: &mut String) -> Result<(), String> {
    let mut letters = body.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter != '\\' {
            text.push(letter);
            continue;
        }
        let (radix, digits) = match letters.peek() {
            Some('0'..='7') => (8, 3),
            Some('x') => {
                letters.next();
                (16, 2)
            }
            _ => {
                text.push(simple(letters.next())?);
                continue;
            }
        };
        let mut value = None;
        for _ in 0..digits {
            let Some(digit) = letters.peek().and_then(|letter| letter.to_digit(radix)) else { break };
            value = Some(value.unwrap_or(0) * radix + digit);
            letters.next();
        }
        text.push(value.and_then(char::from_u32).ok_or("an escape without digits")?);
    }
    Ok(())
}

fn simple(letter: Option<char>) -> Result<char, String> {
    Ok(match letter {
        Some('n') => '\n',
        Some('t') => '\t',
        Some('r') => '\r',
        Some('a') => '\x07',
        Some('b') => '\x08',
        Some('f') => '\x0c',
        Some('v') => '\x0b',
        Some(sign @ ('"' | '\\' | '\'' | '?')) => sign,
        Some(other) => return Err(format!("the unknown escape \\{other}")),
        None => return Err("a backslash at the end of a string".to_owned()),
    })
}
