//! Texts of one language, which denoising and language models read: from every format, cleaned, and held out like those
//! of pairs.

use std::collections::BTreeSet;
use std::fs;

use guildhall::data::pairs::{MessageKeys, PairSpec, SkipReason, TextPair};
use guildhall::data::tasks::{Bitext, Gatherer};
use proptest::prelude::*;

use crate::pairs::{Workshop, gzipped, parquet_file, skipped};
use crate::program;
use crate::task_requests::SMALL;

const TEXTS: [&str; 3] = ["Das Haus ist alt.", "Die Tür ist offen.", "Sieben kleine Wörter."];

fn german(workshop: &Workshop, name: &str) -> PairSpec {
    let (path, language) = (workshop.path(name).display().to_string(), Some("de".to_owned()));
    PairSpec { path, language, of_one_text: true, ..PairSpec::default() }
}

#[test]
fn every_format_gives_the_same_texts() {
    let workshop = Workshop::new();
    let lines = TEXTS.map(|text| format!("{text}\n")).concat();
    let objects = |field: &str| TEXTS.map(|text| format!("{{\"{field}\": \"{text}\"}}\n")).concat();
    workshop.write("news.de", &lines);
    workshop.write("news.txt", lines.replace('\n', "\r\n"));
    workshop.write("news.any", format!("\u{feff}{lines}"));
    workshop.write("packed.de.gz", gzipped(&lines));
    workshop.write("news.jsonl", objects("text"));
    workshop.write("body.jsonl.gz", gzipped(&objects("body")));
    let columns = [TEXTS.map(Some).to_vec()];
    parquet_file(&workshop.path("news.parquet"), "message m { optional binary text (UTF8); }", &columns);
    let body = |name| PairSpec { field: Some("body".into()), ..german(&workshop, name) };
    let by_name = |name| PairSpec { language: None, ..german(&workshop, name) };
    for spec in ["news.de", "news.txt", "news.any", "packed.de.gz", "news.jsonl", "news.parquet"]
        .map(|name| german(&workshop, name))
        .into_iter()
        .chain([body("body.jsonl.gz"), by_name("news.de"), by_name("packed.de.gz")])
    {
        let (texts, summary) = workshop.read(spec.clone()).unwrap();
        assert_eq!(texts, TEXTS.map(|text| [text, text].map(str::to_owned)), "{spec:?}");
        assert_eq!(summary.directions.keys().collect::<Vec<_>>(), [&["de", "de"].map(str::to_owned)], "{spec:?}");
    }
}

#[test]
fn a_folder_serves_a_source_for_each_language() {
    let workshop = Workshop::new();
    for name in ["mono/a.de", "mono/b.txt", "mono/c.jsonl", "mono/a.fr", "mono/d.tsv", "mono/e.po", "mono/f.html"] {
        workshop.write(name, "{\"text\": \"x y z\"}\n");
    }
    let listing = workshop.list(german(&workshop, "mono")).unwrap();
    let names = |listing: &guildhall::data::pairs::PairListing| {
        let name = |path: &std::path::Path| path.file_name().unwrap().to_string_lossy().into_owned();
        listing.files.iter().map(|file| (name(&file.path), file.alone)).collect::<Vec<_>>()
    };
    let wanted = ["a.de", "b.txt", "c.jsonl"].map(|name| (name.to_owned(), true));
    assert_eq!((names(&listing), listing.others), (wanted.to_vec(), 4));
    // By their names alone: those without another beside them are texts, the others pairs, as for any other task.
    for name in ["some/a.de", "some/a.fr", "some/b.fi"] {
        workshop.write(name, "x y z\n");
    }
    let some = PairSpec { language: None, ..german(&workshop, "some") };
    let wanted = [("a.de", false), ("b.fi", true)].map(|(name, alone)| (name.to_owned(), alone));
    assert_eq!(names(&workshop.list(some.clone()).unwrap()), wanted);
    let pairs_alone = workshop.list(PairSpec { of_one_text: false, ..some }).unwrap();
    assert_eq!(names(&pairs_alone), wanted[..1]);
}

