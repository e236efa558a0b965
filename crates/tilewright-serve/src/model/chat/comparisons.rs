//! Filters that compare items: `max`, `min` and `unique`.

use super::{filters::list, operators::compare, text::refuse};
use minijinja::{Error, Value, value::ValueKind};

/// Maximum distinct items of `unique`, which compares all pairs.
const MAX_UNIQUE: usize = 1000;

/// The first item that no other precedes in the order of `operator`. Texts are compared without case.
pub(super) fn extreme(value: &Value, operator: &str) -> Result<Value, Error> {
    let mut best: Option<(Value, Value)> = None;
    for item in list(value)? {
        let key = without_case(&item);
        let replaces = best.as_ref().map_or(Ok(true), |(best, _)| compare(&key, operator, best))?;
        if replaces {
            best = Some((key, item));
        }
    }
    Ok(best.map_or(Value::UNDEFINED, |(_, item)| item))
}

/// The first of equal items, texts without case. Lists and dicts cannot be compared so in Python.
pub(super) fn unique(value: &Value) -> Result<Vec<Value>, Error> {
    let (mut keys, mut items): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
    for item in list(value)? {
        let key = without_case(&item);
        if matches!(key.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
            return Err(refuse(format!("unique of values like a {} is not supported", key.kind())));
        }
        if keys.len() > MAX_UNIQUE {
            return Err(refuse(format!("unique of more than {MAX_UNIQUE} items is not supported")));
        }
        let mut is_new = true;
        for other in &keys {
            is_new &= !equals(other, &key)?;
        }
        if is_new {
            keys.push(key);
            items.push(item);
        }
    }
    Ok(items)
}

/// Equality of hashable values: True is 1.
fn equals(left: &Value, right: &Value) -> Result<bool, Error> {
    let number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    if !number(left) || !number(right) {
        return Ok(left == right);
    }
    Ok(compare(left, "<=", right)? && compare(left, ">=", right)?)
}

fn without_case(value: &Value) -> Value {
    value.as_str().map_or_else(|| value.clone(), |text| Value::from(text.to_lowercase()))
}
