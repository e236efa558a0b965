//! Operators of Python whose results or errors differ from those of minijinja: `%`, `/`, `//` and comparisons, and
//! the filters that compare items: `max`, `min` and `unique`.

use super::{
    filters::list,
    objects::Tuple,
    printf,
    text::{checked, refuse},
};
use minijinja::{Error, Value, value::ValueKind};
use std::cmp::Ordering;

/// `left % right`: formatting for a text, else the remainder with the sign of the divisor.
pub(super) fn modulo(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(format) = left.as_str() {
        return checked(printf::format(format, right)?).map(Value::from);
    }
    Ok(match divisible(left, right, "%")? {
        Operands::Integers(a, b) => {
            let rest = a.checked_rem(b).unwrap_or(0);
            Value::from(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest })
        }
        Operands::Floats(a, b) => {
            let rest = a % b;
            Value::from(match rest {
                0.0 => rest.copysign(b),
                _ if (rest < 0.0) != (b < 0.0) => rest + b,
                _ => rest,
            })
        }
    })
}

/// `left / right`, a float.
pub(super) fn divide(left: &Value, right: &Value) -> Result<Value, Error> {
    Ok(match divisible(left, right, "/")? {
        Operands::Integers(a, b) => Value::from(a as f64 / b as f64),
        Operands::Floats(a, b) => Value::from(a / b),
    })
}

/// `left // right`, rounded down.
pub(super) fn floor_divide(left: &Value, right: &Value) -> Result<Value, Error> {
    match divisible(left, right, "//")? {
        Operands::Integers(a, b) => {
            let quotient = a.checked_div(b).ok_or_else(|| refuse("the quotient is too large"))?;
            let down = a % b != 0 && (a < 0) != (b < 0);
            Ok(Value::from(if down { quotient - 1 } else { quotient }))
        }
        Operands::Floats(a, b) => {
            // as CPython: the remainder is exact, the quotient may be rounded to the next integer
            let rest = a % b;
            let down = rest != 0.0 && (rest < 0.0) != (b < 0.0);
            let quotient = (a - rest) / b - if down { 1.0 } else { 0.0 };
            let floor = quotient.floor();
            Ok(Value::from(match quotient {
                0.0 => quotient.copysign(a / b),
                _ if quotient - floor > 0.5 => floor + 1.0,
                _ => floor,
            }))
        }
    }
}

enum Operands {
    Integers(i64, i64),
    Floats(f64, f64),
}

/// Two numbers, of which the second is not 0.
fn divisible(left: &Value, right: &Value, operator: &str) -> Result<Operands, Error> {
    let number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    if !number(left) || !number(right) {
        let (left, right) = (left.kind(), right.kind());
        return Err(refuse(format!("unsupported operand types for {operator}: {left} and {right}")));
    }
    let operands = match (integer(left), integer(right)) {
        (Some(a), Some(b)) => Operands::Integers(a, b),
        _ => Operands::Floats(float(left)?, float(right)?),
    };
    match operands {
        Operands::Integers(_, 0) => Err(refuse("division by zero")),
        Operands::Floats(_, 0.0) => Err(refuse("division by zero")),
        operands => Ok(operands),
    }
}

fn float(value: &Value) -> Result<f64, Error> {
    integer(value).map_or_else(|| f64::try_from(value.clone()), |value| Ok(value as f64))
}

fn integer(value: &Value) -> Option<i64> {
    match value.kind() {
        ValueKind::Bool => Some(i64::from(value.is_true())),
        _ => value.as_i64().filter(|_| value.is_integer()),
    }
}

/// A comparison. Only equality is defined for values of different kinds, and a list never equals a tuple.
pub(super) fn compare(left: &Value, operator: &str, right: &Value) -> Result<bool, Error> {
    let is_tuple = |value: &Value| value.downcast_object_ref::<Tuple>().is_some();
    let is_list = |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    let mixed = is_list(left) && is_list(right) && is_tuple(left) != is_tuple(right);
    match operator {
        "==" => return Ok(!mixed && left == right),
        "!=" => return Ok(mixed || left != right),
        _ => {}
    }
    let number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    let order = match (left.as_str(), right.as_str()) {
        (Some(left), Some(right)) => left.cmp(right),
        _ if number(left) && number(right) => match (integer(left), integer(right)) {
            (Some(left), Some(right)) => left.cmp(&right),
            _ => float(left)?.partial_cmp(&float(right)?).ok_or_else(|| refuse("NaN has no order"))?,
        },
        _ => {
            let (left, right) = (left.kind(), right.kind());
            return Err(refuse(format!("{operator} is not supported between a {left} and a {right}")));
        }
    };
    Ok(match operator {
        "<" => order == Ordering::Less,
        ">" => order == Ordering::Greater,
        "<=" => order != Ordering::Greater,
        _ => order != Ordering::Less,
    })
}

/// `item in container`; a text contains only texts.
pub(super) fn contains(container: &Value, item: &Value) -> Result<bool, Error> {
    match (container.as_str(), item.as_str()) {
        (Some(text), Some(part)) => Ok(text.contains(part)),
        (Some(_), None) => Err(refuse(format!("a text cannot contain a {}", item.kind()))),
        (None, _) => match container.kind() {
            ValueKind::Undefined => Ok(false),
            ValueKind::Map if matches!(item.kind(), ValueKind::Seq | ValueKind::Map) => {
                Err(refuse(format!("a {} is no key of a dict", item.kind())))
            }
            ValueKind::Map => Ok(container.try_iter()?.any(|key| key == *item)),
            ValueKind::Seq | ValueKind::Iterable => {
                for other in container.try_iter()? {
                    if compare(&other, "==", item)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            kind => Err(refuse(format!("a {kind} is not iterable"))),
        },
    }
}

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
