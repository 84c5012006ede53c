//! The attacks, as a table: what is changed, what is then asked of the program, and whether the change may be meant.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::dice::{Dice, at_number};
use super::files::{GZIP, LINES, TABLE, TEXT, ZSTD, change, fnv1a, join, split};
use super::stage::{Request, Stage};
use crate::program::{reseal, sealed};

/// Whether the changed file may be what somebody wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meant {
    /// Read as before the change, or refused.
    Never,
    /// Other text, other finite weights, another recipe: a file of its own right.
    Perhaps,
}

/// What was done.
pub(super) struct Attack {
    pub(super) request: Request,
    pub(super) meant: Meant,
    pub(super) told: String,
}

pub(super) type Act = fn(&Stage, &mut Dice) -> Attack;

pub(super) const ATTACKS: &[(&str, Act)] = &[
    ("checkpoint, as it lies", torn),
    ("weights, sealed", weights),
    ("weights not finite, sealed", not_finite),
    ("header, sealed", header),
    ("header's bytes, sealed", header_bytes),
    ("manifest, sealed", manifest),
    ("recipe, sealed", recipe),
    ("tokenizer, sealed", tokenizer),
    ("names and links, sealed", names),
    ("JSONL's bytes", |stage, dice| source(stage, dice, LINES, Meant::Perhaps)),
    ("JSONL's lines", lines),
    ("plain text", |stage, dice| source(stage, dice, TEXT, Meant::Perhaps)),
    ("Parquet", |stage, dice| source(stage, dice, TABLE, Meant::Perhaps)),
    ("gzip", |stage, dice| source(stage, dice, GZIP, Meant::Never)),
    ("zstd", |stage, dice| source(stage, dice, ZSTD, Meant::Never)),
    ("prepared text", prepared),
    ("prepared tokens, sealed", tokens),
    ("prepared manifest", prepared_manifest),
    ("prepared tokenizer, sealed", prepared_tokenizer),
    ("recording", recording),
    ("recording, sealed", recording_sealed),
    ("shadow sets", visits),
    ("shadow sets, sealed", visits_sealed),
    ("given tokenizer", given_tokenizer),
];

/// Of a checkpoint of several files.
pub(super) const ATTACKS_OF_SEVERAL: &[(&str, Act)] = &[
    ("one of several, as it lies", torn),
    ("weights of several, sealed", weights),
    ("not finite in several, sealed", not_finite),
    ("header of several, sealed", header),
    ("manifest of several, sealed", manifest),
    ("names of several, sealed", names),
    ("index, sealed", index),
    ("bytes of an index, sealed", index_bytes),
];

const OF_CHECKPOINTS: [Request; 4] = [Request::Generate, Request::Evaluate, Request::Resume, Request::Init];

fn attack(request: Request, meant: Meant, told: impl Into<String>) -> Attack {
    Attack { request, meant, told: told.into() }
}

fn bytes_of(dice: &mut Dice, path: &Path) -> String {
    change(path, |bytes| {
        let all = 0..bytes.len();
        dice.bytes(bytes, all)
    })
}

fn torn(stage: &Stage, dice: &mut Dice) -> Attack {
    let (file, request) = (dice.pick(&stage.files()).clone(), *dice.pick(&OF_CHECKPOINTS));
    attack(request, Meant::Never, format!("{file}: {}", bytes_of(dice, &stage.checkpoint().join(&file))))
}

/// Whether a request reads such a file.
fn reads(request: Request, file: &str) -> bool {
    file.starts_with("model") || request == Request::Resume && file.starts_with("optimizer")
}

/// A tensor file that a request reads.
fn tensors_of(stage: &Stage, request: Request, dice: &mut Dice) -> String {
    let mut files = stage.files();
    files.retain(|file| file.ends_with(".safetensors") && reads(request, file));
    dice.pick(&files).clone()
}

/// An index that a request reads.
fn index_of(stage: &Stage, request: Request, dice: &mut Dice) -> PathBuf {
    let mut files = stage.files();
    files.retain(|file| file.ends_with(".index.json") && reads(request, file));
    stage.checkpoint().join(dice.pick(&files))
}

