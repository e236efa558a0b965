//! JSON parser of variants. Handles untrusted text: errors name the path, and it never panics.

use super::{MAX_DEPTH, MEMBERS, OPERATOR};
use crate::{
    Error, Result,
    attention::variant::{
        ExpressionVariant, Graph, Hook, HookBuffer, Input, NamedData, Node, Op, Recorder, ValueKind,
        recorder::{MAX_ELEMENTS, check_name},
    },
};
use serde_json::{Map, Value};
use std::{collections::HashMap, sync::Arc};

impl ExpressionVariant {
    /// Parses a variant; [`json`](super) documents the format.
    ///
    /// # Errors
    /// When the text is not JSON or not a variant. The error names the path and the expectation, as in
    /// `attention.variant: logits.mul[1]: unknown operation "tahn", expected one of neg, abs, ..`.
    pub fn from_json(text: &str) -> Result<Self> {
        let document: Value =
            serde_json::from_str(text).map_err(|error| Error::new(OPERATOR, error.to_string()))?;
        let Value::Object(members) = &document else {
            return Err(unexpected("the document", &document, "an object"));
        };
        for member in members.keys() {
            let known = MEMBERS.into_iter().chain(Hook::ALL.map(Hook::name));
            if !known.clone().any(|name| name == member) {
                let known: Vec<&str> = known.collect();
                let text = format!("unknown member {member:?}, expected one of {}", known.join(", "));
                return Err(Error::new(OPERATOR, text));
            }
        }
        let name = members.get("name").and_then(Value::as_str);
        let value_or_null = members.get("name").unwrap_or(&Value::Null);
        let name = name.ok_or_else(|| unexpected("name", value_or_null, "a string"))?;
        let softmax = members.get("softmax").unwrap_or(&Value::Bool(true));
        let softmax = softmax.as_bool().ok_or_else(|| unexpected("softmax", softmax, "true or false"))?;
        let mask_tail = members.get("mask_tail").map(key_count).transpose()?;
        let (named, bound) = read_named(members)?;
        let names = NameIndex::new(&named);
        let recorder = Recorder::default();
        let mut graphs: [Graph; 7] = Default::default();
        for hook in Hook::ALL {
            let scope = Scope { recorder: &recorder, hook, named: &names, bound: Bindings::default() };
            graphs[hook as usize] = match members.get(hook.name()) {
                Some(value) => scope.hook(value)?,
                None => scope.identity(),
            };
        }
        let assembled = Self::assemble(name, softmax, recorder, graphs);
        let assembled = assembled.map_err(|error| Error::new(OPERATOR, error))?;
        Ok(assembled.with_bound(bound).with_mask_tail(mask_tail))
    }
}

fn result_kinds(hook: Hook) -> &'static [ValueKind] {
    match hook {
        Hook::Query | Hook::Key | Hook::Update => &[ValueKind::Number, ValueKind::Number],
        Hook::Mask => &[ValueKind::Truth],
        Hook::Value | Hook::Logits | Hook::Output => &[ValueKind::Number],
    }
}

fn unexpected(path: &str, value: &Value, expected: &str) -> Error {
    let shown = match value {
        Value::Null => "nothing".to_owned(),
        Value::Array(items) => format!("an array of {}", items.len()),
        Value::Object(_) => "an object".to_owned(),
        other => other.to_string().chars().take(60).collect(),
    };
    Error::new(OPERATOR, format!("{path}: {shown}, expected {expected}"))
}

/// A number, or the name of one without a JSON literal.
fn constant(path: &str, value: &Value) -> Result<Option<f32>> {
    Ok(match value {
        Value::Number(number) => {
            let number_f64 = number.as_f64().unwrap_or(f64::INFINITY);
            crate::ensure!(
                (number_f64 as f32).is_finite(),
                OPERATOR,
                "{path}: {number}, expected a number that f32 can hold"
            );
            Some(number_f64 as f32)
        }
        Value::String(name) => match name.as_str() {
            "inf" => Some(f32::INFINITY),
            "-inf" => Some(f32::NEG_INFINITY),
            "nan" => Some(f32::NAN),
            _ => None,
        },
        _ => None,
    })
}

