//! Preparing corpora and reading batches from them, through the public interface.
//!
//! Everything a test reads is written by it. Oracles are loops over whole documents in memory.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use guildhall::data::{
    Batch, BatchPlan, Config, Corpus, Error, IGNORE, Loader, PackedRows, Permutation, PrepareStage, Row, Source, Split,
    StepBatches, Tokenizer, eval_batches, prepare,
};
use parquet::data_type::{ByteArray, ByteArrayType, Int32Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use proptest::prelude::*;
use tempfile::TempDir;

const VOCAB: usize = 300;

/// A temporary folder with texts and a cache.
struct Workshop {
    folder: TempDir,
}

impl Workshop {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    /// `sources` are below the folder; `rest` is further TOML.
    fn config(&self, sources: &[&str], rest: &str) -> Config {
        let sources: Vec<_> = sources.iter().map(|source| self.path(source).display().to_string()).collect();
        let cache = self.path("cache").display().to_string();
        toml::from_str(&format!("sources = {sources:?}\ncache = {cache:?}\n{rest}")).unwrap()
    }

    fn prepare(&self, sources: &[&str], rest: &str) -> Result<Corpus, Error> {
        prepare(&self.config(sources, rest), VOCAB, &|_| {})
    }

    /// The message of a preparation that must fail.
    fn failure(&self, sources: &[&str], rest: &str) -> String {
        self.prepare(sources, rest).unwrap_err().to_string()
    }

    fn cached_names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("cache")).into_iter().flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn text(words: usize, salt: usize) -> String {
    (0..words).map(|word| format!("word{} ", (word * word + salt) % 23)).collect()
}

fn tokens_of(corpus: &Corpus, split: Split) -> Vec<Vec<u32>> {
    let reader = corpus.split(split);
    let starts = std::iter::once(0).chain(reader.ends().iter().copied());
    starts.zip(reader.ends()).map(|(start, &end)| reader.read(start..end).unwrap()).collect()
}

fn texts_of(corpus: &Corpus, split: Split) -> Vec<String> {
    let decode = |tokens: Vec<u32>| {
        let (last, tokens) = tokens.split_last().unwrap();
        assert_eq!(*last, corpus.tokenizer.end_of_text());
        corpus.tokenizer.decode(tokens).unwrap()
    };
    tokens_of(corpus, split).into_iter().map(decode).collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

fn jsonl(field: &str, texts: &[&str]) -> String {
    let line = |text: &&str| format!("{}\n", serde_json::json!({ "id": 7, field: text }));
    texts.iter().map(line).collect()
}

/// A file of two columns, `id` and `field`, with several row groups.
fn parquet(path: &Path, field: &str, texts: &[Option<&str>]) {
    let schema = format!("message rows {{ required int32 id; optional byte_array {field} (utf8); }}");
    let schema = Arc::new(parse_message_type(&schema).unwrap());
    let properties = WriterProperties::builder().set_compression(parquet::basic::Compression::SNAPPY).build();
    let file = File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    for rows in texts.chunks(3) {
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int32Type>().write_batch(&vec![1; rows.len()], None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let values: Vec<_> = rows.iter().flatten().map(|text| ByteArray::from(*text)).collect();
        let levels: Vec<_> = rows.iter().map(|row| i16::from(row.is_some())).collect();
        column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
}

// ---- formats ----

const TEXTS: [&str; 5] = ["first text", "second \"text\"\nof two lines", "dritter Täxt", "4", "fünf 🦀"];

#[test]
fn every_format_gives_the_same_documents() {
    let shop = Workshop::new();
    let lines = jsonl("text", &TEXTS);
    shop.write("a.jsonl", &lines);
    shop.write("b.ndjson", format!("\u{feff}\n{lines}\n  \n"));
    shop.write("c.json-lines.gz", gzip(lines.as_bytes()));
    shop.write("d.JSONL.zst", zstd(lines.as_bytes()));
    parquet(&shop.path("e.parquet"), "text", &TEXTS.map(Some));
    for (index, text) in TEXTS.iter().enumerate() {
        shop.write(&format!("plain/{index}.md"), text);
        shop.write(&format!("gz/{index}.txt.gz"), gzip(text.as_bytes()));
        shop.write(&format!("zst/{index}.zst"), zstd(text.as_bytes()));
    }
    for source in ["a.jsonl", "b.ndjson", "c.json-lines.gz", "d.JSONL.zst", "e.parquet", "plain", "gz", "zst"] {
        let corpus = shop.prepare(&[source], "held_out = 0").unwrap();
        assert_eq!(texts_of(&corpus, Split::Train), TEXTS, "{source}");
        assert_eq!(corpus.manifest.train.text_bytes, TEXTS.map(str::len).iter().sum::<usize>() as u64);
    }
}

#[test]
fn concatenated_compressed_streams_are_read_to_the_end() {
    let shop = Workshop::new();
    shop.write("a.gz", [gzip(b"one "), gzip(b"two")].concat());
    shop.write("b.zst", [zstd(b"three "), zstd(b"four")].concat());
    let corpus = shop.prepare(&["a.gz", "b.zst"], "held_out = 0").unwrap();
    assert_eq!(texts_of(&corpus, Split::Train), ["one two", "three four"]);
}

#[test]
fn the_field_can_be_chosen() {
    let shop = Workshop::new();
    shop.write("a.jsonl", jsonl("body", &TEXTS));
    parquet(&shop.path("b.parquet"), "body", &TEXTS.map(Some));
    let source = |name: &str| format!("{{ path = {:?}, field = 'body' }}", shop.path(name));
    let config = format!(
        "sources = [{}, {}]\ncache = {:?}\nheld_out = 0",
        source("a.jsonl"),
        source("b.parquet"),
        shop.path("cache")
    );
    let corpus = prepare(&toml::from_str(&config).unwrap(), VOCAB, &|_| {}).unwrap();
    assert_eq!(texts_of(&corpus, Split::Train), [TEXTS, TEXTS].concat());
}

#[test]
fn bad_lines_are_named_by_file_and_line() {
    let shop = Workshop::new();
    let cases = [
        ("{\"text\": \"fine\"}\n\n{\"text\": oops}\n", "a.jsonl:3", "column 10"),
        ("{\"text\": \"fine\"}\n[1, 2]\n", "a.jsonl:2", "JSON object"),
        ("{\"body\": \"x\", \"id\": 1}\n", "a.jsonl:1", "`body`, `id`"),
        ("{\"text\": \"fine\"}\n{\"text\": 5}\n", "a.jsonl:2", "a number"),
        ("{\"text\": null}", "a.jsonl:1", "null"),
        ("{\"text\": \"cut", "a.jsonl:1", "EOF"),
    ];
    for (content, place, reason) in cases {
        shop.write("a.jsonl", content);
        let message = shop.failure(&["a.jsonl"], "");
        assert!(message.contains(place) && message.contains(reason), "{content:?} gives {message}");
    }
    shop.write("a.jsonl", b"{\"text\": \"fine\"}\n{\"text\": \"\xff\"}\n");
    let message = shop.failure(&["a.jsonl"], "");
    assert!(message.contains("a.jsonl:2"), "{message}");
}

#[test]
fn bad_parquet_is_named_by_file_column_and_row() {
    let shop = Workshop::new();
    parquet(&shop.path("a.parquet"), "body", &TEXTS.map(Some));
    let message = shop.failure(&["a.parquet"], "");
    assert!(message.contains("a.parquet") && message.contains("`text`") && message.contains("`id`, `body`"));
    parquet(&shop.path("b.parquet"), "text", &[Some("x"), Some("y"), Some("z"), None]);
    let message = shop.failure(&["b.parquet"], "");
    assert!(message.contains("b.parquet: row 4") && message.contains("null"), "{message}");
    shop.write("c.parquet", "no parquet at all");
    let message = shop.failure(&["c.parquet"], "");
    assert!(message.contains("c.parquet"), "{message}");
    let source = format!("{{ path = {:?}, field = 'id' }}", shop.path("a.parquet"));
    let config = format!("sources = [{source}]\ncache = {:?}", shop.path("cache"));
    let error = prepare(&toml::from_str(&config).unwrap(), VOCAB, &|_| {}).unwrap_err();
    assert!(error.to_string().contains("not text"), "{error}");
}

#[test]
fn damaged_compression_is_an_error_naming_the_file() {
    let shop = Workshop::new();
    let long = text(500, 0);
    for (name, bytes) in [("a.txt.gz", gzip(long.as_bytes())), ("a.txt.zst", zstd(long.as_bytes()))] {
        shop.write(name, &bytes[..bytes.len() / 2]);
        let message = shop.failure(&[name], "");
        assert!(message.contains(name), "{message}");
    }
}

/// The library underneath panics on some of these.
#[test]
fn damaged_parquet_is_never_a_panic() {
    let shop = Workshop::new();
    let path = shop.path("a.parquet");
    parquet(&path, "text", &TEXTS.map(Some));
    let whole = fs::read(&path).unwrap();
    for at in (4..whole.len()).step_by(5) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x55;
        fs::write(&path, bytes).unwrap();
        if let Err(error) = shop.prepare(&["a.parquet"], "") {
            assert!(error.to_string().contains("a.parquet"), "byte {at}: {error}");
        }
    }
}

// ---- sources ----

#[test]
fn folders_are_read_in_order_and_what_is_passed_over_is_counted() {
    let shop = Workshop::new();
    shop.write("text/b.txt", "bee");
    shop.write("text/a/z.rs", "zed");
    shop.write("text/a.txt", "ay");
    shop.write("text/picture.png", b"\x89PNG\0\0");
    shop.write("text/latin1.txt", b"caf\xe9");
    shop.write("text/zeros", b"a\0b");
    shop.write("text/empty.txt", "");
    shop.write("text/.git/config", "hidden");
    std::os::unix::fs::symlink(shop.path("text"), shop.path("text/a/loop")).unwrap();
    std::os::unix::fs::symlink(shop.path("nowhere"), shop.path("text/dangling")).unwrap();
    let corpus = shop.prepare(&["text"], "held_out = 0").unwrap();
    assert_eq!(texts_of(&corpus, Split::Train), ["ay", "zed", "bee"]);
    let skipped = &corpus.manifest.skipped;
    assert_eq!((skipped.binary, skipped.empty, skipped.hidden, skipped.broken_links), (3, 1, 1, 1));
    assert_eq!(skipped.binary_examples, ["latin1.txt", "picture.png", "zeros"]);
    assert!(skipped.to_string().starts_with("3 binary files, 1 empty documents"), "{skipped}");
    let source = &corpus.manifest.sources[0];
    assert_eq!((source.files, source.documents, source.text_bytes), (3, 3, 8));
}

#[test]
fn globs_match_files_and_every_file_counts_once() {
    let shop = Workshop::new();
    shop.write("src/a.rs", "ay");
    shop.write("src/deep/b.rs", "bee");
    shop.write("src/deep/c.txt", "sea");
    shop.write("src/odd[1].txt", "odd");
    let corpus = shop.prepare(&["src/**/*.rs", "src/deep", "src/a.rs", "src/odd[1].txt"], "held_out = 0").unwrap();
    assert_eq!(texts_of(&corpus, Split::Train), ["ay", "bee", "sea", "odd"]);
    let documents: Vec<_> = corpus.manifest.sources.iter().map(|source| source.documents).collect();
    assert_eq!(documents, [2, 1, 0, 1]);
}

#[test]
fn a_cache_inside_a_source_is_not_read() {
    let shop = Workshop::new();
    shop.write("a.txt", text(50, 0));
    let config = shop.config(&["."], "");
    let first = prepare(&config, VOCAB, &|_| {}).unwrap();
    let second = prepare(&config, VOCAB, &|_| {}).unwrap();
    assert_eq!(first.dir, second.dir);
    assert_eq!(second.manifest.sources[0].files, 1);
}

#[test]
fn all_sources_that_match_nothing_are_told_with_the_nearest_folder() {
    let shop = Workshop::new();
    shop.write("here/a.txt", "x");
    fs::create_dir(shop.path("hollow")).unwrap();
    let message = shop.failure(&["here/missing/b.txt", "here/*.rs", "hollow", "here/a.txt", "x/***"], "");
    let here = fs::canonicalize(shop.path("here")).unwrap();
    assert_eq!(message.matches(&format!("nearest existing folder is {}", here.display())).count(), 2);
    for part in ["4 sources", "missing/b.txt", "here/*.rs", "hollow", "no files but hidden", "not a valid glob"] {
        assert!(message.contains(part), "{part} in {message}");
    }
}

#[test]
fn a_named_file_must_be_text() {
    let shop = Workshop::new();
    shop.write("a.txt", b"caf\xe9 au lait");
    let message = shop.failure(&["a.txt"], "");
    assert!(message.contains("a.txt") && message.contains("invalid UTF-8 at byte 4"), "{message}");
    shop.write("only/binary.bin", b"\0\0");
    let message = shop.failure(&["only"], "");
    assert!(message.contains("1 binary files"), "{message}");
}

#[test]
fn values_that_make_no_sense_are_all_told() {
    let shop = Workshop::new();
    let message = shop.failure(&[], "held_out = 2\nmax_bytes = 0");
    assert!(["sources", "held_out", "max_bytes"].iter().all(|key| message.contains(key)), "{message}");
}

#[test]
fn max_bytes_takes_whole_files_chosen_by_name_alone() {
    let choose = |max_bytes: usize| {
        let shop = Workshop::new();
        for index in 0..20 {
            shop.write(&format!("text/{index:02}.txt"), text(20, index));
        }
        shop.prepare(&["text"], &format!("held_out = 0\nmax_bytes = {max_bytes}"))
            .map(|corpus| (texts_of(&corpus, Split::Train), corpus.manifest.skipped.over_max_bytes))
    };
    let bytes = |texts: &[String]| texts.iter().map(String::len).sum::<usize>();
    let (some, over) = choose(600).unwrap();
    assert!(bytes(&some) <= 600 && bytes(&some) > 400, "{} bytes", bytes(&some));
    assert_eq!(some.len() as u64 + over, 20);
    assert_eq!(choose(600).unwrap().0, some, "another folder gives the same choice");
    assert!(some.iter().all(|text| choose(1200).unwrap().0.contains(text)), "a larger cap adds files");
    let all: Vec<_> = (0..20).map(|index| text(20, index)).collect();
    assert_eq!(choose(1 << 20).unwrap(), (all.clone(), 0));
    assert_ne!(some, all[..some.len()], "the choice is not the first files");
    let message = choose(10).unwrap_err().to_string();
    assert!(message.contains("20 files") && message.contains("max_bytes = 10"), "{message}");
}

/// Only reading them tells how much text these hold.
#[test]
fn max_bytes_counts_the_text_of_compressed_files_and_lines() {
    let shop = Workshop::new();
    for index in 0..10 {
        shop.write(&format!("text/{index}.txt.gz"), gzip(text(40, index).as_bytes()));
        shop.write(&format!("text/{index}.jsonl"), jsonl("text", &[&text(20, index), &text(20, index + 1)]));
    }
    let corpus = shop.prepare(&["text"], "held_out = 0\nmax_bytes = 1000").unwrap();
    let bytes = corpus.manifest.train.text_bytes;
    assert!((700..=1000).contains(&bytes), "{bytes} bytes");
    assert_eq!(texts_of(&corpus, Split::Train).iter().map(String::len).sum::<usize>() as u64, bytes);
    assert_eq!(corpus.manifest.sources[0].files + corpus.manifest.skipped.over_max_bytes, 20);
}

// ---- tokenizer ----

fn trained() -> Tokenizer {
    Tokenizer::train(&[text(500, 0), TEXTS.concat()], VOCAB, None).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn any_text_survives_the_tokenizer(texts in prop::collection::vec(".{0,60}|[\\s\\S]{0,30}", 1..8)) {
        let tokenizer = trained();
        for text in &texts {
            let tokens = tokenizer.encode(text).unwrap();
            prop_assert!(tokens.iter().all(|&token| (token as usize) < tokenizer.vocab()));
            prop_assert_eq!(&tokenizer.decode(&tokens).unwrap(), text);
        }
    }
}

#[test]
fn a_document_cannot_forge_its_end() {
    let tokenizer = trained();
    let tokens = tokenizer.encode("a<|endoftext|>b").unwrap();
    assert!(!tokens.contains(&tokenizer.end_of_text()));
    assert_eq!(tokenizer.decode(&tokens).unwrap(), "a<|endoftext|>b");
    assert_eq!(tokenizer.decode(&[tokenizer.end_of_text()]).unwrap(), "<|endoftext|>");
}

#[test]
fn tokens_outside_the_vocabulary_are_errors() {
    let tokenizer = trained();
    assert_eq!(tokenizer.vocab(), VOCAB);
    let message = tokenizer.decode(&[1, VOCAB as u32]).unwrap_err().to_string();
    assert!(message.contains("token 300") && message.contains("300 entries"), "{message}");
}

#[test]
fn a_trained_vocabulary_may_be_too_small_but_not_too_large() {
    let shop = Workshop::new();
    shop.write("a.txt", "ab ab ab");
    let config = shop.config(&["a.txt"], "held_out = 0");
    let message = prepare(&config, 100, &|_| {}).unwrap_err().to_string();
    assert!(message.contains("model.vocab = 100") && message.contains("258"), "{message}");
    let corpus = prepare(&config, 5000, &|_| {}).unwrap();
    assert!(corpus.vocab() < 300, "three words have few pairs to merge: {}", corpus.vocab());
}

#[test]
fn a_given_tokenizer_is_used_as_it_is() {
    let shop = Workshop::new();
    shop.write("a.txt", text(100, 0));
    let json = trained().to_json().unwrap();
    let given = |json: String, rest: &str| {
        let path = shop.write("given.json", json);
        shop.prepare(&["a.txt"], &format!("held_out = 0\ntokenizer = {path:?}\n{rest}"))
    };
    let corpus = given(json.clone(), "").unwrap();
    assert_eq!(tokens_of(&corpus, Split::Train)[0][..10], trained().encode(&text(100, 0)).unwrap()[..10]);

    let renamed = json.replace("<|endoftext|>", "<|finis|>");
    let message = given(renamed.clone(), "").unwrap_err().to_string();
    assert!(message.contains("data.end_of_text") && message.contains("`</s>`"), "{message}");
    let corpus = given(renamed.clone(), "end_of_text = '<|finis|>'").unwrap();
    assert_eq!(corpus.tokenizer.end_of_text_name(), "<|finis|>");
    let message = given(renamed, "end_of_text = '<|fin|>'").unwrap_err().to_string();
    assert!(message.contains("no token `<|fin|>`"), "{message}");

    let message = given("{}".into(), "").unwrap_err().to_string();
    assert!(message.contains("given.json") && message.contains("cannot be used"), "{message}");
    shop.write("given.json", json);
    let config = shop.config(&["a.txt"], &format!("tokenizer = {:?}", shop.path("given.json")));
    let message = prepare(&config, 299, &|_| {}).unwrap_err().to_string();
    assert!(message.contains("300 entries") && message.contains("model.vocab = 299"), "{message}");
    assert!(prepare(&config, 301, &|_| {}).is_ok(), "a model may have more entries than the tokenizer");
}

#[test]
fn large_vocabularies_take_four_bytes() {
    let shop = Workshop::new();
    shop.write("a.txt", text(100, 0));
    let far = r#""added_tokens": [{"id": 70000, "content": "<far>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true},"#;
    let json = trained().to_json().unwrap().replacen("\"added_tokens\": [", far, 1);
    let path = shop.write("far.json", json);
    let config = shop.config(&["a.txt"], &format!("held_out = 0\ntokenizer = {path:?}"));
    let result = prepare(&config, 80_000, &|_| {});
    match result {
        Ok(corpus) => {
            assert_eq!(corpus.manifest.token_bytes, if corpus.vocab() > 1 << 16 { 4 } else { 2 });
            assert_eq!(texts_of(&corpus, Split::Train), [text(100, 0)]);
        }
        Err(error) => panic!("{error}"),
    }
}

// ---- prepared corpora ----

#[test]
fn two_preparations_give_equal_bytes() {
    let contents = |shop: &Workshop| {
        let corpus = shop.prepare(&["text"], "held_out = 0.2").unwrap();
        let mut files: Vec<_> = fs::read_dir(&corpus.dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        let keep = |path: &PathBuf| !path.ends_with("manifest.json");
        let contents: Vec<_> = files.iter().filter(|path| keep(path)).map(|path| fs::read(path).unwrap()).collect();
        (contents, corpus.rows(Split::Train, 8).unwrap().fingerprint())
    };
    let shops = [Workshop::new(), Workshop::new()];
    let [first, second] = shops.map(|shop| {
        for index in 0..10 {
            shop.write(&format!("text/{index}.txt"), text(100, index));
        }
        contents(&shop)
    });
    assert_eq!(first.0.len(), 5);
    assert_eq!(first, second);
}

#[test]
fn a_second_preparation_reads_nothing_until_something_changes() {
    let shop = Workshop::new();
    let path = shop.write("a.txt", text(100, 0));
    let config = shop.config(&["a.txt"], "");
    let work = |config: &Config| {
        let events = Mutex::new(Vec::new());
        let corpus = prepare(config, VOCAB, &|event| events.lock().unwrap().push(event)).unwrap();
        (corpus.dir, events.into_inner().unwrap())
    };
    let (first, events) = work(&config);
    assert!(matches!(events[0], PrepareStage::Surveying { files_done: 0, files: 1 }));
    assert!(matches!(events[1], PrepareStage::TrainingTokenizer { .. }));
    let bytes = fs::metadata(&path).unwrap().len();
    assert_eq!(*events.last().unwrap(), PrepareStage::Tokenizing { bytes_done: bytes, bytes });
    assert_eq!(work(&config), (first.clone(), vec![]));
    fs::write(&path, text(101, 0)).unwrap();
    let (second, events) = work(&config);
    assert!(second != first && !events.is_empty());
    let (third, _) = work(&Config { held_out: 0.25, ..config });
    assert!(third != first && third != second);
}

#[test]
fn many_preparations_at_once_all_succeed() {
    let shop = Workshop::new();
    shop.write("a.txt", text(2000, 0));
    let config = shop.config(&["a.txt"], "");
    let surveys = AtomicUsize::new(0);
    let count = |event| {
        if matches!(event, PrepareStage::Surveying { .. }) {
            surveys.fetch_add(1, Ordering::Relaxed);
        }
    };
    let one = || prepare(&config, VOCAB, &count).unwrap().dir;
    let dirs: BTreeSet<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..6).map(|_| scope.spawn(one)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(dirs.len(), 1);
    assert_eq!(surveys.into_inner(), 1, "only one does the work");
}

#[test]
fn an_interrupted_preparation_leaves_nothing_that_looks_whole() {
    let shop = Workshop::new();
    shop.write("a.txt", text(2000, 0));
    let config = shop.config(&["a.txt"], "");
    let interrupted = catch_unwind(AssertUnwindSafe(|| {
        prepare(&config, VOCAB, &|event| {
            if matches!(event, PrepareStage::Tokenizing { .. }) {
                // As `panic!`, without its message among the test's output.
                std::panic::resume_unwind(Box::new("interrupted"));
            }
        })
    }));
    assert!(interrupted.is_err());
    let names = shop.cached_names();
    assert!(names.iter().all(|name| name.ends_with(".lock")), "{names:?}");
    assert!(prepare(&config, VOCAB, &|_| {}).is_ok());
    assert_eq!(shop.cached_names().len(), names.len() + 1);
}

#[test]
fn a_failed_preparation_leaves_nothing_either() {
    let shop = Workshop::new();
    shop.write("a.jsonl", "{\"text\": \"x\"}\nbad");
    shop.failure(&["a.jsonl"], "");
    let names = shop.cached_names();
    assert!(names.iter().all(|name| name.ends_with(".lock")), "{names:?}");
}

#[test]
fn damage_is_found_on_opening_and_named() {
    type Damage = (&'static str, &'static str, fn(&Path));
    let flip: fn(&Path) = |path| {
        let mut bytes = fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let cut: fn(&Path) = |path| {
        let bytes = fs::read(path).unwrap();
        fs::write(path, &bytes[..bytes.len() - 1]).unwrap();
    };
    let remove: fn(&Path) = |path| fs::remove_file(path).unwrap();
    let other: fn(&Path) = |path| {
        let json = fs::read_to_string(path).unwrap();
        fs::write(path, json.replacen("\"format\": 2", "\"format\": 99", 1)).unwrap();
    };
    let rename: fn(&Path) = |path| {
        let json = fs::read_to_string(path).unwrap();
        fs::write(path, json.replacen("train-00000.tokens", "../../secret", 1)).unwrap();
    };
    let cases: [Damage; 12] = [
        ("train-00000.tokens", "SHA-256", flip),
        ("train-00000.tokens", "bytes instead of", cut),
        ("train-00000.tokens", "missing", remove),
        ("held-out-00000.tokens", "SHA-256", flip),
        ("train.documents", "SHA-256", flip),
        ("train.documents", "bytes instead of", cut),
        ("tokenizer.json", "SHA-256", flip),
        ("tokenizer.json", "missing", remove),
        ("manifest.json", "EOF", cut),
        ("manifest.json", "No such file", remove),
        ("manifest.json", "format 99", other),
        ("manifest.json", "../../secret", rename),
    ];
    for (name, reason, damage) in cases {
        let shop = Workshop::new();
        shop.write("a.txt", text(200, 0));
        let dir = shop.prepare(&["a.txt"], "held_out = 0.2").unwrap().dir;
        damage(&dir.join(name));
        let message = Corpus::open(&dir).unwrap_err().to_string();
        assert!(message.contains(name) && message.contains(reason), "{name}, {reason}: {message}");
        if reason != "No such file" {
            assert!(message.contains("delete") && message.contains("run prepare again"), "{message}");
        }
        let again = shop.prepare(&["a.txt"], "held_out = 0.2").unwrap_err().to_string();
        assert_eq!(again, message, "preparing does not hide the damage");
    }
}

#[test]
fn a_token_outside_the_vocabulary_is_named_by_shard_and_position() {
    let shop = Workshop::new();
    shop.write("a.txt", text(200, 0));
    let corpus = shop.prepare(&["a.txt"], "held_out = 0").unwrap();
    let path = corpus.dir.join("train-00000.tokens");
    let mut bytes = fs::read(&path).unwrap();
    bytes[2 * 13..2 * 14].copy_from_slice(&40_000u16.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let corpus = Corpus::open_with(&corpus.dir, guildhall::data::CorpusCheck::Sizes).unwrap();
    let rows = corpus.rows(Split::Train, 4).unwrap();
    assert!(rows.get(2, 0).is_ok());
    let message = rows.get(3, 0).unwrap_err().to_string();
    let vocabulary = format!("vocabulary of {}", corpus.vocab());
    for part in ["train-00000.tokens", "token 13", "40000", &vocabulary] {
        assert!(message.contains(part), "{part} in {message}");
    }
}

#[test]
fn too_little_text_is_told_in_numbers() {
    let shop = Workshop::new();
    shop.write("a.txt", "tiny");
    let corpus = shop.prepare(&["a.txt"], "held_out = 0").unwrap();
    let tokens = corpus.manifest.train.tokens;
    let message = corpus.rows(Split::Train, 128).unwrap_err().to_string();
    for part in ["train", &format!("{tokens} tokens found"), "128 needed for 1 rows of 128", "data.sources"] {
        assert!(message.contains(part), "{part} in {message}");
    }
    let message = corpus.rows_at_least(Split::Train, 1, 50).unwrap_err().to_string();
    assert!(message.contains("50 needed for 50 rows of 1"), "{message}");
    let message = corpus.rows_at_least(Split::HeldOut, 8, 1).unwrap_err().to_string();
    assert!(message.contains("held-out") && message.contains("data.held_out"), "{message}");
    assert_eq!(corpus.rows(Split::HeldOut, 8).unwrap().len(), 0);
    assert!(corpus.rows(Split::Train, 0).is_err());
}

#[test]
fn something_is_held_out_of_every_corpus_that_has_something_to_spare() {
    for documents in [1, 2, 3, 50] {
        let shop = Workshop::new();
        let texts: Vec<_> = (0..documents).map(|index| text(60, index)).collect();
        let lines = texts.iter().map(String::as_str).collect::<Vec<_>>();
        shop.write("a.jsonl", jsonl("text", &lines));
        let corpus = shop.prepare(&["a.jsonl"], "held_out = 0.05").unwrap();
        let (train, held_out) = (texts_of(&corpus, Split::Train), texts_of(&corpus, Split::HeldOut));
        assert!(!train.is_empty() && !held_out.is_empty(), "{documents} documents");
        if documents <= 2 {
            // One of them holds more than half of the text, so its end is held out and not all of it.
            assert_eq!((train.len(), held_out.len()), (documents, 1));
            let whole = |text: &String| texts.contains(text) || texts.contains(&format!("{text}{}", held_out[0]));
            assert!(train.iter().all(whole), "{train:?} {held_out:?}");
        } else {
            let union: BTreeSet<_> = train.iter().chain(&held_out).cloned().collect();
            assert_eq!(union, texts.into_iter().collect());
            assert_eq!(train.len() + held_out.len(), documents);
        }
    }
}

// ---- rows ----

/// The rows of documents, built token by token over the whole corpus.
fn brute_rows(documents: &[Vec<u32>], seq: usize) -> Vec<Row> {
    let mut all = Vec::new();
    for (document, tokens) in documents.iter().enumerate() {
        for (place, &token) in tokens.iter().enumerate() {
            let target = tokens.get(place + 1).copied().unwrap_or(IGNORE);
            all.push((document, token, target));
        }
    }
    let row = |stretch: &[(usize, u32, u32)]| {
        let mut row = Row::default();
        for (place, &(document, token, target)) in stretch.iter().enumerate() {
            row.tokens.push(token);
            row.targets.push(target);
            row.segments.push((document - stretch[0].0) as u32);
            let starts = stretch[..place].iter().filter(|(other, ..)| *other == document).count();
            row.positions.push(starts as u32);
        }
        row
    };
    all.chunks_exact(seq).map(row).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn rows_are_those_of_a_loop_over_all_documents(
        texts in prop::collection::vec("[a-z]{0,12}( [a-z]{1,4}){0,6}", 1..12),
        held_out in prop::sample::select(vec![0.0, 0.2]),
    ) {
        prop_assume!(texts.iter().any(|text| text.len() > 1));
        let shop = Workshop::new();
        shop.write("a.jsonl", jsonl("text", &texts.iter().map(String::as_str).collect::<Vec<_>>()));
        let corpus = shop.prepare(&["a.jsonl"], &format!("held_out = {held_out}")).unwrap();
        for split in Split::ALL {
            let documents = tokens_of(&corpus, split);
            for seq in [1, 2, 3, 7, 16] {
                let Ok(rows) = corpus.rows(split, seq) else { continue };
                let found: Vec<_> = (0..rows.len()).map(|index| rows.get(index, 0).unwrap()).collect();
                prop_assert_eq!(found, brute_rows(&documents, seq));
            }
        }
    }
}

#[test]
fn rows_outside_the_split_are_errors() {
    let shop = Workshop::new();
    shop.write("a.txt", text(50, 0));
    let rows = shop.prepare(&["a.txt"], "held_out = 0").unwrap().rows(Split::Train, 4).unwrap();
    assert!(rows.get(rows.len() - 1, 0).is_ok());
    assert!(matches!(rows.get(rows.len(), 0), Err(Error::RowOutOfRange { .. })));
}

#[test]
fn fingerprints_of_rows_tell_content_and_length_apart() {
    let shop = Workshop::new();
    shop.write("a.txt", text(50, 0));
    shop.write("b.txt", text(50, 1));
    let print = |source: &str, split, seq| {
        let rows: PackedRows = shop.prepare(&[source], "held_out = 0.3").unwrap().rows(split, seq).unwrap();
        rows.fingerprint()
    };
    let prints = [
        print("a.txt", Split::Train, 4),
        print("b.txt", Split::Train, 4),
        print("a.txt", Split::HeldOut, 4),
        print("a.txt", Split::Train, 5),
    ];
    assert_eq!(prints.iter().collect::<BTreeSet<_>>().len(), 4);
    assert_eq!(print("a.txt", Split::Train, 4), prints[0]);
}

// ---- order, shares, batches ----

/// Row `i` is `[i, i, ..]`; slow or failing where a test wants it.
struct Numbers {
    rows: usize,
    pause: Duration,
    fails_at: Option<usize>,
}

impl Numbers {
    fn new(rows: usize) -> Self {
        Self { rows, pause: Duration::ZERO, fails_at: None }
    }
}

impl Source for Numbers {
    fn len(&self) -> usize {
        self.rows
    }

    fn seq(&self) -> usize {
        2
    }

    fn get(&self, index: usize, _pass: u64) -> Result<Row, Error> {
        thread::sleep(self.pause);
        if self.fails_at == Some(index) {
            return Err(Error::RowOutOfRange { index, len: self.rows });
        }
        let pair = vec![index as u32; 2];
        Ok(Row {
            tokens: pair.clone(),
            targets: vec![1, IGNORE],
            segments: pair.clone(),
            positions: pair,
            ..Row::default()
        })
    }

    fn fingerprint(&self) -> String {
        format!("numbers {}", self.rows)
    }
}

fn numbers(batch: &Batch) -> Vec<u32> {
    assert_eq!(batch.tokens.len(), batch.rows * batch.seq);
    batch.tokens.chunks(2).map(|pair| pair[0]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn an_order_is_a_bijection(n in 1u64..5000, seed: u64, epoch: u64) {
        let order = Permutation::new(n, seed, epoch);
        let values: BTreeSet<_> = (0..n).map(|index| order.get(index)).collect();
        prop_assert_eq!(values.len() as u64, n);
        prop_assert!(values.last().is_some_and(|&last| last < n));
    }

    /// The rows of a step, put together again from all ranks and micro-batches, are those of one rank that
    /// takes the step whole; and every batch knows where it stands.
    #[test]
    fn shares_make_up_the_step(
        rows in 1usize..40,
        rows_per_step in 1usize..20,
        micro_batch in 1usize..24,
        ranks in 1usize..7,
        step in 0u64..50,
        seed: u64,
    ) {
        let source = Numbers::new(rows);
        let whole = BatchPlan { seed, rows_per_step, micro_batch: rows_per_step, rank: 0, ranks: 1 };
        let whole = numbers(&whole.batch(&source, step, 0).unwrap());
        prop_assert_eq!(whole.len(), rows_per_step);
        let mut found = Vec::new();
        let plan = BatchPlan { seed, rows_per_step, micro_batch, rank: 0, ranks };
        for micro in 0..plan.micro_batches() {
            for rank in 0..ranks {
                let batch = BatchPlan { rank, ..plan }.batch(&source, step, micro).unwrap();
                prop_assert_eq!(batch.first_token, found.len() as u64 * 2);
                found.extend(numbers(&batch));
            }
        }
        prop_assert_eq!(found, whole);
    }

    #[test]
    fn every_epoch_shows_every_row_once(rows in 1usize..30, rows_per_step in 1usize..12, seed: u64) {
        let plan = BatchPlan { seed, rows_per_step, micro_batch: 5, rank: 0, ranks: 1 };
        let order: Vec<_> = (0..3 * rows)
            .map(|index| plan.row(&Numbers::new(rows), (index / rows_per_step) as u64, index % rows_per_step))
            .collect();
        for (pass, rows_of_pass) in (0..).zip(order.chunks(rows)) {
            let expected = (0..rows).map(|row| (row, pass));
            prop_assert!(rows_of_pass.iter().copied().collect::<BTreeSet<_>>().into_iter().eq(expected));
        }
    }
}

#[test]
fn every_epoch_has_an_order_of_its_own() {
    let plan = BatchPlan { seed: 1, rows_per_step: 50, micro_batch: 50, rank: 0, ranks: 1 };
    let of_step = |step| numbers(&plan.batch(&Numbers::new(100), step, 0).unwrap());
    assert_ne!([of_step(0), of_step(1)], [of_step(2), of_step(3)]);
}

#[test]
fn plans_that_describe_nothing_are_errors() {
    let plan = BatchPlan { seed: 0, rows_per_step: 4, micro_batch: 2, rank: 0, ranks: 2 };
    let source: Arc<dyn Source> = Arc::new(Numbers::new(3));
    for bad in [
        BatchPlan { rows_per_step: 0, ..plan },
        BatchPlan { micro_batch: 0, ..plan },
        BatchPlan { rank: 2, ..plan },
        BatchPlan { ranks: 0, ..plan },
    ] {
        assert!(matches!(Loader::new(Arc::clone(&source), bad, 0), Err(Error::BadPlan(_))), "{bad:?}");
    }
    assert!(Loader::new(Arc::new(Numbers::new(0)), plan, 0).is_err());
    assert!(plan.batch(&Numbers::new(0), 0, 0).is_err());
}

#[test]
fn valid_targets_are_counted() {
    let plan = BatchPlan { seed: 0, rows_per_step: 5, micro_batch: 5, rank: 0, ranks: 1 };
    assert_eq!(plan.batch(&Numbers::new(9), 0, 0).unwrap().valid(), 5);
    assert_eq!(Batch::empty(8, 3).valid(), 0);
    assert_eq!(Batch::empty(8, 3).first_token, 24);
}

#[test]
fn evaluation_shows_the_first_rows_in_order() {
    let source = Numbers::new(10);
    let mut found = Vec::new();
    let of_rank = |rank| eval_batches(&source, 7, 3, rank, 2).unwrap().map(Result::unwrap).collect::<Vec<_>>();
    let (first, second) = (of_rank(0), of_rank(1));
    assert_eq!((first.len(), second.len()), (3, 3));
    for (a, b) in first.iter().zip(&second) {
        found.extend(numbers(a));
        assert_eq!(b.first_token, found.len() as u64 * 2);
        found.extend(numbers(b));
    }
    assert_eq!(found, [0, 1, 2, 3, 4, 5, 6]);
    let all = eval_batches(&source, usize::MAX, 4, 0, 1).unwrap().map(|batch| batch.unwrap().rows);
    assert_eq!(all.collect::<Vec<_>>(), [4, 4, 2]);
    assert_eq!(eval_batches(&Numbers::new(0), 5, 4, 0, 1).unwrap().count(), 0);
    assert!(eval_batches(&source, 5, 0, 0, 1).is_err());
}

// ---- loader ----

fn plan() -> BatchPlan {
    BatchPlan { seed: 3, rows_per_step: 6, micro_batch: 4, rank: 1, ranks: 2 }
}

fn take(loader: &mut Loader, steps: usize) -> Vec<StepBatches> {
    (0..steps).map(|_| loader.next().unwrap()).collect()
}

#[test]
fn a_loader_gives_what_its_plan_says_and_resumes_anywhere() {
    let source: Arc<dyn Source> = Arc::new(Numbers::new(10));
    let all = take(&mut Loader::new(Arc::clone(&source), plan(), 0).unwrap(), 8);
    for (step, batches) in (0..).zip(&all) {
        assert_eq!(batches.step, step);
        let expected: Vec<_> = (0..2).map(|micro| plan().batch(source.as_ref(), step, micro).unwrap()).collect();
        assert_eq!(batches.micro, expected);
        assert_eq!(batches.valid(), 3);
    }
    for first in [1, 5] {
        let resumed = take(&mut Loader::new(Arc::clone(&source), plan(), first).unwrap(), 3);
        assert_eq!(resumed, all[first as usize..first as usize + 3]);
    }
}

#[test]
fn an_error_while_reading_ahead_arrives() {
    let source = Numbers { fails_at: Some(4), ..Numbers::new(10) };
    let mut loader = Loader::new(Arc::new(source), plan(), 0).unwrap();
    let error = (0..20).find_map(|_| loader.next().err()).unwrap();
    assert!(matches!(error, Error::RowOutOfRange { index: 4, .. }), "{error}");
    assert!(matches!(loader.next(), Err(Error::LoaderStopped)));
}

#[test]
fn dropping_a_loader_ends_its_thread_promptly() {
    let source = Arc::new(Numbers { pause: Duration::from_millis(5), ..Numbers::new(10_000) });
    let plan = BatchPlan { rows_per_step: 10_000, micro_batch: 10_000, rank: 0, ranks: 1, seed: 0 };
    let loader = Loader::new(Arc::clone(&source) as Arc<dyn Source>, plan, 0).unwrap();
    let started = Instant::now();
    drop(loader);
    // The step would take 50 s; a second is a hundred times what one row takes.
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    assert_eq!(Arc::strong_count(&source), 1, "the thread has let go of the source");
    let mut full = Loader::new(Arc::new(Numbers::new(10)), self::plan(), 0).unwrap();
    full.next().unwrap();
    thread::sleep(Duration::from_millis(20));
    drop(full);
}
