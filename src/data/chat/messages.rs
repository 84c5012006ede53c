//! The messages of a conversation as data sets have them: `{"role": .., "content": ..}`, or `{"from": .., "value": ..}` as
//! ShareGPT wrote them. Content may be a list of parts, `[{"type": "text", "text": ..}]`, which are put together.

use serde_json::{Map, Value};

/// What a message says, and by whom; other fields are the template's business.
pub(super) type ChatMessage = Map<String, Value>;

pub(super) const ASSISTANT: &str = "assistant";

/// Who may speak, and the other names that data sets have for them.
const ROLES: [(&str, &[&str]); 5] = [
    ("system", &[]),
    ("developer", &[]),
    ("user", &["human"]),
    (ASSISTANT, &["gpt", "chatgpt", "model"]),
    ("tool", &["function", "observation"]),
];

/// Fields with calls of tools, which are not text.
const CALLS: [&str; 2] = ["tool_calls", "function_call"];

/// The conversation in a field, as JSON in one form; empty if it has no messages.
///
/// # Errors
/// What is wrong with it, in words.
pub(in crate::data) fn conversation(field: Value) -> Result<String, String> {
    let messages = match field {
        Value::Array(messages) => messages,
        Value::Null => return Ok(String::new()),
        _ => return Err("it is no list of messages".to_owned()),
    };
    let messages: Vec<Value> = (1..)
        .zip(messages)
        .map(|(number, value)| message(value).map_err(|problem| format!("message {number} {problem}")))
        .collect::<Result<_, _>>()?;
    match messages.is_empty() {
        true => Ok(String::new()),
        false => Ok(Value::Array(messages).to_string()),
    }
}

fn message(value: Value) -> Result<Value, String> {
    let Value::Object(mut message) = value else { return Err("is no object with a role and content".to_owned()) };
    message.retain(|_, value| !value.is_null());
    for (name, other) in [("role", "from"), ("content", "value")] {
        if let Some(value) = message.remove(other).filter(|_| !message.contains_key(name)) {
            message.insert(name.to_owned(), value);
        }
    }
    if let Some(text) = message.get("content").and_then(text_of_parts) {
        message.insert("content".to_owned(), text.into());
    }
    let names = || message.keys().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
    let text = |key: &str| match message.get(key) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(_) => Err(format!("has no text in `{key}`")),
        None => Err(format!("has no `{key}` (it has {})", names())),
    };
    let has_calls = |value: &Value| value.as_array().is_none_or(|calls| !calls.is_empty());
    if let Some(calls) = CALLS.iter().find(|key| message.get(**key).is_some_and(has_calls)) {
        return Err(format!("has `{calls}`: calls of tools cannot be learned yet"));
    }
    let role = text("role")?;
    text("content")?;
    let is_it = |(name, others): &&(&str, &[&str])| *name == role || others.contains(&role.as_str());
    let known = || ROLES.map(|(name, others)| [&[name], others].concat().join(", ")).join(", ");
    let (name, _) =
        ROLES.iter().find(is_it).ok_or_else(|| format!("has the unknown role `{role}`; known are {}", known()))?;
    message.insert("role".to_owned(), (*name).into());
    Ok(Value::Object(message))
}

/// The text of a list of parts, if all of them are text and there is any.
fn text_of_parts(content: &Value) -> Option<String> {
    let parts = content.as_array().filter(|parts| !parts.is_empty())?;
    let text = |part: &Value| match part.get("type") {
        Some(kind) if kind == "text" => part.get("text")?.as_str().map(str::to_owned),
        _ => None,
    };
    parts.iter().map(text).collect()
}

/// The messages of what [`conversation`] gave.
pub(super) fn messages(json: &str) -> Result<Vec<ChatMessage>, String> {
    serde_json::from_str(json).map_err(|error| error.to_string())
}

pub(super) fn is_answer(message: &ChatMessage) -> bool {
    message.get("role").and_then(Value::as_str) == Some(ASSISTANT)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn both_forms_become_one() {
        let own = json!([{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b", "name": null }]);
        let shared = json!([{ "from": "human", "value": "a" }, { "from": "gpt", "value": "b" }]);
        let expected = r#"[{"content":"a","role":"user"},{"content":"b","role":"assistant"}]"#;
        assert_eq!(conversation(own).as_deref(), Ok(expected));
        assert_eq!(conversation(shared).as_deref(), Ok(expected));
        let [first, second] = ["a", "b"].map(|text| json!({ "type": "text", "text": text }));
        let parts = json!([{ "role": "user", "content": [first, second] }]);
        assert_eq!(conversation(parts).as_deref(), Ok(r#"[{"content":"ab","role":"user"}]"#));
        assert_eq!(conversation(json!([])).as_deref(), Ok(""));
        assert_eq!(conversation(json!(null)).as_deref(), Ok(""));
    }

    #[test]
    fn what_is_wrong_is_told() {
        let calls = json!([{ "role": "assistant", "content": "", "tool_calls": [{ "name": "f" }] }]);
        for (value, told) in [
            (json!("text"), "no list of messages"),
            (json!(["text"]), "message 1 is no object"),
            (
                json!([{ "role": "user", "content": "a" }, { "role": "bard", "content": "b" }]),
                "message 2 has the unknown role `bard`",
            ),
            (json!([{ "role": "user", "text": "a" }]), "no `content` (it has `role`, `text`)"),
            (json!([{ "role": "user", "content": [] }]), "no text in `content`"),
            (json!([{ "role": "user", "content": [{ "type": "image" }] }]), "no text in `content`"),
            (calls, "`tool_calls`: calls of tools"),
        ] {
            let problem = conversation(value.clone()).unwrap_err();
            assert!(problem.contains(told), "{value}: {problem}");
        }
    }
}