fn index(stage: &Stage, dice: &mut Dice) -> Attack {
    let request = *dice.pick(&OF_CHECKPOINTS);
    let path = index_of(stage, request, dice);
    let text = fs::read_to_string(&path).unwrap();
    let (text, told) = match dice.below(3) {
        0 => exchanged(&text, dice),
        _ => dice.json(&text),
    };
    fs::write(&path, text).unwrap();
    reseal(&stage.checkpoint());
    attack(request, Meant::Never, told)
}

/// A tensor in the file of another, or in one that is elsewhere.
fn exchanged(text: &str, dice: &mut Dice) -> (String, String) {
    let mut index: Value = serde_json::from_str(text).unwrap();
    let map = index["weight_map"].as_object_mut().unwrap();
    let names: Vec<String> = map.keys().cloned().collect();
    let (tensor, other) = (dice.pick(&names).clone(), map[dice.pick(&names)].as_str().unwrap().to_owned());
    let elsewhere = [other.clone(), format!("../step-000004/{other}"), format!("./{other}"), "/dev/zero".to_owned()];
    let file = dice.pick(&elsewhere).clone();
    map.insert(tensor.clone(), file.clone().into());
    (index.to_string(), format!("{tensor} in {file}"))
}

fn index_bytes(stage: &Stage, dice: &mut Dice) -> Attack {
    let request = *dice.pick(&OF_CHECKPOINTS);
    let path = index_of(stage, request, dice);
    let told = bytes_of(dice, &path);
    reseal(&stage.checkpoint());
    attack(request, Meant::Never, told)
}

fn weights(stage: &Stage, dice: &mut Dice) -> Attack {
    let request = *dice.pick(&OF_CHECKPOINTS);
    let file = tensors_of(stage, request, dice);
    let mut meant = Meant::Perhaps;
    let told = change(&stage.checkpoint().join(&file), |bytes| {
        let (header, before) = split(bytes);
        let mut data = before.clone();
        let all = 0..data.len();
        let told = dice.bytes(&mut data, all);
        let finite = data.as_chunks::<4>().0.iter().all(|&word| f32::from_le_bytes(word).is_finite());
        if data.len() != before.len() || !finite {
            meant = Meant::Never;
        }
        *bytes = join(&header, &data);
        told
    });
    reseal(&stage.checkpoint());
    attack(request, meant, format!("{file}: {told}"))
}

fn not_finite(stage: &Stage, dice: &mut Dice) -> Attack {
    let request = *dice.pick(&OF_CHECKPOINTS);
    let file = tensors_of(stage, request, dice);
    let value = *dice.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7f80_0001)]);
    let at = change(&stage.checkpoint().join(&file), |bytes| {
        let data = split(bytes).1.len();
        let at = bytes.len() - data + 4 * dice.below(data / 4);
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        at
    });
    reseal(&stage.checkpoint());
    // Only what the file is read for has to be looked at.
    attack(request, Meant::Never, format!("{file}: {value} at {at}"))
}

fn header(stage: &Stage, dice: &mut Dice) -> Attack {
    let request = *dice.pick(&OF_CHECKPOINTS);
    let file = tensors_of(stage, request, dice);
    let told = change(&stage.checkpoint().join(&file), |bytes| {
        let (text, data) = split(bytes);
        let (text, told) = match dice.below(4) {
            0 => swapped(&text, dice),
            1 => {
                let number = dice.extreme();
                (at_number(&text, dice.below(4000), number), format!("a number made {number}"))
            }
            _ => dice.json(&text),
        };
        *bytes = join(&text, &data);
        told
    });
    reseal(&stage.checkpoint());
    attack(request, Meant::Never, format!("{file}: {told}"))
}

