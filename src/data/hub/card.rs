//! The front matter of a data set's card: its configurations, and the files of their splits.

use std::fs;
use std::path::Path;

use saphyr::{LoadableYamlNode, Yaml};

use super::TRAIN;
use crate::data::error::Error;

/// A configuration that a card names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CardConfig {
    pub(super) name: String,
    pub(super) is_default: bool,
    /// What patterns are relative to; empty means the data set's folder.
    pub(super) folder: String,
    pub(super) files: ConfigFiles,
}

/// Where the files of a configuration are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ConfigFiles {
    /// Below a folder, by the hub's conventions for names; empty means the data set's.
    Folder(String),
    /// For each split, by patterns.
    Patterns(Vec<(String, Vec<String>)>),
}

impl CardConfig {
    /// A configuration that is a sub-folder.
    pub(super) fn of_folder(name: &str) -> CardConfig {
        let (folder, files) = (String::new(), ConfigFiles::Folder(name.to_owned()));
        CardConfig { name: name.to_owned(), is_default: false, folder, files }
    }
}

/// The configurations of a card; none, where it has front matter without any. Nothing, where there is no front matter.
///
/// # Errors
/// A card that cannot be read or understood.
pub(super) fn read(path: &Path) -> Result<Option<Vec<CardConfig>>, Error> {
    if !path.is_file() {
        return Ok(None);
    }
    let bytes = fs::read(path).map_err(Error::io("read", path))?;
    let text = String::from_utf8_lossy(&bytes).replace("\r\n", "\n");
    let Some(front) = front_matter(&text) else { return Ok(None) };
    let folder = path.parent().unwrap_or(path).to_owned();
    let wrong = |problem: String| Error::DataSet { path: folder.clone(), message: format!("README.md: {problem}") };
    let documents = Yaml::load_from_str(front).map_err(|error| wrong(format!("its front matter is no YAML ({error})")));
    let documents = documents?;
    let configs = documents.first().and_then(|document| document.as_mapping_get("configs"));
    let Some(configs) = configs.filter(|configs| !configs.is_null()) else { return Ok(Some(Vec::new())) };
    let list = configs.as_vec().ok_or_else(|| "`configs` is no list".to_owned());
    let configs = list.and_then(|list| list.iter().map(config).collect());
    configs.map(Some).map_err(wrong)
}

/// What is between the first line, three dashes, and the next such line.
fn front_matter(text: &str) -> Option<&str> {
    let rest = text.trim_start_matches('\u{feff}').strip_prefix("---\n")?;
    rest.split_once("\n---").map(|(front, _)| front)
}

fn config(yaml: &Yaml) -> Result<CardConfig, String> {
    let name = yaml.as_mapping_get("config_name").and_then(text).ok_or("a configuration has no `config_name`")?;
    let is_default = yaml.as_mapping_get("default").and_then(Yaml::as_bool).unwrap_or(false);
    let folder = yaml.as_mapping_get("data_dir").and_then(text).unwrap_or_default();
    if folder.starts_with('/') || folder.split('/').any(|part| part == "..") {
        return Err(format!("`data_dir` of `{name}`, {folder}, leads out of the folder"));
    }
    let files = match yaml.as_mapping_get("data_files").filter(|files| !files.is_null()) {
        None => ConfigFiles::Folder(folder.trim_start_matches("./").to_owned()),
        Some(files) => {
            let wrong = || format!("`data_files` of `{name}` is neither paths nor a list of `split` and `path`");
            ConfigFiles::Patterns(patterns(files).ok_or_else(wrong)?)
        }
    };
    Ok(CardConfig { name, is_default, folder, files })
}

/// A path, a list of paths, or a list of splits with paths.
fn patterns(yaml: &Yaml) -> Option<Vec<(String, Vec<String>)>> {
    if let Some(paths) = paths(yaml) {
        return Some(vec![(TRAIN.to_owned(), paths)]);
    }
    let split = |yaml: &Yaml| Some((text(yaml.as_mapping_get("split")?)?, paths(yaml.as_mapping_get("path")?)?));
    yaml.as_vec()?.iter().map(split).collect()
}

fn paths(yaml: &Yaml) -> Option<Vec<String>> {
    match text(yaml) {
        Some(path) => Some(vec![path]),
        None => yaml.as_vec()?.iter().map(text).collect(),
    }
}

/// A text, or a number that stands for one.
fn text(yaml: &Yaml) -> Option<String> {
    yaml.as_str().map(str::to_owned).or_else(|| yaml.as_integer().map(|number| number.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_say_where_splits_are() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("README.md");
        let found = |text: &str| {
            fs::write(&path, text).unwrap();
            read(&path)
        };
        assert_eq!(found("# Notes\n").unwrap(), None);
        assert_eq!(found("---\nlicense: mit\n---\n# Set\n").unwrap(), Some(Vec::new()));
        let configs = found(
            "---\r\nconfigs:\r\n- config_name: en\r\n  default: true\r\n  data_files:\r\n  - split: train\r\n    path: data/train-*\r\n  - split: test\r\n    path: [a, b]\r\n- config_name: de\r\n  data_dir: de\r\n- config_name: 2024\r\n  data_files: x/*.jsonl\r\n---\r\n",
        );
        let configs = configs.unwrap().unwrap();
        let patterns = |of: &[(&str, &[&str])]| {
            let own = |paths: &[&str]| paths.iter().map(|path| (*path).to_owned()).collect();
            ConfigFiles::Patterns(of.iter().map(|(split, paths)| ((*split).to_owned(), own(paths))).collect())
        };
        assert_eq!(configs[0].files, patterns(&[("train", &["data/train-*"]), ("test", &["a", "b"])]));
        assert!(configs[0].is_default && !configs[1].is_default);
        assert_eq!((&configs[1].files, &*configs[2].name), (&ConfigFiles::Folder("de".into()), "2024"));
        assert_eq!(configs[2].files, patterns(&[("train", &["x/*.jsonl"])]));
        for (wrong, told) in [
            ("---\nconfigs: [\n---\n", "is no YAML"),
            ("---\nconfigs: en\n---\n", "`configs` is no list"),
            ("---\nconfigs:\n- data_files: a\n---\n", "no `config_name`"),
            ("---\nconfigs:\n- config_name: a\n  data_files: {b: c}\n---\n", "`data_files` of `a`"),
            ("---\nconfigs:\n- config_name: a\n  data_dir: ../b\n---\n", "leads out"),
        ] {
            let error = found(wrong).unwrap_err().to_string();
            assert!(error.contains(told), "{wrong}: {error}");
        }
    }
}
