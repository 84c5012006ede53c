//! The deserializer behind `read.rs`: a TOML value that knows its path, or, where there is no usable value,
//! the simplest one the type at hand accepts.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::vec;

use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error, IntoDeserializer, MapAccess, SeqAccess,
    VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;
use toml::{Table, Value};

use super::read::{Expected, Fault, Wrong};
use super::source::join;

/// What all nodes of one reading share.
pub(super) struct State {
    /// Paths where a sample stands in for the value.
    pub(super) broken: BTreeSet<String>,
    /// What was asked for so far.
    pub(super) expected: RefCell<BTreeMap<String, Expected>>,
    /// Sample also what may be absent, so that every key is visited.
    every_key: bool,
}

impl State {
    pub(super) fn new(broken: BTreeSet<String>) -> Self {
        State {
            broken,
            expected: RefCell::default(),
            every_key: false,
        }
    }

    pub(super) fn of_every_key() -> Self {
        State {
            every_key: true,
            ..State::new(BTreeSet::new())
        }
    }

    pub(super) fn node<'a>(&'a self, path: String, value: Option<&'a Value>) -> Node<'a> {
        let value = value.filter(|_| !self.broken.contains(&path));
        Node {
            path,
            value,
            state: self,
        }
    }
}

/// A value on its way into a type; without one, a sample is made.
pub(super) struct Node<'a> {
    path: String,
    value: Option<&'a Value>,
    state: &'a State,
}

impl<'a> Node<'a> {
    fn child(&self, key: &str, value: Option<&'a Value>) -> Node<'a> {
        self.state.node(join(&self.path, key), value)
    }

    /// Remembers what the type asks for here.
    fn expect(&self, expected: Expected) -> Expected {
        let expected = expected.or_form(&self.path);
        let mut all = self.state.expected.borrow_mut();
        all.insert(self.path.clone(), expected.clone());
        expected
    }

    fn fault(&self, wrong: Wrong) -> Fault {
        Fault {
            path: self.path.clone(),
            value: self.value.cloned(),
            wrong,
        }
    }

    /// Reads a value without parts: `visit` gives nothing for a value of another type.
    fn scalar<T>(
        self,
        expected: Expected,
        visit: impl FnOnce(Option<&Value>) -> Option<Result<T, Fault>>,
    ) -> Result<T, Fault> {
        let expected = self.expect(expected);
        match visit(self.value) {
            Some(Ok(read)) => Ok(read),
            _ => Err(self.fault(Wrong::Type(expected))),
        }
    }

    fn is_broken(&self, key: &str) -> bool {
        self.state.broken.contains(&join(&self.path, key))
    }

    /// The fields to read: those that are there, and those a sample stands in for.
    fn fields(&self, names: &'static [&'static str], table: Option<&'a Table>) -> Parts<'a> {
        let value = |name: &str| table.and_then(|table| table.get(name));
        let wanted =
            |name: &str| value(name).is_some() || self.is_broken(name) || self.state.every_key;
        let names = names.iter().copied().filter(|name| wanted(name));
        Parts::new(names.map(|name| (name, self.child(name, value(name)))))
    }

    fn unknown_key(&self, known: &'static [&'static str], table: &Table) -> Option<Fault> {
        let mut keys = table.iter();
        let (key, value) =
            keys.find(|(key, _)| !known.contains(&key.as_str()) && !self.is_broken(key))?;
        Some(Fault {
            path: join(&self.path, key),
            value: Some(value.clone()),
            wrong: Wrong::Unknown(known),
        })
    }

    /// The variant that an enum's value names, and what the variant holds.
    fn variant(&self, names: &'static [&'static str]) -> Option<(&'static str, Option<Node<'a>>)> {
        let known = |name: &str| names.iter().copied().find(|known| *known == name);
        match self.value {
            None => Some((*names.first()?, None)),
            Some(Value::String(name)) => Some((known(name)?, None)),
            Some(Value::Table(table)) if table.len() == 1 => {
                let (name, value) = table.iter().next()?;
                Some((known(name)?, Some(self.child(name, Some(value)))))
            }
            Some(_) => None,
        }
    }
}

impl Node<'_> {
    fn whole<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.scalar(Expected::Whole, |value| match value {
            None => Some(visitor.visit_u64(1)),
            Some(Value::Integer(whole)) => Some(visitor.visit_i64(*whole)),
            Some(_) => None,
        })
    }

    fn number<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.scalar(Expected::Number, |value| match value {
            None => Some(visitor.visit_f64(1.0)),
            Some(Value::Float(number)) => Some(visitor.visit_f64(*number)),
            Some(Value::Integer(whole)) => Some(visitor.visit_f64(*whole as f64)),
            Some(_) => None,
        })
    }

    fn text<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.scalar(Expected::Text, |value| match value {
            None => Some(visitor.visit_str("sample")),
            Some(Value::String(text)) => Some(visitor.visit_str(text)),
            Some(_) => None,
        })
    }

    fn truth<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.scalar(Expected::Truth, |value| match value {
            None => Some(visitor.visit_bool(false)),
            Some(Value::Boolean(truth)) => Some(visitor.visit_bool(*truth)),
            Some(_) => None,
        })
    }
}