/// Two tensors of other lengths with each other's places, or one in the other's.
fn swapped(text: &str, dice: &mut Dice) -> (String, String) {
    let mut header: Value = serde_json::from_str(text).unwrap();
    let names: Vec<String> = header.as_object().unwrap().keys().cloned().collect();
    let (a, b) = (dice.pick(&names).clone(), dice.pick(&names).clone());
    let [of_a, of_b] = [&a, &b].map(|name| header[name]["data_offsets"].clone());
    let length = |places: &Value| Some(places[1].as_u64()? - places[0].as_u64()?);
    if length(&of_a) == length(&of_b) {
        // Nobody could tell the two from each other: one in the place of both.
        header[&a]["data_offsets"] = of_b;
        return (header.to_string(), format!("{a} where {b} is"));
    }
    header[&a]["data_offsets"] = of_b;
    if dice.below(2) == 0 {
        header[&b]["data_offsets"] = of_a;
    }
    (header.to_string(), format!("{a} in the place of {b}"))
}

fn header_bytes(stage: &Stage, dice: &mut Dice) -> Attack {
    let request = *dice.pick(&OF_CHECKPOINTS);
    let file = tensors_of(stage, request, dice);
    let told = change(&stage.checkpoint().join(&file), |bytes| {
        let header = 8 + split(bytes).0.len();
        let mut changed = bytes[..header].to_vec();
        let told = dice.bytes(&mut changed, 0..header);
        bytes.splice(..header, changed);
        told
    });
    reseal(&stage.checkpoint());
    attack(request, Meant::Never, format!("{file}: {told}"))
}

fn manifest(stage: &Stage, dice: &mut Dice) -> Attack {
    let (path, request) = (stage.checkpoint().join("manifest.json"), *dice.pick(&OF_CHECKPOINTS));
    let (text, told) = dice.json(&fs::read_to_string(&path).unwrap());
    // Where it is still an object, with the checksum that fits; as text, so that names stay that are there twice.
    let is_plain = !text.contains("[[[") && serde_json::from_str::<Value>(&text).is_ok_and(|value| value.is_object());
    let text = match told.ends_with(" twice") || !is_plain {
        true => text,
        false => sealed(serde_json::from_str(&text).unwrap()),
    };
    fs::write(path, text).unwrap();
    attack(request, Meant::Never, told)
}

fn recipe(stage: &Stage, dice: &mut Dice) -> Attack {
    let path = stage.checkpoint().join("config.toml");
    let text = fs::read_to_string(&path).unwrap();
    let number = dice.extreme();
    let lines: Vec<&str> = text.lines().collect();
    let chosen = *dice.pick(&lines);
    let (key, _) = chosen.split_once(" = ").unwrap_or((chosen, ""));
    let deep = 1 << (4 + dice.below(14));
    let other = match dice.below(6) {
        0 => String::new(),
        1 => format!("{chosen}\n{chosen}"),
        2 => format!("{key} = {}{}", "[".repeat(deep), "]".repeat(deep)),
        3 => format!("{key} = \"../../../etc/passwd\""),
        _ => format!("{key} = {number}"),
    };
    fs::write(&path, text.replacen(chosen, &other, 1)).unwrap();
    reseal(&stage.checkpoint());
    let request = *dice.pick(&OF_CHECKPOINTS[..2]);
    attack(request, Meant::Perhaps, format!("{chosen:?} made {:?}", other.chars().take(60).collect::<String>()))
}

fn tokenizer(stage: &Stage, dice: &mut Dice) -> Attack {
    let told = tokenizer_at(&stage.checkpoint().join("tokenizer.json"), dice);
    reseal(&stage.checkpoint());
    attack(*dice.pick(&OF_CHECKPOINTS[..2]), Meant::Perhaps, told)
}

fn tokenizer_at(path: &Path, dice: &mut Dice) -> String {
    let text = fs::read_to_string(path).unwrap();
    let (text, told) = match dice.below(3) {
        0 => {
            let number = dice.extreme();
            (at_number(&text, dice.below(4000), number), format!("a number made {number}"))
        }
        _ => dice.json(&text),
    };
    fs::write(path, text).unwrap();
    told
}