#[test]
fn texts_are_cleaned_and_what_gives_none_is_told() {
    let workshop = Workshop::new();
    let long = "lang ".repeat(100);
    let lines = format!("Das Haus\n\n12:30 %s\ndas   Haus\nDas Haus\n{long}\n");
    workshop.write("news.de", [lines.as_bytes(), b"caf\xe9 und Kuchen\n"].concat());
    let (texts, summary) = workshop.read(german(&workshop, "news.de")).unwrap();
    assert_eq!(texts.iter().map(|both| &both[0][..]).collect::<Vec<_>>(), ["Das Haus", "das Haus"]);
    let reasons = [
        SkipReason::EmptySide,
        SkipReason::PlaceholderOnly,
        SkipReason::Duplicate,
        SkipReason::TooLong,
        SkipReason::WrongEncoding,
    ];
    assert_eq!(reasons.map(|reason| skipped(&summary, reason)), [1; 5]);
    for (name, bytes, words) in [
        ("empty.de", &b""[..], &["empty.de has no text in `de`", "left out: none"][..]),
        ("blank.de", b"\n \n", &["blank.de has no text in `de`", "2 with an empty side"]),
        ("latin.de", b"caf\xe9\nr\xf6t\nblau\n", &["latin.de is not UTF-8 text", "byte 4"]),
        ("wide.de", b"\xff\xfeD\0a\0s\0\n\0", &["wide.de is not UTF-8 text", "UTF-16"]),
        ("news.tsv", b"a\tb\n", &["news.tsv", "holds pairs", "`language`"]),
        ("news.jsonl", b"{\"body\": \"x\"}\n", &["news.jsonl:1", "no text in field `text`", "`body`"]),
    ] {
        workshop.write(name, bytes);
        let error = workshop.error(german(&workshop, name));
        assert!(words.iter().all(|word| error.contains(word)), "{name}: {error}");
    }
    workshop.write("other/news.fr", "x y z\n");
    let error = workshop.error(german(&workshop, "other"));
    assert!(error.contains("no file of texts in `de`") && error.contains("news.de"), "{error}");
    // Without a language, a table is asked for one.
    let error = workshop.error(PairSpec { language: None, ..german(&workshop, "news.jsonl") });
    assert!(error.contains("`from` and `to`, or `language`"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Texts that are also sides of pairs, however they are written: nothing that one task holds out is trained on by another.
    #[test]
    fn nothing_held_out_of_pairs_is_trained_on_alone(
        pairs in prop::collection::vec((0usize..30, 0usize..20), 1..80),
        texts in prop::collection::vec((0usize..2, 0usize..40, any::<bool>()), 1..80),
        fraction in 0.0f64..0.6,
    ) {
        let mut gatherer = Gatherer::new(fraction);
        let mut push = |task: usize, languages: [&str; 2], texts: [String; 2]| {
            gatherer.push(task, TextPair { languages: languages.map(str::to_owned), texts, is_message: false });
        };
        for (english, german) in &pairs {
            push(0, ["en", "de"], [format!("message {english}"), format!("Satz {german}")]);
        }
        for &(language, number, shouts) in &texts {
            let text = format!("{} {number}", ["message", "Satz"][language]);
            let text = if shouts { text.to_uppercase() + "!" } else { text };
            push(1, [["en", "de"][language]; 2], [text.clone(), text]);
        }
        let got = gatherer.finish();
        let keys = MessageKeys::default();
        let sides = |held_out: bool| {
            let of_bitext = |bitext: &Bitext| {
                let pairs = if held_out { bitext.held_out.clone() } else { bitext.train.clone() };
                let key = |language: usize, text: u32| (language, keys.key(&got.languages[language].texts[text as usize]));
                let [a, b] = bitext.languages;
                pairs.into_iter().flat_map(|[x, y]| [key(a, x), key(b, y)]).collect::<Vec<_>>()
            };
            got.bitexts.iter().flat_map(of_bitext).collect::<BTreeSet<_>>()
        };
        prop_assert!(sides(false).is_disjoint(&sides(true)));
        let kept: usize = got.bitexts.iter().map(|bitext| bitext.train.len() + bitext.held_out.len()).sum();
        let distinct = pairs.iter().collect::<BTreeSet<_>>().len() + texts.iter().collect::<BTreeSet<_>>().len();
        prop_assert_eq!(kept as u64 + got.leaks, distinct as u64);
    }
}

fn head() -> String {
    SMALL.replace("batch_tokens = 256", "batch_tokens = 512")
}

const DENOISING: &str = "[[data.tasks]]\nkind = 'denoising'\nmin_pairs = 2\n";

fn sentences(word: &str) -> String {
    let letter = |n: usize| char::from(b'a' + n as u8 % 26);
    (0..40).map(|n| format!("{word} number {}{} of all\n", letter(n), letter(n / 3))).collect()
}

#[test]
fn languages_without_pairs_are_learned() {
    let shop = program::Workshop::new();
    shop.write("pairs/house.en", &sentences("the house"));
    shop.write("pairs/house.de", &sentences("das Haus"));
    // German texts of pairs, written otherwise, and a language that has no pairs.
    shop.write("mono/news.de", &(sentences("das Haus").to_uppercase() + &sentences("der Hund")));
    shop.write("mono/news.fi", &sentences("talo"));
    shop.write("mono/few.sv", "huset är gammalt\n");
    shop.write("mono/readme.html", "<p>about these files</p>\n");
    let sources =
        "sources = [{ path = 'mono', language = 'de' }, 'mono/news.fi', { path = 'mono', language = 'sv' }]\n";
    let translation = "[[data.tasks]]\nkind = 'translation'\nsources = ['pairs']\n";
    let model = "[[data.tasks]]\nkind = 'language_model'\nsources = ['mono/news.fi']\n";
    shop.write("tasks.toml", &format!("{}{translation}{DENOISING}{sources}{model}", head()));
    let told = shop.succeeds("train tasks.toml").err;
    for words in
        ["3 languages with texts", "task     denoising: ", "1 with fewer than min_pairs pairs: denoising sv (1)"]
    {
        assert!(told.contains(words), "no {words:?} in {told}");
    }
    let evaluated = shop.summary("runs/tasks")["eval_tasks"].clone();
    let parts: Vec<String> = evaluated
        .as_array()
        .unwrap()
        .iter()
        .map(|part| ["task", "from", "to"].map(|field| part[field].as_str().unwrap()).join(" "))
        .collect();
    let wanted =
        ["translation de en", "translation en de", "denoising de de", "denoising fi fi", "language_model fi fi"];
    assert_eq!(parts.iter().map(String::as_str).collect::<BTreeSet<_>>(), wanted.into());
    assert!(told.contains("since a text of theirs is held out elsewhere"), "a case of leaks: {told}");
    // Whoever writes a file anew has another corpus.
    let folders = || fs::read_dir(shop.path("cache")).unwrap().flatten().filter(|entry| entry.path().is_dir()).count();
    let before = folders();
    fs::remove_file(shop.path("mono/news.fi")).unwrap();
    shop.write("mono/news.fi", &sentences("koira juoksee"));
    shop.succeeds("prepare tasks.toml");
    assert_eq!(folders(), before + 1);
}

#[test]
fn wrong_sources_of_texts_are_refused() {
    let shop = program::Workshop::new();
    shop.write("mono/news.de", &sentences("das Haus"));
    shop.write("mono/empty.fi", "");
    shop.write("pairs/house.en", &sentences("the house"));
    shop.write("pairs/house.de", "das Haus\n");
    let translation = "[[data.tasks]]\nkind = 'translation'\n";
    let cases: &[(&str, &str, &[&str])] = &[
        (
            translation,
            "sources = [{ path = 'mono', language = 'de' }]",
            &["data.tasks[0].sources", "`language`", "denoising"],
        ),
        (DENOISING, "sources = [{ path = 'mono', language = 'de', from = 'en' }]", &["of pairs", "or of one language"]),
        (DENOISING, "sources = [{ path = 'mono', field = 'body' }]", &["`field`", "language = \"de\""]),
        (DENOISING, "sources = [{ path = 'mono', language = 'd e' }]", &["\"d e\" is no language"]),
        (DENOISING, "sources = [{ path = 'mono', langauge = 'de' }]", &["langauge"]),
        (
            DENOISING,
            "sources = ['mono/news.de']\nlanguages = ['de', 'xx']",
            &["no source has the language `xx`", "`de`"],
        ),
        (DENOISING, "sources = ['mono/news.de', 'mono/empty.fi']", &["empty.fi has no text in `fi`"]),
        (DENOISING, "sources = ['mono']\nlanguages = ['fi']", &["no text to train on in the language `fi`"]),
        (DENOISING, "sources = [{ path = 'mono', language = 'sv' }]", &["no file of texts in `sv`"]),
        (DENOISING, "sources = ['pairs']", &["house.de has 1 lines", "sources with `language`"]),
    ];
    for (kind, sources, words) in cases {
        shop.write("tasks.toml", &format!("{}{kind}{sources}\n", head()));
        shop.fails("prepare tasks.toml", 2, words);
    }
}

/// As star ratings are: what they are of is text, they are none.
#[test]
fn labels_may_be_digits() {
    let shop = program::Workshop::new();
    let rated =
        sentences("the house").lines().enumerate().map(|(n, text)| format!("{text}\t{}\n", n % 5)).collect::<String>();
    shop.write("stars.tsv", &rated);
    let task =
        "[[data.tasks]]\nkind = 'classification'\nname = 'stars'\nsources = [{ path = 'stars.tsv', from = 'en' }]\n";
    // In a line of JSON they are numbers, and as good.
    let json = |(text, label): (&str, &str)| format!("{{\"text\": \"{text}\", \"label\": {label}}}\n");
    shop.write("stars.jsonl", &rated.lines().map(|line| json(line.split_once('\t').unwrap())).collect::<String>());
    let fields = "{ path = 'stars.jsonl', from = 'en', fields = ['text', 'label'] }";
    shop.write("tasks.toml", &format!("{}{}", head(), task.replace("{ path = 'stars.tsv', from = 'en' }", fields)));
    let found = shop.succeeds("prepare tasks.toml").err;
    shop.write("stars.jsonl", &shop.read("stars.jsonl").replace("\"label\": 3}", "\"label\": 3.5}"));
    shop.fails("prepare tasks.toml", 2, &["stars.jsonl", "label", "it is a number"]);
    shop.write("tasks.toml", &format!("{}{task}", head()));
    let task_line = |err: &str| err.lines().find(|line| line.starts_with("task ")).unwrap().to_owned();
    assert_eq!(task_line(&found), task_line(&shop.succeeds("prepare tasks.toml").err), "the same pairs");
    let told = shop.succeeds("train tasks.toml").err;
    assert!(!told.contains("mostly placeholders"), "{told}");
    let scored = shop.succeeds("evaluate runs/tasks/checkpoints/latest --chrf --sentences 4 --outputs out").out;
    assert!(scored.contains("\"accuracy\""), "{scored}");
    let labels = shop.read("out/stars.en-classification_stars.ref");
    assert!(labels.lines().all(|label| label.len() == 1 && label.parse::<u8>().unwrap() < 5), "{labels}");
}
