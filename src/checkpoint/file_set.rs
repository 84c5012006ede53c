//! The files that tensors of one kind are in: one, or several and an index that says which tensor is where, named as
//! Hugging Face does. What is where follows from names, shapes and the size of files alone.
//!
//! ```text
//!   model.safetensors       or       model-00001-of-00002.safetensors    every tensor in one of them, whole
//!                                    model-00002-of-00002.safetensors
//!                                    model.safetensors.index.json        metadata.total_size, weight_map
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use serde_json::{Value, json};

use super::Error;
use super::error::all_of;
use super::layout::{FileLayout, HEADER_BYTES_MAX, TensorEntry, TensorList, deal};
use super::manifest::regular;
use super::members::Members;

const ENDING: &str = ".safetensors";

/// Tensors that share files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TensorKind {
    Model,
    Optimizer,
    /// Of a model that is elsewhere, as PEFT names it.
    Adapter,
}

impl TensorKind {
    fn stem(self) -> &'static str {
        match self {
            TensorKind::Model => "model",
            TensorKind::Optimizer => "optimizer",
            TensorKind::Adapter => "adapter_model",
        }
    }

    /// The one file, if it is one.
    fn single(self) -> String {
        format!("{}{ENDING}", self.stem())
    }

    /// File `number`, from 1, of several.
    fn one_of(self, number: usize, count: usize) -> String {
        format!("{}-{number:05}-of-{count:05}{ENDING}", self.stem())
    }

    fn index(self) -> String {
        format!("{}.index.json", self.single())
    }

    /// Whether a file's name says that it has such tensors.
    pub fn is_of(self, name: &str) -> bool {
        name.starts_with(self.stem()) && name.ends_with(ENDING)
    }
}

/// The files of one kind, with their layouts.
#[derive(Clone, Debug)]
pub struct FileSet {
    /// By name, in order.
    pub files: Vec<(String, FileLayout)>,
    /// Name and contents, where there are several files.
    pub index: Option<(String, Vec<u8>)>,
    /// The number of each tensor's file.
    places: BTreeMap<String, usize>,
}

impl FileSet {
    /// The files of at most `limit` bytes that tensors make, but for tensors that are larger by themselves.
    pub(super) fn new(kind: TensorKind, tensors: &TensorList, limit: u64) -> FileSet {
        let dealt = deal(tensors, limit);
        let count = dealt.len();
        let name = |number| if count == 1 { kind.single() } else { kind.one_of(number, count) };
        let files = (1..).zip(&dealt).map(|(number, tensors)| (name(number), FileLayout::new(tensors))).collect();
        let mut set = FileSet::of(files);
        set.index = (count > 1).then(|| (kind.index(), set.index_text()));
        set
    }

    fn of(files: Vec<(String, FileLayout)>) -> FileSet {
        let numbered = files.iter().enumerate();
        let places =
            numbered.flat_map(|(file, (_, layout))| layout.entries.keys().map(move |name| (name.clone(), file)));
        FileSet { places: places.collect(), index: None, files }
    }

    /// With the files of another, which has tensors of other names.
    pub(super) fn with(self, other: &FileSet) -> FileSet {
        let index = self.index;
        let files = self.files.into_iter().chain(other.files.iter().cloned()).collect();
        FileSet { index, ..FileSet::of(files) }
    }

    fn index_text(&self) -> Vec<u8> {
        let map: BTreeMap<&str, &str> =
            self.places.iter().map(|(tensor, &file)| (tensor.as_str(), self.files[file].0.as_str())).collect();
        let index = json!({ "metadata": { "total_size": self.total_bytes() }, "weight_map": map });
        let mut text = serde_json::to_vec_pretty(&index).expect("names and a number are plain JSON");
        text.push(b'\n');
        text
    }

    /// Bytes of all tensors.
    fn total_bytes(&self) -> u64 {
        self.entries().map(|(_, entry)| entry.bytes()).sum()
    }

