//! The deserializer behind `read.rs`: a TOML value that knows its path, or, where there is no usable value,
//! the simplest one the type at hand accepts.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::vec;

use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, IntoDeserializer, MapAccess, SeqAccess, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;
use toml::Value;

use super::rejection::{Expected, Rejection, Wrong};
use super::source::{KINDED, join};

/// What all nodes of one reading share.
pub(super) struct ReadingState {
    /// Paths no type knows, where the value is passed over.
    unknown: BTreeSet<String>,
    /// Paths where a sample stands in for the value.
    pub(super) broken: BTreeSet<String>,
    /// What was asked for so far.
    pub(super) expected: RefCell<BTreeMap<String, Expected>>,
    /// Sample also what may be absent, so that every key is visited; of an enum, the variant of this number.
    every_key: Option<usize>,
    /// The most variants that an enum had.
    pub(super) variants: Cell<usize>,
}

impl ReadingState {
    pub(super) fn new(broken: BTreeSet<String>) -> Self {
        ReadingState {
            unknown: BTreeSet::new(),
            broken,
            expected: RefCell::default(),
            every_key: None,
            variants: Cell::new(0),
        }
    }

    pub(super) fn of_every_key(variant: usize) -> Self {
        ReadingState { every_key: Some(variant), ..ReadingState::new(BTreeSet::new()) }
    }

    /// Keeps a fault from happening again; false if that was tried before.
    pub(super) fn set_aside(&mut self, fault: &Rejection) -> bool {
        let aside = if matches!(fault.wrong, Wrong::Unknown(_)) { &mut self.unknown } else { &mut self.broken };
        aside.insert(fault.path.clone())
    }

    /// Names of the fields right below `path` that are sampled; a list's elements are no fields.
    fn sampled_below<'a>(&'a self, path: &str) -> impl Iterator<Item = &'a str> {
        let name = move |broken: &'a String| match broken.rsplit_once('.').unwrap_or(("", broken)) {
            (parent, name) if parent == path && !name.ends_with(']') => Some(name),
            _ => None,
        };
        self.broken.iter().filter_map(name)
    }

    pub(super) fn node<'a>(&'a self, path: String, value: Option<&'a Value>) -> ValueNode<'a> {
        let value = value.filter(|_| !self.broken.contains(&path));
        ValueNode { path, value, state: self }
    }
}

/// A value on its way into a type; without one, a sample is made.
pub(super) struct ValueNode<'a> {
    path: String,
    value: Option<&'a Value>,
    state: &'a ReadingState,
}

impl<'a> ValueNode<'a> {
    fn child(&self, key: &str, value: Option<&'a Value>) -> ValueNode<'a> {
        self.state.node(join(&self.path, key), value)
    }

    /// Remembers what the type asks for here.
    fn expect(&self, expected: Expected) -> Expected {
        let expected = expected.or_form(&self.path);
        let mut all = self.state.expected.borrow_mut();
        all.insert(self.path.clone(), expected.clone());
        expected
    }

    fn fault(&self, wrong: Wrong) -> Rejection {
        Rejection { path: self.path.clone(), value: self.value.cloned(), wrong }
    }

    /// Reads a value without parts: `visit` gives nothing for a value of another type.
    fn scalar<T>(
        self,
        expected: Expected,
        visit: impl FnOnce(Option<&Value>) -> Option<Result<T, Rejection>>,
    ) -> Result<T, Rejection> {
        let expected = self.expect(expected);
        match visit(self.value) {
            Some(Ok(read)) => Ok(read),
            _ => Err(self.fault(Wrong::Type(expected))),
        }
    }

    /// What there is of a table, and the fields a sample stands in for. A field that is not known is refused
    /// by the type, and then no longer offered.
    fn parts(&self, fields: &[&'static str]) -> Parts<'a> {
        let table = self.value.and_then(Value::as_table);
        let there = table.into_iter().flatten().map(|(name, value)| (name.as_str(), Some(value)));
        let absent = |name: &&str| table.is_none_or(|table| !table.contains_key(*name));
        let required = self.state.sampled_below(&self.path).filter(absent);
        let every = fields.iter().copied().filter(|_| self.state.every_key.is_some());
        let all = there.chain(required.chain(every).map(|name| (name, None)));
        let all = all.filter(|(name, _)| !(*name == "kind" && self.is_kinded()));
        let offered = all.filter(|(name, _)| !self.state.unknown.contains(&join(&self.path, name)));
        Parts::new(offered.map(|(name, value)| (name, self.child(name, value))))
    }

    fn elements(&self, array: &'a [Value]) -> Parts<'a> {
        let path = |index: usize| format!("{}[{index}]", self.path);
        let elements = array.iter().enumerate();
        Parts::new(elements.map(|(index, value)| ("", self.state.node(path(index), Some(value)))))
    }

    fn is_kinded(&self) -> bool {
        KINDED.contains(&&*self.path)
    }

    /// The kind that a table names; its other keys are the variant's.
    fn kind(&self, names: &'static [&'static str]) -> Result<(&'static str, Option<ValueNode<'a>>), Rejection> {
        let table = self.value.and_then(Value::as_table);
        let kind = self.child("kind", table.and_then(|table| table.get("kind")));
        let expected = kind.expect(Expected::Choice(names));
        let own = |value| Some(ValueNode { path: self.path.clone(), value, state: self.state });
        let of = |name: &str| names.iter().copied().find(|known| *known == name);
        match (self.value, kind.value) {
            (Some(Value::String(name)), _) => {
                of(name).map(|name| (name, own(None))).ok_or_else(|| self.fault(Wrong::Type(expected)))
            }
            (Some(Value::Table(_)), Some(Value::String(name))) => {
                of(name).map(|name| (name, own(self.value))).ok_or_else(|| kind.fault(Wrong::Type(expected)))
            }
            (Some(Value::Table(_)), Some(_)) => Err(kind.fault(Wrong::Type(expected))),
            // Of a table without a sound kind nothing else is asked.
            (Some(Value::Table(_)), None) if self.state.broken.contains(&kind.path) => Ok((names[0], own(None))),
            (Some(Value::Table(_)), None) => Err(kind.fault(Wrong::Missing("kind"))),
            (None, _) => Ok((self.sampled(names), own(None))),
            (Some(_), _) => Err(self.fault(Wrong::Type(expected))),
        }
    }

    /// The variant that stands in for a value.
    fn sampled(&self, names: &'static [&'static str]) -> &'static str {
        names[self.state.every_key.unwrap_or(0).min(names.len() - 1)]
    }

    /// The variant that an enum's value names, and what the variant holds.
    fn variant(&self, names: &'static [&'static str]) -> Option<(&'static str, Option<ValueNode<'a>>)> {
        let known = |name: &str| names.iter().copied().find(|known| *known == name);
        match self.value {
            None => Some((self.sampled(names), None)),
            Some(Value::String(name)) => Some((known(name)?, None)),
            Some(Value::Table(table)) if table.len() == 1 => {
                let (name, value) = table.iter().next()?;
                Some((known(name)?, Some(self.child(name, Some(value)))))
            }
            Some(_) => None,
        }
    }
}

