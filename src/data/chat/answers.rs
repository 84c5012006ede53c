//! Which part of a conversation's text is answers.

use std::ops::Range;

use super::messages::{ChatMessage, is_answer};
use super::template::{ANSWER, ChatTemplate};

/// The text of a conversation, and the bytes of it that are answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RenderedChat {
    pub(super) text: String,
    pub(super) answers: Vec<Range<usize>>,
}

/// Where the template has blocks `{% generation %}`, what they write; else what an assistant's message adds to the text that
/// asks for it.
///
/// # Errors
/// What the template says; a template whose text of some messages does not begin as its text of fewer does.
pub(super) fn render(template: &ChatTemplate, messages: &[ChatMessage]) -> Result<RenderedChat, String> {
    let text = template.render(messages, false)?;
    if template.marks_answers() {
        return Ok(marked(&text));
    }
    let mut answers = Vec::new();
    for (place, _) in messages.iter().enumerate().filter(|(_, message)| is_answer(message)) {
        let of_fewer = |count: usize, asks: bool| {
            let failed = |message| format!("of its first {count} messages alone the template says: {message}");
            template.render(&messages[..count], asks).map_err(failed)
        };
        let before = of_fewer(place, true)?;
        let through = if place + 1 == messages.len() { text.clone() } else { of_fewer(place + 1, false)? };
        if !through.starts_with(&before) || !text.starts_with(&through) {
            return Err(unstable(place + 1));
        }
        answers.push(before.len()..through.len());
    }
    Ok(RenderedChat { text, answers })
}

/// The text alone, for whom no part of it is different.
///
/// # Errors
/// What the template says.
pub(super) fn render_all(template: &ChatTemplate, messages: &[ChatMessage]) -> Result<RenderedChat, String> {
    Ok(RenderedChat { answers: Vec::new(), ..marked(&template.render(messages, false)?) })
}

fn unstable(message: usize) -> String {
    format!(
        "where the answer in message {message} begins and ends cannot be told, since the template writes the messages before it \
         otherwise when more follow: put {{% generation %}} and {{% endgeneration %}} around answers in a copy of the template, \
         and name it as data.chat_template, or set data.chat_loss = \"all\""
    )
}

/// Takes the marks out of a text.
pub(super) fn marked(text: &str) -> RenderedChat {
    let mut rendered = RenderedChat { text: String::with_capacity(text.len()), answers: Vec::new() };
    let mut start = 0;
    for piece in text.split_inclusive(ANSWER) {
        rendered.text.push_str(piece.trim_end_matches(ANSWER));
        match piece.chars().next_back() {
            Some(mark) if mark == ANSWER[0] => start = rendered.text.len(),
            Some(mark) if mark == ANSWER[1] => rendered.answers.push(start..rendered.text.len()),
            _ => {}
        }
    }
    rendered
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use crate::data::chat::messages::{conversation, messages};

    fn chat(turns: &[(&str, &str)]) -> Vec<ChatMessage> {
        let turns: Vec<Value> = turns.iter().map(|(role, text)| json!({ "role": role, "content": text })).collect();
        messages(&conversation(turns.into()).unwrap()).unwrap()
    }

    fn answers(source: &str, turns: &[(&str, &str)]) -> Result<Vec<String>, String> {
        let template = ChatTemplate::new(Path::new("t"), source, BTreeMap::new(), None).unwrap();
        let RenderedChat { text, answers } = render(&template, &chat(turns))?;
        Ok(answers.into_iter().map(|range| text[range].to_owned()).collect())
    }

    const TURNS: [(&str, &str); 4] = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", " d\n")];

    #[test]
    fn answers_are_what_the_template_marks_or_what_they_add() {
        let marking = "{% for message in messages %}\n<{{ message.role }}>\n{% if message.role == 'assistant' %}\n    {% generation %}\n{{ message.content }}{{ '!' if not loop.last }}|{% endgeneration %}\n{% else %}\n{{ message.content }}\n{% endif %}\n{% endfor %}";
        assert_eq!(answers(marking, &TURNS).unwrap(), ["b!|", " d\n|"]);
        let plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
        assert_eq!(answers(plain, &TURNS).unwrap(), ["b|", " d\n|"]);
        let unstable = "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else '' }}|{% endfor %}";
        assert!(answers(unstable, &TURNS).unwrap_err().contains("message 2"), "it is told");
    }
}
