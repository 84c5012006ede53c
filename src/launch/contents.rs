//! What processes have read that must be the same, and which of them has read something else.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use super::{Process, Refusal};

/// As much of a line is shown, of two that differ, and so much of it that does not.
const SHOWN: usize = 120;
const SHOWN_BEFORE: usize = 40;
/// More of a text is not compared line by line: a lane cuts longer words.
const COMPARED: usize = 16 << 10;

impl Process {
    /// Refuses to go on where processes have read different things: `what` with this `content`. Collective over the
    /// processes.
    ///
    /// # Errors
    /// The rank of a process that has read another; a process that ended meanwhile.
    pub fn same(&self, what: &str, content: &str) -> Result<(), Refusal> {
        self.compared(what, content, |_| Ok(String::new()))
    }

    /// The same of text for people: the error shows the first line that differs.
    ///
    /// # Errors
    /// As [`Process::same`].
    pub fn same_lines(&self, what: &str, text: &str) -> Result<(), Refusal> {
        self.compared(what, text, |[odd, usual]| {
            let texts = self.of_all(&text[..text.floor_char_boundary(COMPARED)])?;
            let lines = first_difference(&texts[&odd], &texts[&usual]);
            Ok(lines.map_or_else(String::new, |[odd, usual]| format!(" (`{odd}`, not `{usual}`)")))
        })
    }

    /// `difference` tells it of what two ranks have, where they have not the same.
    fn compared(
        &self,
        what: &str,
        content: &str,
        difference: impl FnOnce([usize; 2]) -> Result<String, Refusal>,
    ) -> Result<(), Refusal> {
        // Of content of any length: longer words than a lane carries are cut.
        let digests = self.of_all(&format!("{:x?}", Sha256::digest(content)))?;
        let Some((odd, usual)) = odd_one_out(&digests) else { return Ok(()) };
        let differ = difference([odd, usual])?;
        let text = format!(
            "rank {odd} has read other {what} than rank {usual}{differ}: all processes of a run must find the same files and \
             be given the same options"
        );
        Err(Refusal { is_request: true, text })
    }
}

/// A rank that has not what most ranks have, the first, and the first that has.
fn odd_one_out(contents: &BTreeMap<usize, String>) -> Option<(usize, usize)> {
    let times = |content: &String| contents.values().filter(|other| *other == content).count();
    // Of several that as many have, that of the lowest rank.
    let (usual, most) = contents.iter().rev().max_by_key(|(_, content)| times(content))?;
    let odd = contents.iter().find(|(_, content)| *content != most)?;
    Some((*odd.0, *usual))
}

/// The first line that is not the same in both; nothing at an end stands for no line.
fn first_difference(one: &str, other: &str) -> Option<[String; 2]> {
    let (mut one, mut other) = (one.lines(), other.lines());
    loop {
        let lines = [one.next(), other.next()];
        match lines {
            [None, None] => return None,
            [one, other] if one != other => {
                let lines = lines.map(Option::unwrap_or_default);
                let alike = lines[0].bytes().zip(lines[1].bytes()).take_while(|(one, other)| one == other).count();
                return Some(lines.map(|line| excerpt(line, alike)));
            }
            _ => {}
        }
    }
}

/// Of a line what is around the byte at `place`.
fn excerpt(line: &str, place: usize) -> String {
    let start = line.floor_char_boundary(if place < SHOWN { 0 } else { place - SHOWN_BEFORE });
    let end = line.floor_char_boundary(start + SHOWN);
    format!("{}{}", if start > 0 { "... " } else { "" }, &line[start..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_that_differs_from_most_is_odd() {
        let of = |contents: &[&str]| odd_one_out(&contents.iter().map(|&it| it.to_owned()).enumerate().collect());
        assert_eq!(of(&["a", "a", "a"]), None);
        assert_eq!(of(&["b", "a", "a"]), Some((0, 1)));
        assert_eq!(of(&["a", "a", "b", "c"]), Some((2, 0)));
        assert_eq!(of(&["a", "b"]), Some((1, 0)));
        assert_eq!(of(&["a", "b", "b", "a"]), Some((1, 0)));
    }

    #[test]
    fn the_first_line_that_differs_is_shown() {
        let of = |one: &str, other: &str| first_difference(one, other).map(|lines| lines.join("|"));
        assert_eq!(of("a\nb = 1\nc", "a\nb = 2\nd").as_deref(), Some("b = 1|b = 2"));
        assert_eq!(of("a", "a\nb").as_deref(), Some("|b"));
        assert_eq!(of("a\nb", "a\nb"), None);
        assert_eq!(of(&"€".repeat(100), "").map(|lines| lines.len()), Some(SHOWN + 1));
        let long = |end: &str| format!("{}{end}", "x".repeat(1000));
        let before = "x".repeat(SHOWN_BEFORE);
        assert_eq!(of(&long("1"), &long("2")), Some(format!("... {before}1|... {before}2")));
    }
}