    /// Every tensor, with its name.
    pub fn entries(&self) -> impl Iterator<Item = (&String, &TensorEntry)> {
        self.files.iter().flat_map(|(_, layout)| &layout.entries)
    }

    /// A tensor, and the number of its file.
    pub fn entry(&self, name: &str) -> Option<(usize, &TensorEntry)> {
        let file = *self.places.get(name)?;
        Some((file, &self.files[file].1.entries[name]))
    }

    /// What names the set in messages.
    pub(super) fn name(&self) -> &str {
        self.index.as_ref().map_or(&self.files[0].0, |(name, _)| name)
    }

    /// Reads the layouts of the files of `folder`, of which a manifest lists the names `listed`, trusting nothing in them.
    ///
    /// # Errors
    /// Files or an index that are missing, not listed, cut short, or contradict themselves or each other.
    pub fn read<'a>(
        kind: TensorKind,
        folder: &Path,
        listed: impl Iterator<Item = &'a String> + Clone,
    ) -> Result<FileSet, Error> {
        let is_listed = |name: &str| listed.clone().any(|listed| listed == name);
        let path = folder.join(kind.index());
        let map = is_listed(&kind.index()).then(|| WeightMap::read(&path, |text| WeightMap::parse(kind, text)));
        let map = map.transpose()?;
        let names = map.as_ref().map_or_else(|| vec![kind.single()], |map| map.files.iter().cloned().collect());
        if let Some(stranger) = listed.clone().find(|name| kind.is_of(name) && !names.contains(name)) {
            return Err(Error::damaged(&folder.join(stranger), "no index says what is in it"));
        }
        if let Some(unlisted) = names.iter().find(|name| !is_listed(name)) {
            return Err(Error::damaged(&folder.join(unlisted), "its manifest does not list it"));
        }
        let layouts = names.into_iter().map(|name| FileLayout::read(&folder.join(&name)).map(|layout| (name, layout)));
        let mut set = FileSet::of(layouts.collect::<Result<_, Error>>()?);
        set.check_types(folder)?;
        if let Some(map) = map {
            map.check(&set, folder)?;
            map.check_size(&set).map_err(|reason| Error::damaged(&path, reason))?;
            set.index = Some((kind.index(), map.text));
        }
        Ok(set)
    }

    /// Holds that every tensor has elements of a type that is written here.
    fn check_types(&self, folder: &Path) -> Result<(), Error> {
        let packed = self.entries().find(|(_, entry)| entry.dtype.is_packed());
        packed.map_or(Ok(()), |(name, entry)| {
            Err(Error::damaged(&folder.join(self.name()), format!("{name} is {}, as no tensor here is", entry.dtype)))
        })
    }

    /// Reads the layouts of a model's files in a folder that another program has written, without a manifest, trusting
    /// nothing in them. The files may have any names that are names of files of the folder, and the index may say more.
    ///
    /// # Errors
    /// As [`FileSet::read`]; a file that is a link out of the folder.
    pub fn read_foreign(folder: &Path) -> Result<FileSet, Error> {
        let kind = TensorKind::Model;
        let path = folder.join(kind.index());
        let is_there = path.symlink_metadata().is_ok();
        let map = is_there.then(|| WeightMap::read(&path, WeightMap::parse_foreign)).transpose()?;
        let names = map.as_ref().map_or_else(|| vec![kind.single()], |map| map.files.iter().cloned().collect());
        let entries = std::fs::read_dir(folder).map_err(Error::io("read", folder))?;
        let there: BTreeSet<String> =
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        let is_pickled = |name: &String| name.starts_with("pytorch_model");
        let by = match map {
            Some(_) => "by the index it has tensors",
            None if there.iter().any(is_pickled) => {
                "weights in pytorch_model.bin are not read; transformers saves them as safetensors"
            }
            None => "there is no index either",
        };
        let missing = names.iter().filter(|name| !there.contains(*name));
        let missing = missing.map(|name| Err(Error::damaged(&folder.join(name), format!("it is missing: {by}"))));
        all_of::<()>(missing)?;
        if let Some(stranger) = there.iter().find(|name| kind.is_of(name) && !names.contains(name)) {
            return Err(Error::damaged(&folder.join(stranger), "no index says what is in it"));
        }
        let layouts = names.into_iter().map(|name| {
            check_within(folder, &name)?;
            FileLayout::read(&folder.join(&name)).map(|layout| (name, layout))
        });
        let mut set = FileSet::of_distinct(all_of(layouts)?, folder)?;
        if let Some(map) = map {
            map.check(&set, folder)?;
            set.index = Some((kind.index(), map.text));
        }
        Ok(set)
    }

    /// The same as [`FileSet::of`] where two files may have a tensor of one name.
    fn of_distinct(files: Vec<(String, FileLayout)>, folder: &Path) -> Result<FileSet, Error> {
        let mut first: BTreeMap<&String, &String> = BTreeMap::new();
        for (file, layout) in &files {
            for tensor in layout.entries.keys() {
                if let Some(other) = first.insert(tensor, file) {
                    return Err(Error::damaged(&folder.join(file), format!("it has {tensor}, which {other} has too")));
                }
            }
        }
        Ok(FileSet::of(files))
    }
}

