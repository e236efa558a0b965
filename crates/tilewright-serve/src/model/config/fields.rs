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

    fn invalid(&self, key: &str, value: &Value, expected: &str) -> Error {
        Error::new(OPERATOR, format!("{}{key} = {value}, expected {expected}", self.prefix))
    }

    /// The value as `read` converts it; `None` if absent.
    ///
    /// # Errors
    /// When `read` returns `None`; the text says that `expected` was.
    pub(in crate::model) fn read<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.invalid(key, value, expected))
    }

    /// A positive integer.
    pub(in crate::model) fn size(&self, key: &str) -> Result<Option<usize>> {
        self.integer(key, 1)
    }

    /// An integer that may be 0.
    pub(in crate::model) fn count(&self, key: &str) -> Result<Option<usize>> {
        self.integer(key, 0)
    }

    fn integer(&self, key: &str, min: u64) -> Result<Option<usize>> {
        self.read(key, &format!("an integer in {min}..={MAX_SIZE}"), |value| {
            value.as_u64().filter(|size| (min..=MAX_SIZE).contains(size)).map(|size| size as usize)
        })
    }

    /// A required positive integer.
    pub(in crate::model) fn required_size(&self, key: &str) -> Result<usize> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    /// A positive number.
    pub(in crate::model) fn positive(&self, key: &str) -> Result<Option<f64>> {
        self.read(key, "a number above 0", positive)
    }

    /// A required positive number.
    pub(in crate::model) fn required_positive(&self, key: &str) -> Result<f64> {
        self.positive(key)?.ok_or_else(|| self.missing(key))
    }

    /// A boolean.
    pub(in crate::model) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub(in crate::model) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.read(key, "a string", Value::as_str)
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
        self.require_that(key, &allowed.to_string(), |value| value == allowed)
    }

    /// Rejects any factor except 1, integer or float; absent is accepted.
    pub(in crate::model) fn require_one(&self, key: &str) -> Result<()> {
        self.require_that(key, "1", |value| value.as_f64() == Some(1.0))
    }

    fn require_that(&self, key: &str, expected: &str, allowed: impl FnOnce(&Value) -> bool) -> Result<()> {
        match self.get(key) {
            Some(value) if !allowed(value) => {
                let message = format!("{}{key} = {value} is not supported, expected {expected}", self.prefix);
                Err(Error::new(OPERATOR, message))
            }
            _ => Ok(()),
        }
    }

    /// A list; absent is empty.
    pub(in crate::model) fn list(&self, key: &str) -> Result<&'a [Value]> {
        Ok(self.read(key, "a list", |value| value.as_array().map(Vec::as_slice))?.unwrap_or(&[]))
    }

    /// A required list of positive numbers.
    pub(in crate::model) fn required_positives(&self, key: &str) -> Result<Vec<f64>> {
        let numbers = |value: &Value| value.as_array()?.iter().map(positive).collect();
        self.read(key, "a list of numbers above 0", numbers)?.ok_or_else(|| self.missing(key))
    }

    /// An object, whose fields have `prefix` in errors; `None` if absent.
    pub(in crate::model) fn object(&self, key: &str, prefix: &'static str) -> Result<Option<Fields<'a>>> {
        self.read(key, "an object or null", |value| Some(Fields { prefix, values: value.as_object()? }))
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

fn positive(value: &Value) -> Option<f64> {
    value.as_f64().filter(|&number| number > 0.0 && number.is_finite())
}
