//! `json.dumps` of Python with the options that `transformers` passes on.

use super::{
    objects::{Generator, Labelled},
    text::{MAX_DEPTH, MAX_TEXT, is_dict, number, refuse},
};
use minijinja::{Error, Value, value::ValueKind};

/// The options of `json.dumps`.
#[derive(Debug, Clone)]
pub(super) struct JsonFormat {
    /// One level of indentation.
    pub(super) indent: Option<String>,
    pub(super) item_separator: String,
    pub(super) key_separator: String,
    pub(super) ascii: bool,
    pub(super) sorted: bool,
}

/// `json.dumps(value)`.
pub(super) fn json(value: &Value, format: &JsonFormat) -> Result<String, Error> {
    let mut writer = JsonWriter { text: String::new(), format };
    writer.push(value, 0)?;
    Ok(writer.text)
}

struct JsonWriter<'a> {
    text: String,
    format: &'a JsonFormat,
}

impl JsonWriter<'_> {
    fn push(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH || self.text.len() > MAX_TEXT {
            return Err(refuse("a value is too large for tojson"));
        }
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.text.push_str(match number(value).as_str() {
                "nan" => "NaN",
                "inf" => "Infinity",
                "-inf" => "-Infinity",
                number => number,
            }),
            ValueKind::String => self.push_string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable if is_list(value) => {
                let items: Vec<Value> = value.try_iter()?.take(MAX_TEXT).collect();
                self.text.push('[');
                for (at, item) in items.iter().enumerate() {
                    self.begin_item(at, depth + 1);
                    self.push(item, depth + 1)?;
                }
                self.end_items(items.len(), depth);
                self.text.push(']');
            }
            ValueKind::Map if is_dict(value) => self.push_dict(value, depth)?,
            kind => return Err(refuse(format!("Object of type {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn push_dict(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.format.sorted {
            keys.sort();
        }
        self.text.push('{');
        for (at, key) in keys.iter().enumerate() {
            self.begin_item(at, depth + 1);
            match key.kind() {
                ValueKind::String => self.push_string(key.as_str().unwrap_or_default()),
                ValueKind::Number => self.text += &format!("\"{}\"", number(key)),
                _ => return Err(refuse("tojson: a key of a dict is neither a string nor a number")),
            }
            self.text.push_str(&self.format.key_separator);
            self.push(&value.get_item(key)?, depth + 1)?;
        }
        self.end_items(keys.len(), depth);
        self.text.push('}');
        Ok(())
    }

    fn begin_item(&mut self, at: usize, depth: usize) {
        if at > 0 {
            self.text.push_str(&self.format.item_separator);
        }
        self.push_line(depth);
    }

    fn end_items(&mut self, count: usize, depth: usize) {
        if count > 0 {
            self.push_line(depth);
        }
    }

    fn push_line(&mut self, depth: usize) {
        if let Some(indent) = &self.format.indent {
            self.text.push('\n');
            self.text.push_str(&indent.repeat(depth));
        }
    }

    fn push_string(&mut self, value: &str) {
        self.text.push('"');
        for c in value.chars() {
            match c {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\x08' => self.text.push_str("\\b"),
                '\x0c' => self.text.push_str("\\f"),
                _ if c < ' ' || self.format.ascii && c > '~' => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        self.text += &format!("\\u{unit:04x}");
                    }
                }
                _ => self.text.push(c),
            }
        }
        self.text.push('"');
    }
}

/// Whether `json.dumps` takes the value for a list.
fn is_list(value: &Value) -> bool {
    value.kind() == ValueKind::Seq && value.downcast_object_ref::<Labelled>().is_none()
        || value.len().is_some()
            && value.downcast_object_ref::<Generator>().is_none()
            && value.downcast_object_ref::<Labelled>().is_none()
}
