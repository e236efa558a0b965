//! Hook recorder: a [`Number`] whose operations build a [`Graph`], with common subexpression elimination and constant
//! folding.

use super::{
    At, ExpressionValue, Graph, Hook, HookBuffer, Input, MAX_NODES, Node, Number, Op, Store, ValueKind,
    expression::apply,
};
use std::{
    cell::RefCell,
    collections::HashMap,
    ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Sub},
    sync::Arc,
};

/// Maximum elements of a table or buffer, so that f32 indices are exact.
pub(super) const MAX_ELEMENTS: usize = 1 << 24;

/// Named parameters, tables and buffers of a variant, in order of first use.
#[derive(Debug, Clone, Default)]
pub(super) struct NamedData {
    pub(super) scalars: Vec<(String, f32)>,
    pub(super) tables: Vec<(String, Arc<[f32]>)>,
    pub(super) buffers: Vec<(String, HookBuffer)>,
}

/// Records the hooks of a variant, one at a time.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    state: RefCell<RecorderState>,
}

#[derive(Debug, Default)]
struct RecorderState {
    graph: Graph,
    shared: HashMap<Node, u32>,
    named: NamedData,
    error: Option<String>,
}

impl Recorder {
    /// All indices, including those that a hook does not have, so that the check can report their use.
    pub(super) fn at(&self) -> At<RecordedNumber<'_>> {
        At {
            request: self.input(Input::Request),
            qo: self.input(Input::Qo),
            kv: self.input(Input::Kv),
            qo_head: self.input(Input::QoHead),
            kv_head: self.input(Input::KvHead),
            dim: self.input(Input::Dim),
            num_qo_heads: self.input(Input::NumQoHeads),
            num_kv_heads: self.input(Input::NumKvHeads),
        }
    }

    pub(super) fn input(&self, input: Input) -> RecordedNumber<'_> {
        self.number(Node::Input(input))
    }

    /// Ends the current graph with `results` and starts an empty one.
    pub(super) fn finish(&self, hook: Hook, results: &[u32]) -> Graph {
        let mut state = self.state.borrow_mut();
        state.shared.clear();
        let mut graph = std::mem::take(&mut state.graph);
        if !graph.stores.is_empty() && hook != Hook::Logits {
            state.record_error(format!("the {} hook stores, only the logits hook may", hook.name()));
        }
        graph.results = results.to_vec();
        graph.canonical()
    }

    /// The named data, or the first error.
    pub(super) fn into_named(self) -> Result<NamedData, String> {
        let state = self.state.into_inner();
        state.error.map_or(Ok(state.named), Err)
    }

    /// Adds a number node.
    pub(super) fn number(&self, node: Node) -> RecordedNumber<'_> {
        RecordedNumber { recorder: self, id: self.state.borrow_mut().push(node) }
    }

    /// Adds a condition node.
    pub(super) fn truth(&self, node: Node) -> RecordedCondition<'_> {
        RecordedCondition { recorder: self, id: self.state.borrow_mut().push(node) }
    }

    /// Adds an operation on nodes of the kinds that it takes.
    pub(super) fn apply(&self, op: Op, operands: [u32; 3]) -> u32 {
        let mut state = self.state.borrow_mut();
        state.simplify(op, operands).unwrap_or_else(|node| state.push(node))
    }

    pub(super) fn scalar(&self, name: &str, value: f32) -> RecordedNumber<'_> {
        let mut state = self.state.borrow_mut();
        let index =
            state.find_or_add(name, |named| &mut named.scalars, || value, |v| v.to_bits() == value.to_bits());
        let id = state.push(Node::Scalar(index));
        RecordedNumber { recorder: self, id }
    }

    pub(super) fn read(&self, name: &str, table: &[f32], index: u32) -> RecordedNumber<'_> {
        let mut state = self.state.borrow_mut();
        state.check_len("table", name, table.len());
        let table =
            state.find_or_add(name, |named| &mut named.tables, || table.into(), |t| same_bits(t, table));
        let id = state.push(Node::Read { table, index });
        RecordedNumber { recorder: self, id }
    }

    /// [`Recorder::read`] of a table that is shared, not copied, and compared by address first.
    #[cfg(feature = "json")]
    pub(super) fn read_shared(&self, name: &str, table: &Arc<[f32]>, index: u32) -> RecordedNumber<'_> {
        let mut state = self.state.borrow_mut();
        state.check_len("table", name, table.len());
        let same = |known: &Arc<[f32]>| Arc::ptr_eq(known, table) || same_bits(known, table);
        let table = state.find_or_add(name, |named| &mut named.tables, || table.clone(), same);
        let id = state.push(Node::Read { table, index });
        RecordedNumber { recorder: self, id }
    }

    pub(super) fn store(&self, name: &str, buffer: &HookBuffer, index: u32, value: u32) {
        let mut state = self.state.borrow_mut();
        state.check_len("buffer", name, buffer.len());
        let clone = || buffer.clone();
        let buffer = state.find_or_add(name, |named| &mut named.buffers, clone, |b| b.shares_with(buffer));
        state.graph.stores.push(Store { buffer, index, value });
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

impl RecorderState {
    fn record_error(&mut self, error: String) {
        self.error.get_or_insert(error);
    }

    fn check_len(&mut self, what: &str, name: &str, len: usize) {
        if len == 0 || len > MAX_ELEMENTS {
            self.record_error(format!("{what} {name:?} has {len} elements, expected 1 to {MAX_ELEMENTS}"));
        }
    }

    fn push(&mut self, node: Node) -> u32 {
        if let Some(&id) = self.shared.get(&node) {
            return id;
        }
        if self.graph.nodes.len() == MAX_NODES {
            self.record_error(format!("a hook computes more than {MAX_NODES} different values"));
            return 0;
        }
        let id = self.graph.nodes.len() as u32;
        self.graph.nodes.push(node);
        self.shared.insert(node, id);
        id
    }

    /// Finds or adds a named entry, which must be the same each time; returns its index. Adds nothing after an error, so
    /// that the lists are no longer than the nodes.
    fn find_or_add<T>(
        &mut self,
        name: &str,
        list: impl Fn(&mut NamedData) -> &mut Vec<(String, T)>,
        create: impl FnOnce() -> T,
        same: impl FnOnce(&T) -> bool,
    ) -> u32 {
        if self.error.is_some() {
            return 0;
        }
        let found = list(&mut self.named).iter().position(|(known, _)| known == name);
        if let Some(index) = found {
            if !same(&list(&mut self.named)[index].1) {
                self.record_error(format!("{name:?} is given twice, differently"));
            }
            return index as u32;
        }
        if let Err(error) = check_name(name) {
            self.record_error(error);
        } else if self.named.has(name) {
            self.record_error(format!("{name:?} is given twice, differently"));
        }
        let list = list(&mut self.named);
        list.push((name.to_owned(), create()));
        (list.len() - 1) as u32
    }

    /// An existing node equal to the operation, or `Err` with the node to add.
    fn simplify(&mut self, op: Op, operands: [u32; 3]) -> Result<u32, Node> {
        let takes = op.signature().0.len();
        let constant = |id: u32| match self.graph.nodes[id as usize] {
            Node::Number(bits) => Some(ExpressionValue::<f32>::Number(f32::from_bits(bits))),
            Node::Truth(value) => Some(ExpressionValue::Truth(value)),
            _ => None,
        };
        let constants = [0, 1, 2].map(|i| if i < takes { constant(operands[i]) } else { None });
        if constants[..takes].iter().all(Option::is_some) {
            let known = constants.map(|value| value.unwrap_or(ExpressionValue::Number(0.0)));
            return Err(match apply(op, known) {
                ExpressionValue::Number(value) => Node::Number(value.to_bits()),
                ExpressionValue::Truth(value) => Node::Truth(value),
            });
        }
        let [a, b, c] = operands;
        match (op, constants) {
            (Op::And, [Some(ExpressionValue::Truth(true)), ..])
            | (Op::Or, [Some(ExpressionValue::Truth(false)), ..]) => Ok(b),
            (Op::And, [_, Some(ExpressionValue::Truth(true)), _])
            | (Op::Or, [_, Some(ExpressionValue::Truth(false)), _]) => Ok(a),
            (Op::And, [Some(ExpressionValue::Truth(false)), ..])
            | (Op::Or, [Some(ExpressionValue::Truth(true)), ..]) => Ok(a),
            (Op::And, [_, Some(ExpressionValue::Truth(false)), _])
            | (Op::Or, [_, Some(ExpressionValue::Truth(true)), _]) => Ok(b),
            (Op::Select, [Some(ExpressionValue::Truth(choice)), ..]) => Ok(if choice { b } else { c }),
            _ => Err(Node::Apply(op, operands)),
        }
    }
}

impl NamedData {
    fn has(&self, name: &str) -> bool {
        let scalars = self.scalars.iter().map(|(name, _)| name);
        let others =
            self.tables.iter().map(|(name, _)| name).chain(self.buffers.iter().map(|(name, _)| name));
        scalars.chain(others).any(|known| known == name)
    }
}

/// Checks for a letter, then letters, digits and `_`.
pub(super) fn check_word(name: &str, most: usize) -> Result<(), String> {
    let word = name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        && name.len() <= most;
    if word {
        return Ok(());
    }
    let shown: String = name.chars().take(most).collect();
    Err(format!("{shown:?} is no name: expected a letter, then letters, digits and _, at most {most} in all"))
}

/// Checks the name of a parameter, table or buffer, which must be distinct from inputs.
pub(super) fn check_name(name: &str) -> Result<(), String> {
    check_word(name, 64)?;
    let mut reserved = Input::NAMED.iter().map(|(_, name)| *name).chain(["inf", "nan"]);
    if reserved.any(|known| known == name) {
        return Err(format!("{name:?} has a meaning in every hook, expected another name"));
    }
    Ok(())
}

/// A number during recording.
#[derive(Clone, Copy)]
pub(super) struct RecordedNumber<'a> {
    recorder: &'a Recorder,
    pub(super) id: u32,
}

