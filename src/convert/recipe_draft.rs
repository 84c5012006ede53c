//! A recipe in the making, from what the keys of a `config.json` say.

use serde_json::Value;
use toml::Table;

/// Keys of a recipe whose numbers need not be whole.
const REAL: &[&str] = &[
    "rope_theta",
    "rope_factor",
    "norm_eps",
    "init_std",
    "dropout",
    "balance_weight",
    "z_weight",
    "jitter",
    "output_masking",
    "route_scale",
];

/// A recipe in the making.
#[derive(Default)]
pub(super) struct RecipeDraft(pub(super) Table);

impl RecipeDraft {
    /// A section, or a table within one (`moe.gate`).
    pub(super) fn section(&mut self, path: &str) -> &mut Table {
        path.split('.').fold(&mut self.0, |table, name| {
            let section = table.entry(name).or_insert_with(|| Table::new().into());
            section.as_table_mut().expect("a section is a table")
        })
    }

    /// Gives a key its value; null leaves it out.
    ///
    /// # Errors
    /// Another value that it has already.
    pub(super) fn set(&mut self, path: &str, value: &Value) -> Result<(), String> {
        let value = match value {
            Value::Null => return Ok(()),
            Value::Bool(value) => toml::Value::from(*value),
            Value::String(text) => toml::Value::from(text.as_str()),
            Value::Number(number) => match (number.as_i64(), number.as_f64()) {
                (Some(whole), _) => toml::Value::from(whole),
                (None, Some(real)) => toml::Value::from(real),
                (None, None) => return Err(format!("{value} is no number of 64 bits")),
            },
            Value::Array(_) | Value::Object(_) => return Err(format!("{value} is no plain value")),
        };
        let (section, key) = path.rsplit_once('.').expect("a section and a key");
        // Numbers of TOML are whole or not.
        let real = REAL.contains(&key);
        let value = value.as_integer().filter(|_| real).map_or(value, |whole| toml::Value::from(whole as f64));
        match self.section(section).insert(key.to_owned(), value.clone()) {
            Some(other) if other != value => Err(format!("{value} here and {other} elsewhere: {path} is one number")),
            _ => Ok(()),
        }
    }

    /// What a recipe must say besides: where text is to be found, the user will say.
    pub(super) fn complete(&mut self, dtype: &str, end_of_text: Option<String>) {
        let model = self.section("model");
        let seq = model.get("seq").and_then(toml::Value::as_integer).unwrap_or(1).clamp(1, 1 << 20);
        let is_stacked = model.contains_key("encoder_layers");
        let train = self.section("train");
        train.insert("steps".to_owned(), 1000.into());
        train.insert("batch_tokens".to_owned(), (8 * seq).into());
        train.insert("lr".to_owned(), 1e-4.into());
        train.insert("dtype".to_owned(), dtype.into());
        let data = self.section("data");
        data.insert("tokenizer".to_owned(), "tokenizer.json".into());
        end_of_text.into_iter().for_each(|end| drop(data.insert("end_of_text".to_owned(), end.into())));
        match is_stacked {
            false => data.insert("sources".to_owned(), vec!["text/**/*.txt"].into()),
            true => {
                let task = [("kind", toml::Value::from("translation")), ("sources", vec!["text/*.tsv"].into())];
                let task: Table = task.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
                data.insert("tasks".to_owned(), vec![task].into())
            }
        };
    }
}