impl ValueNode<'_> {
    /// Some types take a list of whole numbers too; the others refuse it.
    fn whole<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Rejection>
    where
        Self: 'de,
    {
        if let Some(Value::Array(array)) = self.value {
            let expected = self.expect(Expected::Whole);
            return visitor.visit_seq(self.elements(array)).map_err(|_| self.fault(Wrong::Type(expected)));
        }
        self.scalar(Expected::Whole, |value| match value {
            None => Some(visitor.visit_u64(1)),
            Some(Value::Integer(whole)) => Some(visitor.visit_i64(*whole)),
            Some(_) => None,
        })
    }

    fn number<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Rejection> {
        self.scalar(Expected::Number, |value| match value {
            None => Some(visitor.visit_f64(1.0)),
            Some(Value::Float(number)) => Some(visitor.visit_f64(*number)),
            Some(Value::Integer(whole)) => Some(visitor.visit_f64(*whole as f64)),
            Some(_) => None,
        })
    }

    fn text<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Rejection> {
        if self.value.and_then(Value::as_str).is_some_and(|text| text.trim().is_empty()) {
            return Err(self.fault(Wrong::Empty));
        }
        self.scalar(Expected::Text, |value| match value {
            None => Some(visitor.visit_str("sample")),
            Some(Value::String(text)) => Some(visitor.visit_str(text)),
            Some(_) => None,
        })
    }

    fn truth<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Rejection> {
        self.scalar(Expected::Truth, |value| match value {
            None => Some(visitor.visit_bool(false)),
            Some(Value::Boolean(truth)) => Some(visitor.visit_bool(*truth)),
            Some(_) => None,
        })
    }
}

/// The deserializer's methods for the widths of a type, all read by the same method of `ValueNode`.
macro_rules! scalars {
    ($($read:ident: $method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Rejection> {
            self.$read(visitor)
        }
    )*};
}