/// Parses parameters, tables and buffers, and the names of the tables that each run binds.
fn read_named(members: &Map<String, Value>) -> Result<(NamedData, Vec<String>)> {
    let (mut named, mut bound) = (NamedData::default(), Vec::new());
    for (name, value) in object_entries(members, "scalars")? {
        let path = format!("scalars.{name}");
        let number = constant(&path, value)?.ok_or_else(|| unexpected(&path, value, "a number"))?;
        named.scalars.push((name.clone(), number));
    }
    for (name, value) in object_entries(members, "tables")? {
        let path = format!("tables.{name}");
        if value.is_number() {
            named.tables.push((name.clone(), vec![0.0; element_count(&path, value)?].into()));
            bound.push(name.clone());
            continue;
        }
        let expected = "an array of numbers, or the number of elements that each run binds";
        let items = value.as_array().ok_or_else(|| unexpected(&path, value, expected))?;
        let mut table = Vec::with_capacity(items.len());
        for (i, item) in items.iter().enumerate() {
            let path = format!("{path}[{i}]");
            table.push(constant(&path, item)?.ok_or_else(|| unexpected(&path, item, "a number"))?);
        }
        named.tables.push((name.clone(), Arc::from(table)));
    }
    for (name, value) in object_entries(members, "buffers")? {
        let path = format!("buffers.{name}");
        named.buffers.push((name.clone(), HookBuffer::new(element_count(&path, value)?)));
    }
    Ok((named, bound))
}

/// The number of keys that a mask hook may hide.
fn key_count(value: &Value) -> Result<u32> {
    let count = value.as_u64().and_then(|count| u32::try_from(count).ok()).filter(|count| *count > 0);
    count.ok_or_else(|| unexpected("mask_tail", value, "a number of keys from 1"))
}

/// The length of a table or buffer without values.
fn element_count(path: &str, value: &Value) -> Result<usize> {
    let len = value.as_u64().filter(|len| (1..=MAX_ELEMENTS as u64).contains(len));
    let expected = format!("a number of elements, 1 to {MAX_ELEMENTS}");
    len.map(|len| len as usize).ok_or_else(|| unexpected(path, value, &expected))
}

fn object_entries<'a>(members: &'a Map<String, Value>, name: &str) -> Result<Vec<(&'a String, &'a Value)>> {
    let Some(value) = members.get(name) else { return Ok(Vec::new()) };
    let list = value.as_object().ok_or_else(|| unexpected(name, value, "an object"))?;
    for key in list.keys() {
        check_name(key).map_err(|error| Error::new(OPERATOR, format!("{name}: {error}")))?;
    }
    Ok(list.iter().collect())
}

/// The parameters, tables and buffers of a document by name, so that a lookup does not search them.
struct NameIndex<'a> {
    named: &'a NamedData,
    scalars: HashMap<&'a str, f32>,
    tables: HashMap<&'a str, &'a Arc<[f32]>>,
    buffers: HashMap<&'a str, &'a HookBuffer>,
}

impl<'a> NameIndex<'a> {
    fn new(named: &'a NamedData) -> Self {
        Self {
            named,
            scalars: named.scalars.iter().map(|(name, value)| (name.as_str(), *value)).collect(),
            tables: named.tables.iter().map(|(name, table)| (name.as_str(), table)).collect(),
            buffers: named.buffers.iter().map(|(name, buffer)| (name.as_str(), buffer)).collect(),
        }
    }
}

/// The bound names of a hook, in order and by name.
#[derive(Default)]
struct Bindings {
    names: Vec<String>,
    operands: HashMap<String, Operand>,
}

/// The names in scope of one hook's expressions.
struct Scope<'a> {
    recorder: &'a Recorder,
    hook: Hook,
    named: &'a NameIndex<'a>,
    bound: Bindings,
}

/// A recorded node and its kind.
#[derive(Clone, Copy)]
struct Operand {
    id: u32,
    kind: ValueKind,
}

/// The location of an expression in the document.
struct JsonPath {
    path: String,
    depth: usize,
}

impl JsonPath {
    fn child(&self, step: &str) -> Self {
        Self { path: format!("{}{step}", self.path), depth: self.depth + 1 }
    }
}

