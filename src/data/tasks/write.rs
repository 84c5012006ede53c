//! A corpus of pairs: which parts there are, the tokenizer's sample, documents by language, and tables of pairs.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use rayon::prelude::*;

use super::gather::{Bitext, GatheredTexts};
use super::index::{LanguageEntry, LeftOutPart, PairIndex, PartEntry, ReadPairs};
use super::sources::{TaskSources, label_language};
use crate::data::config::{Config, TaskKind, TaskTable};
use crate::data::error::Error;
use crate::data::manifest::{SplitEntry, sha256, write_durably};
use crate::data::shards::{SplitWriter, WriterShape};
use crate::data::shuffle::Permutation;
use crate::data::splits::Split;
use crate::data::stages::PrepareStage;
use crate::data::tokenizer::Tokenizer;

/// Which texts a tokenizer is trained on is the same in every run.
const SAMPLE_SEED: u64 = 0x7361_6d70;
/// Texts that all threads turn into tokens before these are written.
const TEXTS_AT_ONCE: usize = 1 << 16;

/// A part and its pairs, as numbers of texts in their languages.
struct TextPart {
    task: usize,
    /// Indices of the languages.
    from: usize,
    to: usize,
    train: Vec<[u32; 2]>,
    held_out: Vec<[u32; 2]>,
}

/// All that is to be written.
pub(in crate::data) struct TaskTexts<'a> {
    config: &'a Config,
    gathered: GatheredTexts,
    parts: Vec<TextPart>,
    left_out: Vec<LeftOutPart>,
    read: ReadPairs,
}

