//! Pairs of texts of many languages, gathered: each text once in its language, pairs as numbers of texts, and what is held
//! out.
//!
//! A message is held out in all languages or in none, by a hash of the text that languages share ([`MessageKeys`]): that of
//! the first language, English before all others, which either side is or is paired with anywhere. Yet two messages may have
//! one translation, and then it would be known from training. So pairs of the training split are dropped if either side
//! occurs, but for case, punctuation and placeholders, in a held-out pair of its language.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::data::pairs::{MessageKeys, TextPair};

/// The language of messages in catalogues, which most corpora share.
const PIVOT: &str = "en";

/// The distinct texts of a language, in the order in which they were met.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LanguageTexts {
    pub language: String,
    pub texts: Vec<String>,
}

/// The pairs of two languages, as numbers of their texts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bitext {
    /// Number of the task whose sources have them.
    pub task: usize,
    /// Indices of the languages.
    pub languages: [usize; 2],
    pub train: Vec<[u32; 2]>,
    pub held_out: Vec<[u32; 2]>,
}

/// All texts and pairs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GatheredTexts {
    pub languages: Vec<LanguageTexts>,
    pub bitexts: Vec<Bitext>,
    /// Pairs that were not kept for training, since a side of theirs is held out.
    pub leaks: u64,
}

/// Gathers pairs one by one.
#[derive(Debug)]
pub struct Gatherer {
    keys: MessageKeys,
    fraction: f64,
    gathered: GatheredTexts,
    /// By language: its index, and the number of each of its texts.
    numbers: HashMap<String, (usize, HashMap<String, u32>)>,
    bitexts: BTreeMap<(usize, [usize; 2]), usize>,
    met: HashSet<(usize, [usize; 2], [u32; 2])>,
    /// Languages whose texts are labels: many texts have the same.
    labels: HashSet<String>,
}

impl Gatherer {
    /// Holds out about `fraction` of the messages.
    pub fn new(fraction: f64) -> Gatherer {
        Gatherer {
            keys: MessageKeys::default(),
            fraction,
            gathered: GatheredTexts::default(),
            numbers: HashMap::new(),
            bitexts: BTreeMap::new(),
            met: HashSet::new(),
            labels: HashSet::new(),
        }
    }

    /// What is written in this language says nothing of the texts that it is paired with.
    pub fn labels(&mut self, language: String) {
        self.labels.insert(language);
    }

    /// Adds a pair to those of a task. One that the task has met before is not added again.
    pub fn push(&mut self, task: usize, pair: TextPair) {
        let TextPair { languages, texts, .. } = pair;
        let [a, b] = languages.map(|language| self.language(language));
        let [in_a, in_b] = texts;
        let both = [self.text(a, in_a), self.text(b, in_b)];
        // One table serves both directions.
        let (languages, both) = if a <= b { ([a, b], both) } else { ([b, a], [both[1], both[0]]) };
        if !self.met.insert((task, languages, both)) {
            return;
        }
        let bitexts = &mut self.gathered.bitexts;
        let of_languages = *self.bitexts.entry((task, languages)).or_insert_with(|| {
            bitexts.push(Bitext { task, languages, ..Bitext::default() });
            bitexts.len() - 1
        });
        // What is held out is known when all pairs are.
        bitexts[of_languages].train.push(both);
    }

    fn language(&mut self, language: String) -> usize {
        let next = self.gathered.languages.len();
        let (index, _) = self.numbers.entry(language.clone()).or_insert_with(|| {
            self.gathered.languages.push(LanguageTexts { language, ..LanguageTexts::default() });
            (next, HashMap::new())
        });
        *index
    }

    fn text(&mut self, language: usize, text: String) -> u32 {
        let LanguageTexts { language, texts } = &mut self.gathered.languages[language];
        let (_, numbers) = self.numbers.get_mut(language).expect("a language that was met");
        *numbers.entry(text).or_insert_with_key(|text| {
            texts.push(text.clone());
            (texts.len() - 1) as u32
        })
    }

