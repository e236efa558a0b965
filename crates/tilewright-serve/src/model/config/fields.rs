//! Typed access to the fields of a JSON object.
//!
//! Invariant: `null` counts as absent, as in `transformers`, and every error names field and value.

use super::OPERATOR;
use serde_json::{Map, Value};
use tilewright::{Error, Result, ensure};

/// Maximum accepted size; products of two sizes fit in 64 bits.
const MAX_SIZE: u64 = i32::MAX as u64;

/// A JSON object with the prefix of its field names in errors (`rope_scaling.`).
#[derive(Debug, Clone, Copy)]
pub(in crate::model) struct Fields<'a> {
    pub(in crate::model) prefix: &'static str,
    pub(in crate::model) values: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The value; `None` if absent or null.
    pub(in crate::model) fn get(&self, key: &str) -> Option<&'a Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    pub(in crate::model) fn invalid(&self, key: &str, value: &Value, expected: &str) -> Error {
        Error::new(OPERATOR, format!("{}{key} = {value}, expected {expected}", self.prefix))
    }

    /// A positive integer.
    pub(in crate::model) fn size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(size @ 1..=MAX_SIZE) => Ok(Some(size as usize)),
            _ => Err(self.invalid(key, value, &format!("an integer in 1..={MAX_SIZE}"))),
        }
    }

    /// An integer that may be 0.
    pub(in crate::model) fn count(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(count @ 0..=MAX_SIZE) => Ok(Some(count as usize)),
            _ => Err(self.invalid(key, value, &format!("an integer in 0..={MAX_SIZE}"))),
        }
    }

    /// A required positive integer.
    pub(in crate::model) fn required_size(&self, key: &str) -> Result<usize> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    /// A positive number.
    pub(in crate::model) fn positive(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number > 0.0 && number.is_finite() => Ok(Some(number)),
            _ => Err(self.invalid(key, value, "a number above 0")),
        }
    }

    /// A required positive number.
    pub(in crate::model) fn required_positive(&self, key: &str) -> Result<f64> {
        self.positive(key)?.ok_or_else(|| self.missing(key))
    }

    /// A boolean; absent is false.
    pub(in crate::model) fn flag(&self, key: &str) -> Result<bool> {
        match self.get(key) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| self.invalid(key, value, "true or false")),
        }
    }

    pub(in crate::model) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| self.invalid(key, value, "a string")),
        }
    }

    /// Token ids: one or a list, each below `vocab_size`; `None` if absent.
    pub(in crate::model) fn ids(&self, key: &str, vocab_size: usize) -> Result<Option<Vec<u32>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let mut ids = Vec::with_capacity(list.len());
        for item in list {
            let id = item.as_u64().filter(|&id| id < vocab_size as u64).ok_or_else(|| {
                self.invalid(key, value, &format!("token ids below vocab_size = {vocab_size}"))
            })?;
            if !ids.contains(&(id as u32)) {
                ids.push(id as u32);
            }
        }
        Ok(Some(ids))
    }

    /// Rejects any value except `allowed`; absent is accepted.
    pub(in crate::model) fn require(&self, key: &str, allowed: &Value) -> Result<()> {
        match self.get(key) {
            Some(value) if value != allowed => Err(Error::new(
                OPERATOR,
                format!("{}{key} = {value} is not supported, expected {allowed}", self.prefix),
            )),
            _ => Ok(()),
        }
    }

    /// Rejects any factor except 1, integer or float; absent is accepted.
    pub(in crate::model) fn require_one(&self, key: &str) -> Result<()> {
        match self.get(key) {
            Some(value) if value.as_f64() != Some(1.0) => {
                let message = format!("{}{key} = {value} is not supported, expected 1", self.prefix);
                Err(Error::new(OPERATOR, message))
            }
            _ => Ok(()),
        }
    }

    /// A list; absent is empty.
    pub(in crate::model) fn list(&self, key: &str) -> Result<&'a [Value]> {
        match self.get(key) {
            None => Ok(&[]),
            Some(value) => {
                value.as_array().map(Vec::as_slice).ok_or_else(|| self.invalid(key, value, "a list"))
            }
        }
    }

    /// A required list of positive numbers.
    pub(in crate::model) fn required_positives(&self, key: &str) -> Result<Vec<f64>> {
        let Some(value) = self.get(key) else { return Err(self.missing(key)) };
        let positive = |number: &Value| number.as_f64().filter(|&number| number > 0.0 && number.is_finite());
        let numbers = value.as_array().and_then(|list| list.iter().map(positive).collect());
        numbers.ok_or_else(|| self.invalid(key, value, "a list of numbers above 0"))
    }

    /// An object, whose fields have `prefix` in errors; `None` if absent.
    pub(in crate::model) fn object(&self, key: &str, prefix: &'static str) -> Result<Option<Fields<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(values)) => Ok(Some(Fields { prefix, values })),
            Some(value) => Err(self.invalid(key, value, "an object or null")),
        }
    }

    /// Rejects the field if it is present.
    pub(in crate::model) fn reject(&self, key: &str) -> Result<()> {
        ensure!(self.get(key).is_none(), OPERATOR, "{}{key} is not supported", self.prefix);
        Ok(())
    }

    fn missing(&self, key: &str) -> Error {
        Error::new(OPERATOR, format!("{}{key} is missing", self.prefix))
    }
}