/// A condition during recording.
#[derive(Clone, Copy)]
pub(super) struct RecordedCondition<'a> {
    recorder: &'a Recorder,
    pub(super) id: u32,
}

impl RecordedNumber<'_> {
    fn apply(self, op: Op, others: [u32; 2]) -> Self {
        debug_assert_eq!(op.signature().1, ValueKind::Number, "{op:?}");
        Self { id: self.recorder.apply(op, [self.id, others[0], others[1]]), ..self }
    }
}

impl<'a> RecordedNumber<'a> {
    fn compare(self, op: Op, other: Self) -> RecordedCondition<'a> {
        RecordedCondition { recorder: self.recorder, id: self.recorder.apply(op, [self.id, other.id, 0]) }
    }
}

macro_rules! operators {
    ($kind:ident: $($trait:ident $method:ident $op:ident;)+) => {
        $(impl $trait for $kind<'_> {
            type Output = Self;

            fn $method(self, other: Self) -> Self {
                Self { id: self.recorder.apply(Op::$op, [self.id, other.id, 0]), ..self }
            }
        })+
    };
}

operators! { RecordedNumber:
    Add add Add;
    Sub sub Sub;
    Mul mul Mul;
    Div div Div;
}

operators! { RecordedCondition:
    BitAnd bitand And;
    BitOr bitor Or;
}

