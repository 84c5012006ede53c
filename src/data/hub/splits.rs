//! Which files are of which split: by the patterns of a card, or by the hub's conventions for names.
//!
//! The conventions, in their order: `data/SPLIT-00000-of-00005.parquet`; folders whose names are a split's keyword, or have
//! it between signs and digits; files whose names do; else everything is to train on. The first that finds a file holds.
//! (<https://huggingface.co/docs/datasets/repository_structure>)

use glob::{MatchOptions, Pattern};

const KEYWORDS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// What may stand beside a keyword in a name.
const SIGNS: &str = "[-._ 0-9]";

const OPTIONS: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };

/// The files of each split, in the order of their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Splits(Vec<(String, Vec<String>)>);

impl Splits {
    /// By the names of the files below `folder`, or of all.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn by_names(data: &[String], folder: &str) -> Result<Splits, String> {
        let prefix = if folder.is_empty() { String::new() } else { format!("{}/", folder.trim_end_matches('/')) };
        let below: Vec<&str> = data.iter().filter_map(|name| name.strip_prefix(&prefix)).collect();
        let whole = |names: Vec<&str>| names.into_iter().map(|name| format!("{prefix}{name}")).collect();
        let of = |split: &str, names: Vec<&str>| (split.to_owned(), whole(names));
        if below.is_empty() {
            return Err(format!("no data is below `{folder}`"));
        }
        let mut shards: Vec<(String, Vec<&str>)> = Vec::new();
        for &name in &below {
            let Some(split) = name.strip_prefix("data/").and_then(shard_of) else { continue };
            match shards.iter_mut().find(|(known, _)| known == split) {
                Some((_, names)) => names.push(name),
                None => shards.push((split.to_owned(), vec![name])),
            }
        }
        if !shards.is_empty() {
            return Ok(Splits(shards.into_iter().map(|(split, names)| of(&split, names)).collect()));
        }
        for by in [folder_patterns, file_patterns] {
            let found = KEYWORDS.map(|(split, keywords)| {
                let patterns: Vec<Pattern> = keywords.iter().flat_map(|keyword| by(keyword)).collect();
                let is_it = |name: &&str| patterns.iter().any(|pattern| pattern.matches_with(name, OPTIONS));
                (split, below.iter().copied().filter(is_it).collect::<Vec<_>>())
            });
            if found.iter().any(|(_, names)| !names.is_empty()) {
                let found = found.into_iter().filter(|(_, names)| !names.is_empty());
                return Ok(Splits(found.map(|(split, names)| of(split, names)).collect()));
            }
        }
        Ok(Splits(vec![of("train", below)]))
    }

    /// By the patterns of each split, which are relative to `folder`.
    ///
    /// # Errors
    /// A pattern that is none, leads elsewhere or finds nothing.
    pub(super) fn by_patterns(
        data: &[String],
        patterns: &[(String, Vec<String>)],
        folder: &str,
    ) -> Result<Splits, String> {
        let split = |(split, patterns): &(String, Vec<String>)| {
            let mut names: Vec<String> = Vec::new();
            for pattern in patterns {
                names.extend(found(data, pattern, folder)?);
            }
            names.sort();
            names.dedup();
            Ok((split.clone(), names))
        };
        Ok(Splits(patterns.iter().map(split).collect::<Result<_, String>>()?))
    }

    pub(super) fn files(&self, split: &str) -> Option<&[String]> {
        self.0.iter().find(|(name, _)| name == split).map(|(_, files)| files.as_slice())
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }
}

/// Whether a file is a numbered shard of a split.
pub(super) fn is_shard(name: &str) -> bool {
    shard_of(name.rsplit('/').next().unwrap_or(name)).is_some()
}

/// The first shard of the set that `name` is a shard of that is not among `data`. The last part of a name may differ between
/// shards.
pub(super) fn missing_shard(name: &str, data: &[String]) -> Option<String> {
    let (folder, last) = name.rsplit_once('/').map_or(("", name), |(folder, last)| (folder, last));
    let split = shard_of(last)?;
    let before = if folder.is_empty() { split.to_owned() } else { format!("{folder}/{split}") };
    let count = last.get(split.len() + "-00000-of-".len()..)?.get(..5)?;
    let shard = |number: usize| format!("{before}-{number:05}-of-{count}");
    let is_there = |shard: &String| data.iter().any(|name| name.starts_with(shard.as_str()));
    (0..count.parse().ok()?).map(shard).find(|shard| !is_there(shard))
}

/// The split of `SPLIT-00000-of-00005.ending`.
fn shard_of(name: &str) -> Option<&str> {
    let pattern = Pattern::new("*-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9]*.*").ok()?;
    if !pattern.matches_with(name, OPTIONS) {
        return None;
    }
    let at = name.rfind("-of-")?.checked_sub(6)?;
    name.get(..at).filter(|split| !split.is_empty())
}

