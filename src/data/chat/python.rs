//! What templates expect of Python: `tojson` as transformers has it, its exceptions and its dates.

use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use std::io;

/// A day that templates may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Day {
    year: i32,
    month: usize,
    day: usize,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl Day {
    /// A day as `"2026-07-26"`.
    pub(super) fn parse(text: &str) -> Option<Day> {
        let is_shaped = text.len() == 10 && text.bytes().enumerate().all(|(i, b)| (i == 4 || i == 7) == (b == b'-'));
        let numbers: Vec<&str> = text.split('-').collect();
        let [year, month, day] = numbers.as_slice() else { return None };
        let (year, month, day) = (year.parse().ok()?, month.parse().ok()?, day.parse().ok()?);
        let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let days = match month {
            2 => 28 + usize::from(is_leap),
            4 | 6 | 9 | 11 => 30,
            _ => 31,
        };
        (is_shaped && (1..=12).contains(&month) && (1..=days).contains(&day)).then_some(Day { year, month, day })
    }

    /// Sakamoto's congruence; 0 is Sunday.
    fn weekday(self) -> usize {
        const SHIFTS: [i32; 12] = [0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4];
        let year = self.year - i32::from(self.month < 3);
        (year + year / 4 - year / 100 + year / 400 + SHIFTS[self.month - 1] + self.day as i32).rem_euclid(7) as usize
    }

    /// As Python's `strftime`, of midnight.
    fn format(self, format: &str) -> Result<String, String> {
        let Day { year, month, day } = self;
        let (month_name, weekday) = (MONTHS[month - 1], WEEKDAYS[self.weekday()]);
        let (mut text, mut letters) = (String::new(), format.chars());
        while let Some(letter) = letters.next() {
            if letter != '%' {
                text.push(letter);
                continue;
            }
            text += &match letters.next() {
                Some('d') => format!("{day:02}"),
                Some('m') => format!("{month:02}"),
                Some('Y') => format!("{year:04}"),
                Some('y') => format!("{:02}", year % 100),
                Some('b') => month_name[..3].to_owned(),
                Some('B') => month_name.to_owned(),
                Some('a') => weekday[..3].to_owned(),
                Some('A') => weekday.to_owned(),
                Some('H' | 'M' | 'S') => "00".to_owned(),
                Some('%') => "%".to_owned(),
                other => return Err(format!("strftime_now: %{} is not known", other.unwrap_or(' '))),
            };
        }
        Ok(text)
    }
}

/// Adds them to an environment. Without a day there is no `strftime_now`.
pub(super) fn add(environment: &mut Environment, day: Option<Day>) {
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    if let Some(day) = day {
        environment.add_function("strftime_now", move |format: String| {
            day.format(&format).map_err(|message| Error::new(ErrorKind::InvalidOperation, message))
        });
    }
}

/// No template writes blanks by the million.
const INDENT_MAX: usize = 64;

/// `json.dumps` without escapes of letters.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let wrong = |message: String| Error::new(ErrorKind::InvalidOperation, format!("tojson: {message}"));
    if indent.is_some_and(|indent| indent > INDENT_MAX) {
        return Err(wrong(format!("indent is above {INDENT_MAX}")));
    }
    let mut bytes = Vec::new();
    let written = match indent {
        Some(indent) => {
            let indent = " ".repeat(indent);
            value
                .serialize(&mut Serializer::with_formatter(&mut bytes, PrettyFormatter::with_indent(indent.as_bytes())))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut bytes, Spaced)),
    };
    written.map_err(|error| wrong(error.to_string()))?;
    String::from_utf8(bytes).map_err(|error| wrong(error.to_string()))
}

/// A space after each comma and colon.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_written_as_python_writes_them() {
        for (day, format, expected) in [
            ("2026-07-26", "%d %b %Y", "26 Jul 2026"),
            ("2024-02-29", "%A, %B %d, %y", "Thursday, February 29, 24"),
            ("2000-01-01", "%a %m %H:%M%%", "Sat 01 00:00%"),
        ] {
            assert_eq!(Day::parse(day).unwrap().format(format).as_deref(), Ok(expected));
        }
        for wrong in ["2026-13-01", "2026-02-29", "26-07-26", "2026/07/26", "2026-7-026", ""] {
            assert_eq!(Day::parse(wrong), None, "{wrong}");
        }
        assert!(Day::parse("2026-07-26").unwrap().format("%Q").is_err());
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let mut environment = Environment::new();
        add(&mut environment, None);
        let value = Value::from(minijinja::value::Serde(serde_json::json!({ "a": [1, "<ä>"], "b": null })));
        let render =
            |source: &str| environment.render_str(source, minijinja::context! { value => value.clone() }).unwrap();
        assert_eq!(render("{{ value|tojson }}"), r#"{"a": [1, "<ä>"], "b": null}"#);
        assert_eq!(render("{{ value.a|tojson(indent=2) }}"), "[\n  1,\n  \"<ä>\"\n]");
    }
}