/// What an index says.
struct WeightMap {
    text: Vec<u8>,
    total_bytes: u64,
    files: BTreeSet<String>,
    /// The file of each tensor.
    file_of: BTreeMap<String, String>,
}

impl WeightMap {
    fn read(path: &Path, parse: impl FnOnce(Vec<u8>) -> Result<WeightMap, String>) -> Result<WeightMap, Error> {
        let file = regular(path).map_err(Error::io("open", path))?;
        let mut text = Vec::new();
        file.take(HEADER_BYTES_MAX + 1).read_to_end(&mut text).map_err(Error::io("read", path))?;
        if text.len() as u64 > HEADER_BYTES_MAX {
            return Err(Error::damaged(path, format!("it has more than {HEADER_BYTES_MAX} bytes")));
        }
        parse(text).map_err(|reason| Error::damaged(path, reason))
    }

    /// What other programs write besides a map is theirs.
    fn parse_foreign(text: Vec<u8>) -> Result<WeightMap, String> {
        let index: ForeignIndex = serde_json::from_slice(&text).map_err(|error| format!("it is no index: {error}"))?;
        let (file_of, files) = WeightMap::files(index.weight_map)?;
        if let Some(name) = files.iter().find(|name| !is_plain(name) || !name.ends_with(ENDING)) {
            return Err(format!("it names {name:?}, which is no name of a {ENDING} file of this folder"));
        }
        Ok(WeightMap { text, total_bytes: 0, files, file_of })
    }

    /// The file of each tensor, and all files.
    fn files(map: Members) -> Result<(BTreeMap<String, String>, BTreeSet<String>), String> {
        let in_text = |(tensor, file): (String, Value)| match file {
            Value::String(file) => Ok((tensor, file)),
            other => Err(format!("it has {tensor} in {other}")),
        };
        let file_of = map.0.into_iter().map(in_text).collect::<Result<BTreeMap<_, _>, _>>()?;
        let files: BTreeSet<String> = file_of.values().cloned().collect();
        if files.is_empty() { Err("it lists no tensor".to_owned()) } else { Ok((file_of, files)) }
    }

    fn parse(kind: TensorKind, text: Vec<u8>) -> Result<WeightMap, String> {
        let index: IndexText = serde_json::from_slice(&text).map_err(|error| format!("it is no index: {error}"))?;
        let total_bytes = match index.metadata.0.as_slice() {
            [(name, size)] if name == "total_size" => size.as_u64().ok_or(format!("its total_size is {size}"))?,
            _ => return Err("its metadata are not a total_size alone".to_owned()),
        };
        let (file_of, files) = WeightMap::files(index.weight_map)?;
        let own = |number| kind.one_of(number, files.len());
        // Also what leads out of the folder.
        match files.iter().zip(1..).find(|(name, number)| **name != own(*number)) {
            Some((name, number)) => Err(format!("it names {name:?} where {} is to be", own(number))),
            None => Ok(WeightMap { text, total_bytes, files, file_of }),
        }
    }

