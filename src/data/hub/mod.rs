//! Data sets of Hugging Face's hub, as its programs download them: which files of a folder are data, and of which split.
//!
//! The card (`README.md`) says so in its front matter, or the names of files and folders do by the hub's conventions. Files
//! are read where they lie, also where they are links into a cache of the hub.

mod card;
mod splits;

use std::fs;
use std::path::{Path, PathBuf};

use super::config::{SourceSpec, SourceTable};
use super::error::Error;
use card::{CardConfig, ConfigFiles};
use splits::Splits;

const TRAIN: &str = "train";

/// What is read of a data set.
const READ: [&str; 5] = [".parquet", ".jsonl", ".ndjson", ".json-lines", ".json"];
/// What else holds data on the hub, and cannot be read here.
const UNREAD: [&str; 6] = [".csv", ".tsv", ".arrow", ".avro", ".orc", ".lance"];
/// Descriptions, which are no data.
const DESCRIPTIONS: [&str; 6] =
    ["config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "README.md"];

/// A file with data, and whether the source holds it out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DataFile {
    pub(super) path: PathBuf,
    pub(super) held_out: bool,
}

/// The folder of the revision `main`, if this is a data set's folder in a cache of the hub.
pub(super) fn snapshot(folder: PathBuf) -> PathBuf {
    let revision = fs::read_to_string(folder.join("refs/main")).unwrap_or_default();
    let snapshot = folder.join("snapshots").join(revision.trim());
    if !revision.is_empty() && snapshot.is_dir() { snapshot } else { folder }
}

/// The files that a source asks for, in the order of their names, if the folder is a data set: if the source says so (by a
/// split, a configuration, or since it holds conversations), if there is a card that says something, or if shards are
/// numbered as on the hub. `files` are all files of the folder.
///
/// # Errors
/// A card that cannot be understood; a configuration or a split that is not there; files that cannot be read here.
pub(super) fn data_set(folder: &Path, files: &[PathBuf], spec: &SourceSpec) -> Result<Option<Vec<DataFile>>, Error> {
    let table = spec.table().cloned().unwrap_or_default();
    let names: Vec<String> = files.iter().filter_map(|path| name(folder, path)).collect();
    let data: Vec<String> = names.iter().filter(|name| is_data(name)).cloned().collect();
    let is_told = table.chat || table.is_of_data_set();
    if data.is_empty() && !is_told {
        return Ok(None);
    }
    let card = card::read(&folder.join("README.md"))?;
    let looks_so = card.is_some() || data.iter().any(|name| splits::is_shard(name));
    if !is_told && !looks_so {
        return Ok(None);
    }
    let wrong = |message: String| Error::DataSet { path: folder.to_owned(), message };
    let splits = splits(&table, &card.unwrap_or_default(), &data).map_err(wrong)?;
    let chosen = choose(&table, &splits).and_then(|chosen| complete(chosen, &data));
    chosen.map_err(wrong).map(|chosen| {
        let file = |(name, held_out): (String, bool)| DataFile { path: folder.join(name), held_out };
        Some(chosen.into_iter().map(file).collect())
    })
}

/// A path below the folder with `/` between names.
fn name(folder: &Path, path: &Path) -> Option<String> {
    let parts = path.strip_prefix(folder).ok()?.components();
    Some(parts.map(|part| part.as_os_str().to_str()).collect::<Option<Vec<_>>>()?.join("/"))
}

fn is_data(name: &str) -> bool {
    let last = name.rsplit('/').next().unwrap_or(name);
    let is_special = name.split('/').any(|part| part.starts_with("__"));
    !DESCRIPTIONS.contains(&last) && !is_special && (has_ending(name, &READ) || has_ending(name, &UNREAD))
}

fn has_ending(name: &str, endings: &[&str]) -> bool {
    let name = name.to_lowercase();
    let bare = name.strip_suffix(".gz").or_else(|| name.strip_suffix(".zst")).unwrap_or(&name);
    endings.iter().any(|ending| bare.ends_with(ending))
}

/// The splits of the configuration that is asked for.
fn splits(table: &SourceTable, card: &[CardConfig], data: &[String]) -> Result<Splits, String> {
    if data.is_empty() {
        return Err(format!("it has no data: {} are read", READ.join(", ")));
    }
    let Some(config) = configuration(table, card, data)? else { return Splits::by_names(data, "") };
    match &config.files {
        ConfigFiles::Folder(folder) => Splits::by_names(data, folder),
        ConfigFiles::Patterns(patterns) => Splits::by_patterns(data, patterns, &config.folder),
    }
    .map_err(|problem| format!("configuration `{}`: {problem}", config.name))
}

/// The one that is asked for, the one called default or marked so, or the only one. A folder without a card may have
/// configurations as sub-folders.
fn configuration(table: &SourceTable, card: &[CardConfig], data: &[String]) -> Result<Option<CardConfig>, String> {
    let names = || list(card.iter().map(|config| config.name.as_str()));
    match &table.config {
        Some(wanted) => {
            let found = card.iter().find(|config| config.name == *wanted).cloned();
            let inside = || data.iter().any(|name| name.starts_with(&format!("{wanted}/")));
            match found {
                Some(found) => Ok(Some(found)),
                None if card.is_empty() && inside() => Ok(Some(CardConfig::of_folder(wanted))),
                None if card.is_empty() => Err(format!(
                    "it has no configuration `{wanted}`: its README.md names none, and there is no such folder with data"
                )),
                None => Err(format!("it has no configuration `{wanted}`, there are {}", names())),
            }
        }
        None => match card {
            [] => Ok(None),
            [only] => Ok(Some(only.clone())),
            several => {
                let default = several.iter().find(|config| config.is_default || config.name == "default").cloned();
                let which = || format!("it has the configurations {}: name one as `config` of the source", names());
                default.map(Some).ok_or_else(which)
            }
        },
    }
}

/// The files of the splits to train on and to hold out.
fn choose(table: &SourceTable, splits: &Splits) -> Result<Vec<(String, bool)>, String> {
    let of = |split: &str| match splits.files(split) {
        Some(files) => Ok(files),
        None => Err(format!("it has no split `{split}`, there are {}", list(splits.names()))),
    };
    let split = table.split.as_deref().unwrap_or(TRAIN);
    if table.held_out.as_deref() == Some(split) {
        return Err(format!("`{split}` is both trained on and held out"));
    }
    let mut chosen: Vec<(String, bool)> = of(split)?.iter().map(|name| (name.clone(), false)).collect();
    if let Some(held_out) = &table.held_out {
        let others = of(held_out)?;
        if let Some(both) = others.iter().find(|name| chosen.iter().any(|(own, _)| own == *name)) {
            return Err(format!("{both} is in both splits, `{split}` and `{held_out}`"));
        }
        chosen.extend(others.iter().map(|name| (name.clone(), true)));
    }
    match chosen.iter().find(|(name, _)| !has_ending(name, &READ)) {
        Some((name, _)) => {
            Err(format!("{name} is of a kind that is not read ({} are): save it as one of these", READ.join(", ")))
        }
        None => Ok(chosen),
    }
}

/// The chosen files, if all shards that belong to them are there.
fn complete(chosen: Vec<(String, bool)>, data: &[String]) -> Result<Vec<(String, bool)>, String> {
    match chosen.iter().find_map(|(name, _)| splits::missing_shard(name, data)) {
        Some(missing) => Err(format!(
            "{missing} is missing, of which others are there: download it too, or name the files to read instead of their \
             folder"
        )),
        None => Ok(chosen),
    }
}

fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