impl<'a> TaskTexts<'a> {
    /// Reads the sources, and finds what each task learns.
    ///
    /// # Errors
    /// What the readers report; a task of which no direction has enough pairs, and a direction by name that has none.
    pub(in crate::data) fn read(config: &'a Config, sources: &TaskSources) -> Result<TaskTexts<'a>, Error> {
        let (gathered, read) = sources.gather()?;
        let mut texts = TaskTexts { config, gathered, parts: Vec::new(), left_out: Vec::new(), read };
        for (index, task) in config.tasks.iter().enumerate() {
            let mut parts = if task.kind.is_of_one_text() { texts.of_one_text(index) } else { texts.of_two(index) };
            texts.check_directions(task, &parts, sources)?;
            texts.check_languages(task, &parts, sources)?;
            texts.leave_out_small(task, &mut parts);
            if parts.is_empty() {
                let (task, help) = (task.name().to_owned(), sources.help(&texts.read));
                let most = texts.left_out.iter().filter(|part| part.name == task);
                let most = most.max_by_key(|part| part.pairs).map_or(0, |part| part.pairs);
                return Err(Error::NoTaskPairs { task, most, min_pairs: config.tasks[index].min_pairs, help });
            }
            texts.parts.extend(parts);
        }
        Ok(texts)
    }

    fn name(&self, language: usize) -> &str {
        &self.gathered.languages[language].language
    }

    /// The bitexts that a task takes its texts from: its own, or those of all translation tasks.
    fn bitexts(&self, index: usize) -> impl Iterator<Item = &Bitext> {
        let own = !self.config.tasks[index].sources.is_empty();
        let translates = |task: usize| self.config.tasks[task].kind == TaskKind::Translation;
        let bitexts = self.gathered.bitexts.iter();
        bitexts.filter(move |bitext| if own { bitext.task == index } else { translates(bitext.task) })
    }

    fn of_two(&self, index: usize) -> Vec<TextPart> {
        let task = &self.config.tasks[index];
        let labels = (task.kind == TaskKind::Classification).then(|| label_language(task));
        let mut parts = Vec::new();
        for bitext in self.bitexts(index) {
            let [a, b] = bitext.languages;
            for (from, to, is_turned) in [(a, b, false), (b, a, true)] {
                let writes = labels.as_ref().is_none_or(|labels| self.name(to) == labels);
                if !writes || !task.takes([self.name(from), self.name(to)]) {
                    continue;
                }
                let turn = |pairs: &[[u32; 2]]| -> Vec<[u32; 2]> {
                    pairs.iter().map(|&[x, y]| if is_turned { [y, x] } else { [x, y] }).collect()
                };
                let (train, held_out) = (turn(&bitext.train), turn(&bitext.held_out));
                parts.push(TextPart { task: index, from, to, train, held_out });
            }
        }
        parts
    }

    /// Each text of a language with itself.
    fn of_one_text(&self, index: usize) -> Vec<TextPart> {
        let task = &self.config.tasks[index];
        let mut languages: BTreeMap<usize, [BTreeSet<u32>; 2]> = BTreeMap::new();
        for bitext in self.bitexts(index) {
            for (side, language) in bitext.languages.into_iter().enumerate() {
                if task.languages.as_ref().is_none_or(|names| names.iter().any(|name| name == self.name(language))) {
                    let [train, held_out] = languages.entry(language).or_default();
                    train.extend(bitext.train.iter().map(|pair| pair[side]));
                    held_out.extend(bitext.held_out.iter().map(|pair| pair[side]));
                }
            }
        }
        let twice = |texts: BTreeSet<u32>| texts.into_iter().map(|text| [text, text]).collect();
        let part = |(language, [train, held_out]): (usize, [BTreeSet<u32>; 2])| {
            let (train, held_out) = (twice(train), twice(held_out));
            TextPart { task: index, from: language, to: language, train, held_out }
        };
        languages.into_iter().map(part).collect()
    }

    /// Refuses a direction that was asked for by the names of both languages and has nothing to train on.
    fn check_directions(&self, task: &TaskTable, parts: &[TextPart], sources: &TaskSources) -> Result<(), Error> {
        for direction in task.directions.iter().flatten().filter(|pattern| !pattern.contains('*')) {
            let alone = TaskTable { directions: Some(vec![direction.clone()]), ..task.clone() };
            let is_it = |part: &&TextPart| alone.takes([self.name(part.from), self.name(part.to)]);
            if parts.iter().filter(is_it).all(|part| part.train.is_empty()) {
                let (task, direction, help) = (task.name().into(), direction.clone(), sources.help(&self.read));
                return Err(Error::EmptyDirection { task, direction, help });
            }
        }
        Ok(())
    }

    /// Refuses a language that a task of one text asks for by name and that has nothing to train on.
    fn check_languages(&self, task: &TaskTable, parts: &[TextPart], sources: &TaskSources) -> Result<(), Error> {
        for language in task.languages.iter().flatten().filter(|_| task.kind.is_of_one_text()) {
            let mut own = parts.iter().filter(|part| self.name(part.from) == language);
            if own.all(|part| part.train.is_empty()) {
                let (task, language, help) = (task.name().into(), language.clone(), sources.help(&self.read));
                return Err(Error::EmptyLanguage { task, language, help });
            }
        }
        Ok(())
    }

    fn leave_out_small(&mut self, task: &TaskTable, parts: &mut Vec<TextPart>) {
        let (kept, small): (Vec<TextPart>, Vec<TextPart>) =
            std::mem::take(parts).into_iter().partition(|part| part.train.len() as u64 >= task.min_pairs);
        *parts = kept;
        let told = |part: &TextPart| LeftOutPart {
            name: task.name().to_owned(),
            from: self.name(part.from).to_owned(),
            to: self.name(part.to).to_owned(),
            pairs: part.train.len() as u64,
        };
        let told: Vec<LeftOutPart> = small.iter().map(told).collect();
        self.left_out.extend(told);
    }

    /// The languages that some part reads or writes, in the order in which they were met.
    fn languages(&self) -> Vec<usize> {
        let all: BTreeSet<usize> = self.parts.iter().flat_map(|part| [part.from, part.to]).collect();
        all.into_iter().collect()
    }

    /// The languages for which there must be a tag.
    pub(in crate::data) fn tagged(&self) -> Vec<String> {
        self.languages().into_iter().map(|language| self.name(language).to_owned()).collect()
    }

    /// The texts of a language that a split has.
    fn texts(&self, language: usize, split: Split) -> BTreeSet<u32> {
        let of_part = |part: &'_ TextPart| -> Vec<u32> {
            let pairs = split.of(&part.train, &part.held_out);
            let sides = [(part.from, 0), (part.to, 1)].into_iter().filter(|(own, _)| *own == language);
            sides.flat_map(|(_, side)| pairs.iter().map(move |pair| pair[side])).collect()
        };
        self.parts.iter().flat_map(of_part).collect()
    }

    fn bytes(&self, language: usize, split: Split) -> u64 {
        let all = &self.gathered.languages[language].texts;
        self.texts(language, split).into_iter().map(|text| all[text as usize].len() as u64).sum()
    }