impl Scope<'_> {
    fn identity(&self) -> Graph {
        let results: Vec<u32> = self.hook.identity().map(|node| self.recorder.number(node).id).collect();
        self.recorder.finish(self.hook, &results)
    }

    fn hook(mut self, value: &Value) -> Result<Graph> {
        let location = JsonPath { path: self.hook.name().to_owned(), depth: 0 };
        let block = value.as_object().filter(|object| object.contains_key("in"));
        let Some(block) = block else {
            let results = self.results(&location, value)?;
            return Ok(self.recorder.finish(self.hook, &results));
        };
        if let Some(other) = block.keys().find(|key| !["let", "store", "in"].contains(&key.as_str())) {
            let text = format!("{}: unknown member {other:?}, expected one of let, store, in", location.path);
            return Err(Error::new(OPERATOR, text));
        }
        let path = &location.path;
        for (i, binding) in items(&format!("{path}.let"), block.get("let"))?.iter().enumerate() {
            let location = location.child(&format!(".let[{i}]"));
            self.bind(&location, binding)?;
        }
        for (i, store) in items(&format!("{path}.store"), block.get("store"))?.iter().enumerate() {
            let location = location.child(&format!(".store[{i}]"));
            self.store(&location, store)?;
        }
        let results = self.results(&location.child(".in"), &block["in"])?;
        Ok(self.recorder.finish(self.hook, &results))
    }

    fn results(&self, location: &JsonPath, value: &Value) -> Result<Vec<u32>> {
        let kinds = result_kinds(self.hook);
        if let [kind] = kinds {
            return Ok(vec![self.expect(location, value, *kind)?]);
        }
        let pair = value.as_array().filter(|items| items.len() == kinds.len());
        let pair = pair.ok_or_else(|| unexpected(&location.path, value, "an array of two expressions"))?;
        let each = |i: usize| self.expect(&location.child(&format!("[{i}]")), &pair[i], kinds[i]);
        (0..pair.len()).map(each).collect()
    }

    fn bind(&mut self, location: &JsonPath, value: &Value) -> Result<()> {
        let Some([Value::String(name), value]) = value.as_array().map(Vec::as_slice) else {
            return Err(unexpected(&location.path, value, "[\"name\", expression]"));
        };
        let word = name.strip_prefix('%').unwrap_or(name);
        let is_unused = self.find(name).is_none() && !word.is_empty();
        crate::ensure!(
            is_unused && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'),
            OPERATOR,
            "{}: {name:?} has a meaning already or is no name, expected another",
            location.path
        );
        let operand = self.operand(&location.child("[1]"), value)?;
        self.bound.names.push(name.clone());
        self.bound.operands.insert(name.clone(), operand);
        Ok(())
    }

    fn store(&self, location: &JsonPath, value: &Value) -> Result<()> {
        let Some([Value::String(name), index, stored]) = value.as_array().map(Vec::as_slice) else {
            return Err(unexpected(&location.path, value, "[\"buffer\", index, value]"));
        };
        let buffer = self.named.buffers.get(name.as_str());
        let names = self.named.named.buffers.iter().map(|(name, _)| name.as_str());
        let buffer = buffer.ok_or_else(|| unknown(&location.path, "buffer", name, names))?;
        let index = self.expect(&location.child("[1]"), index, ValueKind::Number)?;
        let stored = self.expect(&location.child("[2]"), stored, ValueKind::Number)?;
        self.recorder.store(name, buffer, index, stored);
        Ok(())
    }

    fn expect(&self, location: &JsonPath, value: &Value, kind: ValueKind) -> Result<u32> {
        let operand = self.operand(location, value)?;
        let (got, expected) = match kind {
            ValueKind::Number => ("a condition", "a number"),
            ValueKind::Truth => ("a number", "a condition"),
        };
        crate::ensure!(operand.kind == kind, OPERATOR, "{}: {got}, expected {expected}", location.path);
        Ok(operand.id)
    }

    /// Recursion is bounded by the nesting limit here and in the parser.
    fn operand(&self, location: &JsonPath, value: &Value) -> Result<Operand> {
        crate::ensure!(
            location.depth <= MAX_DEPTH,
            OPERATOR,
            "{}: nested deeper than {MAX_DEPTH}, expected let and names",
            self.hook.name()
        );
        if let Some(number) = constant(&location.path, value)? {
            return Ok(self.number(Node::Number(number.to_bits())));
        }
        match value {
            Value::Bool(truth) => {
                Ok(Operand { id: self.recorder.truth(Node::Truth(*truth)).id, kind: ValueKind::Truth })
            }
            Value::String(name) => self.find(name).ok_or_else(|| {
                let mut known: Vec<&str> = self.hook.inputs().map(Input::name).collect();
                known.extend(self.named.named.scalars.iter().map(|(name, _)| name.as_str()));
                known.extend(self.bound.names.iter().map(String::as_str));
                unknown(&location.path, "name", name, known.into_iter())
            }),
            Value::Object(object) if object.len() == 1 => {
                let (name, operands) = object.iter().next().expect("it has one member");
                self.operation(location, name, operands)
            }
            _ => Err(unexpected(&location.path, value, "a number, a name or {\"operation\": operands}")),
        }
    }

    fn number(&self, node: Node) -> Operand {
        Operand { id: self.recorder.number(node).id, kind: ValueKind::Number }
    }

    fn find(&self, name: &str) -> Option<Operand> {
        if let Some(operand) = self.bound.operands.get(name) {
            return Some(*operand);
        }
        if let Some(value) = self.named.scalars.get(name) {
            return Some(Operand { id: self.recorder.scalar(name, *value).id, kind: ValueKind::Number });
        }
        let input = self.hook.inputs().find(|input| input.name() == name);
        input.map(|input| self.number(Node::Input(input)))
    }

    fn operation(&self, location: &JsonPath, name: &str, value: &Value) -> Result<Operand> {
        let inside = location.child(&format!(".{name}"));
        if name == "read" {
            return self.read(&inside, value);
        }
        let Some((op, _)) = Op::NAMED.into_iter().find(|(_, known)| *known == name) else {
            let names = Op::NAMED.into_iter().map(|(_, name)| name).chain(["read"]);
            return Err(unknown(&location.path, "operation", name, names));
        };
        let (operand_kinds, result_kind) = op.signature();
        let mut operands = [0; 3];
        if let [kind] = operand_kinds {
            operands[0] = self.expect(&inside, value, *kind)?;
        } else {
            let operand_values =
                value.as_array().filter(|operand_values| operand_values.len() == operand_kinds.len());
            let expected = format!("an array of {} operands", operand_kinds.len());
            let operand_values = operand_values.ok_or_else(|| unexpected(&inside.path, value, &expected))?;
            for (i, (value, kind)) in operand_values.iter().zip(operand_kinds).enumerate() {
                operands[i] = self.expect(&location.child(&format!(".{name}[{i}]")), value, *kind)?;
            }
        }
        Ok(Operand { id: self.recorder.apply(op, operands), kind: result_kind })
    }

    fn read(&self, location: &JsonPath, value: &Value) -> Result<Operand> {
        let Some([Value::String(name), index]) = value.as_array().map(Vec::as_slice) else {
            return Err(unexpected(&location.path, value, "[\"table\", index]"));
        };
        let table = self.named.tables.get(name.as_str());
        let names = self.named.named.tables.iter().map(|(name, _)| name.as_str());
        let table = table.ok_or_else(|| unknown(&location.path, "table", name, names))?;
        let index = self.expect(&location.child("[1]"), index, ValueKind::Number)?;
        Ok(Operand { id: self.recorder.read_shared(name, table, index).id, kind: ValueKind::Number })
    }
}

fn items<'a>(path: &str, value: Option<&'a Value>) -> Result<&'a [Value]> {
    let Some(value) = value else { return Ok(&[]) };
    value.as_array().map(Vec::as_slice).ok_or_else(|| unexpected(path, value, "an array"))
}

fn unknown<'a>(path: &str, what: &str, name: &str, known: impl Iterator<Item = &'a str>) -> Error {
    let name: String = name.chars().take(60).collect();
    let known: Vec<&str> = known.collect();
    let expected = if known.is_empty() { "none, there is none".to_owned() } else { known.join(", ") };
    Error::new(OPERATOR, format!("{path}: unknown {what} {name:?}, expected one of {expected}"))
}
