//! Rows of pairs of texts: packing, corruption, and mixtures of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;

use guildhall::data::pairs::{MessageKeys, TextPair};
use guildhall::data::tasks::{
    BLOCK, Bitext, Component, Corruption, GatheredTexts, Gatherer, Mixture, PairRows, PairTags, TextToRead, TokenWords,
};
use guildhall::data::{self, BatchPlan, Config, Corpus, IGNORE, PAD, Row, Source, Split};
use proptest::prelude::*;
use tempfile::TempDir;

/// Documents of two languages, the second language's behind those of the first.
struct Texts {
    corpus: Corpus,
    texts: Vec<String>,
    _folder: TempDir,
}

const PAIRS: usize = 60;

fn text(language: usize, number: usize) -> String {
    let words = ["open", "the", "file", "before", "you", "close", "a", "door"];
    let sentence = |first: usize, len: usize| {
        let words: Vec<&str> = (0..len).map(|i| words[(first * 3 + i * 5 + language) % words.len()]).collect();
        format!("{}{}.", words.join(" "), ["", " now", " datei"][(first + language) % 3])
    };
    let sentences = 1 + (number * 7 + language) % 3;
    (0..sentences).map(|i| sentence(number + i, 2 + (number + i) % 9)).collect::<Vec<_>>().join(" ")
}

fn texts() -> Texts {
    let folder = tempfile::tempdir().unwrap();
    let texts: Vec<String> = (0..2).flat_map(|language| (0..PAIRS).map(move |i| text(language, i))).collect();
    let lines: Vec<String> = texts.iter().map(|text| serde_json::json!({ "text": text }).to_string()).collect();
    fs::write(folder.path().join("texts.jsonl"), lines.join("\n")).unwrap();
    let config: Config = toml::from_str(&format!(
        "sources = ['{0}/texts.jsonl']\ncache = '{0}/cache'\nheld_out = 0.0",
        folder.path().display()
    ))
    .unwrap();
    let corpus = data::prepare(&config, 300, &|_| ()).unwrap();
    Texts { corpus, texts, _folder: folder }
}

const TAGS: PairTags = PairTags { source: 0, target: 1, end: 0 };

impl Texts {
    fn rows(&self, reading: TextToRead, lengths: [usize; 2]) -> PairRows {
        let pairs: Vec<[u32; 2]> = (0..PAIRS as u32).map(|i| [i, i + PAIRS as u32]).collect();
        let tags = PairTags { end: self.corpus.tokenizer.end_of_text(), ..TAGS };
        PairRows::new(self.corpus.split(Split::Train).clone(), &pairs, (tags, reading), lengths)
    }

    fn decode(&self, tokens: &[u32]) -> String {
        self.corpus.tokenizer.decode(tokens).unwrap()
    }
}

/// The tokens and targets of each segment of a row; what is behind them is padding.
fn segments(row: &Row, end: u32) -> Vec<(Vec<u32>, Vec<u32>)> {
    let mut segments: Vec<(Vec<u32>, Vec<u32>)> = Vec::new();
    for at in 0..row.tokens.len() {
        let (token, target, segment) = (row.tokens[at], row.targets[at], row.segments[at]);
        if segment == PAD {
            assert_eq!((token, target, row.positions[at]), (end, IGNORE, 0));
            assert!(row.segments[at..].iter().all(|segment| *segment == PAD), "padding is behind all texts");
            break;
        }
        segments.resize(segment as usize + 1, Default::default());
        let (tokens, targets) = &mut segments[segment as usize];
        assert_eq!(row.positions[at] as usize, tokens.len());
        tokens.push(token);
        targets.push(target);
    }
    segments
}