/// The deserializer's methods for the widths of a type, all read by the same method of `Node`.
macro_rules! scalars {
    ($($read:ident: $method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
            self.$read(visitor)
        }
    )*};
}

impl<'de> Deserializer<'de> for Node<'de> {
    type Error = Fault;

    scalars! {
        whole: deserialize_u8 whole: deserialize_u16 whole: deserialize_u32 whole: deserialize_u64
        whole: deserialize_i8 whole: deserialize_i16 whole: deserialize_i32 whole: deserialize_i64
        number: deserialize_f32 number: deserialize_f64
        text: deserialize_str text: deserialize_string
        truth: deserialize_bool
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        if self.value.is_some() || self.state.every_key {
            visitor.visit_some(self)
        } else {
            visitor.visit_none()
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        let expected = self.expect(Expected::List);
        let elements = match self.value {
            None => [].as_slice(),
            Some(Value::Array(elements)) => elements,
            Some(_) => return Err(self.fault(Wrong::Type(expected))),
        };
        let numbered = elements.iter().enumerate().map(|(index, element)| {
            let path = format!("{}[{index}]", self.path);
            ("", self.state.node(path, Some(element)))
        });
        visitor.visit_seq(Parts::new(numbered))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        let expected = self.expect(Expected::Section);
        let table = match self.value {
            None => None,
            Some(Value::Table(table)) => Some(table),
            Some(_) => return Err(self.fault(Wrong::Type(expected))),
        };
        if let Some(fault) = table.and_then(|table| self.unknown_key(fields, table)) {
            return Err(fault);
        }
        let read = visitor.visit_map(self.fields(fields, table));
        read.map_err(|fault| fault.located(&self.path, self.value))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        let expected = self.expect(Expected::Choice(variants));
        let refused = self.fault(Wrong::Type(expected));
        let (name, content) = self.variant(variants).ok_or_else(|| refused.clone())?;
        visitor.visit_enum(Variant {
            name,
            content,
            sampled: self.value.is_none().then_some(self),
            refused,
        })
    }

    /// Untagged enums come here: they look at any value before they choose.
    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.value {
            None => visitor.visit_str("sample"),
            Some(value) => {
                let read = value.clone().deserialize_any(visitor);
                read.map_err(|error| Fault::custom(error.message()))
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
    rest: vec::IntoIter<(&'static str, Node<'a>)>,
    next: Option<Node<'a>>,
}

impl<'a> Parts<'a> {
    fn new(parts: impl Iterator<Item = (&'static str, Node<'a>)>) -> Self {
        Parts {
            rest: parts.collect::<Vec<_>>().into_iter(),
            next: None,
        }
    }
}

/// A type that refuses its value in its own words does so after the value was read, outside of the node.
fn deserialize<'de, S: DeserializeSeed<'de>>(seed: S, node: Node<'de>) -> Result<S::Value, Fault> {
    let (path, value) = (node.path.clone(), node.value);
    seed.deserialize(node)
        .map_err(|fault| fault.located(&path, value))
}

impl<'de> MapAccess<'de> for Parts<'de> {
    type Error = Fault;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Fault> {
        let Some((name, node)) = self.rest.next() else {
            return Ok(None);
        };
        self.next = Some(node);
        seed.deserialize(name.into_deserializer()).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Fault> {
        let node = self.next.take().expect("a key comes before its value");
        deserialize(seed, node)
    }
}

impl<'de> SeqAccess<'de> for Parts<'de> {
    type Error = Fault;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Fault> {
        let element = self.rest.next();
        element.map(|(_, node)| deserialize(seed, node)).transpose()
    }
}

/// One alternative of an enum: a word, or a table of one key.
struct Variant<'a> {
    name: &'static str,
    content: Option<Node<'a>>,
    /// The enum's own node, when there is no value and both shapes are to be sampled.
    sampled: Option<Node<'a>>,
    /// The answer to a word where a table belongs, or the other way round.
    refused: Fault,
}

impl<'a> Variant<'a> {
    fn content(self) -> Result<Node<'a>, Fault> {
        self.content.or(self.sampled).ok_or(self.refused)
    }
}

impl<'de> EnumAccess<'de> for Variant<'de> {
    type Error = Fault;
    type Variant = Self;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self), Fault> {
        Ok((seed.deserialize(self.name.into_deserializer())?, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'de> {
    type Error = Fault;

    fn unit_variant(self) -> Result<(), Fault> {
        match self.content {
            None => Ok(()),
            Some(_) => Err(self.refused),
        }
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, Fault> {
        deserialize(seed, self.content()?)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Fault> {
        self.content()?.deserialize_seq(visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        self.content()?.deserialize_struct("", fields, visitor)
    }
}
