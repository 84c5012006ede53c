//! The byte layout of a safetensors file, from names and shapes alone.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use serde_json::{Value, json};

use super::Error;
use super::element::ElementType;
use super::manifest::regular;
use super::members::Members;

/// The largest header that is believed: real ones are a few megabytes.
pub(super) const HEADER_BYTES_MAX: u64 = 256 << 20;

/// What a pointer begins with that Git LFS leaves in a file's place.
const POINTER: &[u8; 8] = b"version ";

/// Tensors by name.
pub type TensorList = BTreeMap<String, (ElementType, Vec<usize>)>;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    pub dtype: ElementType,
    pub shape: Vec<usize>,
    /// First byte, counted from the file's start.
    pub start: u64,
}

impl TensorEntry {
    pub fn elements(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64
    }

    /// Bytes of the tensor.
    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.bytes() as u64
    }
}

/// Where every tensor of a file lies. Tensors are in the order of their names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileLayout {
    pub entries: BTreeMap<String, TensorEntry>,
    /// The length and the JSON that begin the file.
    pub header: Vec<u8>,
    pub file_bytes: u64,
}

/// Deals tensors, in the order of their names, to as few files as come of filling one after the other with at most `limit`
/// bytes. One that is larger by itself has a file of its own.
pub(super) fn deal(tensors: &TensorList, limit: u64) -> Vec<TensorList> {
    let (mut files, mut text, mut data) = (vec![TensorList::new()], 0, 0);
    for (name, (dtype, shape)) in tensors {
        let at = |start| TensorEntry { dtype: *dtype, shape: shape.clone(), start };
        // A brace or a comma goes with each.
        let length = |start| member(name, &at(start)).len() + 1;
        let file_bytes = |text: usize, data| 8 + padded(text + 1) as u64 + data;
        if text > 0 && file_bytes(text + length(data), data + at(data).bytes()) > limit {
            files.push(TensorList::new());
            (text, data) = (0, 0);
        }
        (text, data) = (text + length(data), data + at(data).bytes());
        files.last_mut().expect("there is one").insert(name.clone(), (*dtype, shape.clone()));
    }
    files
}

/// What a header says of a tensor, whose place is counted from the first byte of all.
fn member(name: &str, entry: &TensorEntry) -> String {
    let offsets = [entry.start, entry.start + entry.bytes()];
    let value = json!({ "dtype": entry.dtype.name(), "shape": entry.shape, "data_offsets": offsets });
    format!("{}:{value}", Value::from(name))
}

/// Data begins on a multiple of eight bytes.
fn padded(text: usize) -> usize {
    text.next_multiple_of(8)
}

impl FileLayout {
    /// Lays tensors out in the order of their names.
    pub fn new(tensors: &TensorList) -> FileLayout {
        let mut offset = 0u64;
        let mut entries = BTreeMap::new();
        let mut members = Vec::with_capacity(tensors.len());
        for (name, (dtype, shape)) in tensors {
            let entry = TensorEntry { dtype: *dtype, shape: shape.clone(), start: offset };
            offset += entry.bytes();
            members.push(member(name, &entry));
            entries.insert(name.clone(), entry);
        }
        let mut text = format!("{{{}}}", members.join(","));
        text.push_str(&" ".repeat(padded(text.len()) - text.len()));
        let header = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        for entry in entries.values_mut() {
            entry.start += header.len() as u64;
        }
        FileLayout { entries, file_bytes: header.len() as u64 + offset, header }
    }

    /// Reads the layout of an existing file, trusting nothing in it.
    ///
    /// # Errors
    /// A file that is missing, cut short, or whose header contradicts itself.
    pub fn read(path: &Path) -> Result<FileLayout, Error> {
        let mut file = regular(path).map_err(Error::io("open", path))?;
        let file_bytes = file.metadata().map_err(Error::io("measure", path))?.len();
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(|_| Error::damaged(path, "it is shorter than eight bytes"))?;
        if length == *POINTER {
            return Err(Error::damaged(path, "it is a pointer of Git LFS, not the file: `git lfs pull` fetches it"));
        }
        let length = u64::from_le_bytes(length);
        if length > HEADER_BYTES_MAX.min(file_bytes - 8) {
            return Err(Error::damaged(path, format!("its header claims {length} bytes")));
        }
        let mut text = vec![0; length as usize];
        file.read_exact(&mut text).map_err(Error::io("read", path))?;
        let entries = parse(&text, length + 8, file_bytes).map_err(|reason| Error::damaged(path, reason))?;
        let header = [&length.to_le_bytes()[..], &text].concat();
        Ok(FileLayout { entries, header, file_bytes })
    }
}