#[test]
fn every_pair_is_in_one_row_and_can_be_read_back() {
    let texts = texts();
    let end = texts.corpus.tokenizer.end_of_text();
    for lengths in [[96, 64], [16, 96], [256, 256]] {
        let rows = texts.rows(TextToRead::Other, lengths);
        let mut met = Vec::new();
        let mut filled = [0, 0];
        for row in (0..rows.len()).map(|index| rows.get(index, 0).unwrap()) {
            let source = row.source.as_deref().unwrap();
            assert_eq!([source.tokens.len(), row.tokens.len()], lengths);
            let (read, written) = (segments(source, end), segments(&row, end));
            assert_eq!(read.len(), written.len());
            for ((read, nothing), (input, targets)) in read.into_iter().zip(written) {
                assert!(nothing.iter().all(|target| *target == IGNORE));
                assert_eq!((read[0], *read.last().unwrap(), input[0]), (TAGS.source, end, TAGS.target));
                assert_eq!((&input[1..], *targets.last().unwrap()), (&targets[..targets.len() - 1], end));
                met.push([texts.decode(&read[1..read.len() - 1]), texts.decode(&input[1..])]);
                filled = [filled[0] + read.len() as u64, filled[1] + input.len() as u64];
            }
        }
        let mut want: Vec<[String; 2]> =
            (0..PAIRS).map(|i| [texts.texts[i].clone(), texts.texts[i + PAIRS].clone()]).collect();
        if rows.too_long() > 0 {
            want.retain(|pair| met.contains(pair));
        }
        met.sort();
        want.sort();
        assert_eq!(met, want, "{lengths:?}");
        assert_eq!((rows.pairs() as u64 + rows.too_long(), rows.filled()), (PAIRS as u64, filled));
    }
    assert!(texts.rows(TextToRead::Other, [16, 96]).too_long() > 0, "a case of pairs that are too long");
    assert_eq!(texts.rows(TextToRead::Other, [256, 256]).too_long(), 0);
    // Nearly all of a row is used on the fuller side.
    let rows = texts.rows(TextToRead::Other, [256, 256]);
    let most = rows.filled().into_iter().max().unwrap() as f64;
    assert!(most > 0.8 * (256 * rows.len()) as f64, "{most} of {} rows", rows.len());
}

#[test]
fn a_text_alone_is_read_as_its_tag() {
    let texts = texts();
    let end = texts.corpus.tokenizer.end_of_text();
    let rows = texts.rows(TextToRead::Nothing, [64, 128]);
    let row = rows.get(0, 0).unwrap();
    let read = segments(row.source.as_deref().unwrap(), end);
    assert!(!read.is_empty() && read.iter().all(|(tokens, _)| tokens == &[TAGS.source, end]));
}

/// Of each segment in a pass, what is read and the clean tokens.
fn corrupted(texts: &Texts, by: Corruption, pass: u64) -> Vec<(Vec<u32>, Vec<u32>)> {
    let words = TokenWords::new(&texts.corpus.tokenizer).unwrap();
    let rows = texts.rows(TextToRead::Corrupted { words, by, seed: 3 }, [128, 128]);
    let end = texts.corpus.tokenizer.end_of_text();
    let of_row = |index| {
        let row = rows.get(index, pass).unwrap();
        let read = segments(row.source.as_deref().unwrap(), end).into_iter();
        let written = segments(&row, end);
        let both =
            read.zip(written).map(|((read, _), (input, _))| (read[1..read.len() - 1].to_vec(), input[1..].to_vec()));
        both.collect::<Vec<_>>()
    };
    (0..rows.len()).flat_map(of_row).collect()
}

fn sorted(tokens: &[u32]) -> Vec<u32> {
    let mut sorted = tokens.to_vec();
    sorted.sort_unstable();
    sorted
}

#[test]
fn corruption_is_as_asked() {
    let texts = texts();
    let mask = texts.corpus.tokenizer.mask().unwrap();
    let nothing = Corruption { mask: 0.0, span: 3.0, drop: 0.0, shuffle: false };
    assert!(corrupted(&texts, nothing, 0).iter().all(|(read, clean)| read == clean));
    // Sentences change places whole.
    let shuffled = corrupted(&texts, Corruption { shuffle: true, ..nothing }, 0);
    assert!(shuffled.iter().all(|(read, clean)| sorted(read) == sorted(clean)));
    assert!(shuffled.iter().any(|(read, clean)| read != clean));
    let sentences = |tokens: &[u32]| {
        let text = texts.decode(tokens);
        let sentences = text.split('.').map(|sentence| sentence.trim().to_owned());
        let mut sentences: Vec<String> = sentences.filter(|sentence| !sentence.is_empty()).collect();
        sentences.sort();
        sentences
    };
    assert!(shuffled.iter().all(|(read, clean)| sentences(read) == sentences(clean)));
    let words = |tokens: &[u32]| texts.decode(tokens).split_whitespace().count() as f64;
    let passes = 0..40;
    // Each word by itself: four standard deviations of the binomial distribution.
    let dropped: Vec<_> =
        passes.clone().flat_map(|pass| corrupted(&texts, Corruption { drop: 0.2, ..nothing }, pass)).collect();
    let [all, left] = [1, 0].map(|side| dropped.iter().map(|both| words([&both.0, &both.1][side])).sum::<f64>());
    let deviation = (0.2f64 * 0.8 / all).sqrt();
    assert!((left / all - 0.8).abs() < 4.0 * deviation, "{left} of {all}");
    // As many words as asked are hidden in each text, in spans of about the mean length, and nothing is longer.
    let by = Corruption { mask: 0.35, span: 2.0, ..nothing };
    let masked: Vec<_> = passes.flat_map(|pass| corrupted(&texts, by, pass)).collect();
    let mut spans = [0.0, 0.0];
    for (read, clean) in &masked {
        assert!(read.len() <= clean.len(), "{} of {}", read.len(), clean.len());
        let count = read.iter().filter(|token| **token == mask).count();
        let left: Vec<u32> = read.iter().filter(|token| **token != mask).copied().collect();
        let hidden = words(clean) - words(&left);
        assert_eq!(hidden, (0.35 * words(clean)).round(), "{} from {}", texts.decode(read), texts.decode(clean));
        assert!(read.windows(2).all(|pair| pair != [mask, mask]), "two spans side by side");
        spans = [spans[0] + hidden, spans[1] + count as f64];
    }
    // The last span of a text is cut to what is left, and no gap has two, which short texts feel: 1.4 to 2.6 for a mean of 2.
    let mean = spans[0] / spans[1];
    assert!((1.4..2.6).contains(&mean), "{mean} words a span");
    // Every pass hides others, the same pass the same.
    assert_ne!(corrupted(&texts, by, 0), corrupted(&texts, by, 1));
    assert_eq!(corrupted(&texts, by, 7), corrupted(&texts, by, 7));
}

