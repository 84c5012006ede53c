//! Requests about tasks and translation that are refused, each with one message, and what is left out with a count.

use std::fs;

use crate::program::Workshop;

/// A model of two stacks without tasks.
pub(crate) const SMALL: &str = r#"
[train]
steps = 2
batch_tokens = 256
lr = 1e-2
eval_every = 2

[model]
family = "m2m"
vocab = 330
d_model = 16
encoder_layers = 1
decoder_layers = 1
heads = 2
seq = 32

[data]
held_out = 0.2
cache = "cache"

"#;

const TRANSLATION: &str = r#"[[data.tasks]]
kind = "translation"
sources = ["pairs"]
"#;

const LATEST: &str = "runs/tasks/checkpoints/latest";

fn shop() -> Workshop {
    let shop = Workshop::new();
    shop.write("tasks.toml", &tasks(TRANSLATION));
    let lines = |word: &str| {
        (0..40)
            .map(|n| {
                format!(
                    "{word} number {} of all\n",
                    "abcdefgh".repeat(n % 5 + 1) + &format!("{}", (b'a' + n as u8 % 26) as char)
                )
            })
            .collect::<String>()
    };
    shop.write("pairs/house.en", &lines("the house"));
    shop.write("pairs/house.de", &lines("das Haus"));
    shop
}

/// A recipe whose tasks are these.
fn tasks(tasks: &str) -> String {
    format!("{SMALL}{tasks}")
}

#[test]
fn wrong_tasks_are_refused_before_anything_is_read() {
    let shop = shop();
    let translation = "[[data.tasks]]\nkind = 'translation'\nsources = ['pairs']\n";
    let cases: &[(String, &[&str])] = &[
        (String::new(), &["data.tasks", "missing", "\"m2m\"", "[[data.tasks]]"]),
        ("[[data.tasks]]\nsources = ['pairs']\n".into(), &["data.tasks[0].kind", "missing"]),
        ("[[data.tasks]]\nkind = 'transaltion'\n".into(), &["data.tasks[0].kind", "did you mean \"translation\"?"]),
        (format!("{translation}wieght = 2.0\n"), &["data.tasks[0].wieght", "did you mean data.tasks[0].weight?"]),
        (format!("{translation}weight = 0.0\n"), &["data.tasks[0].weight = 0.0", "tasks.toml:", "above 0"]),
        (format!("{translation}length_ratio = 0.5\n"), &["data.tasks[0].length_ratio = 0.5", "at least 1"]),
        (format!("{translation}min_pairs = 0\n"), &["data.tasks[0].min_pairs = 0", "at least 1"]),
        (format!("{translation}noise = {{ mask = 0.1 }}\n"), &["data.tasks[0].noise", "corrupts nothing", "denoising"]),
        (
            format!("{translation}directions = ['ende']\n"),
            &["data.tasks[0].directions", "\"ende\" is no direction", "en-*"],
        ),
        (format!("{translation}directions = []\n"), &["takes no direction"]),
        (format!("{translation}languages = []\n"), &["takes no language"]),
        (format!("{translation}name = 'a b'\n"), &["data.tasks[0].name = \"a b\"", "not a name"]),
        (format!("{translation}{translation}"), &["data.tasks[1].name", "another task called \"translation\""]),
        ("[[data.tasks]]\nkind = 'translation'\n".into(), &["data.tasks[0].sources", "nothing to learn from"]),
        ("[[data.tasks]]\nkind = 'denoising'\n".into(), &["data.tasks[0].sources", "no translation task"]),
        (
            format!("{translation}[[data.tasks]]\nkind = 'denoising'\nnoise = {{ mask = 1.5 }}\n"),
            &["data.tasks[1].noise.mask = 1.5", "below 1"],
        ),
        (
            format!("{translation}[[data.tasks]]\nkind = 'denoising'\nnoise = {{ maks = 0.5 }}\n"),
            &["data.tasks[1].noise.maks", "did you mean data.tasks[1].noise.mask?"],
        ),
        (
            format!("{translation}[[data.tasks]]\nkind = 'denoising'\ndirections = ['en-de']\n"),
            &["data.tasks[1].directions", "has no directions", "languages ="],
        ),
        (
            "[[data.tasks]]\nkind = 'classification'\nsources = ['tones.tsv']\n".into(),
            &["data.tasks[0].sources", "`from` is the texts' language"],
        ),
    ];
    for (text, words) in cases {
        shop.write("tasks.toml", &tasks(text));
        shop.fails("train tasks.toml", 2, words);
    }
    let both = tasks(translation).replace("[data]\n", "[data]\nsources = ['corpus']\n");
    shop.write("tasks.toml", &both);
    shop.fails("train tasks.toml", 2, &["data.tasks", "not both"]);
    shop.write("tasks.toml", &tasks(TRANSLATION));
    let one_stack =
        tasks(TRANSLATION).replace("m2m", "gpt2").replace("encoder_layers = 1\ndecoder_layers = 1", "layers = 2");
    shop.write("one.toml", &one_stack);
    shop.fails("train one.toml", 2, &["only an encoder and a decoder learn tasks", "\"gpt2\"", "data.sources"]);
    shop.fails("train tiny.toml --set data.temperature=3.0", 2, &["data.temperature", "nothing uses it"]);
    shop.fails("train tasks.toml --set data.temperature=0", 2, &["data.temperature", "above 0"]);
    assert!(!shop.path("cache").exists());
}