    /// Holds that every file has the tensors that the index says, and no others.
    fn check(&self, set: &FileSet, folder: &Path) -> Result<(), Error> {
        let damaged = |file: &str, reason: String| Err(Error::damaged(&folder.join(file), reason));
        for (file, layout) in &set.files {
            for tensor in layout.entries.keys() {
                match self.file_of.get(tensor) {
                    Some(listed) if listed == file => {}
                    Some(other) => return damaged(file, format!("it has {tensor}, which by the index is in {other}")),
                    None => return damaged(file, format!("it has {tensor}, which the index does not list")),
                }
            }
        }
        let missing = self.file_of.iter().find(|(tensor, _)| !set.places.contains_key(*tensor));
        missing
            .map_or(Ok(()), |(tensor, file)| damaged(file, format!("it has no {tensor}, which by the index is in it")))
    }

    fn check_size(&self, set: &FileSet) -> Result<(), String> {
        let (told, there) = (self.total_bytes, set.total_bytes());
        if told == there { Ok(()) } else { Err(format!("its total_size is {told}, and tensors have {there} bytes")) }
    }
}

/// Member by member, so that nothing that is there twice is lost.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct IndexText {
    metadata: Members,
    weight_map: Members,
}

/// The part of an index that every program writes.
#[derive(serde::Deserialize)]
struct ForeignIndex {
    weight_map: Members,
}

/// Whether it is the name of a file of a folder, and of nothing outside of it.
pub(super) fn is_plain(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
}

/// Refuses a file that is a link out of its folder, but for those of a cache of Hugging Face's hub.
///
/// # Errors
/// The link.
pub fn check_within(folder: &Path, name: &str) -> Result<(), Error> {
    let path = folder.join(name);
    let places = folder.canonicalize().and_then(|folder| Ok((folder, path.canonicalize()?)));
    let (folder, place) = places.map_err(Error::io("find", &path))?;
    match place.starts_with(&folder) || is_blob(&folder, &place) {
        true => Ok(()),
        false => Err(Error::damaged(&path, format!("it is a link out of the folder, to {}", place.display()))),
    }
}

/// Whether a file is what a cache of the hub has for a folder: `snapshots/REVISION/NAME` is a link to `blobs/HASH` there.
/// Both are canonical.
fn is_blob(folder: &Path, place: &Path) -> bool {
    let Some(snapshots) = folder.parent().filter(|parent| parent.ends_with("snapshots")) else { return false };
    place.parent() == snapshots.parent().map(|cache| cache.join("blobs")).as_deref()
}

/// Where tensors of a kind are told of in messages.
pub(super) fn path_of(folder: &Path, set: &FileSet) -> PathBuf {
    folder.join(set.name())
}

#[cfg(test)]
mod tests {
    use super::super::element::ElementType;
    use super::*;

    fn tensors(lengths: &[usize]) -> TensorList {
        (0..).zip(lengths).map(|(n, &len): (usize, _)| (format!("w{n:03}"), (ElementType::F32, vec![len]))).collect()
    }

