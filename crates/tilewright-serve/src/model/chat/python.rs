//! Python behavior that chat templates rely on: `tojson` like `json.dumps`, constants printed like Python's, and the
//! functions that Hugging Face adds.

use super::clock;
use minijinja::{
    Environment, Error, ErrorKind, Output, State, Value,
    value::{Kwargs, ValueKind},
};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use std::io::{self, Write};

/// An environment with the settings of `transformers`.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(print);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment
}

/// Rewrites syntax that minijinja does not support: `{% generation %}` blocks, which mark answers for training and print
/// their content, and backslash line continuations inside strings.
pub(super) fn to_minijinja(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%").into_iter().chain(rest.find("{{")).min() {
        let (before, tag) = rest.split_at(at + 2);
        let close = if before.ends_with('%') { "%}" } else { "}}" };
        let Some((inside, after)) = tag.split_once(close) else { break };
        let inside = match inside.trim_matches(['-', '+', ' ', '\n']) {
            "generation" if close == "%}" => inside.replace("generation", "if true"),
            "endgeneration" if close == "%}" => inside.replace("endgeneration", "endif"),
            _ => join_continued_lines(inside),
        };
        text.extend([before, inside.as_str(), close]);
        rest = after;
    }
    text + rest
}

/// Removes each unescaped backslash that precedes a newline, and that newline.
fn join_continued_lines(inside: &str) -> String {
    let mut parts = inside.split("\\\n").peekable();
    let mut text = String::with_capacity(inside.len());
    while let Some(part) = parts.next() {
        text += part;
        let escaped = part.len() - part.trim_end_matches('\\').len();
        if parts.peek().is_some() && !escaped.is_multiple_of(2) {
            text += "\\\n";
        }
    }
    text
}

fn print(out: &mut Output<'_>, state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    let text = match value.kind() {
        ValueKind::None => "None",
        ValueKind::Bool if value.is_true() => "True",
        ValueKind::Bool => "False",
        _ => return minijinja::escape_formatter(out, state, value),
    };
    out.write_str(text).map_err(Error::from)
}

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}

fn strftime_now(format: &str) -> Result<String, Error> {
    clock::strftime_now(format).map_err(|letter| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not know the code %{letter}"))
    })
}

/// `json.dumps(value, ensure_ascii=False, indent=indent)`.
fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    if ascii == Some(true) {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson(ensure_ascii=true) is not supported"));
    }
    options.assert_all_used()?;
    let text = match indent {
        None => write(value, PythonFormatter),
        Some(indent) => write(value, PrettyFormatter::with_indent(" ".repeat(indent.min(16)).as_bytes())),
    };
    text.map(Value::from_safe_string)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, format!("tojson: {error}")))
}

fn write(value: &Value, formatter: impl Formatter) -> Result<String, serde_json::Error> {
    let mut bytes = Vec::new();
    value.serialize(&mut Serializer::with_formatter(&mut bytes, formatter))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Python's separators, `", "` and `": "`.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}
