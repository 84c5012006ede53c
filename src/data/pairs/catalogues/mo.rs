//! Compiled catalogues: a head of seven numbers, two tables of lengths and places, and the strings.
//!
//! Of either byte order, as the first number tells. A message is `context EOT id NUL plural id`, its translation one
//! text for each plural form with NUL between them. The hash table is not needed, and neither are the strings of
//! revision 0.1 that the machine completes.

use std::path::Path;

use super::header::CatalogueHeader;
use super::{Catalogue, CatalogueEntry, decoded};
use crate::data::error::Error;
use crate::data::pairs::skips::SkipReason;

const MAGIC: u32 = 0x9504_12de;

/// Between a context and its message.
const END_OF_TRANSMISSION: u8 = 4;

pub(super) fn parse(bytes: &[u8], path: &Path) -> Result<Catalogue, Error> {
    let file = Compiled::new(bytes).map_err(|message| Error::Catalogue { path: path.to_owned(), message })?;
    let strings = file.strings().map_err(|message| Error::Catalogue { path: path.to_owned(), message })?;
    let header = strings.iter().find(|(id, _)| id.is_empty()).map_or(&[][..], |(_, text)| text);
    let header = CatalogueHeader::parse(header, path)?;
    let messages = strings.into_iter().filter(|(id, _)| !id.is_empty());
    let entries = messages.map(|(id, text)| entry(id, text, &header)).collect();
    Ok(Catalogue { header, entries })
}

struct Compiled<'a> {
    bytes: &'a [u8],
    big_endian: bool,
    count: usize,
    tables: [usize; 2],
}

impl<'a> Compiled<'a> {
    fn new(bytes: &'a [u8]) -> Result<Self, String> {
        let start: [u8; 4] = bytes.get(..4).and_then(|start| start.try_into().ok()).ok_or("it is too short")?;
        let big_endian = match (u32::from_le_bytes(start), u32::from_be_bytes(start)) {
            (MAGIC, _) => false,
            (_, MAGIC) => true,
            _ => return Err("it does not begin with the magic number".to_owned()),
        };
        let mut file = Self { bytes, big_endian, count: 0, tables: [0; 2] };
        let revision = file.number(4)?;
        if revision >> 16 > 1 {
            return Err(format!("its revision {}.{} is unknown", revision >> 16, revision & 0xffff));
        }
        file.count = file.number(8)? as usize;
        file.tables = [file.number(12)? as usize, file.number(16)? as usize];
        Ok(file)
    }

    fn number(&self, at: usize) -> Result<u32, String> {
        let bytes = at.checked_add(4).and_then(|end| self.bytes.get(at..end)).and_then(|bytes| bytes.try_into().ok());
        let bytes = bytes.ok_or_else(|| format!("it ends before byte {at}, where its tables lead"))?;
        Ok(if self.big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) })
    }

    /// Messages and translations. Strings that overlap could be as long as the file each, so their sum is bounded by
    /// it.
    fn strings(&self) -> Result<Vec<(&'a [u8], &'a [u8])>, String> {
        let mut left = self.bytes.len();
        // The tables of all entries must be within the file before anything is reserved for them.
        if self.count.saturating_mul(8) > self.bytes.len() {
            return Err(format!("its {} messages do not fit its {} bytes", self.count, self.bytes.len()));
        }
        let mut string = |table: usize, index: usize| {
            let at = table.checked_add(8 * index).ok_or("its tables lie outside")?;
            let (length, start) = (self.number(at)? as usize, self.number(at.saturating_add(4))? as usize);
            let string = start.checked_add(length).and_then(|end| self.bytes.get(start..end));
            let string = string.ok_or_else(|| format!("string {index} lies outside"))?;
            left = left.checked_sub(length).ok_or("its strings overlap")?;
            Ok::<_, String>(string)
        };
        (0..self.count).map(|index| Ok((string(self.tables[0], index)?, string(self.tables[1], index)?))).collect()
    }
}

fn entry(id: &[u8], text: &[u8], header: &CatalogueHeader) -> Result<CatalogueEntry, SkipReason> {
    let decoded = |bytes: &[u8]| decoded(bytes, header.encoding);
    let (context, id) = match id.iter().position(|&byte| byte == END_OF_TRANSMISSION) {
        Some(at) => (Some(&id[..at]), &id[at + 1..]),
        None => (None, id),
    };
    let (id, plural_id) = match id.iter().position(|&byte| byte == 0) {
        Some(at) => (&id[..at], Some(&id[at + 1..])),
        None => (id, None),
    };
    let texts = match plural_id {
        Some(_) => text.split(|&byte| byte == 0).map(decoded).collect::<Result<_, _>>()?,
        None => vec![decoded(text)?],
    };
    Ok(CatalogueEntry {
        context: context.map(decoded).transpose()?,
        id: decoded(id)?,
        plural_id: plural_id.map(decoded).transpose()?,
        texts,
        fuzzy: false,
        obsolete: false,
    })
}