#[test]
fn data_that_does_not_serve_the_tasks_is_refused() {
    let shop = shop();
    let of = |more: &str| tasks(&format!("[[data.tasks]]\nkind = 'translation'\nsources = ['pairs']\n{more}\n"));
    let refused = |text: &str, words: &[&str]| {
        shop.write("tasks.toml", text);
        shop.fails("prepare tasks.toml", 2, words);
    };
    refused(&of("languages = ['en', 'xx']"), &["task `translation`", "language `xx`", "`de`, `en`"]);
    refused(&of("directions = ['en-fr']"), &["task `translation`", "direction `en-fr`", "`de`, `en`"]);
    refused(&of("directions = ['fr-*']"), &["direction `fr-*`", "`de`, `en`"]);
    refused(&of("min_pairs = 1000"), &["min_pairs = 1000", "at most ", "40 pairs were read", "lower min_pairs"]);
    refused(&of("max_chars = 5"), &["min_pairs = 1", "at most 0", "40 too long"]);
    refused(&of("").replace("'pairs'", "'nowhere'"), &["nowhere", "matches no file"]);
    refused(&of("").replace("'pairs'", "'nowhere/*.mo'"), &["nowhere/*.mo", "iso-codes", "libgtk-3-common"]);
    refused(&of("").replace("vocab = 330", "vocab = 259"), &["model.vocab = 259", "at least 260"]);
    refused(
        &of("directions = ['en-de']\nmax_chars = 5"),
        &["no pair to train on for the direction `en-de`", "too long"],
    );
    // A tokenizer without tags is refused before any text becomes tokens.
    shop.succeeds("train tiny.toml --set train.steps=1");
    fs::copy(shop.path("runs/tiny/checkpoints/latest/tokenizer.json"), shop.path("own.json")).unwrap();
    let own = of("").replace("cache = \"cache\"", "cache = \"other\"\ntokenizer = \"own.json\"");
    refused(&own, &["own.json", "no tags for ", "`__de__`", "its tags are none", "\"bpe\""]);
    let made = fs::read_dir(shop.path("other"))
        .map_or(0, |entries| entries.flatten().filter(|entry| entry.path().is_dir()).count());
    assert_eq!(made, 0, "text was prepared in vain");
    // Rows that hold no pair, and nothing held out.
    shop.write("tasks.toml", &of("").replace("seq = 32", "seq = 4"));
    shop.fails("train tasks.toml", 2, &["no pair of train fits rows of 4 tokens to read and 4 to write"]);
    shop.write("tasks.toml", &of("").replace("held_out = 0.2", "held_out = 1e-12"));
    shop.fails("train tasks.toml", 2, &["nothing is held out", "data.held_out"]);
    // A catalogue that a folder has is counted where others serve, and named where none does.
    shop.write("l/de/LC_MESSAGES/p.po", "\u{0}\u{1}no catalogue");
    refused(&of("").replace("'pairs'", "'l'"), &["0 pairs were read", "1 catalogues were unreadable: ", "p.po"]);
    // Line n of one file is the translation of line n of the other.
    shop.write("pairs/house.de", "nur eine Zeile\n");
    refused(&of(""), &["house.de has 1 lines", "house.en has 40"]);
}

#[test]
fn what_is_left_out_is_counted() {
    let shop = shop();
    shop.write("pairs/house.en", &(shop.read("pairs/house.en") + "\nsame\nthe house number aa of all\n"));
    shop.write("pairs/house.de", &(shop.read("pairs/house.de") + "leer\nsame\ndas Haus\n"));
    shop.write("pairs/few.en", "one\n");
    shop.write("pairs/few.fi", "yksi\n");
    shop.write("pairs/readme.txt", "about these files");
    let text = tasks(TRANSLATION).replace("sources = [\"pairs\"]", "sources = [\"pairs\"]\nmin_pairs = 5");
    shop.write("tasks.toml", &text);
    let err = shop.succeeds("prepare tasks.toml").err;
    for words in [
        "2 languages with texts to train on",
        "task     translation: ",
        "1 with an empty side",
        "1 not translated",
        "1 files that hold no pairs by their names",
        "2 with fewer than min_pairs pairs: translation en-fi (1), translation fi-en (1)",
    ] {
        assert!(err.contains(words), "no {words:?} in {err}");
    }
    // What was found before is told again.
    let again = shop.succeeds("prepare tasks.toml").err;
    assert!(again.contains("found in") && again.contains("1 with an empty side"), "{again}");
}

