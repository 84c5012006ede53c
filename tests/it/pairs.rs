//! Parallel text through the public interface: the same pairs in every format, and files that are not what they should
//! be.
//!
//! Everything a test reads is written by it, in sentences of our own.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use guildhall::data::pairs::catalogues::{Catalogue, CatalogueEntry};
use guildhall::data::pairs::{
    Cleaner, Cleaning, MessageKeys, PairListing, PairSpec, PairSummary, SkipReason, list, open, read_all,
};
use guildhall::data::sources::Compression;
use guildhall::data::{Error, Split};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use proptest::prelude::*;
use tempfile::TempDir;

const PAIRS: [[&str; 2]; 4] = [
    ["The door is open.", "Die Tür ist offen."],
    ["Fish & chips < soup", "Fisch & Pommes < Suppe"],
    ["He said \"good night\".", "Er sagte „gute Nacht“."],
    ["Seven small words in one line", "Sieben kleine Wörter in einer Zeile"],
];

pub(crate) struct Workshop {
    folder: TempDir,
}

impl Workshop {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    fn spec(&self, name: &str, languages: Option<[&str; 2]>) -> PairSpec {
        let [from, to] = languages.map_or([None, None], |languages| languages.map(|name| Some(name.to_owned())));
        PairSpec { path: self.path(name).display().to_string(), from, to, ..PairSpec::default() }
    }

    pub(crate) fn list(&self, spec: PairSpec) -> Result<PairListing, Error> {
        list(&[spec], &self.path("cache"))
    }

    pub(crate) fn read(&self, spec: PairSpec) -> Result<(Vec<[String; 2]>, PairSummary), Error> {
        let mut texts = Vec::new();
        let summary = read_all(&self.list(spec)?, Cleaning::default(), &mut |pair| {
            texts.push(pair.texts);
            Ok(())
        })?;
        Ok((texts, summary))
    }

    /// The message of a reading that must fail.
    pub(crate) fn error(&self, spec: PairSpec) -> String {
        self.read(spec).expect_err("it can be read").to_string()
    }
}

fn english_german(workshop: &Workshop, name: &str) -> PairSpec {
    workshop.spec(name, Some(["en", "de"]))
}

pub(crate) fn skipped(summary: &PairSummary, reason: SkipReason) -> u64 {
    summary.directions.values().map(|direction| direction.skips.count(reason)).sum()
}

fn side(index: usize) -> String {
    PAIRS.iter().map(|pair| format!("{}\n", pair[index])).collect()
}