    /// Texts for a tokenizer, about so many bytes: of each language as many as its share is, which the temperature makes
    /// more even, and what one has too little of goes to the others.
    pub(in crate::data) fn sample(&self, bytes: usize) -> Vec<String> {
        let languages = self.languages();
        let texts = |language: usize| {
            let all: Vec<u32> = self.texts(language, Split::Train).into_iter().collect();
            let order = Permutation::new(all.len().max(1) as u64, SAMPLE_SEED, language as u64);
            let texts = (0..all.len()).map(|place| all[order.get(place as u64) as usize]);
            texts.map(|text| &self.gathered.languages[language].texts[text as usize]).collect::<Vec<&String>>()
        };
        let texts: Vec<Vec<&String>> = languages.into_iter().map(texts).collect();
        let sizes: Vec<f64> = texts.iter().map(|texts| texts.iter().map(|text| text.len() as f64).sum()).collect();
        let quotas = shares(&sizes, bytes as f64, self.config.temperature);
        let mut sample = Vec::new();
        for (texts, quota) in texts.iter().zip(quotas) {
            let mut taken = 0.0;
            let within = |text: &&&String| {
                let fits = taken < quota;
                taken += text.len() as f64;
                fits
            };
            sample.extend(texts.iter().take_while(within).map(|text| (*text).clone()));
        }
        sample
    }

    /// Refuses a tokenizer that cannot tell the languages, or hide words, before any text is tokenised.
    ///
    /// # Errors
    /// What it lacks.
    pub(in crate::data) fn check(&self, tokenizer: &Tokenizer, path: &Path) -> Result<(), Error> {
        if self.config.tasks.iter().any(|task| task.kind == TaskKind::Denoising) {
            tokenizer.mask()?;
        }
        let missing: Vec<String> =
            self.tagged().into_iter().filter(|language| tokenizer.tag(language).is_none()).collect();
        match missing.is_empty() {
            true => Ok(()),
            false => Err(Error::NoTags { path: path.to_owned(), missing, tags: tokenizer.tags() }),
        }
    }

    /// Writes the documents of both splits, language by language, and the tables.
    ///
    /// # Errors
    /// What writing can meet.
    pub(in crate::data) fn write(
        &self,
        dir: &Path,
        tokenizer: &Tokenizer,
        shape: WriterShape,
        progress: &dyn Fn(PrepareStage),
    ) -> Result<([SplitEntry; 2], PairIndex), Error> {
        let mut index = PairIndex {
            left_out: self.left_out.clone(),
            read: self.read.clone(),
            leaks: self.gathered.leaks,
            ..PairIndex::default()
        };
        let entry = |language| LanguageEntry { language, train: 0..0, held_out: 0..0 };
        index.languages = self.tagged().into_iter().map(entry).collect();
        let part = |part: &TextPart| PartEntry {
            task: part.task,
            name: self.config.tasks[part.task].name().to_owned(),
            from: self.name(part.from).to_owned(),
            to: self.name(part.to).to_owned(),
            train: 0..0,
            held_out: 0..0,
        };
        index.parts = self.parts.iter().map(part).collect();
        let train = self.write_split(Split::Train, &mut index, (dir, tokenizer, shape), progress)?;
        let held_out = self.write_split(Split::HeldOut, &mut index, (dir, tokenizer, shape), progress)?;
        Ok(([train, held_out], index))
    }