/// Rows whose first token is their number, and whose second is the pass.
struct Numbered(usize, u32);

impl Source for Numbered {
    fn len(&self) -> usize {
        self.0
    }

    fn seq(&self) -> usize {
        3
    }

    fn get(&self, index: usize, pass: u64) -> Result<Row, data::Error> {
        Ok(Row::of_document(&[index as u32, pass as u32, self.1]))
    }

    fn fingerprint(&self) -> String {
        format!("{} {}", self.0, self.1)
    }
}

fn mixture(parts: &[(usize, f64)], seed: u64) -> Mixture {
    let component = |(number, (rows, share)): (usize, &(usize, f64))| Component {
        rows: Arc::new(Numbered(*rows, number as u32)),
        share: *share,
    };
    Mixture::new(parts.iter().enumerate().map(component).collect(), seed).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// In every block the proportions are exact up to a row; each component is gone through pass by pass, each row once.
    #[test]
    fn proportions_are_exact(parts in prop::collection::vec((1usize..400, 0.05f64..4.0), 1..6), seed: u64, rows_per_step in 1usize..300) {
        let mixture = mixture(&parts, seed);
        let sum: f64 = parts.iter().map(|(_, share)| share).sum();
        let plan = BatchPlan { seed, rows_per_step, micro_batch: rows_per_step, rank: 0, ranks: 1 };
        let steps = (2 * BLOCK).div_ceil(rows_per_step) as u64;
        let mut met: Vec<Vec<(u32, u32)>> = vec![Vec::new(); parts.len()];
        let mut rows = 0;
        for step in 0..steps {
            let batch = plan.batch(&mixture, step, 0).unwrap();
            for (component, tokens) in batch.components.iter().zip(batch.tokens.chunks_exact(3)) {
                prop_assert_eq!(*component, tokens[2]);
                if rows < 2 * BLOCK {
                    met[*component as usize].push((tokens[1], tokens[0]));
                }
                rows += 1;
            }
        }
        for ((met, (len, share)), quota) in met.iter().zip(&parts).zip(mixture.quotas()) {
            prop_assert_eq!(met.len(), 2 * quota);
            prop_assert!((quota as f64 - share / sum * BLOCK as f64).abs() <= 1.0);
            let mut passes = BTreeMap::<u32, Vec<u32>>::new();
            met.iter().for_each(|(pass, row)| passes.entry(*pass).or_default().push(*row));
            let last = (met.len() - 1) / len;
            prop_assert_eq!(passes.len(), last + 1);
            for (pass, mut rows) in passes {
                rows.sort_unstable();
                rows.dedup();
                let whole = if pass as usize == last { met.len() - last * len } else { *len };
                prop_assert_eq!(rows.len(), whole, "pass {} of {} rows", pass, len);
            }
        }
    }

    /// Whatever the ranks and micro-batches, and wherever it begins, a step has the same rows.
    #[test]
    fn mixtures_do_not_depend_on_the_mesh(seed: u64, rows_per_step in 1usize..40, micro_batch in 1usize..48, ranks in 1usize..6, step in 0u64..900) {
        let mixture = mixture(&[(7, 1.0), (300, 2.5), (40, 0.3)], 5);
        let plan = |micro_batch, rank, ranks| BatchPlan { seed, rows_per_step, micro_batch, rank, ranks };
        let whole = plan(rows_per_step, 0, 1).batch(&mixture, step, 0).unwrap();
        let (mut tokens, mut components) = (Vec::new(), Vec::new());
        for micro in 0..plan(micro_batch, 0, ranks).micro_batches() {
            for rank in 0..ranks {
                let part = plan(micro_batch, rank, ranks).batch(&mixture, step, micro).unwrap();
                tokens.extend(part.tokens);
                components.extend(part.components);
            }
        }
        prop_assert_eq!((tokens, components), (whole.tokens, whole.components));
    }
}