#[test]
fn pairs_that_rows_have_no_room_for_are_told() {
    let shop = shop();
    // Words that have no parts in common, up to six of them.
    let letters = |seed: usize| [7, 11, 13, 17].map(|step| (b'a' + (seed * step / 5 % 26) as u8) as char);
    let words =
        |n: usize| (0..n % 6 + 1).flat_map(|k| [' '].into_iter().chain(letters(n * 31 + k * 57))).collect::<String>();
    for (language, word) in [("en", "house"), ("de", "Haus")] {
        let lines = (0..60).map(|n| format!("{word}{}\n", words(n))).collect::<String>();
        shop.write(&format!("pairs/house.{language}"), &lines);
    }
    shop.write("tasks.toml", &tasks(TRANSLATION).replace("seq = 32", "seq = 16\nsource_seq = 16"));
    let err = shop.succeeds("train tasks.toml").err;
    let told: Vec<&str> = err.lines().filter(|line| line.starts_with("left out ")).collect();
    let [train, held_out] = &told[..] else { panic!("{err}") };
    for (line, what) in [(train, "to train on"), (held_out, "that are held out")] {
        let rest = format!(
            "pairs {what}, longer than rows of 16 tokens to read and 16 to write (model.source_seq, model.seq)"
        );
        assert!(line.contains(&rest), "{line}");
        // By direction they add up.
        let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.trim_end_matches(',').parse().ok()).collect();
        let [sum, of, _, _, a, of_a, b, of_b] = numbers[..] else { panic!("{line}") };
        assert!((a + b, of_a + of_b) == (sum, of) && 0 < a && a < of_a, "{line}");
    }
    let scored = shop.succeeds(&format!("evaluate {LATEST}")).err;
    assert!(scored.contains(held_out) && !scored.contains("to train on, longer"), "{scored}");
    shop.write("tasks.toml", &tasks(TRANSLATION));
    assert!(!shop.succeeds("train tasks.toml").err.contains("longer than rows"), "all fit");
}

#[test]
fn lines_are_translated_one_by_one() {
    let shop = shop();
    let trained = shop.succeeds("train tasks.toml");
    let next = trained.err.lines().find(|line| line.starts_with("next ")).unwrap().to_owned();
    assert!(next.contains(&format!("translate {LATEST} --from ")), "{next}");
    shop.write("lines.txt", &format!("the house number ab of all\n\n{}\nthe  house\n", "long ".repeat(60)));
    let all = shop.succeeds(&format!("translate {LATEST} --from en --to de lines.txt --max-tokens 6 --beams 2"));
    let lines: Vec<&str> = all.out.split('\n').collect();
    assert_eq!((lines.len(), lines[1], lines[4]), (5, "", ""), "a line for each: {:?}", all.out);
    assert!(all.err.contains("lines.txt:3 is longer than the 32 tokens"), "{}", all.err);
    // The same from standard input, each line by itself.
    let piped = |line: &str| {
        shop.write("one.txt", line);
        shop.shell(&format!("\"$GUILDHALL\" translate {LATEST} --from en --to de --max-tokens 6 --beams 2 < one.txt"))
            .out
    };
    assert_eq!(
        piped("the house"),
        format!("{}\n", lines[3]),
        "white space says nothing, and a last line may have no end"
    );
    assert_eq!(piped("\n\n"), "\n\n");
    assert_eq!(piped(""), "");
    let refused = |arguments: &str, words: &[&str]| shop.fails(&format!("translate {arguments}"), 2, words);
    refused(&format!("{LATEST} --from en --to fr"), &["--to fr", "no such tag", "de, en"]);
    refused(&format!("{LATEST} --from xx --to de"), &["--from xx", "no such tag", "de, en"]);
    refused(&format!("{LATEST} --from en --to de nowhere.txt"), &["nowhere.txt", "No such file"]);
    refused(&format!("{LATEST} --from en --to de --beams 0"), &["--beams 0"]);
    refused(
        &format!("{LATEST} --from en --to de --beams {}", u64::MAX),
        &["--beams 18446744073709551615", "1000 or fewer"],
    );
    refused(&format!("{LATEST} --from en --to de --max-tokens 0"), &["--max-tokens 0"]);
    refused(&format!("{LATEST} --from en"), &["--to"]);
    fs::write(shop.path("latin.txt"), b"caf\xe9\n").unwrap();
    refused(&format!("{LATEST} --from en --to de latin.txt"), &["latin.txt:1", "not UTF-8"]);
    shop.fails(&format!("generate {LATEST} --prompt the"), 2, &["an encoder and a decoder", "guildhall translate"]);
    shop.succeeds("train tiny.toml --set train.steps=1");
    refused("runs/tiny/checkpoints/latest --from en --to de", &["one stack", "guildhall generate"]);
}
