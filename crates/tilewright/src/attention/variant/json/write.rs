//! JSON serialization of variants. Shared and deeply nested subexpressions are bound to names.

use crate::attention::variant::{ExpressionVariant, Graph, Hook, Node};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Nesting depth from which a subexpression is bound to a name.
const BIND_DEPTH: usize = 16;

impl ExpressionVariant {
    /// Serializes to JSON for [`Self::from_json`]; buffers by length.
    pub fn to_json(&self) -> String {
        let mut document = self.code();
        document.insert("name".to_owned(), json!(self.name));
        let numbers = |table: &[f32]| table.iter().map(|x| number(*x)).collect::<Value>();
        let scalars = self.named.scalars.iter().map(|(name, value)| (name.clone(), number(*value)));
        let table = |(at, (name, table)): (usize, &(String, _))| {
            let values: &Arc<[f32]> = table;
            (name.clone(), if self.is_bound(at) { json!(values.len()) } else { numbers(values) })
        };
        let tables = self.named.tables.iter().enumerate().map(table);
        let buffers = self.named.buffers.iter().map(|(name, buffer)| (name.clone(), json!(buffer.len())));
        let lists: [(&str, Map<String, Value>); 3] =
            [("scalars", scalars.collect()), ("tables", tables.collect()), ("buffers", buffers.collect())];
        for (name, list) in lists.into_iter().filter(|(_, list)| !list.is_empty()) {
            document.insert(name.to_owned(), Value::Object(list));
        }
        format!("{:#}", Value::Object(document))
    }

    /// The active hooks and whether there is a softmax, which determine a kernel.
    pub(in crate::attention::variant) fn code(&self) -> Map<String, Value> {
        let mut document = Map::new();
        if !self.softmax {
            document.insert("softmax".to_owned(), json!(false));
        }
        if let Some(tail) = self.mask_tail {
            document.insert("mask_tail".to_owned(), json!(tail));
        }
        for hook in Hook::ALL.into_iter().filter(|hook| self.is_live(*hook)) {
            document.insert(hook.name().to_owned(), Writer::new(self, self.graph(hook)).hook());
        }
        document
    }
}

/// The shortest number that parses to the same f32.
fn number(x: f32) -> Value {
    if x.is_nan() {
        json!("nan")
    } else if x.is_infinite() {
        json!(if x > 0.0 { "inf" } else { "-inf" })
    } else {
        // the f64 of the shortest decimal rounds to the same f32
        let digits = x.to_string().parse::<f64>().unwrap_or(f64::from(x));
        if digits.fract() == 0.0 && digits.abs() < 1e9 && x.to_bits() != (-0.0_f32).to_bits() {
            json!(digits as i64)
        } else {
            json!(digits)
        }
    }
}

/// Converts the nodes of one hook to expressions.
struct Writer<'a> {
    variant: &'a ExpressionVariant,
    graph: &'a Graph,
    written: Vec<Value>,
    bindings: Vec<Value>,
}

impl<'a> Writer<'a> {
    fn new(variant: &'a ExpressionVariant, graph: &'a Graph) -> Self {
        let mut writer = Self { variant, graph, written: Vec::new(), bindings: Vec::new() };
        let mut uses = vec![0_usize; graph.nodes.len()];
        let operands = graph.nodes.iter().flat_map(Node::operands).chain(&graph.results);
        let stores = graph.stores.iter().flat_map(|store| [&store.index, &store.value]);
        operands.chain(stores).for_each(|&id| uses[id as usize] += 1);
        let mut depths = Vec::with_capacity(graph.nodes.len());
        for (node, uses) in graph.nodes.iter().zip(uses) {
            let expression = writer.expression(node);
            let depth = 1 + node.operands().iter().map(|&id| depths[id as usize]).max().unwrap_or(0);
            let bind = !node.operands().is_empty() && (uses > 1 || depth > BIND_DEPTH);
            depths.push(if bind { 0 } else { depth });
            let expression = if bind { writer.bind(expression) } else { expression };
            writer.written.push(expression);
        }
        writer
    }

    fn bind(&mut self, expression: Value) -> Value {
        // parameter names never begin with %
        let name = format!("%{}", self.bindings.len());
        self.bindings.push(json!([name, expression]));
        json!(name)
    }

    fn hook(self) -> Value {
        let result = match self.graph.results.as_slice() {
            &[id] => self.written[id as usize].clone(),
            ids => ids.iter().map(|&id| self.written[id as usize].clone()).collect(),
        };
        if self.bindings.is_empty() && self.graph.stores.is_empty() {
            return result;
        }
        let mut block = Map::new();
        if !self.graph.stores.is_empty() {
            let stores = self.graph.stores.iter().map(|store| {
                let (buffer, _) = &self.variant.named.buffers[store.buffer as usize];
                json!([buffer, self.written[store.index as usize], self.written[store.value as usize]])
            });
            block.insert("store".to_owned(), stores.collect());
        }
        if !self.bindings.is_empty() {
            block.insert("let".to_owned(), Value::Array(self.bindings));
        }
        block.insert("in".to_owned(), result);
        Value::Object(block)
    }

    fn expression(&self, node: &Node) -> Value {
        let operand = |id: u32| self.written[id as usize].clone();
        match node {
            Node::Number(bits) => number(f32::from_bits(*bits)),
            Node::Truth(value) => json!(value),
            Node::Input(input) => json!(input.name()),
            Node::Scalar(index) => json!(self.variant.named.scalars[*index as usize].0),
            Node::Read { table, index } => {
                json!({ "read": [self.variant.named.tables[*table as usize].0, operand(*index)] })
            }
            Node::Apply(op, _) => {
                let mut operands: Vec<Value> = node.operands().iter().map(|&id| operand(id)).collect();
                let operands = if operands.len() == 1 { operands.remove(0) } else { Value::Array(operands) };
                json!({ op.name(): operands })
            }
        }
    }
}
