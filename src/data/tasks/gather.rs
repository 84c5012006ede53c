//! Pairs of texts of many languages, gathered: each text once in its language, pairs as numbers of texts, and what is held
//! out.
//!
//! A message is held out in all languages or in none, by a hash of the side that languages share ([`MessageKeys`]). Yet two
//! messages may have one translation, and then it would be known from training. So pairs of the training split are dropped
//! if either side occurs, but for case, punctuation and placeholders, in a held-out pair of its language.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::data::pairs::{MessageKeys, TextPair};

/// The language of messages in catalogues: where it is one side, it is the one that others share.
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
        let shared = usize::from(languages[1] == PIVOT);
        let split = self.keys.split(&texts[shared], self.fraction);
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
        let Bitext { train, held_out, .. } = &mut bitexts[of_languages];
        split.of(train, held_out).push(both);
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

    /// What was gathered, without pairs for training that tell of held-out ones.
    pub fn finish(self) -> GatheredTexts {
        let Gatherer { keys, mut gathered, labels, .. } = self;
        let GatheredTexts { languages, bitexts, leaks } = &mut gathered;
        let is_text: Vec<bool> = languages.iter().map(|texts| !labels.contains(&texts.language)).collect();
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

/// A pair's texts, each with its language.
fn sides(languages: [usize; 2], pair: [u32; 2]) -> [(usize, u32); 2] {
    [(languages[0], pair[0]), (languages[1], pair[1])]
}
