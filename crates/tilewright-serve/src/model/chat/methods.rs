//! Methods of Python's strings, dicts and lists. Methods that change a list or a dict are refused, as in the sandbox of
//! `transformers`.

use super::{
    objects::{pair, view},
    text::{MAX_TEXT, checked, refuse, str},
};
use minijinja::{
    Error, ErrorKind, FormatStyle, State, Value, format_filter,
    value::{ValueKind, from_args},
};

/// Attributes of Python's dict.
pub(super) const DICT: [&str; 11] =
    ["clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"];

pub(super) fn call(_: &State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match (value.kind(), value.as_str()) {
        (ValueKind::String, Some(text)) => text_method(text, method, args),
        (ValueKind::Map, _) => dict_method(value, method, args),
        (ValueKind::Seq, _) => list_method(value, method, args),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn dict_method(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if method == "get" {
        let (key, default): (&Value, Option<Value>) = from_args(args)?;
        let found = value.get_item(key)?;
        let default = default.unwrap_or_else(|| Value::from(()));
        return Ok(if found.is_undefined() { default } else { found });
    }
    let () = from_args(args)?;
    match method {
        "items" => Ok(view("dict_items", items(value)?)),
        "keys" => Ok(view("dict_keys", value.try_iter()?.collect())),
        "values" => {
            let values = value.try_iter()?.map(|key| value.get_item(&key));
            Ok(view("dict_values", values.collect::<Result<_, _>>()?))
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// The pairs of a dict.
pub(super) fn items(value: &Value) -> Result<Vec<Value>, Error> {
    if value.is_undefined() {
        return Ok(Vec::new());
    }
    if value.kind() != ValueKind::Map {
        return Err(refuse("Can only get item pairs from a mapping."));
    }
    value.try_iter()?.map(|key| Ok(pair(key.clone(), value.get_item(&key)?))).collect()
}

fn list_method(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (wanted,): (&Value,) = from_args(args)?;
    match method {
        "count" => Ok(Value::from(value.try_iter()?.filter(|item| item == wanted).count())),
        "index" => {
            let at = value.try_iter()?.position(|item| item == *wanted);
            at.map(Value::from).ok_or_else(|| refuse("the value is not in the list"))
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn text_method(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            let side = match method {
                "strip" => Side::Both,
                "lstrip" => Side::Start,
                _ => Side::End,
            };
            Ok(Value::from(strip(text, chars, side)))
        }
        "split" | "rsplit" => split(text, method == "rsplit", args),
        "splitlines" => {
            let (keep,): (Option<bool>,) = from_args(args)?;
            let lines = split_lines(text, keep.unwrap_or(false));
            Ok(Value::from(lines.into_iter().map(Value::from).collect::<Vec<_>>()))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            partition(text, separator, method == "rpartition")
        }
        "startswith" | "endswith" => {
            let (affixes,): (&Value,) = from_args(args)?;
            has_affix(text, affixes, method == "startswith").map(Value::from)
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "replace" => {
            let (old, new, count): (&str, &str, Option<i64>) = from_args(args)?;
            replace(text, old, new, count).map(Value::from)
        }
        "find" | "rfind" | "index" | "rindex" | "count" => {
            let (wanted,): (&str,) = from_args(args)?;
            search(text, wanted, method)
        }
        "join" => {
            let (items,): (&Value,) = from_args(args)?;
            join(text, items)
        }
        "format" => {
            if let Some(value) = args.iter().find(|value| !prints_alike(value)) {
                return Err(refuse(format!("str.format of a {} is not supported", value.kind())));
            }
            checked(format_filter(FormatStyle::StrFormat, text, args)?).map(Value::from)
        }
        "zfill" | "ljust" | "rjust" | "center" => pad(text, method, args),
        _ => {
            let () = from_args(args)?;
            plain_method(text, method)
        }
    }
}

/// Methods without arguments.
fn plain_method(text: &str, method: &str) -> Result<Value, Error> {
    let all = |test: &dyn Fn(char) -> bool| Value::from(!text.is_empty() && text.chars().all(test));
    Ok(match method {
        "upper" => Value::from(text.to_uppercase()),
        "lower" => Value::from(text.to_lowercase()),
        "capitalize" => Value::from(capitalize(text)),
        "title" => Value::from(title(text)),
        "isupper" => Value::from(is_upper(text)),
        "islower" => Value::from(is_lower(text)),
        "isspace" => all(&is_space),
        "isalpha" => all(&char::is_alphabetic),
        "isascii" => Value::from(text.is_ascii()),
        "isdigit" | "isdecimal" | "isnumeric" | "isalnum" => {
            if text.chars().any(|c| !c.is_ascii() && c.is_numeric()) {
                return Err(refuse(format!("{method} of digits outside of ASCII is not supported")));
            }
            match method {
                "isalnum" => all(&char::is_alphanumeric),
                _ => all(&|c| c.is_ascii_digit()),
            }
        }
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    })
}

/// Whether `{}` prints the value as Python does.
fn prints_alike(value: &Value) -> bool {
    value.is_integer() || matches!(value.kind(), ValueKind::String | ValueKind::Bool | ValueKind::None)
}

/// Python's `isspace`.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// The ends of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Both,
    Start,
    End,
}

/// Removes `chars`, or spaces, at one end of `text` or at both.
pub(super) fn strip<'a>(text: &'a str, chars: Option<&str>, side: Side) -> &'a str {
    let stripped = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if side == Side::End { text } else { text.trim_start_matches(stripped) };
    if side == Side::Start { text } else { text.trim_end_matches(stripped) }
}

/// Whether there are cased letters, and all are capitals.
pub(super) fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)
}

/// Whether there are cased letters, and none is a capital.
pub(super) fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)
}