    /// By the definition: each file is as full as the next tensor lets it be.
    #[test]
    fn files_are_as_full_as_they_may_be() {
        let lengths: Vec<usize> = (0..60).map(|n| (n * n * 37) % 300).chain([2000, 1]).collect();
        let all = tensors(&lengths);
        for limit in [1, 100, 600, 1000, 4096, 1 << 20, u64::MAX] {
            let set = FileSet::new(TensorKind::Model, &all, limit);
            let dealt: Vec<&TensorEntry> = set.entries().map(|(_, entry)| entry).collect();
            assert_eq!(dealt.len(), all.len(), "every tensor is somewhere");
            assert!(set.entries().map(|(name, _)| name).eq(all.keys()), "in their order");
            for (number, (name, layout)) in set.files.iter().enumerate() {
                assert!(layout.file_bytes <= limit || layout.entries.len() == 1, "{name} at {limit}");
                assert!(!layout.entries.is_empty(), "{name} at {limit}");
                if let Some((_, next)) = set.files.get(number + 1) {
                    let mut more: TensorList =
                        layout.entries.keys().map(|key| (key.clone(), all[key].clone())).collect();
                    let first = next.entries.keys().next().unwrap();
                    more.insert(first.clone(), all[first].clone());
                    assert!(FileLayout::new(&more).file_bytes > limit, "{name} has room for {first} at {limit}");
                }
            }
            assert_eq!(set.index.is_some(), set.files.len() > 1);
            if let Some((_, text)) = &set.index {
                let map = WeightMap::parse(TensorKind::Model, text.clone()).unwrap();
                map.check(&set, Path::new("")).unwrap();
                map.check_size(&set).unwrap();
            }
        }
    }

    #[test]
    fn files_are_named_as_elsewhere() {
        let set = FileSet::new(TensorKind::Optimizer, &tensors(&[100, 100, 100]), 500);
        let names: Vec<&str> = set.files.iter().map(|(name, _)| name.as_str()).collect();
        let number = |n: usize| format!("optimizer-0000{n}-of-00003.safetensors");
        assert_eq!(names, [number(1), number(2), number(3)]);
        let (name, text) = set.index.unwrap();
        assert_eq!(name, "optimizer.safetensors.index.json");
        let want = format!(
            "{{\n  \"metadata\": {{\n    \"total_size\": 1200\n  }},\n  \"weight_map\": {{\n    \"w000\": \"{}\",\n    \
             \"w001\": \"{}\",\n    \"w002\": \"{}\"\n  }}\n}}\n",
            number(1),
            number(2),
            number(3)
        );
        assert_eq!(String::from_utf8(text).unwrap(), want);
        assert_eq!(FileSet::new(TensorKind::Model, &tensors(&[1]), 1).files[0].0, "model.safetensors");
        assert_eq!(FileSet::new(TensorKind::Model, &tensors(&[]), 1).files.len(), 1);
    }

    #[test]
    fn an_index_that_lies_is_refused() {
        let two = r#""a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors""#;
        let text = |map: &str| format!(r#"{{"metadata":{{"total_size":8}},"weight_map":{{{map}}}}}"#);
        let parse = |text: String| WeightMap::parse(TensorKind::Model, text.into_bytes()).map(|map| map.files.len());
        assert_eq!(parse(text(two)), Ok(2));
        let out = |name: &str| text(&two.replace("model-00002-of-00002.safetensors", name));
        for lie in [
            "[]".to_owned(),
            "{".to_owned(),
            text(""),
            text(&format!(r#"{two},"a":"model-00002-of-00002.safetensors""#)),
            text(&format!(r#"{two},"c":3"#)),
            text(two).replace(":8}", ":-8}"),
            text(two).replace(":8}", r#":8,"more":1}"#),
            text(two).replacen('{', r#"{"more":1,"#, 1),
            text(two).replacen('{', r#"{"metadata":{"total_size":8},"#, 1),
            out("../model-00002-of-00002.safetensors"),
            out("/etc/passwd"),
            out("./model-00002-of-00002.safetensors"),
            out("model-00003-of-00002.safetensors"),
            out("model-2-of-2.safetensors"),
            out("optimizer-00002-of-00002.safetensors"),
            out("model.safetensors"),
            out("config.toml"),
        ] {
            assert!(parse(lie.clone()).is_err(), "{lie}");
        }
    }
}