    fn write_split(
        &self,
        split: Split,
        index: &mut PairIndex,
        (dir, tokenizer, shape): (&Path, &Tokenizer, WriterShape),
        progress: &dyn Fn(PrepareStage),
    ) -> Result<SplitEntry, Error> {
        let (mut writer, mut documents, mut bytes_done) = (SplitWriter::create(dir, split, shape)?, 0, 0);
        let bytes = self.languages().into_iter().map(|language| self.bytes(language, split)).sum();
        let mut numbers: HashMap<(usize, u32), u32> = HashMap::new();
        for (place, language) in self.languages().into_iter().enumerate() {
            let numbered: Vec<u32> = self.texts(language, split).into_iter().collect();
            let texts: Vec<&String> =
                numbered.iter().map(|&text| &self.gathered.languages[language].texts[text as usize]).collect();
            let first = documents;
            for (numbered, texts) in numbered.chunks(TEXTS_AT_ONCE).zip(texts.chunks(TEXTS_AT_ONCE)) {
                progress(PrepareStage::Tokenizing { bytes_done, bytes });
                bytes_done += texts.iter().map(|text| text.len() as u64).sum::<u64>();
                let tokens: Vec<Vec<u32>> =
                    texts.par_iter().map(|text| tokenizer.encode(text)).collect::<Result<_, _>>()?;
                for ((number, text), tokens) in numbered.iter().zip(texts).zip(tokens) {
                    writer.append(&tokens, text.len())?;
                    writer.end_document()?;
                    numbers.insert((language, *number), documents as u32);
                    documents += 1;
                }
            }
            let entry = &mut index.languages[place];
            *split.of(&mut entry.train, &mut entry.held_out) = first..documents;
        }
        let mut table = Vec::new();
        for (part, entry) in self.parts.iter().zip(&mut index.parts) {
            let first = table.len() as u64 / 8;
            for &[reads, writes] in split.of(&part.train, &part.held_out) {
                let both = [numbers[&(part.from, reads)], numbers[&(part.to, writes)]];
                table.extend(both.into_iter().flat_map(u32::to_le_bytes));
            }
            let range = first..table.len() as u64 / 8;
            *split.of(&mut entry.train, &mut entry.held_out) = range;
        }
        write_durably(&dir.join(split.pairs_name()), &table)?;
        *split.of(&mut index.train_sha256, &mut index.held_out_sha256) = sha256(&table);
        writer.finish()
    }
}

/// Of `all`, shares in proportion to size^(1/temperature), of which none is more than there is.
fn shares(sizes: &[f64], all: f64, temperature: f64) -> Vec<f64> {
    let weights: Vec<f64> = sizes.iter().map(|size| size.powf(1.0 / temperature)).collect();
    let (mut shares, mut left) = (vec![None; sizes.len()], all);
    loop {
        let open = |shares: &[Option<f64>]| (0..sizes.len()).filter(|&i| shares[i].is_none()).collect::<Vec<_>>();
        let sum: f64 = open(&shares).into_iter().map(|i| weights[i]).sum();
        let short: Vec<usize> = open(&shares).into_iter().filter(|&i| weights[i] / sum * left >= sizes[i]).collect();
        if short.is_empty() {
            return (0..sizes.len()).map(|i| shares[i].unwrap_or(weights[i] / sum * left)).collect();
        }
        for i in short {
            shares[i] = Some(sizes[i]);
            left = (left - sizes[i]).max(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::tasks::gather::LanguageTexts;

    /// Two languages that have a hundred texts and ten: at a temperature the sample has more of the second than its share.
    #[test]
    fn the_tokenizers_sample_follows_the_temperature() {
        let language = |name: &str, count: usize| LanguageTexts {
            language: name.to_owned(),
            texts: (0..count).map(|n| format!("{name} {n:03}")).collect(),
        };
        let gathered = GatheredTexts { languages: vec![language("de", 100), language("fi", 10)], ..Default::default() };
        let train = (0..100).map(|n| [n, n % 10]).collect();
        let of = |temperature: f64| {
            let text = format!("temperature = {temperature:?}\n[[tasks]]\nkind = 'translation'\nsources = ['pairs']");
            let config: Config = toml::from_str(&text).unwrap();
            let (gathered, train): (GatheredTexts, Vec<[u32; 2]>) = (gathered.clone(), Vec::clone(&train));
            let parts = vec![TextPart { task: 0, from: 0, to: 1, train, held_out: Vec::new() }];
            let texts = TaskTexts { config: &config, gathered, parts, left_out: Vec::new(), read: Default::default() };
            texts.sample(110).iter().filter(|text| text.starts_with("fi")).count()
        };
        // Of 110 bytes, of texts of six: a tenth is two texts, half is ten, and there are no more.
        assert_eq!((of(1.0), of(1e9)), (2, 10));
    }

    #[test]
    fn shares_grow_more_even_with_the_temperature() {
        assert_eq!(shares(&[900.0, 100.0], 100.0, 1.0), [90.0, 10.0]);
        assert_eq!(shares(&[900.0, 100.0], 100.0, 2.0), [75.0, 25.0]);
        // What one language lacks goes to the others.
        assert_eq!(shares(&[900.0, 5.0], 100.0, 1e9), [95.0, 5.0]);
        assert_eq!(shares(&[7.0, 5.0], 100.0, 5.0), [7.0, 5.0]);
    }
}