impl<'de> Deserializer<'de> for ValueNode<'de> {
    type Error = Rejection;

    scalars! {
        whole: deserialize_u8 whole: deserialize_u16 whole: deserialize_u32 whole: deserialize_u64
        whole: deserialize_i8 whole: deserialize_i16 whole: deserialize_i32 whole: deserialize_i64
        number: deserialize_f32 number: deserialize_f64
        text: deserialize_str text: deserialize_string
        truth: deserialize_bool
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Rejection> {
        if self.value.is_some() || self.state.every_key.is_some() {
            visitor.visit_some(self)
        } else {
            visitor.visit_none()
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Rejection> {
        let expected = self.expect(Expected::List);
        match self.value {
            None => visitor.visit_seq(self.elements(&[])),
            Some(Value::Array(array)) => visitor.visit_seq(self.elements(array)),
            Some(_) => Err(self.fault(Wrong::Type(expected))),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Rejection> {
        let expected = self.expect(Expected::Section);
        if !self.value.is_none_or(Value::is_table) {
            return Err(self.fault(Wrong::Type(expected)));
        }
        let read = visitor.visit_map(self.parts(fields));
        read.map_err(|fault| fault.located(&self.path, self.value))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Rejection> {
        let expected = self.expect(Expected::Choice(variants));
        self.state.variants.set(self.state.variants.get().max(variants.len()));
        let refused = self.fault(Wrong::Type(expected));
        // Some types take a list of words too; the others refuse it.
        if let Some(Value::Array(array)) = self.value {
            let read = visitor.visit_seq(self.elements(array));
            return read.map_err(|fault| if fault.path.is_empty() { refused } else { fault });
        }
        if self.is_kinded() {
            let (name, content) = self.kind(variants)?;
            return visitor.visit_enum(Variant { name, content, sampled: None, refused });
        }
        let (name, content) = self.variant(variants).ok_or_else(|| refused.clone())?;
        visitor.visit_enum(Variant { name, content, sampled: self.value.is_none().then_some(self), refused })
    }

    /// Types of several shapes come here and look at what there is.
    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Rejection> {
        // A key is known by its path, an element of a list by its list's.
        if !self.path.ends_with(']') {
            self.expect(Expected::Text);
        }
        match self.value {
            None => visitor.visit_str("sample"),
            Some(Value::String(text)) if text.trim().is_empty() => Err(self.fault(Wrong::Empty)),
            Some(Value::String(text)) => visitor.visit_str(text),
            Some(Value::Integer(whole)) => visitor.visit_i64(*whole),
            Some(Value::Float(number)) => visitor.visit_f64(*number),
            Some(Value::Boolean(truth)) => visitor.visit_bool(*truth),
            Some(Value::Datetime(date)) => visitor.visit_string(date.to_string()),
            Some(Value::Array(array)) => visitor.visit_seq(self.elements(array)),
            Some(Value::Table(_)) => {
                let read = visitor.visit_map(self.parts(&[]));
                read.map_err(|fault| fault.located(&self.path, self.value))
            }
        }
    }

    forward_to_deserialize_any! {
        i128 u128 char bytes byte_buf unit unit_struct newtype_struct tuple tuple_struct map identifier
        ignored_any
    }
}

/// The fields of a struct or the elements of a list, each with its name.
struct Parts<'a> {
    rest: vec::IntoIter<(&'a str, ValueNode<'a>)>,
    next: Option<ValueNode<'a>>,
}

impl<'a> Parts<'a> {
    fn new(parts: impl Iterator<Item = (&'a str, ValueNode<'a>)>) -> Self {
        Parts { rest: parts.collect::<Vec<_>>().into_iter(), next: None }
    }
}

/// A type that refuses its value in its own words does so after the value was read, outside of the node.
fn deserialize<'de, S: DeserializeSeed<'de>>(seed: S, node: ValueNode<'de>) -> Result<S::Value, Rejection> {
    let (path, value) = (node.path.clone(), node.value);
    seed.deserialize(node).map_err(|fault| fault.located(&path, value))
}

impl<'de> MapAccess<'de> for Parts<'de> {
    type Error = Rejection;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Rejection> {
        let Some((name, node)) = self.rest.next() else {
            return Ok(None);
        };
        let known = seed.deserialize(name.into_deserializer()).map(Some);
        let known = known.map_err(|fault: Rejection| fault.located(&node.path, node.value));
        self.next = Some(node);
        known
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Rejection> {
        let node = self.next.take().expect("a key comes before its value");
        deserialize(seed, node)
    }
}

impl<'de> SeqAccess<'de> for Parts<'de> {
    type Error = Rejection;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Rejection> {
        let element = self.rest.next();
        element.map(|(_, node)| deserialize(seed, node)).transpose()
    }
}

/// One alternative of an enum: a word, or a table of one key.
struct Variant<'a> {
    name: &'static str,
    content: Option<ValueNode<'a>>,
    /// The enum's own node, when there is no value and both shapes are to be sampled.
    sampled: Option<ValueNode<'a>>,
    /// The answer to a word where a table belongs, or the other way round.
    refused: Rejection,
}

impl<'a> Variant<'a> {
    fn content(self) -> Result<ValueNode<'a>, Rejection> {
        self.content.or(self.sampled).ok_or(self.refused)
    }
}

impl<'de> EnumAccess<'de> for Variant<'de> {
    type Error = Rejection;
    type Variant = Self;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self), Rejection> {
        Ok((seed.deserialize(self.name.into_deserializer())?, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'de> {
    type Error = Rejection;

    fn unit_variant(self) -> Result<(), Rejection> {
        match self.content {
            None => Ok(()),
            Some(_) => Err(self.refused),
        }
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, Rejection> {
        deserialize(seed, self.content()?)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Rejection> {
        self.content()?.deserialize_seq(visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Rejection> {
        self.content()?.deserialize_struct("", fields, visitor)
    }
}
