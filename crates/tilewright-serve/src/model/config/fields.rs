//! The fields of one JSON object, read with their type checked.
//!
//! Invariant: `null` counts as absent, as `transformers` reads it, and every refusal names field and value.

use super::OPERATOR;
use serde_json::{Map, Value};
use tilewright::{Error, Result, ensure};

/// The largest size that is believed: more is a damaged file, and products of two stay inside 64 bits.
const MOST: u64 = i32::MAX as u64;

/// One object, and what to write before the name of its fields (`rope_scaling.`).
#[derive(Debug, Clone, Copy)]
pub(super) struct Fields<'a> {
    pub(super) place: &'static str,
    pub(super) values: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The value, unless it is absent or null.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, value: &Value, expected: &str) -> Error {
        Error::new(OPERATOR, format!("{}{key} = {value}, expected {expected}", self.place))
    }

    /// A positive integer.
    pub(super) fn size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(size @ 1..=MOST) => Ok(Some(size as usize)),
            _ => Err(self.wrong(key, value, &format!("an integer in 1..={MOST}"))),
        }
    }

    /// A positive integer that must be there.
    pub(super) fn required_size(&self, key: &str) -> Result<usize> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    /// A number above zero.
    pub(super) fn positive(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number > 0.0 && number.is_finite() => Ok(Some(number)),
            _ => Err(self.wrong(key, value, "a number above 0")),
        }
    }

    /// A number above zero that must be there.
    pub(super) fn required_positive(&self, key: &str) -> Result<f64> {
        self.positive(key)?.ok_or_else(|| self.missing(key))
    }

    /// A boolean; absent is false.
    pub(super) fn flag(&self, key: &str) -> Result<bool> {
        match self.get(key) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(key, value, "true or false")),
        }
    }

    /// A string.
    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| self.wrong(key, value, "a string")),
        }
    }

    /// Token ids: one or a list, each below `vocab_size`. `None` when absent.
    pub(super) fn ids(&self, key: &str, vocab_size: usize) -> Result<Option<Vec<u32>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let mut ids = Vec::with_capacity(list.len());
        for item in list {
            let id = item.as_u64().filter(|&id| id < vocab_size as u64).ok_or_else(|| {
                self.wrong(key, value, &format!("token ids below vocab_size = {vocab_size}"))
            })?;
            if !ids.contains(&(id as u32)) {
                ids.push(id as u32);
            }
        }
        Ok(Some(ids))
    }

    /// Refuses a switch that is set to anything but `allowed`.
    pub(super) fn only(&self, key: &str, allowed: &Value) -> Result<()> {
        match self.get(key) {
            Some(value) if value != allowed => Err(Error::new(
                OPERATOR,
                format!("{}{key} = {value} is not supported, expected {allowed}", self.place),
            )),
            _ => Ok(()),
        }
    }

    /// Refuses a factor other than 1, however it is spelled.
    pub(super) fn only_one(&self, key: &str) -> Result<()> {
        match self.get(key) {
            Some(value) if value.as_f64() != Some(1.0) => {
                let message = format!("{}{key} = {value} is not supported, expected 1", self.place);
                Err(Error::new(OPERATOR, message))
            }
            _ => Ok(()),
        }
    }

    /// A list; absent is empty.
    pub(super) fn list(&self, key: &str) -> Result<&'a [Value]> {
        match self.get(key) {
            None => Ok(&[]),
            Some(value) => {
                value.as_array().map(Vec::as_slice).ok_or_else(|| self.wrong(key, value, "a list"))
            }
        }
    }

    /// Refuses a field that is there at all.
    pub(super) fn none(&self, key: &str) -> Result<()> {
        ensure!(self.get(key).is_none(), OPERATOR, "{}{key} is not supported", self.place);
        Ok(())
    }

    fn missing(&self, key: &str) -> Error {
        Error::new(OPERATOR, format!("{}{key} is missing", self.place))
    }
}