impl Neg for RecordedNumber<'_> {
    type Output = Self;

    fn neg(self) -> Self {
        self.apply(Op::Neg, [0; 2])
    }
}

impl Not for RecordedCondition<'_> {
    type Output = Self;

    fn not(self) -> Self {
        Self { id: self.recorder.apply(Op::Not, [self.id, 0, 0]), ..self }
    }
}

macro_rules! unary {
    ($($method:ident $op:ident;)+) => {
        $(fn $method(self) -> Self {
            self.apply(Op::$op, [0; 2])
        })+
    };
}

impl<'a> Number for RecordedNumber<'a> {
    type Bool = RecordedCondition<'a>;

    fn number(self, value: f32) -> Self {
        self.recorder.number(Node::Number(value.to_bits()))
    }
    fn truth(self, value: bool) -> RecordedCondition<'a> {
        self.recorder.truth(Node::Truth(value))
    }
    unary! {
        abs Abs;
        floor Floor;
        sqrt Sqrt;
        exp2 Exp2;
        log2 Log2;
        exp Exp;
        tanh Tanh;
        sigmoid Sigmoid;
    }
    fn min(self, other: Self) -> Self {
        self.apply(Op::Min, [other.id, 0])
    }
    fn max(self, other: Self) -> Self {
        self.apply(Op::Max, [other.id, 0])
    }
    fn mul_add(self, factor: Self, summand: Self) -> Self {
        self.apply(Op::MulAdd, [factor.id, summand.id])
    }
    fn turns(self, high: Self, low: Self) -> Self {
        self.apply(Op::Turns, [high.id, low.id])
    }
    fn sin_cos_turns(self) -> (Self, Self) {
        (self.apply(Op::SinTurns, [0; 2]), self.apply(Op::CosTurns, [0; 2]))
    }
    fn lt(self, other: Self) -> RecordedCondition<'a> {
        self.compare(Op::Lt, other)
    }
    fn le(self, other: Self) -> RecordedCondition<'a> {
        self.compare(Op::Le, other)
    }
    fn eq(self, other: Self) -> RecordedCondition<'a> {
        self.compare(Op::Eq, other)
    }
    fn select(condition: RecordedCondition<'a>, a: Self, b: Self) -> Self {
        Self { id: a.recorder.apply(Op::Select, [condition.id, a.id, b.id]), ..a }
    }
    fn scalar(self, name: &str, value: f32) -> Self {
        self.recorder.scalar(name, value)
    }
    fn read(self, name: &str, table: &[f32]) -> Self {
        self.recorder.read(name, table, self.id)
    }
    fn store(self, name: &str, buffer: &HookBuffer, index: Self) {
        self.recorder.store(name, buffer, index.id, self.id);
    }
}
