//! Changes by chance: of bytes, of JSON, of numbers. The same seed makes the same change.

use std::ops::Range;

use guildhall_tensor::{Draws, Purpose};
use serde_json::{Value, json};

/// A stream of draws.
pub(super) struct Dice {
    draws: Draws,
    drawn: u64,
}

/// What numbers are at their ends.
const EXTREMES: [&str; 14] = [
    "0",
    "-1",
    "1",
    "2",
    "65536",
    "1048576",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "18446744073709551615",
    "1e308",
    "-1e308",
    "0.5",
];

/// Where a name may lead.
const PATHS: [&str; 6] =
    ["../../../etc/passwd", "/etc/passwd", "..", "", "model.safetensors/../config.toml", "/dev/zero"];

impl Dice {
    pub(super) fn new(seed: u64, case: usize) -> Dice {
        Dice { draws: Draws::new(seed, Purpose::Test, case as u64, 0), drawn: 0 }
    }

    /// Below `n`.
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.drawn += 1;
        // Two words, so that large ranges are reached.
        let word = u64::from(self.draws.bits(2 * self.drawn)) << 32 | u64::from(self.draws.bits(2 * self.drawn + 1));
        (word % n.max(1) as u64) as usize
    }

    pub(super) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    pub(super) fn extreme(&mut self) -> &'static str {
        self.pick::<&str>(&EXTREMES)
    }

    /// A place in `range`, half the time near one of its ends, where headers and footers are.
    fn place(&mut self, range: &Range<usize>) -> usize {
        let len = range.len();
        range.start
            + match self.below(4) {
                0 => self.below(len.min(200)),
                1 => len - 1 - self.below(len.min(200)),
                _ => self.below(len),
            }
    }

    /// Changes some of the bytes within `range`, and says how.
    pub(super) fn bytes(&mut self, bytes: &mut Vec<u8>, range: Range<usize>) -> String {
        let (at, other) = (self.place(&range), self.place(&range));
        let len = (1 + self.below(40)).min(range.end - at);
        match self.below(9) {
            0..3 => {
                bytes[at] ^= 1 << self.below(8);
                format!("a bit of byte {at} flipped")
            }
            3 => {
                bytes[at] = *self.pick(&[0, 1, 0x7f, 0x80, 0xff]);
                format!("byte {at} made {}", bytes[at])
            }
            4 => {
                bytes.truncate(at);
                format!("cut off at {at}")
            }
            5 => {
                let more: Vec<u8> = (0..len).map(|_| self.below(256) as u8).collect();
                bytes.splice(at..at, more);
                format!("{len} bytes put in at {at}")
            }
            6 => {
                bytes.drain(at..at + len);
                format!("{len} bytes taken out at {at}")
            }
            7 => {
                let fill = *self.pick(&[0, 0xff]);
                bytes[at..at + len].fill(fill);
                format!("{len} bytes from {at} on made {fill}")
            }
            _ => {
                let len = len.min(range.end - other);
                let copy = bytes[at..at + len.min(range.end - at)].to_vec();
                bytes[other..other + copy.len()].copy_from_slice(&copy);
                format!("{len} bytes from {at} on copied to {other}")
            }
        }
    }

    /// Changes one thing of a JSON text, and says what.
    pub(super) fn json(&mut self, text: &str) -> (String, String) {
        let Ok(mut value) = serde_json::from_str::<Value>(text) else { return (text.to_owned(), "nothing".to_owned()) };
        let mut keys = Vec::new();
        gather(&value, &mut keys);
        let key = if keys.is_empty() { String::new() } else { self.pick(&keys).clone() };
        match self.below(8) {
            0 => {
                let second = format!("{key}:{},{key}:", self.stranger());
                (text.replacen(&format!("{key}:"), &second, 1), format!("{key} twice"))
            }
            1 => {
                let deep = 1 << (4 + self.below(14));
                let deep = format!("{key}:{}{}", "[".repeat(deep), "]".repeat(deep));
                (text.replacen(&format!("{key}:"), &format!("{deep},\"x\":"), 1), format!("{key} nested deeply"))
            }
            2 => {
                let number = self.extreme();
                (at_number(text, self.below(64), number), format!("a number made {number}"))
            }
            _ => {
                let told = self.node(&mut value);
                (value.to_string(), told)
            }
        }
    }

    /// Changes one node of a tree: the deeper, the more often.
    fn node(&mut self, value: &mut Value) -> String {
        let size = value.as_object().map_or(0, serde_json::Map::len) + value.as_array().map_or(0, Vec::len);
        if size > 0 && self.below(8) > 0 {
            let chosen = self.below(size);
            return match value {
                Value::Object(members) => {
                    let (name, child) = members.iter_mut().nth(chosen).expect("one of so many");
                    format!("{name}.{}", self.node(child))
                }
                Value::Array(items) => format!("{chosen}.{}", self.node(&mut items[chosen])),
                _ => unreachable!("leaves have no children"),
            };
        }
        match (value, self.below(4)) {
            (Value::Object(members), 0 | 1) if !members.is_empty() => {
                let name = members.keys().nth(self.below(members.len())).expect("one of so many").clone();
                let gone = members.remove(&name);
                match (self.below(2), gone) {
                    (1, Some(gone)) => {
                        let other = (*self.pick(&PATHS)).to_owned();
                        members.insert(other.clone(), gone);
                        format!("{name} renamed {other:?}")
                    }
                    _ => format!("{name} left out"),
                }
            }
            (Value::Array(items), 0 | 1) if !items.is_empty() => {
                let at = self.below(items.len());
                match self.below(2) {
                    0 => items.push(items[at].clone()),
                    _ => drop(items.remove(at)),
                }
                format!("item {at} twice or left out")
            }
            (value, _) => {
                *value = self.stranger();
                let shown = value.to_string();
                format!("made {}", shown.chars().take(40).collect::<String>())
            }
        }
    }

    /// A value that belongs nowhere.
    fn stranger(&mut self) -> Value {
        match self.below(8) {
            0 => Value::Null,
            1 => json!([]),
            2 => json!({ "a": [1] }),
            3 => "\u{0}\u{ffff}x".repeat(1 + self.below(3000)).into(),
            4 => (*self.pick(&PATHS)).into(),
            5 => true.into(),
            _ => serde_json::from_str(self.extreme()).expect("a number"),
        }
    }
}

/// All names in a tree, as JSON writes them.
fn gather(value: &Value, keys: &mut Vec<String>) {
    match value {
        Value::Object(members) => members.iter().for_each(|(name, child)| {
            keys.push(Value::from(name.as_str()).to_string());
            gather(child, keys);
        }),
        Value::Array(items) => items.iter().for_each(|child| gather(child, keys)),
        _ => {}
    }
}

/// The text with another number in the place of its `index`-th, counted around.
pub(super) fn at_number(text: &str, index: usize, number: &str) -> String {
    let bytes = text.as_bytes();
    let begins = |&at: &usize| {
        let before = at.checked_sub(1).map_or(b' ', |before| bytes[before]);
        bytes[at].is_ascii_digit() && matches!(before, b' ' | b':' | b'[' | b',' | b'-' | b'=')
    };
    let starts: Vec<usize> = (0..bytes.len()).filter(begins).collect();
    let Some(&start) = starts.get(index % starts.len().max(1)) else { return text.to_owned() };
    let is_number = |byte: &u8| byte.is_ascii_digit() || b".eE+-".contains(byte);
    let len = bytes[start..].iter().take_while(|byte| is_number(byte)).count();
    format!("{}{number}{}", &text[..start], &text[start + len..])
}
