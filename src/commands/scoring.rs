//! Scores of what a checkpoint writes for held-out texts, by task and direction: BLEU, chrF, exact matches, accuracy.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use super::decoding::{DecodeOptions, TextDecoder, check_beams};
use super::prepare::held_out_tasks;
use super::trained::Trained;
use super::{CommandFailure, say};
use crate::cli::EvaluateArgs;
use crate::data::tasks::{PartLabel, TaskPart};
use crate::data::{Corpus, TaskKind};
use crate::model::Translator;
use crate::score::{Bleu, BleuOptions, Chrf, ChrfOptions, Tokenize, exact_match};
use crate::train::Error;

/// Of the texts of a part: what was read, what was written, and what should have been.
struct Outputs {
    sources: Vec<String>,
    hypotheses: Vec<String>,
    references: Vec<String>,
}

/// Whether scores are asked for.
pub(super) fn is_asked(arguments: &EvaluateArgs) -> bool {
    arguments.bleu || arguments.chrf
}

/// Refuses options that score nothing.
pub(super) fn check(arguments: &EvaluateArgs) -> Result<(), CommandFailure> {
    let scores = is_asked(arguments);
    let wrong = |text: &str| Err(CommandFailure::Request(anyhow::anyhow!("{text}")));
    let options = [
        ("--sentences", arguments.sentences.is_some()),
        ("--beams", arguments.beams.is_some()),
        ("--outputs", arguments.outputs.is_some()),
    ];
    match options.iter().find(|(_, given)| *given && !scores) {
        Some((option, _)) => wrong(&format!("{option} without --bleu or --chrf: no text is written; add one of them")),
        None if arguments.sentences == Some(0) => wrong("--sentences 0: there is nothing to score; use 1 or more"),
        None => check_beams(arguments.beams.unwrap_or(GREEDY)),
    }
}

/// Refuses a checkpoint that learned no tasks.
pub(super) fn check_tasks(arguments: &EvaluateArgs, trained: &Trained) -> Result<(), CommandFailure> {
    if !is_asked(arguments) || !trained.config.data.tasks.is_empty() {
        return Ok(());
    }
    let (folder, family) = (arguments.checkpoint.display(), trained.config.model.family.name());
    Err(CommandFailure::Request(anyhow::anyhow!(
        "--bleu and --chrf: {folder} holds a model of the family {family:?} that learned no [[data.tasks]]: it has \
         nothing to translate; leave them out for its held-out loss"
    )))
}

/// Makes the folder for outputs, or refuses it before anything is decoded.
pub(super) fn outputs_folder(arguments: &EvaluateArgs, trained: &Trained) -> Result<(), CommandFailure> {
    let Some(folder) = arguments.outputs.as_ref().filter(|_| trained.process.leads()) else { return Ok(()) };
    fs::create_dir_all(folder).map_err(|error| {
        let wrong = format!("--outputs {}: {error}; name a folder that can be written", folder.display());
        CommandFailure::Request(anyhow::anyhow!(wrong))
    })
}

/// The scores of every part of the held-out split, in the order of its losses: none for a part whose task has none.
///
/// # Errors
/// What decoding reports; a folder that cannot be written.
pub(super) fn scores(arguments: &EvaluateArgs, corpus: &Corpus) -> Result<Vec<Map<String, Value>>, CommandFailure> {
    // One rank: texts are decoded one after the other.
    let trained = Trained::open(&arguments.checkpoint, &arguments.backend.with(&arguments.overrides.set), Some(1))?;
    let parts = held_out_tasks(corpus, &trained.config, &|_| ())?;
    if corpus.tokenizer.normalizes() {
        say(
            "note: the tokenizer rewrites texts before it cuts them (its normalizer): references are what it makes of them",
        );
    }
    let most = arguments.sentences.unwrap_or(SENTENCES);
    let outputs = trained.run(|model, mesh, rank| {
        let translator = Translator::new(model, &rank.device, mesh);
        let search = DecodeOptions { beams: arguments.beams.unwrap_or(GREEDY), length_penalty: 1.0, max_tokens: None };
        let decoder = TextDecoder::new(&translator, &trained, search);
        parts.iter().map(|part| written(&decoder, part, most)).collect::<Result<Vec<_>, Error>>()
    })?;
    let scored = parts.iter().zip(&outputs).map(|(part, outputs)| match outputs {
        Some(outputs) => {
            if let Some(folder) = &arguments.outputs {
                write(folder, &part.label, outputs)?;
            }
            score(arguments, part, outputs)
        }
        None => Ok(Map::new()),
    });
    scored.collect()
}

