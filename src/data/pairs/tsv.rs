//! A pair in two columns of each line, with tabs between columns and no quotes.

use std::path::Path;

use super::lines::LineReader;
use super::{FoundPair, PairRecords};
use crate::data::error::Error;
use crate::data::sources::Compression;

/// `columns` count from 1.
pub(super) fn read(path: &Path, compression: Compression, columns: [usize; 2]) -> Result<PairRecords<'static>, Error> {
    let mut lines = LineReader::open(path, compression)?;
    let path = path.to_owned();
    let mut next = move || -> Result<Option<FoundPair>, Error> {
        let Some(line) = lines.next()? else { return Ok(None) };
        let Ok(line) = line else { return Ok(Some(line.map(|_| Default::default()))) };
        let cells: Vec<&str> = line.split('\t').collect();
        let cell = |column: usize| {
            let missing = || Error::MissingCell { path: path.clone(), line: lines.count, column, columns: cells.len() };
            cells.get(column.wrapping_sub(1)).map(|cell| (*cell).to_owned()).ok_or_else(missing)
        };
        // An empty line at the end, as editors leave it, is no row.
        if line.is_empty() {
            return Ok(Some(Err(super::SkipReason::EmptySide)));
        }
        Ok(Some(Ok([cell(columns[0])?, cell(columns[1])?])))
    };
    Ok(Box::new(std::iter::from_fn(move || next().transpose())))
}