    /// What was gathered, split, without pairs for training that tell of held-out ones.
    pub fn finish(self) -> GatheredTexts {
        let Gatherer { keys, fraction, mut gathered, labels, .. } = self;
        let GatheredTexts { languages, bitexts, leaks } = &mut gathered;
        let is_text: Vec<bool> = languages.iter().map(|texts| !labels.contains(&texts.language)).collect();
        let shared = SharedTexts::of(languages, bitexts, &is_text);
        for Bitext { languages: both, train, held_out, .. } in bitexts.iter_mut() {
            for pair in std::mem::take(train) {
                let split = keys.split(shared.of_pair(sides(*both, pair)), fraction);
                split.of(&mut *train, &mut *held_out).push(pair);
            }
        }
        let sides = |languages, pair| sides(languages, pair).into_iter().filter(|(language, _)| is_text[*language]);
        let held_out =
            bitexts.iter().flat_map(|bitext| bitext.held_out.iter().map(|pair| sides(bitext.languages, *pair)));
        let held_out = held_out.flatten().collect::<HashSet<(usize, u32)>>();
        let of = |(language, text): (usize, u32)| (language, keys.key(&languages[language].texts[text as usize]));
        let held_out: HashSet<(usize, String)> = held_out.into_iter().map(of).collect();
        for Bitext { languages: both, train, .. } in bitexts {
            let before = train.len();
            train.retain(|pair| !sides(*both, *pair).any(|side| held_out.contains(&of(side))));
            *leaks += (before - train.len()) as u64;
        }
        gathered
    }
}

/// Of each text the one that languages share: its partner in the first language that it is paired with.
struct SharedTexts<'a> {
    languages: &'a [LanguageTexts],
    is_text: &'a [bool],
    /// By language and text; none where a text has no partner in a language before its own.
    partners: Vec<Vec<Option<(usize, u32)>>>,
}

impl<'a> SharedTexts<'a> {
    fn of(languages: &'a [LanguageTexts], bitexts: &[Bitext], is_text: &'a [bool]) -> SharedTexts<'a> {
        let partners = languages.iter().map(|language| vec![None; language.texts.len()]).collect();
        let mut shared = SharedTexts { languages, is_text, partners };
        for Bitext { languages: [a, b], train, .. } in bitexts {
            if is_text[*a] && is_text[*b] && a != b {
                let first = if shared.language(*a) < shared.language(*b) { 0 } else { 1 };
                train.iter().for_each(|pair| {
                    let both = sides([*a, *b], *pair);
                    shared.pair(both[1 - first], both[first]);
                });
            }
        }
        shared
    }

    /// English, then by name.
    fn language(&self, language: usize) -> (bool, &'a str) {
        let name = &self.languages[language].language[..];
        (name != PIVOT, name)
    }

    fn text(&self, (language, text): (usize, u32)) -> &'a str {
        &self.languages[language].texts[text as usize]
    }

    fn order(&self, text: (usize, u32)) -> ((bool, &'a str), &'a str) {
        (self.language(text.0), self.text(text))
    }

    fn pair(&mut self, (language, text): (usize, u32), partner: (usize, u32)) {
        let known = self.partners[language][text as usize];
        if known.is_none_or(|known| self.order(partner) < self.order(known)) {
            self.partners[language][text as usize] = Some(partner);
        }
    }

    /// What a pair is known by: in the first language of its sides and of their partners, and of equals its own side.
    fn of_pair(&self, sides: [(usize, u32); 2]) -> &'a str {
        let texts = sides.into_iter().filter(|(language, _)| self.is_text[*language]);
        let partners = texts.clone().filter_map(|(language, text)| self.partners[language][text as usize]);
        let own = texts.map(|side| (self.language(side.0), false, side));
        let all = own.chain(partners.map(|partner| (self.language(partner.0), true, partner)));
        let first = all.min_by_key(|&(language, is_partner, text)| (language, is_partner, self.text(text)));
        first.map_or("", |(.., text)| self.text(text))
    }
}

/// A pair's texts, each with its language.
fn sides(languages: [usize; 2], pair: [u32; 2]) -> [(usize, u32); 2] {
    [(languages[0], pair[0]), (languages[1], pair[1])]
}
