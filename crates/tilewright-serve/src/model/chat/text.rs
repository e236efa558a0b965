//! Values as Python's `str` and `repr` print them.
//!
//! Invariant: a text of more than [`MAX_TEXT`] bytes, or of more than [`MAX_DEPTH`] nested containers, is an error. Containers
//! may share their elements, so a short template can describe a text of any length.

use super::objects::{Label, Labelled, Tuple};
use minijinja::{Error, ErrorKind, Value, value::ValueKind};

/// Maximum bytes of one text.
pub(super) const MAX_TEXT: usize = 4 << 20;
pub(super) const MAX_DEPTH: usize = 32;

/// An error that a template raises.
pub(super) fn refuse(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason.into())
}

/// `str(value)`; an undefined value is empty, as in Jinja2.
pub(super) fn str(value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => checked(text.to_owned()),
        None if value.is_undefined() => Ok(String::new()),
        None => repr(value, false),
    }
}

/// `text` unless it is too long.
pub(super) fn checked(text: String) -> Result<String, Error> {
    if text.len() > MAX_TEXT {
        return Err(refuse(format!("a text has more than {} MiB", MAX_TEXT >> 20)));
    }
    Ok(text)
}

/// `repr(value)`; `sorted` orders the keys of dicts, as `pprint` does.
pub(super) fn repr(value: &Value, sorted: bool) -> Result<String, Error> {
    let mut text = String::new();
    push_repr(&mut text, value, sorted, 0)?;
    Ok(text)
}

fn push_repr(text: &mut String, value: &Value, sorted: bool, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH || text.len() > MAX_TEXT {
        return Err(refuse("a value is too large to print"));
    }
    match value.kind() {
        ValueKind::Undefined => text.push_str("Undefined"),
        ValueKind::String => push_quoted(text, value.as_str().unwrap_or_default()),
        ValueKind::Number => text.push_str(&number(value)),
        ValueKind::None | ValueKind::Bool => text.push_str(&value.to_string()),
        ValueKind::Seq | ValueKind::Iterable => {
            let label = value.downcast_object_ref::<Labelled>().map(|labelled| &labelled.label);
            if let Some(Label::Text(label)) = label {
                text.push_str(label);
                return Ok(());
            }
            let name = if let Some(Label::View(name)) = label { name } else { "" };
            text.push_str(name);
            text.push_str(if name.is_empty() { "" } else { "(" });
            let tuple = value.downcast_object_ref::<Tuple>().is_some();
            text.push(if tuple { '(' } else { '[' });
            let mut count = 0;
            for item in value.try_iter()? {
                text.push_str(if count > 0 { ", " } else { "" });
                push_repr(text, &item, sorted, depth + 1)?;
                count += 1;
            }
            text.push_str(match (tuple, count) {
                (true, 1) => ",)",
                (true, _) => ")",
                (false, _) => "]",
            });
            text.push_str(if name.is_empty() { "" } else { ")" });
        }
        // A namespace, for example.
        ValueKind::Map if !is_dict(value) => {
            return Err(refuse("an object is not printed as Python prints it"));
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if sorted {
                keys.sort();
            }
            text.push('{');
            for (at, key) in keys.iter().enumerate() {
                text.push_str(if at > 0 { ", " } else { "" });
                push_repr(text, key, sorted, depth + 1)?;
                text.push_str(": ");
                push_repr(text, &value.get_item(key)?, sorted, depth + 1)?;
            }
            text.push('}');
        }
        kind => return Err(refuse(format!("a {kind} is not printed as Python prints it"))),
    }
    Ok(())
}

/// Whether a map is a dict.
pub(super) fn is_dict(value: &Value) -> bool {
    value.as_object().is_none_or(|object| !object.type_name().ends_with("Namespace"))
}

/// A string with the quotes and escapes of Python.
fn push_quoted(text: &mut String, value: &str) {
    let quote = if value.contains('\'') && !value.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for c in value.chars() {
        match c {
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\\' => text.push_str("\\\\"),
            _ if c == quote => text.extend(['\\', c]),
            _ if is_printable(c) => text.push(c),
            _ => {
                *text += &match u32::from(c) {
                    code @ 0..=0xff => format!("\\x{code:02x}"),
                    code @ 0x100..=0xffff => format!("\\u{code:04x}"),
                    code => format!("\\U{code:08x}"),
                }
            }
        }
    }
    text.push(quote);
}

/// Python's `isprintable`. The standard library escapes the same categories, except marks after a letter.
fn is_printable(c: char) -> bool {
    let mut pair = String::from("a");
    pair.push(c);
    matches!(c, '\'' | '"') || pair.escape_debug().skip(1).eq([c])
}

/// An integer or a float as Python prints it.
pub(super) fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => float_repr(float),
        _ => value.to_string(),
    }
}

/// The shortest digits, with an exponent below 1e-4 and from 1e16.
pub(super) fn float_repr(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    } else if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if (-4..16).contains(&exponent) {
        return format!("{value:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}