fn pair(languages: [&str; 2], texts: [&str; 2]) -> TextPair {
    TextPair { languages: languages.map(str::to_owned), texts: texts.map(str::to_owned), is_message: true }
}

fn gathered(pairs: &[TextPair], fraction: f64) -> GatheredTexts {
    let mut gatherer = Gatherer::new(fraction);
    pairs.iter().for_each(|pair| gatherer.push(0, pair.clone()));
    gatherer.finish()
}

#[test]
fn texts_and_pairs_are_gathered_once() {
    let pairs = [
        pair(["en", "de"], ["open", "öffnen"]),
        pair(["en", "fr"], ["open", "ouvrir"]),
        pair(["de", "en"], ["öffnen", "open"]),
        pair(["en", "de"], ["close", "schließen"]),
    ];
    let got = gathered(&pairs, 0.0);
    let languages: Vec<_> = got.languages.iter().map(|texts| (&texts.language[..], texts.texts.len())).collect();
    assert_eq!(languages, [("en", 2), ("de", 2), ("fr", 1)]);
    let bitexts: Vec<_> = got.bitexts.iter().map(|bitext| (bitext.languages, bitext.train.clone())).collect();
    assert_eq!(bitexts, [([0, 1], vec![[0, 0], [1, 1]]), ([0, 2], vec![[0, 0]])]);
    assert!(got.leaks == 0 && got.bitexts.iter().all(|bitext| bitext.held_out.is_empty()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Few translations for many messages: no held-out text of any language is trained on, however it is written, and no
    /// message is on both sides.
    #[test]
    fn nothing_held_out_is_trained_on(
        table in prop::collection::vec((0usize..40, 0usize..5, 0usize..12, any::<bool>(), any::<bool>()), 1..200),
        fraction in 0.0f64..0.6,
    ) {
        let languages = ["en", "de", "fr", "uk", "ja"];
        let of = |&(message, language, translation, shouts, turned): &(usize, usize, usize, bool, bool)| {
            let english = format!("message {message}");
            let english = if shouts { english.to_uppercase() + "!" } else { english };
            let other = languages[language.max(1)];
            let translated = format!("{other} {translation}{}", if shouts { "…" } else { "" });
            if turned { pair([other, "en"], [&translated, &english]) } else { pair(["en", other], [&english, &translated]) }
        };
        let pairs: Vec<TextPair> = table.iter().map(of).collect();
        let got = gathered(&pairs, fraction);
        let keys = MessageKeys::default();
        let sides = |held_out: bool| {
            let of_bitext = |bitext: &Bitext| {
                let pairs = if held_out { bitext.held_out.clone() } else { bitext.train.clone() };
                let side = |language: usize, text: u32| {
                    let texts = &got.languages[language];
                    (texts.language.clone(), keys.key(&texts.texts[text as usize]))
                };
                let [a, b] = bitext.languages;
                pairs.into_iter().flat_map(|[x, y]| [side(a, x), side(b, y)]).collect::<Vec<_>>()
            };
            got.bitexts.iter().flat_map(of_bitext).collect::<BTreeSet<_>>()
        };
        let (train, held_out) = (sides(false), sides(true));
        prop_assert!(train.is_disjoint(&held_out));
        // All distinct pairs are in one split or the other, or counted.
        let distinct: BTreeSet<_> = pairs.iter().map(|pair| {
            let mut sides = [0, 1].map(|side| (pair.languages[side].clone(), pair.texts[side].clone()));
            sides.sort();
            sides
        }).collect();
        let kept: usize = got.bitexts.iter().map(|bitext| bitext.train.len() + bitext.held_out.len()).sum();
        prop_assert_eq!(kept as u64 + got.leaks, distinct.len() as u64);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Messages in several languages, with pairs between any two of them and alone: what of a message is held out in one
    /// pair is in none that is trained on, whether English is among them or not.
    #[test]
    fn a_message_is_held_out_in_all_languages_or_in_none(
        messages in prop::collection::vec((1u8..64, any::<u64>()), 1..80),
        with_english: bool,
        fraction in 0.1f64..0.6,
    ) {
        let languages = [if with_english { "en" } else { "uk" }, "de", "es", "fr", "ja", "zz"];
        let mut pairs = Vec::new();
        for (number, &(spoken, chosen)) in messages.iter().enumerate() {
            let mut spoken: Vec<&str> =
                (0..6).filter(|place| spoken >> place & 1 == 1).map(|place| languages[place]).collect();
            spoken.sort_by_key(|language| (*language != "en", *language));
            let text = |language: &str| format!("{language} {number}");
            for (place, a) in spoken.iter().enumerate() {
                for (other, b) in spoken.iter().enumerate().skip(place) {
                    // With the first language all are paired; of the others, and of texts alone, some.
                    let is_there = place == 0 && other > 0 || chosen >> (place * 6 + other) & 1 == 1;
                    let turned = chosen >> (36 + place + other) & 1 == 1;
                    let both = if turned { [*b, *a] } else { [*a, *b] };
                    pairs.extend(is_there.then(|| pair(both, both.map(|language| &*text(language).leak()))));
                }
            }
        }
        let got = gathered(&pairs, fraction);
        let messages = |held_out: bool| {
            let of_bitext = |bitext: &Bitext| {
                let pairs = if held_out { &bitext.held_out } else { &bitext.train };
                let texts = &got.languages[bitext.languages[0]].texts;
                let number = |pair: &[u32; 2]| texts[pair[0] as usize].split(' ').next_back().unwrap().to_owned();
                pairs.iter().map(number).collect::<Vec<_>>()
            };
            got.bitexts.iter().flat_map(of_bitext).collect::<BTreeSet<_>>()
        };
        prop_assert!(messages(true).is_disjoint(&messages(false)));
        prop_assert_eq!(got.leaks, 0, "what is split by messages leaks nothing");
    }
}

#[test]
fn rows_of_pairs_mix_too() {
    let texts = texts();
    let words = TokenWords::new(&texts.corpus.tokenizer).unwrap();
    let readings =
        [TextToRead::Other, TextToRead::Corrupted { words, by: Corruption::default(), seed: 9 }, TextToRead::Nothing];
    let rows = readings.map(|reading| Arc::new(texts.rows(reading, [96, 64])) as Arc<dyn Source>);
    let mixture = Mixture::new(rows.map(|rows| Component { rows, share: 1.0 }).to_vec(), 1).unwrap();
    let plan = BatchPlan { seed: 0, rows_per_step: 16, micro_batch: 16, rank: 0, ranks: 1 };
    let batch = plan.batch(&mixture, 3, 0).unwrap();
    let source = batch.source.as_deref().unwrap();
    assert_eq!((source.rows, source.seq, source.first_token), (16, 96, 0));
    assert_eq!((batch.rows, batch.seq, batch.components.len()), (16, 64, 16));
    // As by itself: the third component's rows read nothing.
    let end = texts.corpus.tokenizer.end_of_text();
    let reads_nothing = |row: usize| {
        let of = |vector: &[u32], seq: usize| vector[row * seq..][..seq].to_vec();
        let row = Row {
            tokens: of(&source.tokens, 96),
            targets: of(&source.targets, 96),
            segments: of(&source.segments, 96),
            positions: of(&source.positions, 96),
            ..Row::default()
        };
        segments(&row, end).iter().all(|(tokens, _)| tokens.len() == 2)
    };
    assert!((0..16).all(|row| reads_nothing(row) == (batch.components[row] == 2)), "{:?}", batch.components);
}

#[test]
fn mixtures_of_nothing_are_refused() {
    let of = |rows: usize, share: f64| Component { rows: Arc::new(Numbered(rows, 0)), share };
    let longer: Arc<dyn Source> = Arc::new(texts().rows(TextToRead::Other, [96, 64]));
    for (components, says) in [
        (vec![], "nothing"),
        (vec![of(4, 1.0), of(0, 1.0)], "source 1 of a mixture has 0 rows"),
        (vec![of(4, 0.0)], "the share 0"),
        (vec![of(4, f64::NAN)], "the share NaN"),
        (vec![of(4, 1.0), Component { rows: longer, share: 1.0 }], "another length"),
        (vec![of(4, 1.0); BLOCK + 1], "4096 at most"),
    ] {
        let error = Mixture::new(components, 0).err().expect("an error").to_string();
        assert!(error.contains(says), "{error}");
    }
}