fn folder_patterns(keyword: &str) -> Vec<Pattern> {
    parsed([
        format!("**/{keyword}/**"),
        format!("**/{keyword}{SIGNS}*/**"),
        format!("**/*{SIGNS}{keyword}/**"),
        format!("**/*{SIGNS}{keyword}{SIGNS}*/**"),
    ])
}

fn file_patterns(keyword: &str) -> Vec<Pattern> {
    parsed([format!("**/{keyword}{SIGNS}*"), format!("**/*{SIGNS}{keyword}{SIGNS}*")])
}

fn parsed<const N: usize>(patterns: [String; N]) -> Vec<Pattern> {
    patterns.iter().map(|pattern| Pattern::new(pattern).expect("our own patterns are patterns")).collect()
}

/// A pattern of a path, name by name; nothing stands for any number of names. Whoever wrote it, the time that it takes is a
/// product of lengths: the signs of a whole path would be tried in all ways in which they can be placed.
struct PathPattern(Vec<Option<Pattern>>);

impl PathPattern {
    fn new(path: &str) -> Result<PathPattern, glob::PatternError> {
        let part = |part: &str| if part == "**" { Ok(None) } else { Pattern::new(part).map(Some) };
        path.split('/').map(part).collect::<Result<_, _>>().map(PathPattern)
    }

    fn matches(&self, path: &str) -> bool {
        let names: Vec<&str> = path.split('/').collect();
        // How many of the names what came before may stand for.
        let mut taken = vec![false; names.len() + 1];
        taken[0] = true;
        for part in &self.0 {
            let before = std::mem::replace(&mut taken, vec![false; names.len() + 1]);
            for (count, _) in before.iter().enumerate().filter(|(_, may)| **may) {
                match part {
                    Some(one) => {
                        if names.get(count).is_some_and(|name| one.matches_with(name, OPTIONS)) {
                            taken[count + 1] = true;
                        }
                    }
                    None => {
                        let seen = names[count..].iter().take_while(|name| !name.starts_with('.')).count();
                        taken[count..=count + seen].fill(true);
                    }
                }
            }
        }
        taken[names.len()]
    }
}

/// The files that a pattern of a card means: files, or all of a folder.
fn found(data: &[String], written: &str, folder: &str) -> Result<Vec<String>, String> {
    let is_elsewhere =
        written.contains("://") || written.starts_with('/') || written.split('/').any(|part| part == "..");
    if is_elsewhere {
        return Err(format!("`{written}` leads out of the folder: only its own files are read"));
    }
    let parts = [folder, written].into_iter().flat_map(|path| path.split('/'));
    let path: Vec<&str> = parts.filter(|part| !part.is_empty() && *part != ".").collect();
    let path = path.join("/");
    let wrong = |error: glob::PatternError| format!("`{written}` is no pattern: {}", error.msg);
    let patterns = [PathPattern::new(&path).map_err(wrong)?, PathPattern::new(&format!("{path}/**")).map_err(wrong)?];
    let is_it = |name: &&String| patterns.iter().any(|pattern| pattern.matches(name));
    let names: Vec<String> = data.iter().filter(is_it).cloned().collect();
    match names.is_empty() {
        true => Err(format!("`{written}` in README.md finds no file with data")),
        false => Ok(names),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the library has it, which tries every way there is.
    #[test]
    fn patterns_by_names_find_what_patterns_of_paths_find() {
        let names = ["a.x", "d/a.x", "d/b.x", "d/e/a.x", "d/.h/a.x", ".h/a.x", "d/e/f/.a.x", "d/e/f/b.y", "ad/a.x"];
        for written in [
            "a.x",
            "*",
            "*.x",
            "d/*",
            "d/?.x",
            "**",
            "**/*",
            "**/a.x",
            "d/**",
            "d/**/*.x",
            "**/e/**",
            "*/*.x",
            "**/**/b.*",
            "[a-d]/a.x",
            "[!d]*/*",
            ".h/*",
            "d/**/.a.x",
            "**/f/**/*",
        ] {
            let (own, theirs) = (PathPattern::new(written).unwrap(), Pattern::new(written).unwrap());
            for name in names {
                assert_eq!(own.matches(name), theirs.matches_with(name, OPTIONS), "{name} by {written}");
            }
        }
        assert!(PathPattern::new("d/**x").is_err() && PathPattern::new("[").is_err());
    }

    #[test]
    fn no_pattern_takes_for_ever() {
        let (pattern, name) = (format!("{}b/**/x", "*a".repeat(40)), format!("{}/x", "a".repeat(200)));
        assert!(!PathPattern::new(&pattern).unwrap().matches(&name));
        let deep = format!("{}y", "a/".repeat(200));
        assert!(!PathPattern::new(&"**/a/".repeat(40)).unwrap().matches(&deep));
    }
}