/// The first letter as a capital, the others as small letters.
pub(super) fn capitalize(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().into_iter().flat_map(char::to_uppercase);
    first.collect::<String>() + &letters.as_str().to_lowercase()
}

/// `str.title`: a letter after a letter is small, any other is a capital.
fn title(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        if inside {
            result.extend(c.to_lowercase());
        } else {
            result.extend(c.to_uppercase());
        }
        inside = c.is_uppercase() || c.is_lowercase();
    }
    result
}

/// Replaces the first `count` occurrences; all if it is negative or absent.
pub(super) fn replace(text: &str, old: &str, new: &str, count: Option<i64>) -> Result<String, Error> {
    let count = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    let found = if old.is_empty() { text.chars().count() + 1 } else { text.len() / old.len() };
    if found.min(count).saturating_mul(new.len()) > 16 * MAX_TEXT {
        return Err(refuse("the result of replace may be too long"));
    }
    checked(text.replacen(old, new, count))
}

fn split(text: &str, from_end: bool, args: &[Value]) -> Result<Value, Error> {
    let (separator, count) = split_arguments(args)?;
    let parts = match separator.as_deref() {
        Some("") => return Err(refuse("empty separator")),
        Some(separator) => split_at(text, separator, count, from_end),
        None => split_at_spaces(text, count, from_end),
    };
    Ok(Value::from(parts.into_iter().map(Value::from).collect::<Vec<_>>()))
}

/// The arguments of `split`: the separator, and the maximum number of splits.
fn split_arguments(args: &[Value]) -> Result<(Option<String>, usize), Error> {
    let (separator, count, options): (Option<&str>, Option<i64>, minijinja::value::Kwargs) = from_args(args)?;
    let separator = match separator {
        Some(separator) => Some(separator.to_owned()),
        None => options.get("sep")?,
    };
    let count = count.or(options.get("maxsplit")?).unwrap_or(-1);
    options.assert_all_used()?;
    Ok((separator, usize::try_from(count).unwrap_or(usize::MAX)))
}

fn split_at<'a>(text: &'a str, separator: &str, count: usize, from_end: bool) -> Vec<&'a str> {
    let parts = count.saturating_add(1);
    if !from_end {
        return text.splitn(parts, separator).collect();
    }
    let mut parts: Vec<&str> = text.rsplitn(parts, separator).collect();
    parts.reverse();
    parts
}