/// Files that are others, elsewhere, or none.
fn names(stage: &Stage, dice: &mut Dice) -> Attack {
    let (folder, request) = (stage.checkpoint(), *dice.pick(&OF_CHECKPOINTS));
    let mut files = stage.files();
    files.retain(|file| file != "manifest.json");
    let (file, other) = (dice.pick(&files).as_str(), dice.pick(&files).as_str());
    let path = folder.join(file);
    let told = match dice.below(8) {
        0 if file != other => {
            fs::rename(&path, folder.join("aside")).unwrap();
            fs::rename(folder.join(other), &path).unwrap();
            fs::rename(folder.join("aside"), folder.join(other)).unwrap();
            format!("{file} and {other} exchanged")
        }
        kind @ 1..5 => {
            let to = ["/dev/zero", "/etc/passwd", file, "."][kind - 1];
            fs::remove_file(&path).unwrap();
            symlink(to, &path).unwrap();
            format!("{file} a link to {to}")
        }
        5 => {
            fs::remove_file(&path).unwrap();
            assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
            format!("{file} a pipe")
        }
        _ => {
            fs::remove_file(&path).unwrap();
            unlist(&folder, file);
            format!("{file} gone, and not listed")
        }
    };
    if let Ok(text) = fs::read(folder.join("manifest.json"))
        && path.metadata().is_ok_and(|metadata| metadata.is_file())
    {
        fs::write(folder.join("manifest.json"), text).unwrap();
        reseal(&folder);
    }
    attack(request, Meant::Never, told)
}

fn unlist(folder: &Path, file: &str) {
    let path = folder.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    manifest["files"].as_object_mut().unwrap().remove(file);
    fs::write(path, sealed(manifest)).unwrap();
}

fn source(stage: &Stage, dice: &mut Dice, name: &'static str, meant: Meant) -> Attack {
    attack(Request::Prepare(name), meant, bytes_of(dice, &stage.shop.path(name)))
}

fn lines(stage: &Stage, dice: &mut Dice) -> Attack {
    let text = stage.shop.read(LINES);
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let at = dice.below(lines.len());
    let (line, told) = dice.json(&lines[at]);
    lines[at] = line;
    stage.shop.write(LINES, &lines.join("\n"));
    attack(Request::Prepare(LINES), Meant::Perhaps, format!("line {at}: {told}"))
}

fn prepared(stage: &Stage, dice: &mut Dice) -> Attack {
    let folder = stage.prepared();
    let mut files: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.retain(|path| !path.ends_with("manifest.json"));
    let path = dice.pick(&files).clone();
    attack(Request::Train, Meant::Never, format!("{}: {}", path.display(), bytes_of(dice, &path)))
}

/// Other tokens, with their hash in the manifest.
fn tokens(stage: &Stage, dice: &mut Dice) -> Attack {
    let folder = stage.prepared();
    let split = *dice.pick(&["train", "held-out"]);
    let ends = dice.below(2) == 0;
    let name = if ends { format!("{split}.documents") } else { format!("{split}-00000.tokens") };
    let mut length = [0, 0];
    let told = change(&folder.join(&name), |bytes| {
        length[0] = bytes.len();
        let all = 0..bytes.len();
        let told = dice.bytes(bytes, all);
        length[1] = bytes.len();
        told
    });
    let (path, field) = (folder.join("manifest.json"), split.replace('-', "_"));
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let hash = super::stage::hash(&fs::read(folder.join(&name)).unwrap());
    match ends {
        true => manifest[&field]["boundaries_sha256"] = hash.into(),
        false => manifest[&field]["shards"][0]["sha256"] = hash.into(),
    }
    fs::write(path, manifest.to_string()).unwrap();
    // Other tokens of the vocabulary are another text; what does not fit the manifest's lengths is none.
    let meant = if length[0] == length[1] { Meant::Perhaps } else { Meant::Never };
    attack(Request::Train, meant, format!("{name}: {told}"))
}

fn prepared_manifest(stage: &Stage, dice: &mut Dice) -> Attack {
    let path = stage.prepared().join("manifest.json");
    let (text, told) = dice.json(&fs::read_to_string(&path).unwrap());
    fs::write(path, text).unwrap();
    attack(Request::Train, Meant::Never, told)
}

fn prepared_tokenizer(stage: &Stage, dice: &mut Dice) -> Attack {
    let folder = stage.prepared();
    let told = tokenizer_at(&folder.join("tokenizer.json"), dice);
    let path = folder.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    manifest["tokenizer_sha256"] = super::stage::hash(&fs::read(folder.join("tokenizer.json")).unwrap()).into();
    fs::write(path, manifest.to_string()).unwrap();
    attack(Request::Train, Meant::Perhaps, told)
}

