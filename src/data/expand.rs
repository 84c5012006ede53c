//! Paths as people write them: `~` and `${NAME:-default}`.

use std::env;
use std::path::PathBuf;

use super::error::Error;

/// Replaces a leading `~` by the home folder and `${NAME}` or `${NAME:-default}` by environment variables.
///
/// # Errors
/// A variable that is unset and has no default, or an unclosed brace.
pub fn expand(text: &str) -> Result<PathBuf, Error> {
    expand_with(text, &|name| env::var(name).ok()).map(PathBuf::from)
}

fn expand_with(text: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<String, Error> {
    let mut rest = text;
    let mut expanded = String::new();
    if let Some(after) = text.strip_prefix('~').filter(|after| after.is_empty() || after.starts_with('/')) {
        expanded.push_str(&lookup("HOME", None, text, variable)?);
        rest = after;
    }
    while let Some((before, after)) = rest.split_once("${") {
        let (inside, after) = after.split_once('}').ok_or_else(|| Error::OpenVariable { text: text.to_owned() })?;
        let (name, default) = match inside.split_once(":-") {
            Some((name, default)) => (name, Some(default)),
            None => (inside, None),
        };
        expanded.push_str(before);
        expanded.push_str(&lookup(name, default, text, variable)?);
        rest = after;
    }
    expanded.push_str(rest);
    Ok(expanded)
}

/// As in a shell, a default also replaces an empty value.
fn lookup(
    name: &str,
    default: Option<&str>,
    text: &str,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<String, Error> {
    match (variable(name), default) {
        (Some(value), None) => Ok(value),
        (Some(value), Some(_)) if !value.is_empty() => Ok(value),
        (_, Some(default)) => expand_with(default, variable),
        (None, None) => Err(Error::UnsetVariable { name: name.to_owned(), text: text.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(name: &str) -> Option<String> {
        match name {
            "HOME" => Some("/home/me".into()),
            "SET" => Some("value".into()),
            "EMPTY" => Some(String::new()),
            _ => None,
        }
    }

    #[test]
    fn home_and_variables_expand() {
        for (text, expected) in [
            ("plain/path", "plain/path"),
            ("~", "/home/me"),
            ("~/a", "/home/me/a"),
            ("~other/a", "~other/a"),
            ("a/${SET}/b", "a/value/b"),
            ("${UNSET:-x}y${SET:-z}", "xyvalue"),
            ("${EMPTY:-x}|${EMPTY}|", "x||"),
            ("${UNSET:-~/d}/e", "/home/me/d/e"),
            ("cost$5", "cost$5"),
        ] {
            assert_eq!(expand_with(text, &variables).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn unset_and_unclosed_variables_are_errors() {
        let unset = expand_with("a/${UNSET}", &variables).unwrap_err().to_string();
        assert!(unset.contains("UNSET") && unset.contains(":-default"), "{unset}");
        let open = expand_with("a/${SET", &variables).unwrap_err().to_string();
        assert!(open.contains("closing brace"), "{open}");
    }
}