/// Texts of a part that are decoded unless the command line says otherwise.
const SENTENCES: usize = 200;

/// Beams unless the command line says otherwise.
const GREEDY: usize = 1;

/// The first texts of a part in the order of its rows, which is by chance. None of a task that writes no other text than
/// it was given, and of a part without rows.
fn written(decoder: &TextDecoder, part: &TaskPart, most: usize) -> Result<Option<Outputs>, Error> {
    let is_scored = matches!(part.kind, TaskKind::Translation | TaskKind::Classification);
    let count = part.rows.pairs().min(most);
    if !is_scored || count == 0 {
        return Ok(None);
    }
    let mut outputs = Outputs { sources: Vec::new(), hypotheses: Vec::new(), references: Vec::new() };
    for number in 0..count {
        let [source, target] = part.rows.pair(number)?;
        outputs.sources.push(decoder.line(&source[1..source.len() - 1])?);
        outputs.references.push(decoder.line(&target[1..target.len() - 1])?);
        outputs.hypotheses.push(decoder.text(&source, target[0])?);
    }
    Ok(Some(outputs))
}

fn score(arguments: &EvaluateArgs, part: &TaskPart, outputs: &Outputs) -> Result<Map<String, Value>, CommandFailure> {
    let Outputs { hypotheses, references, .. } = outputs;
    let references: Vec<Vec<&String>> = references.iter().map(|reference| vec![reference]).collect();
    let mut fields = Map::new();
    fields.insert("sentences".to_owned(), hypotheses.len().into());
    let exact = exact_match(hypotheses, &references).map_err(CommandFailure::run)?;
    if part.kind == TaskKind::Classification {
        fields.insert("accuracy".to_owned(), exact.into());
        return Ok(fields);
    }
    fields.insert("exact".to_owned(), exact.into());
    if arguments.bleu {
        let bleu = Bleu::new(BleuOptions { tokenize: words_of(&part.label.to), ..BleuOptions::default() });
        let score = bleu.corpus(hypotheses, &references).map_err(CommandFailure::run)?.score;
        fields.insert("bleu".to_owned(), score.into());
        fields.insert("bleu_signature".to_owned(), bleu.signature(&references).into());
    }
    if arguments.chrf {
        let chrf = Chrf::new(ChrfOptions::default());
        let score = chrf.corpus(hypotheses, &references).map_err(CommandFailure::run)?.score;
        fields.insert("chrf".to_owned(), score.into());
        fields.insert("chrf_signature".to_owned(), chrf.signature(&references).into());
    }
    Ok(fields)
}

/// How BLEU cuts a language into words; by characters where words have no blanks between them.
fn words_of(language: &str) -> Tokenize {
    match language.split(['_', '-', '@']).next().unwrap_or_default() {
        "zh" => Tokenize::Zh,
        "ja" | "ko" | "th" => Tokenize::Char,
        _ => Tokenize::V13a,
    }
}

/// Three files of lines, which sacrebleu reads.
fn write(folder: &Path, PartLabel { task, from, to }: &PartLabel, outputs: &Outputs) -> Result<(), CommandFailure> {
    let Outputs { sources, hypotheses, references } = outputs;
    for (what, lines) in [("src", sources), ("hyp", hypotheses), ("ref", references)] {
        let path = folder.join(format!("{task}.{from}-{to}.{what}").replace(['/', ':'], "_"));
        let text: String = lines.iter().flat_map(|line| [line, "\n"]).collect();
        fs::write(&path, text).map_err(|error| not_written(&path, &error))?;
    }
    Ok(())
}

fn not_written(path: &Path, error: &std::io::Error) -> CommandFailure {
    CommandFailure::Run(anyhow::anyhow!("could not write {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn languages_without_blanks_are_cut_otherwise() {
        let of = ["zh_CN", "zh", "ja", "ko", "de", "sr@latin", "pt_BR"].map(words_of);
        let [zh, char, words] = [Tokenize::Zh, Tokenize::Char, Tokenize::V13a];
        assert_eq!(of, [zh, zh, char, char, words, words, words]);
    }
}