fn recording(stage: &Stage, dice: &mut Dice) -> Attack {
    attack(Request::Replay, Meant::Never, bytes_of(dice, &stage.shop.path("routes")))
}

/// Numbers of its header, or routes of its first block, with checksums that fit.
fn recording_sealed(stage: &Stage, dice: &mut Dice) -> Attack {
    let mut meant = Meant::Never;
    let told = change(&stage.shop.path("routes"), |bytes| {
        let layers = u32::from_le_bytes(bytes[28..32].try_into().unwrap()) as usize;
        let header = 56 + 4 * layers;
        if dice.below(2) == 0 {
            let at = 12 + 4 * dice.below((header - 12) / 4);
            let word = *dice.pick(&[0, 1, 0x7fff_ffff, 0x8000_0000, u32::MAX]);
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
            let hash = fnv1a(&[&bytes[..header]]);
            bytes[header..header + 8].copy_from_slice(&hash.to_le_bytes());
            return format!("the header's word at {at} made {word}");
        }
        let [slots, seq] = [16, 20].map(|at| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize);
        let (first, entries) = (header + 8, 2 * slots * seq);
        let (entry, expert) = (dice.below(entries), *dice.pick(&[0u16, 3, 4, 5, 0x7fff, 0xffff]));
        bytes[first + 2 * entry..first + 2 * entry + 2].copy_from_slice(&expert.to_le_bytes());
        // The block of step 1, the first layer, row 0.
        let block = &bytes[first..first + 2 * entries];
        let hash = fnv1a(&[block, &1u64.to_le_bytes(), &0u64.to_le_bytes(), &0u64.to_le_bytes()]);
        bytes[first + 2 * entries..first + 2 * entries + 8].copy_from_slice(&hash.to_le_bytes());
        if expert < 4 || expert == 0xffff {
            meant = Meant::Perhaps;
        }
        format!("entry {entry} made expert {expert}")
    });
    attack(Request::Replay, meant, told)
}

fn visits(stage: &Stage, dice: &mut Dice) -> Attack {
    attack(Request::Replay, Meant::Never, bytes_of(dice, &stage.shop.path("routes.visits")))
}

/// Numbers of their header, or the set of their first block, with checksums that fit.
fn visits_sealed(stage: &Stage, dice: &mut Dice) -> Attack {
    let mut meant = Meant::Never;
    let told = change(&stage.shop.path("routes.visits"), |bytes| {
        let layers = u32::from_le_bytes(bytes[40..44].try_into().unwrap()) as usize;
        let header = 68 + 8 * layers;
        if dice.below(2) == 0 {
            let at = 12 + 4 * dice.below((header - 12) / 4);
            let word = *dice.pick(&[0, 1, 0x7fff_ffff, 0x8000_0000, u32::MAX]);
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
            let hash = fnv1a(&[&bytes[..header]]);
            bytes[header..header + 8].copy_from_slice(&hash.to_le_bytes());
            return format!("the header's word at {at} made {word}");
        }
        let set = *dice.pick(&[0u8, 1, 0x0f, 0x10, 0xff]);
        // The block of step 1, micro-batch 0, layer 0, expert group 0.
        let hash = fnv1a(&[&[set], &1u64.to_le_bytes(), &[0; 24]]);
        bytes[header + 8] = set;
        bytes[header + 9..header + 17].copy_from_slice(&hash.to_le_bytes());
        if set < 16 {
            meant = Meant::Perhaps;
        }
        format!("the first set made {set:#x}")
    });
    attack(Request::Replay, meant, told)
}

fn given_tokenizer(stage: &Stage, dice: &mut Dice) -> Attack {
    fs::copy(stage.prepared().join("tokenizer.json"), stage.shop.path("own.json")).unwrap();
    let told = tokenizer_at(&stage.shop.path("own.json"), dice);
    let recipe = stage.shop.read("tiny.toml").replace("[data]\n", "[data]\ntokenizer = \"own.json\"\n");
    stage.shop.write("tiny.toml", &recipe);
    attack(Request::Prepare(TEXT), Meant::Perhaps, told)
}
