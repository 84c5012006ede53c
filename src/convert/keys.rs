//! What the keys of a `config.json` mean: a table for each family, read both ways.

use serde_json::Value;

/// A key of `config.json`.
#[derive(Debug)]
pub(super) struct ForeignKey {
    /// Its names, of which the first is written. Points are between objects within objects.
    pub(super) names: &'static [&'static str],
    pub(super) meaning: KeyMeaning,
}

/// What a key says.
#[derive(Clone, Copy, Debug)]
pub(super) enum KeyMeaning {
    /// What a key of the recipe says; absent means the second.
    Same(&'static str, Plain),
    /// The same, where null means 0, and absent what the family has.
    OrNone(&'static str),
    /// One of these, of which the first is meant where it is absent: the model has nothing else.
    Only(&'static [Plain]),
    /// One of these, and it must be there.
    Stated(&'static [Plain]),
    /// The width of a head, as the family has it.
    HeadDim,
    /// The width of a head, which the recipe says; absent means this, or as much as there is of the model's width for each.
    OwnHeadDim(Option<u64>),
    /// Whether weights of the chosen experts are made to add up to 1; absent means this.
    SumToOne(bool),
    /// A whole number, which is what a key of the recipe says times what another key of the file does, which stands before it
    /// in the table.
    Times(&'static str, &'static str),
    /// The longest row, whatever is shorter; absent means this.
    RowLength(u64),
    /// Whether rotary positions are stretched, by this name, or not (`default`, or nothing): the recipe's factor is the second
    /// then.
    Stretch(&'static str, Plain),
    /// What another meaning is where positions are stretched; otherwise the key has none.
    IfStretched(&'static KeyMeaning),
    /// How many layers behind the model's predict further tokens. They are left out.
    FurtherLayers,
    /// Which layers have experts.
    Layers,
    /// Which layers see a window of tokens and which see all, as the family has it.
    Windows,
    /// Of training elsewhere; exported models have this.
    Training(Plain),
    /// Nothing that a model computes with; exported models have this, if anything.
    Free(Option<Plain>),
}

impl KeyMeaning {
    /// Whether a key of the recipe says the same.
    pub(super) fn is_of(&self, recipe: &str) -> bool {
        match self {
            KeyMeaning::Same(own, _) | KeyMeaning::OrNone(own) => *own == recipe,
            KeyMeaning::RowLength(_) => recipe == "model.seq",
            KeyMeaning::OwnHeadDim(_) => recipe == "model.head_dim",
            KeyMeaning::IfStretched(inner) => inner.is_of(recipe),
            _ => false,
        }
    }
}

/// A plain value of JSON.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Plain {
    Null,
    Bool(bool),
    Whole(u64),
    Real(f64),
    Text(&'static str),
    /// Nothing: the key must be there.
    Required,
}

impl Plain {
    pub(super) fn json(self) -> Value {
        match self {
            Plain::Null | Plain::Required => Value::Null,
            Plain::Bool(value) => value.into(),
            Plain::Whole(value) => value.into(),
            Plain::Real(value) => value.into(),
            Plain::Text(value) => value.into(),
        }
    }

    /// Whether it is this value; 1 and 1.0 are.
    pub(super) fn is(self, value: &Value) -> bool {
        match (self, value.as_f64()) {
            (Plain::Whole(own), Some(value)) => own as f64 == value,
            (Plain::Real(own), Some(value)) => own == value,
            _ => self.json() == *value,
        }
    }
}

impl ForeignKey {
    /// Whether a key of a file is this one, or within it where nothing of it matters.
    pub(super) fn is_of(&self, name: &str) -> bool {
        let free = matches!(self.meaning, KeyMeaning::Free(_));
        self.names.iter().any(|own| {
            let rest = name.strip_prefix(own);
            rest.is_some_and(|rest| rest.is_empty() || free && rest.starts_with('.'))
        })
    }
}

pub(super) const fn same(names: &'static [&'static str], recipe: &'static str, absent: Plain) -> ForeignKey {
    ForeignKey { names, meaning: KeyMeaning::Same(recipe, absent) }
}

pub(super) const fn only(names: &'static [&'static str], values: &'static [Plain]) -> ForeignKey {
    ForeignKey { names, meaning: KeyMeaning::Only(values) }
}

pub(super) const fn training(names: &'static [&'static str], exported: Plain) -> ForeignKey {
    ForeignKey { names, meaning: KeyMeaning::Training(exported) }
}

/// A key that says something only where positions are stretched.
pub(super) const fn stretched(names: &'static [&'static str], meaning: &'static KeyMeaning) -> ForeignKey {
    key(names, KeyMeaning::IfStretched(meaning))
}

pub(super) const fn free(names: &'static [&'static str]) -> ForeignKey {
    ForeignKey { names, meaning: KeyMeaning::Free(None) }
}

pub(super) const fn key(names: &'static [&'static str], meaning: KeyMeaning) -> ForeignKey {
    ForeignKey { names, meaning }
}

/// Keys of all families: what they say is not of the model.
pub(super) const COMMON: &[ForeignKey] = &[
    free(&["architectures"]),
    free(&["model_type"]),
    free(&["dtype", "torch_dtype"]),
    free(&["transformers_version"]),
    free(&["_name_or_path"]),
    free(&["_attn_implementation_autoset"]),
    key(&["use_cache"], KeyMeaning::Free(Some(Plain::Bool(true)))),
    free(&["bos_token_id"]),
    free(&["eos_token_id"]),
    free(&["output_router_logits"]),
    free(&["output_attentions"]),
    free(&["output_hidden_states"]),
    free(&["gradient_checkpointing"]),
    free(&["task_specific_params"]),
    free(&["id2label"]),
    free(&["label2id"]),
    free(&["tokenizer_class"]),
    free(&["is_llama_config"]),
];