fn parse(text: &[u8], data_start: u64, file_bytes: u64) -> Result<BTreeMap<String, TensorEntry>, String> {
    let members: Members =
        serde_json::from_slice(text).map_err(|error| format!("its header is not a JSON object of tensors: {error}"))?;
    let tensors = members.0.into_iter().filter(|(name, _)| name != "__metadata__");
    let entries = tensors.map(|(name, value)| {
        let entry = parse_entry(&value, data_start).ok_or_else(|| {
            let types = ElementType::ALL.map(ElementType::name).join(", ");
            format!("its header describes {name} as {value}: it is no place of elements of {types}")
        })?;
        let end = entry.start.checked_add(entry.bytes()).filter(|&end| end <= file_bytes);
        end.map(|_| (name.clone(), entry)).ok_or(format!("{name} lies outside the file"))
    });
    let entries = entries.collect::<Result<_, String>>()?;
    tile(&entries, data_start, file_bytes)?;
    Ok(entries)
}

/// Holds that the tensors lie end to end: bytes of two tensors, or of none, are a mistake or a trap.
fn tile(entries: &BTreeMap<String, TensorEntry>, data_start: u64, file_bytes: u64) -> Result<(), String> {
    let mut order: Vec<(&String, &TensorEntry)> = entries.iter().collect();
    order.sort_by_key(|(_, entry)| (entry.start, entry.bytes()));
    let mut end = data_start;
    for (name, entry) in order {
        match entry.start.cmp(&end) {
            Ordering::Less => return Err(format!("{name} begins within another tensor")),
            Ordering::Greater => return Err(format!("the {} bytes before {name} are no tensor's", entry.start - end)),
            Ordering::Equal => end += entry.bytes(),
        }
    }
    if end < file_bytes { Err(format!("its last {} bytes are no tensor's", file_bytes - end)) } else { Ok(()) }
}

fn parse_entry(value: &Value, data_start: u64) -> Option<TensorEntry> {
    let fields = value.as_object().filter(|fields| fields.len() == 3)?;
    // Truth values are bytes too: masks are stored so, which are no weights.
    let dtype = fields.get("dtype")?.as_str().map(|name| if name == "BOOL" { ElementType::U8.name() } else { name })?;
    let dtype = ElementType::ALL.into_iter().find(|own| own.name() == dtype)?;
    let shape = fields.get("shape")?.as_array()?.iter().map(|n| usize::try_from(n.as_u64()?).ok());
    let shape = shape.collect::<Option<Vec<usize>>>()?;
    let elements = shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n))?;
    let [start, end] = fields.get("data_offsets")?.as_array()?.as_slice() else { return None };
    let (start, end) = (start.as_u64()?, end.as_u64()?);
    let bytes = elements.checked_mul(dtype.bytes())? as u64;
    (end.checked_sub(start)? == bytes).then_some(TensorEntry { dtype, shape, start: start.checked_add(data_start)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_safetensors_crate_reads_our_layout() {
        let tensors = BTreeMap::from([
            ("b".to_owned(), (ElementType::Bf16, vec![3])),
            ("a \"quoted\"".to_owned(), (ElementType::F32, vec![2, 2])),
            ("empty".to_owned(), (ElementType::F32, vec![0, 4])),
        ]);
        let layout = FileLayout::new(&tensors);
        let mut file = layout.header.clone();
        file.resize(layout.file_bytes as usize, 0);
        let read = safetensors::SafeTensors::deserialize(&file).expect("a valid file");
        assert_eq!(read.tensor("b").unwrap().shape(), [3]);
        assert_eq!(read.tensor("a \"quoted\"").unwrap().data().len(), 16);
        let parsed = parse(&layout.header[8..], layout.header.len() as u64, layout.file_bytes).unwrap();
        assert_eq!(parsed, layout.entries);
    }

    #[test]
    fn headers_that_lie_are_refused() {
        for text in [
            "[]",
            "{",
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#,
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[96,104]}}"#,
            r#"{"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}"#,
            r#"{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}"#,
            r#"{"a":{"dtype":"F32","shape":[0],"data_offsets":[18446744073709551615,18446744073709551615]}}"#,
            // Two tensors in one place, a hole, bytes behind the last, one name twice, something else besides.
            r#"{"a":{"dtype":"F32","shape":[23],"data_offsets":[0,92]},"b":{"dtype":"F32","shape":[1],"data_offsets":[88,92]}}"#,
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[88,92]}}"#,
            r#"{"a":{"dtype":"F32","shape":[22],"data_offsets":[0,88]}}"#,
            r#"{"a":{"dtype":"F32","shape":[23],"data_offsets":[0,92]},"a":{"dtype":"F32","shape":[23],"data_offsets":[0,92]}}"#,
            r#"{"a":{"dtype":"F32","shape":[23],"data_offsets":[0,92],"offset":0}}"#,
        ] {
            assert!(parse(text.as_bytes(), 8, 100).is_err(), "{text}");
        }
        let whole = r#"{"a":{"dtype":"F32","shape":[23],"data_offsets":[0,92]}}"#;
        assert_eq!(parse(whole.as_bytes(), 8, 100).map(|entries| entries.len()), Ok(1));
    }
}
