//! What the catalogues of programs hold: pairs of English and each language, and why others were left out.
//!
//! `CATALOGUES='/usr/share/locale/*/LC_MESSAGES/*.mo' cargo run --example catalogues` prints a row for each language.
//! With `DUMP=1` it prints each catalogue as it was read instead, as a line of JSON, which `oracle/catalogues.py`
//! compares with what Python reads. Without `CATALOGUES` it writes a small one and reads that.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::{env, fs, io};

use anyhow::ensure;
use guildhall::data::Split;
use guildhall::data::pairs::catalogues::Catalogue;
use guildhall::data::pairs::{Cleaning, MessageKeys, PairLayout, PairListing, PairSpec, SkipReason, list, read_all};
use serde_json::json;

const SMALL: &str = r#"
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\n"

msgid "_Open the door"
msgstr "Die Tür ö_ffnen"

msgid "%d door"
msgid_plural "%d doors"
msgstr[0] "%d Tür"
msgstr[1] "%d Türen"

#, fuzzy
msgid "Close the window"
msgstr "Die Tür schließen"
"#;

pub(crate) fn main() -> anyhow::Result<()> {
    if let Ok(path) = env::var("CATALOGUES") {
        let spec = PairSpec { path, ..PairSpec::default() };
        let listing = list(&[spec], Path::new(".guildhall"))?;
        return match env::var("SHOW") {
            Ok(language) => show(&listing, &language),
            _ if env::var_os("DUMP").is_some() => dump(&listing),
            _ => table(&listing),
        };
    }
    let folder = tempfile::tempdir()?;
    fs::create_dir_all(folder.path().join("house/po"))?;
    fs::write(folder.path().join("house/po/de.po"), SMALL)?;
    let spec = PairSpec { path: folder.path().display().to_string(), ..PairSpec::default() };
    let mut targets = Vec::new();
    let summary = read_all(&list(&[spec], Path::new(".guildhall"))?, Cleaning::default(), &mut |pair| {
        targets.push(pair.texts[1].clone());
        Ok(())
    })?;
    ensure!(targets == ["Die Tür öffnen", "%d Tür", "%d Türen"], "{targets:?}");
    let direction = &summary.directions[&["en".to_owned(), "de".to_owned()]];
    ensure!(direction.skips.count(SkipReason::Fuzzy) == 1, "{summary:?}");
    Ok(())
}

fn show(listing: &PairListing, language: &str) -> anyhow::Result<()> {
    let files = listing.files.iter().filter(|file| file.languages[1] == language).cloned().collect();
    let mut out = io::BufWriter::new(io::stdout().lock());
    let mut written = Ok(());
    read_all(&PairListing { files, ..PairListing::default() }, Cleaning::default(), &mut |pair| {
        if written.is_ok() {
            written = writeln!(out, "{}", pair.texts.join("\t"));
        }
        Ok(())
    })?;
    Ok(written?)
}

fn table(listing: &PairListing) -> anyhow::Result<()> {
    let keys = MessageKeys::default();
    let mut held_out: BTreeMap<String, u64> = BTreeMap::new();
    let summary = read_all(listing, Cleaning::default(), &mut |pair| {
        if keys.split(&pair.texts[0], 0.02) == Split::HeldOut {
            *held_out.entry(pair.languages[1].clone()).or_insert(0) += 1;
        }
        Ok(())
    })?;
    let mut out = io::stdout().lock();
    writeln!(out, "language\tcatalogues\tpairs\theld out\tleft out")?;
    for (languages, direction) in &summary.directions {
        let held_out = held_out.get(&languages[1]).copied().unwrap_or(0);
        writeln!(out, "{}\t{}\t{}\t{held_out}\t{}", languages[1], direction.files, direction.pairs, direction.skips)?;
    }
    writeln!(out, "{} catalogues of English, {} other files", listing.english, listing.others)?;
    writeln!(out, "{} unreadable: {:?}", summary.unreadable, summary.unreadable_examples)?;
    writeln!(out, "messages that are no English text: {:?}", summary.foreign)?;
    Ok(())
}

fn dump(listing: &PairListing) -> anyhow::Result<()> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    for file in &listing.files {
        let PairLayout::Catalogue { compiled, .. } = file.layout else { continue };
        let line = match Catalogue::read(&file.path, guildhall::data::sources::Compression::None, compiled) {
            Err(error) => json!({ "path": file.path, "error": error.to_string() }),
            Ok(catalogue) => {
                let entries = catalogue.entries.iter().flatten();
                let entries = entries.map(|entry| json!([entry.context, entry.id, entry.plural_id, entry.texts]));
                let plurals: Vec<_> = (0..=200).map(|number| catalogue.header.plurals.form(number)).collect();
                let undecoded = catalogue.entries.iter().filter(|entry| entry.is_err()).count();
                json!({ "path": file.path, "plurals": plurals, "undecoded": undecoded, "entries": entries.collect::<Vec<_>>() })
            }
        };
        writeln!(out, "{line}")?;
    }
    Ok(())
}