fn split_at_spaces(text: &str, count: usize, from_end: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = strip(text, None, if from_end { Side::End } else { Side::Start });
    while !rest.is_empty() {
        let at = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = at.filter(|_| parts.len() < count) else {
            // The rest keeps the spaces at its far end.
            parts.push(rest);
            break;
        };
        if from_end {
            parts.push(&rest[rest.ceil_char_boundary(at + 1)..]);
            rest = strip(&rest[..at], None, Side::End);
        } else {
            parts.push(&rest[..at]);
            rest = strip(&rest[at..], None, Side::Start);
        }
    }
    if from_end {
        parts.reverse();
    }
    parts
}

/// The lines of `text`, with their ends if `keep` is set.
pub(super) fn split_lines(text: &str, keep: bool) -> Vec<&str> {
    let is_end = |c: char| {
        matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(is_end) {
        let length = if rest[at..].starts_with("\r\n") { 2 } else { rest.ceil_char_boundary(at + 1) - at };
        lines.push(&rest[..if keep { at + length } else { at }]);
        rest = &rest[at + length..];
    }
    lines.extend((!rest.is_empty()).then_some(rest));
    lines
}

fn partition(text: &str, separator: &str, from_end: bool) -> Result<Value, Error> {
    if separator.is_empty() {
        return Err(refuse("empty separator"));
    }
    let found = if from_end { text.rsplit_once(separator) } else { text.split_once(separator) };
    let parts = match (found, from_end) {
        (Some((before, after)), _) => [before, separator, after],
        (None, true) => ["", "", text],
        (None, false) => [text, "", ""],
    };
    Ok(Value::from_object(super::objects::Tuple(parts.map(Value::from).into())))
}

fn has_affix(text: &str, affixes: &Value, start: bool) -> Result<bool, Error> {
    let has = |affix: &Value| match affix.as_str() {
        Some(affix) => Ok(if start { text.starts_with(affix) } else { text.ends_with(affix) }),
        None => Err(refuse(format!("a prefix or suffix is a {}, expected a text", affix.kind()))),
    };
    if affixes.downcast_object_ref::<super::objects::Tuple>().is_none() {
        return has(affixes);
    }
    for affix in affixes.try_iter()? {
        if has(&affix)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Positions in characters.
fn search(text: &str, wanted: &str, method: &str) -> Result<Value, Error> {
    if method == "count" {
        let count = if wanted.is_empty() { text.chars().count() + 1 } else { text.matches(wanted).count() };
        return Ok(Value::from(count));
    }
    let at = if method.starts_with('r') { text.rfind(wanted) } else { text.find(wanted) };
    match at {
        Some(at) => Ok(Value::from(text[..at].chars().count())),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(refuse("substring not found")),
    }
}

fn join(separator: &str, items: &Value) -> Result<Value, Error> {
    let mut text = String::new();
    for (at, item) in items.try_iter()?.enumerate() {
        text.push_str(if at > 0 { separator } else { "" });
        text.push_str(
            item.as_str().ok_or_else(|| refuse(format!("sequence item {at}: expected str instance")))?,
        );
        if text.len() > MAX_TEXT {
            return Err(refuse("the result of join is too long"));
        }
    }
    Ok(Value::from(text))
}

fn pad(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (usize, Option<&Value>) = from_args(args)?;
    let fill = fill.map_or(Ok(" ".to_owned()), str)?;
    let missing = width.min(MAX_TEXT).saturating_sub(text.chars().count());
    let (sign, digits) = text.split_at(text.starts_with(['-', '+']) as usize);
    Ok(Value::from(match method {
        "zfill" => format!("{sign}{}{digits}", "0".repeat(missing)),
        _ if fill.chars().count() != 1 => {
            return Err(refuse("the fill character must be exactly one character"));
        }
        "ljust" => text.to_owned() + &fill.repeat(missing),
        "rjust" => fill.repeat(missing) + text,
        _ => {
            // CPython gives the odd space to the left if the width is odd.
            let before = missing / 2 + (missing & width & 1);
            fill.repeat(before) + text + &fill.repeat(missing - before)
        }
    }))
}