pub(crate) fn gzipped(text: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

pub(crate) fn parquet_file(path: &Path, schema: &str, columns: &[Vec<Option<&str>>]) {
    let schema = parse_message_type(schema).unwrap();
    let properties = WriterProperties::builder().build().into();
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema.into(), properties).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for values in columns {
        let mut column = group.next_column().unwrap().unwrap();
        let present: Vec<ByteArray> = values.iter().flatten().map(|&text| text.into()).collect();
        let levels: Vec<i16> = values.iter().map(|value| i16::from(value.is_some())).collect();
        column.typed::<ByteArrayType>().write_batch(&present, Some(&levels), None).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

fn memory() -> String {
    let unit = |[source, target]: &[&str; 2]| {
        let variant = |language: &str, text: &str| {
            format!("<tuv xml:lang=\"{language}\"><prop>none</prop><seg>{}</seg></tuv>\n", escaped(text))
        };
        format!("<tu><note>no text</note>{}{}</tu>\n", variant("EN-us", source), variant("de", target))
    };
    let units: String = PAIRS.iter().map(unit).collect();
    format!("<tmx version=\"1.4\"><header srclang=\"en\"/><body>\n{units}</body></tmx>\n")
}

/// A compiled catalogue.
fn compiled(entries: &[(&[u8], &[u8])], big_endian: bool) -> Vec<u8> {
    let number = |value: usize| {
        if big_endian { (value as u32).to_be_bytes() } else { (value as u32).to_le_bytes() }
    };
    let (count, ids) = (entries.len(), 28);
    let texts = ids + 8 * count;
    let mut bytes: Vec<u8> = [0x9504_12de, 0, count, ids, texts, 0, 0].into_iter().flat_map(number).collect();
    let (mut tables, mut strings) = (Vec::new(), Vec::new());
    let both = entries.iter().map(|entry| entry.0).chain(entries.iter().map(|entry| entry.1));
    for string in both {
        tables.extend(number(string.len()));
        tables.extend(number(texts + 8 * count + strings.len()));
        strings.extend(string);
        strings.push(0);
    }
    bytes.extend(tables);
    bytes.extend(strings);
    bytes
}

fn header(charset: &str) -> Vec<u8> {
    format!("Language: de\nContent-Type: text/plain; charset={charset}\nPlural-Forms: nplurals=2; plural=n != 1;\n")
        .into()
}

fn catalogue(charset: &str, big_endian: bool, encode: impl Fn(&str) -> Vec<u8>) -> Vec<u8> {
    let texts: Vec<(Vec<u8>, Vec<u8>)> = PAIRS.iter().map(|pair| (encode(pair[0]), encode(pair[1]))).collect();
    let header = header(charset);
    let mut entries: Vec<(&[u8], &[u8])> = vec![(b"", &header)];
    entries.extend(texts.iter().map(|(id, text)| (id.as_slice(), text.as_slice())));
    compiled(&entries, big_endian)
}

fn quoted(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

#[test]
fn every_format_gives_the_same_pairs() {
    let workshop = Workshop::new();
    workshop.write("news.en", side(0));
    workshop.write("news.de.gz", gzipped(&side(1)));
    workshop.write("marked.en", format!("\u{feff}{}", side(0).replace('\n', "\r\n")));
    workshop.write("marked.de.zst", zstd::encode_all(side(1).as_bytes(), 1).unwrap());
    let rows = |row: &dyn Fn(&[&str; 2]) -> String| PAIRS.iter().map(|pair| row(pair) + "\n").collect::<String>();
    workshop.write("a.tsv", rows(&|[source, target]| format!("{source}\t{target}\tmore")));
    workshop.write("flat.jsonl", rows(&|[en, de]| serde_json::json!({ "en": en, "de": de }).to_string()));
    let nested = rows(&|[en, de]| serde_json::json!({ "translation": { "en": en, "de": de } }).to_string());
    workshop.write("nested.jsonl.gz", gzipped(&nested));
    let columns = [0, 1].map(|side| PAIRS.iter().map(|pair| Some(pair[side])).collect());
    let flat = "message m { optional binary en (UTF8); optional binary de (UTF8); }";
    parquet_file(&workshop.path("flat.parquet"), flat, &columns);
    let nested = "message m { required group translation { optional binary en (UTF8); optional binary de (UTF8); } }";
    parquet_file(&workshop.path("nested.parquet"), nested, &columns);
    workshop.write("a.tmx", memory());
    let declared = format!("<?xml version=\"1.0\" encoding=\"ISO-8859-1\"?>{}", memory().replace(['„', '“'], "''"));
    workshop.write("latin.tmx", declared.chars().map(|letter| letter as u32 as u8).collect::<Vec<_>>());
    let wide = format!("\u{feff}<?xml version=\"1.0\" encoding=\"UTF-16\"?>{}", memory());
    workshop.write("wide.tmx", wide.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>());
    let utf8 = |text: &str| text.as_bytes().to_vec();
    workshop.write("de/LC_MESSAGES/little.mo", catalogue("UTF-8", false, utf8));
    workshop.write("de/LC_MESSAGES/big.mo", catalogue("utf-8", true, utf8));
    let entry = |[id, text]: &[&str; 2]| format!("msgid \"{}\"\nmsgstr \"{}\"", quoted(id), quoted(text));
    workshop.write("house/po/de.po", format!("msgid \"\"\nmsgstr \"Language: de\\n\"\n\n{}", rows(&entry)));
    let expected = PAIRS.map(|pair| pair.map(str::to_owned));
    for name in [
        "news",
        "marked",
        "a.tsv",
        "flat.jsonl",
        "nested.jsonl.gz",
        "flat.parquet",
        "nested.parquet",
        "a.tmx",
        "wide.tmx",
        "de/LC_MESSAGES/little.mo",
        "de/LC_MESSAGES/big.mo",
        "house/po/de.po",
    ] {
        let (texts, summary) = workshop.read(english_german(&workshop, name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(texts, expected, "{name}");
        assert_eq!(summary.directions.keys().collect::<Vec<_>>(), [&["en".to_owned(), "de".to_owned()]], "{name}");
    }
    let (texts, _) = workshop.read(english_german(&workshop, "latin.tmx")).unwrap();
    assert_eq!(texts[0], expected[0]);
    assert_eq!(texts[2][1], "Er sagte ''gute Nacht''.");
}

#[test]
fn fields_and_columns_have_the_names_that_are_given() {
    let workshop = Workshop::new();
    workshop.write("a.tsv", "x\tdas Haus\tthe house\n");
    workshop.write("a.jsonl", "{\"pair\": {\"english\": \"the house\", \"other\": \"das Haus\"}}\n");
    let named = |name: &str, fields: [&str; 2]| PairSpec {
        fields: Some(fields.map(str::to_owned)),
        ..english_german(&workshop, name)
    };
    let expected = [["the house".to_owned(), "das Haus".to_owned()]];
    assert_eq!(workshop.read(named("a.tsv", ["3", "2"])).unwrap().0, expected);
    assert_eq!(workshop.read(named("a.jsonl", ["pair.english", "pair.other"])).unwrap().0, expected);
    let error = workshop.error(named("a.tsv", ["3", "5"]));
    assert!(error.contains("a.tsv:1: no column 5, the line has 3"), "{error}");
    let error = workshop.error(named("a.tsv", ["0", "two"]));
    assert!(error.contains("numbers of columns from 1"), "{error}");
    let error = workshop.error(named("a.jsonl", ["pair.english", "pair.german"]));
    assert!(error.contains("a.jsonl:1") && error.contains("`pair.german`"), "{error}");
    let error = workshop.error(named("a.jsonl", ["pair", "pair.other"]));
    assert!(error.contains("it is an object with `english`, `other`"), "{error}");
}

#[test]
fn a_translation_of_hugging_face_may_lack_a_side() {
    let workshop = Workshop::new();
    let schema = "message m { required group translation { optional binary de (UTF8); optional binary en (UTF8); } }";
    let columns =
        [vec![Some("das Haus"), None, Some(" ")], vec![Some("the house"), Some("the door"), Some("the wall")]];
    parquet_file(&workshop.path("a.parquet"), schema, &columns);
    let (texts, summary) = workshop.read(english_german(&workshop, "a.parquet")).unwrap();
    assert_eq!(texts, [["the house".to_owned(), "das Haus".to_owned()]]);
    assert_eq!(skipped(&summary, SkipReason::EmptySide), 2);
    let error = workshop.error(workshop.spec("a.parquet", Some(["en", "fr"])));
    assert!(error.contains("no column `fr`; name one of `translation.de`, `translation.en`"), "{error}");
    let bytes = fs::read(workshop.path("a.parquet")).unwrap();
    for cut in [0, 3, 12, bytes.len() / 2, bytes.len() - 1] {
        workshop.write("cut.parquet", &bytes[..cut]);
        let error = workshop.error(english_german(&workshop, "cut.parquet"));
        assert!(error.contains("cannot be read as Parquet"), "{error}");
    }
}

#[test]
fn files_of_unequal_length_are_named_with_their_lines() {
    let workshop = Workshop::new();
    for (source, target, told) in
        [("a b\nc d\ne f\n", "x y\n", ["3 lines", "1:"]), ("a b", "x y\nz\n\n", ["1 lines", "3:"])]
    {
        workshop.write("news.en", source);
        workshop.write("news.de", target);
        let error = workshop.error(english_german(&workshop, "news"));
        assert!(told.iter().all(|part| error.contains(part)) && error.contains("news.de"), "{error}");
    }
}

#[test]
fn lines_in_a_wrong_encoding_are_counted_unless_most_are() {
    let workshop = Workshop::new();
    let mut german = side(1).into_bytes();
    let at = german.windows(2).position(|pair| pair == "ü".as_bytes()).unwrap();
    german.splice(at..at + 2, [0xfc]);
    workshop.write("news.en", side(0));
    workshop.write("news.de", &german);
    let (texts, summary) = workshop.read(english_german(&workshop, "news")).unwrap();
    assert_eq!((texts.len(), skipped(&summary, SkipReason::WrongEncoding)), (3, 1));
    let latin: Vec<u8> = "für\nTür\nWörter\nvier\n".chars().map(|letter| letter as u32 as u8).collect();
    workshop.write("news.de", latin);
    let error = workshop.error(english_german(&workshop, "news"));
    assert!(error.contains("news.de") && error.contains("at byte 2") && error.contains("convert"), "{error}");
    workshop.write("news.de", side(1).encode_utf16().flat_map(u16::to_be_bytes).collect::<Vec<_>>());
    assert!(workshop.error(english_german(&workshop, "news")).contains("news.de"), "UTF-16 without a mark");
    let marked: Vec<u8> = format!("\u{feff}{}", side(1)).encode_utf16().flat_map(u16::to_le_bytes).collect();
    workshop.write("news.de", marked);
    assert!(workshop.error(english_german(&workshop, "news")).contains("UTF-16"));
}

#[test]
fn broken_tables_name_their_lines() {
    let workshop = Workshop::new();
    workshop.write("a.tsv", "one\teins\ntwo\n");
    assert!(workshop.error(english_german(&workshop, "a.tsv")).contains("a.tsv:2: no column 2"));
    workshop.write("a.jsonl", "{\"en\": \"one\", \"de\": \"eins\"}\n{\"en\": \"two\"");
    assert!(workshop.error(english_german(&workshop, "a.jsonl")).contains("a.jsonl:2: not a JSON object"));
    workshop.write("a.jsonl", "{\"en\": \"one\", \"de\": 1}\n");
    assert!(workshop.error(english_german(&workshop, "a.jsonl")).contains("`de` (it is a number)"));
    let deep = format!("{{\"en\": {}", "[".repeat(100_000));
    workshop.write("a.jsonl", deep);
    assert!(workshop.error(english_german(&workshop, "a.jsonl")).contains("a.jsonl:1"));
}

#[test]
fn codes_within_segments_are_no_text() {
    let workshop = Workshop::new();
    let unit = |english: &str, german: &str| {
        format!("<tu><tuv lang=\"en\"><seg>{english}</seg></tuv><tuv xml:lang=\"de-AT\"><seg>{german}</seg></tuv></tu>")
    };
    let codes = unit(
        "Press <bpt i=\"1\">&lt;b&gt;<sub>no</sub></bpt>the <hi>red <hi>round</hi></hi> button<ept i=\"1\">&lt;/b&gt;</ept>&#33;",
        "Den <hi>roten runden</hi> Knopf<ph x=\"1\"/> dr&#xFC;cken<it pos=\"begin\">{</it><ut>}</ut><![CDATA[ & halten]]>",
    );
    let other = "<tu><tuv xml:lang=\"en\"><seg>alone</seg></tuv><tuv xml:lang=\"fr\"><seg>seul</seg></tuv></tu>";
    // Of two variants the first counts.
    let twice = unit("first words", "erste Worte").replace("</tu>", "<tuv lang=\"en\"><seg>others</seg></tuv></tu>");
    workshop.write("a.tmx", format!("<tmx><body>{codes}{twice}{other}</body></tmx>"));
    let (texts, summary) = workshop.read(english_german(&workshop, "a.tmx")).unwrap();
    let expected = ["Press the red round button!", "Den roten runden Knopf drücken & halten"];
    assert_eq!(texts, [expected, ["first words", "erste Worte"]].map(|pair| pair.map(str::to_owned)));
    assert_eq!(skipped(&summary, SkipReason::MissingLanguage), 1);
    let error = workshop.error(workshop.spec("a.tmx", Some(["en", "pl"])));
    assert!(error.contains("`en` and `pl`") && error.contains("3 units, in `de-AT`, `en`, `fr`"), "{error}");
}

#[test]
fn damaged_memories_are_errors() {
    let workshop = Workshop::new();
    let whole = memory();
    for (text, part) in [
        ("", "no unit"),
        ("no xml at all", "no unit"),
        (&whole.replace("&amp;", "&undefined;"), "unknown entity"),
        (&whole.replace("</seg></tuv>\n</tu>", "</tuv></tu>"), "not XML"),
        (&whole.replace("<tmx", "<?xml version='1.0' encoding='klingon'?><tmx"), "unknown encoding `klingon`"),
        (&format!("<tmx><!-- {}", "<tu> & ".repeat(4_000_000)), "without a complete unit"),
    ] {
        workshop.write("a.tmx", text);
        let error = workshop.error(english_german(&workshop, "a.tmx"));
        assert!(error.contains(part) && error.contains("a.tmx"), "{error}");
    }
    // A truncated file has some of its units, and never more.
    for cut in 0..whole.len() {
        workshop.write("a.tmx", &whole.as_bytes()[..cut]);
        if let Ok((texts, _)) = workshop.read(english_german(&workshop, "a.tmx")) {
            assert!(!texts.is_empty() && texts.len() <= PAIRS.len());
        }
    }
}

fn entries(workshop: &Workshop, text: &str) -> Result<Vec<Result<CatalogueEntry, SkipReason>>, Error> {
    let path = workshop.write("po/de.po", text);
    Catalogue::read(&path, Compression::None, false).map(|catalogue| catalogue.entries)
}

const EVERYTHING: &str = r#"
# A comment
#, fuzzy
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\n"
"Plural-Forms: nplurals=3; plural=n==1 ? 0 : n<5 ? 1 : 2;\n"

#: house.c:12
#. says where
msgctxt "kitchen"
msgid "first "
"line\n"
"\tand \"second\""
msgstr "eins" " und\x41\101\\"

#, c-format, fuzzy
#, no-wrap
#| msgid "a doubtful house"
msgid "a doubtful door"
msgstr "eine zweifelhafte Tür"
#~ msgctxt "cellar"
#~ msgid "an old "
#~ "door"
#~ msgstr "eine alte Tür"
msgid "%d house"
msgid_plural "%d houses"
msgstr[0] "ein Haus"
msgstr[1] "wenige Häuser"
msgstr[2] "viele Häuser"

msgid "%d mouse"
msgid_plural "%d mice"
msgstr[0] "eine Maus"
msgstr[1] "Mäuse"

msgid "not translated"
msgstr ""
# The end
"#;

#[test]
fn catalogues_of_text_are_read_whole() {
    let workshop = Workshop::new();
    let path = workshop.write("po/de.po", EVERYTHING);
    let catalogue = Catalogue::read(&path, Compression::None, false).unwrap();
    let read: Vec<_> = catalogue.entries.iter().flatten().collect();
    assert_eq!(read.len(), 6);
    assert_eq!(read[0].context.as_deref(), Some("kitchen"));
    assert_eq!(
        (read[0].id.as_str(), &read[0].texts),
        ("first line\n\tand \"second\"", &vec!["eins undAA\\".to_owned()])
    );
    assert!(read[1].fuzzy && !read[1].obsolete && read[1].id == "a doubtful door");
    assert!(read[2].obsolete && read[2].id == "an old door" && read[2].context.as_deref() == Some("cellar"));
    assert_eq!((read[3].plural_id.as_deref(), read[3].texts.len()), (Some("%d houses"), 3));
    let (texts, summary) = workshop.read(workshop.spec("po", None)).unwrap();
    let expected = [
        ["first line and \"second\"", "eins undAA\\"],
        ["%d house", "ein Haus"],
        ["%d houses", "viele Häuser"],
        ["%d mouse", "eine Maus"],
        // The header promises a third form, which this entry does not have.
        ["%d mice", "Mäuse"],
    ];
    assert_eq!(texts, expected.map(|pair| pair.map(str::to_owned)));
    for reason in [SkipReason::Fuzzy, SkipReason::Obsolete, SkipReason::Untranslated] {
        assert_eq!(skipped(&summary, reason), 1, "{reason:?}");
    }
}

#[test]
fn broken_catalogues_of_text_name_their_lines() {
    let workshop = Workshop::new();
    for (text, line, part) in [
        ("msgid \"a", 1, "closing quote"),
        ("msgid \"a\"\nmsgid \"b\"\n", 2, "out of order"),
        ("msgstr \"a\"\n", 1, "out of order"),
        ("\n\"a\"\n", 2, "before any keyword"),
        ("msgid \"a\"\nmsgstr[1] \"b\"", 2, "out of order"),
        ("msgid \"a\"\nmsgid_plural \"b\"\nmsgstr[0] \"c\"\nmsgstr[4000000000] \"d\"", 4, "plural form 4000000000"),
        ("msgid \"a\"\nmsgstr[99999999999999999999999] \"d\"", 2, "unknown keyword"),
        ("msgid \"a\" b\n", 1, "behind the closing quote"),
        ("msgid \"a\\q\"\n", 1, "unknown escape"),
        ("msgid \"a\\x\"\n", 1, "escape without digits"),
        ("msgid\n", 1, "without a string"),
        ("mgsid \"a\"\n", 1, "unknown keyword `mgsid`"),
        ("<html>\n", 1, "unknown keyword"),
    ] {
        let error = entries(&workshop, text).expect_err(text).to_string();
        assert!(error.contains(&format!("de.po:{line}:")) && error.contains(part), "{text}: {error}");
    }
    let unknown = "msgid \"\"\nmsgstr \"Content-Type: text/plain; charset=ELVISH\\n\"\n";
    assert!(entries(&workshop, unknown).unwrap_err().to_string().contains("unknown encoding `ELVISH`"));
    assert_eq!(entries(&workshop, "").unwrap().len(), 0);
}

#[test]
fn a_text_that_cannot_be_decoded_spoils_its_entry_alone() {
    let workshop = Workshop::new();
    let mut text = b"msgid \"one\"\nmsgstr \"eins\"\n# f\xfcr\nmsgid \"two\"\nmsgstr \"zw\xf6lf\"\n".to_vec();
    text.extend(b"msgid \"three \"\n\"doors\"\nmsgstr \"drei\"\n");
    let path = workshop.write("po/de.po", text);
    let read = Catalogue::read(&path, Compression::None, false).unwrap().entries;
    let told: Vec<_> = read.iter().map(|entry| entry.as_ref().map(|entry| entry.id.as_str())).collect();
    assert_eq!(told, [Ok("one"), Err(&SkipReason::WrongEncoding), Ok("three doors")]);
    let header = header("UTF-8");
    let bytes = compiled(&[(b"", &header), (b"one", b"eins"), (b"two", b"zw\xf6lf")], false);
    let path = workshop.write("de/LC_MESSAGES/a.mo", bytes);
    let read = Catalogue::read(&path, Compression::None, true).unwrap().entries;
    assert_eq!((read.len(), read[1].clone()), (2, Err(SkipReason::WrongEncoding)));
}

#[test]
fn encodings_of_headers_are_followed() {
    let workshop = Workshop::new();
    for (charset, bytes, expected) in [
        ("ISO-8859-1", &b"T\xfcr"[..], "Tür"),
        ("iso-8859-15", b"10 \xa4 Lohn", "10 € Lohn"),
        ("KOI8-R", b"\xe4\xd7\xc5\xd2\xd8", "Дверь"),
        ("EUC-JP", b"\xc8\xe2", "扉"),
        // The second byte of the letter is a backslash.
        ("SHIFT_JIS", b"\x95\x5c\x8e\xa6", "表示"),
        ("CHARSET", "Tür".as_bytes(), "Tür"),
    ] {
        let head = header(charset);
        let path = workshop.write("xx/LC_MESSAGES/a.mo", compiled(&[(b"", &head), (b"door", bytes)], true));
        let read = Catalogue::read(&path, Compression::None, true).unwrap().entries;
        assert_eq!(read[0].as_ref().unwrap().texts, [expected], "{charset}");
        let head = format!("msgid \"\"\nmsgstr \"\"\n\"Content-Type: text/plain; charset={charset}\\n\"\n\n");
        let text = [head.as_bytes(), b"msgid \"door\"\nmsgstr \"", bytes, b"\"\n"].concat();
        let path = workshop.write("po/xx.po", text);
        let read = Catalogue::read(&path, Compression::None, false).unwrap().entries;
        assert_eq!(read[0].as_ref().unwrap().texts, [expected], "{charset} in text");
    }
}

fn whole_catalogue() -> Vec<u8> {
    let header = header("UTF-8");
    let entries: [(&[u8], &[u8]); 4] = [
        (b"", &header),
        (b"%d door\0%d doors", "%d Tür\0%d Türen".as_bytes()),
        (b"kitchen\x04door", "Küchentür".as_bytes()),
        (b"window", b"Fenster"),
    ];
    compiled(&entries, false)
}

/// As the attribute of `read` says: no panic, and nothing is reserved that the file has no room for.
fn survives(workshop: &Workshop, bytes: &[u8]) -> Result<Catalogue, Error> {
    let path = workshop.write("de/LC_MESSAGES/a.mo", bytes);
    let result = Catalogue::read(&path, Compression::None, true);
    if let Ok(catalogue) = &result {
        let kept: usize = catalogue.entries.iter().flatten().map(|entry| entry.texts.concat().len()).sum();
        // A byte becomes at most three, in encodings of one byte a letter.
        assert!(kept <= 3 * bytes.len());
        catalogue.pairs().for_each(drop);
    }
    result
}

#[test]
fn hostile_compiled_catalogues_are_errors() {
    let workshop = Workshop::new();
    let whole = whole_catalogue();
    let read = survives(&workshop, &whole).unwrap();
    assert_eq!(read.entries.len(), 3);
    assert_eq!(read.entries[1].as_ref().unwrap().context.as_deref(), Some("kitchen"));
    for cut in 0..whole.len() - 1 {
        let error = survives(&workshop, &whole[..cut]).expect_err("cut").to_string();
        assert!(error.contains("a.mo is not a catalogue of gettext"), "{error}");
    }
    let with = |place: usize, value: u32| {
        let mut bytes = whole.clone();
        bytes[place..place + 4].copy_from_slice(&value.to_le_bytes());
        survives(&workshop, &bytes)
    };
    for (place, value, part) in [
        (0, 0x1234_5678, "magic number"),
        (4, 0x0002_0000, "revision 2.0"),
        (8, u32::MAX, "do not fit"),
        (8, 30, "outside"),
        (12, u32::MAX, "ends before byte"),
        (16, u32::MAX - 7, "ends before byte"),
        (28 + 8, u32::MAX, "outside"),
        (28 + 12, u32::MAX, "outside"),
    ] {
        let error = with(place, value).expect_err(part).to_string();
        assert!(error.contains(part) || error.contains("overlap"), "{part}: {error}");
    }
    // Strings that all are the whole file.
    let size = 8000u32;
    let mut bytes = vec![0; size as usize];
    for (index, value) in [0x9504_12de, 0, 400, 28, 28].into_iter().enumerate() {
        bytes[4 * index..4 * index + 4].copy_from_slice(&u32::to_le_bytes(value));
    }
    (0..400).for_each(|entry| bytes[28 + 8 * entry..32 + 8 * entry].copy_from_slice(&size.to_le_bytes()));
    assert!(survives(&workshop, &bytes).unwrap_err().to_string().contains("overlap"));
    assert!(survives(&workshop, b"").is_err());
}

/// Without a header there is UTF-8, and the plural forms of English.
#[test]
fn a_catalogue_without_a_header_is_read() {
    let workshop = Workshop::new();
    let bytes = compiled(&[(b"door\0doors", "Tür\0Türen".as_bytes()), (b"bad", b"\xff")], false);
    let read = survives(&workshop, &bytes).unwrap();
    let pairs: Vec<_> = read.pairs().collect();
    let expected = [["door", "Tür"], ["doors", "Türen"]].map(|pair| Ok(pair.map(str::to_owned)));
    assert_eq!(pairs[..2], expected);
    assert_eq!(pairs[2..], [Err(SkipReason::WrongEncoding)]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn changed_bytes_of_a_compiled_catalogue_do_no_harm(
        changes in prop::collection::vec((0usize..200, any::<u8>()), 1..6),
    ) {
        let workshop = Workshop::new();
        let mut bytes = whole_catalogue();
        let length = bytes.len();
        changes.iter().for_each(|&(at, byte)| bytes[at % length] = byte);
        let _any = survives(&workshop, &bytes);
    }

    #[test]
    fn changed_bytes_of_a_catalogue_of_text_do_no_harm(
        changes in prop::collection::vec((0usize..2000, any::<u8>()), 1..6),
    ) {
        let workshop = Workshop::new();
        let mut bytes = EVERYTHING.as_bytes().to_vec();
        let length = bytes.len();
        changes.iter().for_each(|&(at, byte)| bytes[at % length] = byte);
        let path = workshop.write("po/de.po", bytes);
        let _any = Catalogue::read(&path, Compression::None, false).map(|catalogue| catalogue.pairs().count());
    }
}

#[test]
fn folders_of_aligned_lines_have_all_their_languages() {
    let workshop = Workshop::new();
    for (name, text) in [
        ("corpus/hello.en", "good day\ngood night\n"),
        ("corpus/hello.de", "guten Tag\ngute Nacht\n"),
        ("corpus/hello.fr", "bonjour\nbonne nuit\n"),
        ("corpus/more/alone.en", "alone\n"),
        ("corpus/notes.md", "no pairs\n"),
        ("corpus/notes.txt", "no pairs\n"),
    ] {
        workshop.write(name, text);
    }
    let listing = workshop.list(workshop.spec("corpus", None)).unwrap();
    let languages: Vec<_> = listing.files.iter().map(|file| file.languages.join("-")).collect();
    assert_eq!(languages, ["de-en", "de-fr", "en-fr"]);
    assert_eq!(listing.others, 2);
    for name in ["codes/news.eng_Latn", "codes/news.pt_BR", "codes/news.ids"] {
        workshop.write(name, "good day\n");
    }
    let coded = workshop.list(workshop.spec("codes", None)).unwrap();
    assert_eq!(
        (coded.files[0].languages.join("-"), coded.files.len(), coded.others),
        ("eng_Latn-pt_BR".to_owned(), 1, 1)
    );
    let spec = PairSpec { from: Some("fr".into()), ..workshop.spec("corpus", None) };
    let (texts, summary) = workshop.read(spec).unwrap();
    assert_eq!(texts[0], ["bonjour".to_owned(), "guten Tag".to_owned()]);
    assert_eq!((texts.len(), summary.directions.len()), (4, 2));
    let error = workshop.error(workshop.spec("corpus", Some(["fr", "pl"])));
    assert!(error.contains("no file from fr to pl"), "{error}");
    let error = workshop.error(workshop.spec("corpus/notes.md", None));
    assert!(error.contains("holds pairs") && error.contains(".mo"), "{error}");
    let error = workshop.error(workshop.spec("codes/news.pt_BR", None));
    assert!(
        error.contains("holds pairs") && error.contains("in one source: their folder or a glob (news.*)"),
        "{error}"
    );
    workshop.write("a.tsv", "x\ty\n");
    let error = workshop.error(workshop.spec("a.tsv", None));
    assert!(error.contains("set `from` and `to`"), "{error}");
}

#[test]
fn catalogues_are_found_by_language_and_program() {
    let workshop = Workshop::new();
    let german = catalogue("UTF-8", false, |text| text.as_bytes().to_vec());
    let shown = |name: &str| format!("share/locale/{name}");
    for name in ["de/LC_MESSAGES/door.mo", "sr@latin/LC_MESSAGES/door.mo", "en_GB/LC_MESSAGES/door.mo"] {
        workshop.write(&shown(name), &german);
    }
    workshop.write(&shown("de/LC_MESSAGES/broken.mo"), &german[..50]);
    let names: Vec<String> = (0..30).map(|number| format!("menu.item.number{number}")).collect();
    let header = header("UTF-8");
    let symbols: Vec<(&[u8], &[u8])> = names.iter().map(|name| (name.as_bytes(), &b"ein Eintrag"[..])).collect();
    workshop
        .write(&shown("de/LC_MESSAGES/menu.mo"), compiled(&[&[(&b""[..], &header[..])], &symbols[..]].concat(), false));
    let spec = || workshop.spec("share/locale/*/LC_MESSAGES/*.mo", None);
    let (texts, summary) = workshop.read(spec()).unwrap();
    assert_eq!(texts.len(), 2 * PAIRS.len());
    let languages: BTreeSet<_> = summary.directions.keys().map(|languages| languages[1].as_str()).collect();
    assert_eq!(languages, ["de", "sr@latin"].into());
    assert_eq!(workshop.list(spec()).unwrap().english, 1);
    assert_eq!((summary.unreadable, summary.unreadable_examples.len()), (1, 1));
    assert_eq!(summary.foreign, BTreeMap::from([("menu".to_owned(), 1)]));
    let error = workshop.error(workshop.spec(&shown("de/LC_MESSAGES/broken.mo"), None));
    assert!(error.contains("broken.mo is not a catalogue of gettext"), "one that is named is not passed over: {error}");
}

#[test]
fn what_files_before_had_is_known() {
    let workshop = Workshop::new();
    for name in ["one.tsv", "two.tsv"] {
        workshop.write(name, "the door\tdie Tür\n");
    }
    let mut cleaner = Cleaner::new(Cleaning::default());
    let mut counts = Vec::new();
    for name in ["one.tsv", "two.tsv"] {
        let listing = workshop.list(english_german(&workshop, name)).unwrap();
        let mut reader = open(&listing.files[0], &mut cleaner).unwrap();
        counts.push(reader.by_ref().map(Result::unwrap).count());
        assert_eq!(reader.skips().count(SkipReason::Duplicate), (1 - counts[counts.len() - 1]) as u64);
    }
    assert_eq!(counts, [1, 0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Programs share messages, which their translators mark, wrap and end as they like: none is trained on in one
    /// language and held out in another.
    #[test]
    fn no_message_leaks_between_languages(
        words in prop::collection::vec(prop::collection::vec("[a-z]{2,7}", 2..6), 8..30),
        ways in prop::collection::vec((0usize..5, 0usize..8, 0usize..4), 40..80),
        fraction in 0.1f64..0.5,
    ) {
        let workshop = Workshop::new();
        let languages = ["de", "fr", "pt_BR", "sr@latin", "zh_CN"];
        let mut texts: BTreeMap<(usize, usize), String> = BTreeMap::new();
        for (number, &(language, message, way)) in ways.iter().enumerate() {
            let plain = words[message % words.len()].join(" ");
            let written = match way {
                0 => plain,
                1 => format!("_{}…", plain[..1].to_uppercase() + &plain[1..]),
                2 => plain.replace(' ', "\\n"),
                _ => format!("<b>{}:</b>", plain.to_uppercase()),
            };
            let file = texts.entry((language, number % 3)).or_default();
            file.push_str(&format!("msgid \"{written}\"\nmsgstr \"etwas {number} anderes als das\"\n\n"));
        }
        for ((language, program), text) in &texts {
            workshop.write(&format!("l/{}/LC_MESSAGES/p{program}.po", languages[*language]), text);
        }
        let keys = MessageKeys::default();
        let mut sides: BTreeMap<String, BTreeSet<bool>> = BTreeMap::new();
        let (read, _) = workshop.read(workshop.spec("l/*/LC_MESSAGES/*.po", None)).unwrap();
        prop_assert!(!read.is_empty());
        for [message, _] in &read {
            let held_out = keys.split(message, fraction) == Split::HeldOut;
            let letters = message.to_lowercase().replace("<b>", "").replace("</b>", "");
            let letters: String = letters.chars().filter(|letter| letter.is_alphanumeric()).collect();
            sides.entry(letters).or_default().insert(held_out);
        }
        prop_assert!(sides.values().all(|sides| sides.len() == 1), "{sides:?}");
    }
}
