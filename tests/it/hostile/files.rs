//! The files that are attacked: text in every format, and changed ones with checksums that fit again.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

use crate::program::Workshop;

pub(super) const LINES: &str = "lines.jsonl";
pub(super) const TABLE: &str = "table.parquet";
pub(super) const GZIP: &str = "lines.jsonl.gz";
pub(super) const ZSTD: &str = "lines.jsonl.zst";
pub(super) const TEXT: &str = "text.txt";

/// The same texts in every format.
pub(super) fn write(shop: &Workshop, texts: &[String]) {
    let lines: String = texts.iter().map(|text| format!("{}\n", serde_json::json!({ "text": text }))).collect();
    shop.write(LINES, &lines);
    shop.write(TEXT, &texts.join("\n"));
    table(&shop.path(TABLE), texts);
    let mut gzip = flate2::write::GzEncoder::new(File::create(shop.path(GZIP)).unwrap(), flate2::Compression::fast());
    gzip.write_all(lines.as_bytes()).unwrap();
    gzip.finish().unwrap();
    let mut zstd = zstd::Encoder::new(File::create(shop.path(ZSTD)).unwrap(), 1).unwrap();
    // As the program of that name writes them.
    zstd.include_checksum(true).unwrap();
    zstd.write_all(lines.as_bytes()).unwrap();
    zstd.finish().unwrap();
}

fn table(path: &Path, texts: &[String]) {
    let schema = Arc::new(parse_message_type("message rows { required byte_array text (utf8); }").unwrap());
    let properties = WriterProperties::builder().set_compression(parquet::basic::Compression::SNAPPY).build();
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::new(properties)).unwrap();
    for rows in texts.chunks(16) {
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let values: Vec<_> = rows.iter().map(|text| ByteArray::from(text.as_str())).collect();
        column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
}

/// The header of a safetensors file as text, and what follows it.
pub(super) fn split(file: &[u8]) -> (String, Vec<u8>) {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    (String::from_utf8(file[8..8 + length].to_vec()).unwrap(), file[8 + length..].to_vec())
}

/// The two as a file again.
pub(super) fn join(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

/// The checksum of recordings (Fowler, Noll, Vo).
pub(super) fn fnv1a(parts: &[&[u8]]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    parts.iter().copied().flatten().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Changes a file with a function of its bytes.
pub(super) fn change<T>(path: &Path, f: impl FnOnce(&mut Vec<u8>) -> T) -> T {
    let mut bytes = fs::read(path).unwrap();
    let told = f(&mut bytes);
    fs::write(path, bytes).unwrap();
    told
}
