//! The letters of labels that keys reach, `_File` in GTK and `&File` in Qt, and contexts within messages: taken off
//! both sides alike.

/// What marks the letter behind it.
const MARKERS: [char; 2] = ['_', '&'];

/// A context before the message, `menu|File`, is no longer than this in bytes.
const CONTEXT_BYTES_MAX: usize = 40;

/// The message and its translation without markers and contexts. What looks like a marker and is part of a name
/// (`foo_bar`, `AT&T`), which translators keep as it is, stays.
pub(super) fn strip([message, translation]: [String; 2]) -> [String; 2] {
    let message = without_context(&message, &translation).to_owned();
    MARKERS.iter().fold([message, translation], |[message, translation], &marker| {
        let Some(at) = only(&message, marker) else { return [message, translation] };
        match only(&translation, marker) {
            Some(other) if is_name(&message, at, &translation, other) => [message, translation],
            Some(other) => [removed(&message, at), removed(&translation, other)],
            // Translators may leave markers out; within a word it may be a name that they replaced.
            None if !translation.contains(marker) && begins_word(&message, at) => [removed(&message, at), translation],
            None => [message, translation],
        }
    })
}

fn without_context<'a>(message: &'a str, translation: &str) -> &'a str {
    match message.split_once('|') {
        Some((context, rest))
            if !context.is_empty()
                && context.len() <= CONTEXT_BYTES_MAX
                && !rest.trim().is_empty()
                && !rest.contains('|')
                && !translation.contains('|') =>
        {
            rest
        }
        _ => message,
    }
}

/// The place of the one marker, if there is one alone and a letter or digit behind it.
fn only(text: &str, marker: char) -> Option<usize> {
    let (at, _) = text.match_indices(marker).next()?;
    let rest = &text[at + 1..];
    let entity = marker == '&' && rest.split_once(';').is_some_and(|(name, _)| name.chars().all(char::is_alphanumeric));
    let marks = rest.chars().next().is_some_and(char::is_alphanumeric);
    (marks && !entity && !rest.contains(marker)).then_some(at)
}

fn begins_word(text: &str, at: usize) -> bool {
    text[..at].chars().next_back().is_none_or(|letter| !letter.is_alphanumeric())
}

/// Whether both places are within the same word, spelt the same: a name. A capital after the marker at the beginning of
/// a word makes it a label after all.
fn is_name(message: &str, at: usize, translation: &str, other: usize) -> bool {
    let label = begins_word(message, at) && message[at + 1..].starts_with(char::is_uppercase);
    word_at(message, at) == word_at(translation, other) && !label
}

fn word_at(text: &str, at: usize) -> &str {
    let inside = |letter: char| letter.is_alphanumeric() || matches!(letter, '_' | '&' | '-');
    let start = text[..at].rfind(|letter| !inside(letter));
    let start = start.map_or(0, |start| start + text[start..].chars().next().map_or(1, char::len_utf8));
    let end = text[at..].find(|letter| !inside(letter)).map_or(text.len(), |end| at + end);
    &text[start..end]
}

/// Without the marker. One in brackets with its letter, as where letters of keys are of another script, goes with them.
fn removed(text: &str, at: usize) -> String {
    let (before, rest) = (&text[..at], &text[at + 1..]);
    let letter = rest.chars().next().map_or(0, char::len_utf8);
    for (open, close) in [('(', ')'), ('（', '）'), ('[', ']')] {
        if let (Some(before), Some(after)) = (before.strip_suffix(open), rest[letter..].strip_prefix(close)) {
            return format!("{}{after}", before.trim_end());
        }
    }
    format!("{before}{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_go_and_names_stay() {
        for ([message, translation], expected) in [
            (["_File", "_Datei"], ["File", "Datei"]),
            (["E_xit", "_Beenden"], ["Exit", "Beenden"]),
            (["_Open…", "開く(_O)…"], ["Open…", "開く…"]),
            (["&File", "文件 (&F)"], ["File", "文件"]),
            (["_Save", "Speichern"], ["Save", "Speichern"]),
            (["_OK now", "_OK jetzt"], ["OK now", "OK jetzt"]),
            (
                ["the key foo_bar is bad", "der Schlüssel foo_bar ist falsch"],
                ["the key foo_bar is bad", "der Schlüssel foo_bar ist falsch"],
            ),
            (["_exit failed", "_exit schlug fehl"], ["_exit failed", "_exit schlug fehl"]),
            (["AT&T phone", "Telefon von AT&T"], ["AT&T phone", "Telefon von AT&T"]),
            (["Drag & drop", "Ziehen & ablegen"], ["Drag & drop", "Ziehen & ablegen"]),
            (["a &lt; b", "b &gt; a"], ["a &lt; b", "b &gt; a"]),
            (["__init__ failed", "__init__ schlug fehl"], ["__init__ failed", "__init__ schlug fehl"]),
            (["file_name missing", "Dateiname fehlt"], ["file_name missing", "Dateiname fehlt"]),
            (["menu|File", "Datei"], ["File", "Datei"]),
            (["a|b|c", "x"], ["a|b|c", "x"]),
            (["yes|no", "ja|nein"], ["yes|no", "ja|nein"]),
            (["_", "_"], ["_", "_"]),
        ] {
            let [message, translation] = strip([message.to_owned(), translation.to_owned()]);
            assert_eq!([message.as_str(), translation.as_str()], expected);
        }
    }
}
