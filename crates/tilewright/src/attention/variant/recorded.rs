//! A variant as data: recorded from hooks or parsed from JSON. It is a [`Variant`] itself, which evaluates its graphs.

use super::{
    At, ExpressionValue, Graph, Hook, HookBuffer, Input, MAX_NODES, NamedData, Node, Number, Pair, Recorder,
    Variant, expression::apply,
};
use crate::{Error, Result};
use std::sync::Arc;

/// A variant's hooks as expression graphs, with the values of its parameters, tables and buffers, each sorted by name.
///
/// Recording it returns an equal variant.
#[derive(Debug, Clone)]
pub struct ExpressionVariant {
    pub(super) name: String,
    pub(super) softmax: bool,
    pub(super) named: NamedData,
    /// Names of the tables that each run binds.
    pub(super) bound: Vec<String>,
    /// As [`Variant::mask_tail`].
    pub(super) mask_tail: Option<u32>,
    /// In the order of [`Hook::ALL`].
    pub(super) graphs: [Graph; 7],
}

impl ExpressionVariant {
    /// Records the hooks of `variant`.
    ///
    /// # Errors
    /// When a name is used twice or is invalid, a table or buffer is empty or has more than 2^24 elements, a hook other
    /// than logits stores, or one computes more than 512 values.
    pub fn of<V: Variant>(variant: &V) -> Result<Self> {
        let recorder = Recorder::default();
        let graphs = Hook::ALL.map(|hook| record(&recorder, variant, hook));
        let assembled = Self::assemble(variant.name(), variant.has_softmax(), recorder, graphs)
            .map_err(|error| Error::new("attention.new", format!("variant {}: {error}", variant.name())))?;
        Ok(assembled.with_bound(variant.bound_tables()).with_mask_tail(variant.mask_tail()))
    }

    /// With this [`Variant::mask_tail`], if there is a mask hook.
    pub(super) fn with_mask_tail(self, tail: Option<u32>) -> Self {
        Self { mask_tail: tail.filter(|_| self.is_live(Hook::Mask)), ..self }
    }

    /// With tables of these names bound by each run, as far as hooks read them.
    pub(super) fn with_bound(self, mut names: Vec<String>) -> Self {
        names.retain(|name| self.named.tables.iter().any(|(known, _)| known == name));
        names.sort_unstable();
        names.dedup();
        Self { bound: names, ..self }
    }

    /// Whether each run binds the table of this index.
    pub fn is_bound(&self, table: usize) -> bool {
        self.named.tables.get(table).is_some_and(|(name, _)| self.bound.contains(name))
    }

    /// With the values of tables in host memory, by index.
    pub(crate) fn with_values<'v>(&self, values: impl IntoIterator<Item = (usize, &'v [f32])>) -> Self {
        let mut variant = self.clone();
        for (table, values) in values {
            variant.named.tables[table].1 = values.into();
        }
        variant
    }

    pub(super) fn assemble(
        name: &str,
        softmax: bool,
        recorder: Recorder,
        graphs: [Graph; 7],
    ) -> Result<Self, String> {
        super::recorder::check_word(name, 256)?;
        let named = recorder.into_named()?;
        let mut variant =
            Self { name: name.to_owned(), softmax, named, bound: Vec::new(), mask_tail: None, graphs };
        variant.sort_names();
        Ok(variant)
    }

    /// The graph of a hook.
    pub fn graph(&self, hook: Hook) -> &Graph {
        &self.graphs[hook as usize]
    }

    /// Whether the hook has an effect.
    pub fn is_live(&self, hook: Hook) -> bool {
        self.graph(hook).is_live(hook)
    }

    /// The named parameters, indexed by [`Node::Scalar`].
    pub fn scalars(&self) -> &[(String, f32)] {
        &self.named.scalars
    }

    /// The named tables, indexed by [`Node::Read`]. Those that each run binds have only the length.
    pub fn tables(&self) -> &[(String, Arc<[f32]>)] {
        &self.named.tables
    }

    /// The named buffers, indexed by [`Store`](super::expression::Store).
    pub fn buffers(&self) -> &[(String, HookBuffer)] {
        &self.named.buffers
    }

    /// The inputs of a hook, in the order of [`Input`].
    pub(super) fn inputs(&self, hook: Hook) -> Vec<Input> {
        let input = |node: &Node| if let Node::Input(input) = node { Some(*input) } else { None };
        let mut inputs: Vec<Input> = self.graph(hook).nodes.iter().filter_map(input).collect();
        inputs.sort_unstable();
        inputs
    }

    /// Whether a hook reads the position of a query or key.
    pub(crate) fn reads_positions(&self) -> bool {
        let mut nodes = self.graphs.iter().flat_map(|graph| &graph.nodes);
        nodes.any(|node| matches!(node, Node::Input(Input::Qo | Input::Kv)))
    }

    /// Drops unused names and sorts the others, so that equal variants compare equal.
    fn sort_names(&mut self) {
        let (mut scalars, mut tables, mut buffers) = (Vec::new(), Vec::new(), Vec::new());
        for graph in &self.graphs {
            for node in &graph.nodes {
                match node {
                    Node::Scalar(index) => scalars.push(*index),
                    Node::Read { table, .. } => tables.push(*table),
                    _ => {}
                }
            }
            buffers.extend(graph.stores.iter().map(|store| store.buffer));
        }
        let scalars = retain_used(&mut self.named.scalars, &scalars);
        let tables = retain_used(&mut self.named.tables, &tables);
        let buffers = retain_used(&mut self.named.buffers, &buffers);
        for graph in &mut self.graphs {
            for node in &mut graph.nodes {
                match node {
                    Node::Scalar(index) => *index = scalars[*index as usize],
                    Node::Read { table, .. } => *table = tables[*table as usize],
                    _ => {}
                }
            }
            graph.stores.iter_mut().for_each(|store| store.buffer = buffers[store.buffer as usize]);
        }
    }

    /// A hash of the computation, independent of the values of parameters, tables and buffers. Variants with equal
    /// fingerprints can share a kernel. The same on every machine.
    pub fn fingerprint(&self) -> u64 {
        let names = |list: Vec<&String>| format!("{list:?}");
        let scalars = names(self.named.scalars.iter().map(|(name, _)| name).collect());
        let tables = names(self.named.tables.iter().map(|(name, _)| name).collect());
        let buffers = names(self.named.buffers.iter().map(|(name, _)| name).collect());
        let tail = self.mask_tail.map_or(String::new(), |tail| format!(" {tail}"));
        let text = format!("{scalars} {tables} {buffers} {} {:?}{tail}", self.softmax, self.graphs);
        // FNV-1a
        text.bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    }

    /// The hook's results at `at`: numbers or a condition, according to the hook.
    #[inline(always)]
    pub(crate) fn evaluate<N: Number>(&self, hook: Hook, at: &At<N>, arguments: [N; 2]) -> ([N; 2], N::Bool) {
        // a small array if possible, because every element is initialized first
        const SMALL: usize = 24;
        let graph = self.graph(hook);
        let empty = ExpressionValue::Number(at.num_qo_heads);
        let (mut small, mut large);
        let values: &mut [ExpressionValue<N>] = if graph.nodes.len() <= SMALL {
            small = [empty; SMALL];
            &mut small
        } else {
            large = [empty; MAX_NODES];
            &mut large
        };
        for (index, node) in graph.nodes.iter().enumerate() {
            values[index] = self.node(node, at, arguments, values);
        }
        for store in &graph.stores {
            let (name, buffer) = &self.named.buffers[store.buffer as usize];
            if let (ExpressionValue::Number(index), ExpressionValue::Number(value)) =
                (values[store.index as usize], values[store.value as usize])
            {
                at.store(name, buffer, index, value);
            }
        }
        let (mut numbers, mut condition) = ([at.num_qo_heads; 2], at.always());
        for (i, &id) in graph.results.iter().enumerate() {
            match values[id as usize] {
                ExpressionValue::Number(number) => numbers[i] = number,
                ExpressionValue::Truth(truth) => condition = truth,
            }
        }
        (numbers, condition)
    }

    #[inline(always)]
    fn node<N: Number>(
        &self,
        node: &Node,
        at: &At<N>,
        arguments: [N; 2],
        values: &[ExpressionValue<N>],
    ) -> ExpressionValue<N> {
        match *node {
            Node::Number(bits) => ExpressionValue::Number(at.number(f32::from_bits(bits))),
            Node::Truth(value) => ExpressionValue::Truth(at.num_qo_heads.truth(value)),
            Node::Input(input) => ExpressionValue::Number(input_value(input, at, arguments)),
            Node::Scalar(index) => {
                let (name, value) = &self.named.scalars[index as usize];
                ExpressionValue::Number(at.scalar(name, *value))
            }
            Node::Read { table, index } => {
                let (name, table) = &self.named.tables[table as usize];
                match values[index as usize] {
                    ExpressionValue::Number(index) => ExpressionValue::Number(at.read(name, table, index)),
                    ExpressionValue::Truth(_) => values[index as usize],
                }
            }
            Node::Apply(op, operands) => apply(op, operands.map(|id| values[id as usize])),
        }
    }
}

/// Drops entries not in `used`, sorts by name, and returns the new indices.
fn retain_used<T>(list: &mut Vec<(String, T)>, used: &[u32]) -> Vec<u32> {
    let mut kept: Vec<(usize, (String, T))> = std::mem::take(list).into_iter().enumerate().collect();
    let len = kept.len();
    kept.retain(|(index, _)| used.contains(&(*index as u32)));
    kept.sort_by(|(_, (a, _)), (_, (b, _))| a.cmp(b));
    let mut new_indices = vec![0; len];
    for (to, (from, entry)) in kept.into_iter().enumerate() {
        new_indices[from] = to as u32;
        list.push(entry);
    }
    new_indices
}

#[inline(always)]
fn input_value<N: Number>(input: Input, at: &At<N>, arguments: [N; 2]) -> N {
    match input {
        Input::Request => at.request,
        Input::Qo => at.qo,
        Input::Kv => at.kv,
        Input::QoHead => at.qo_head,
        Input::KvHead => at.kv_head,
        Input::Dim => at.dim,
        Input::NumQoHeads => at.num_qo_heads,
        Input::NumKvHeads => at.num_kv_heads,
        Input::First | Input::X | Input::Logit | Input::Max | Input::O => arguments[0],
        Input::Second | Input::Sum => arguments[1],
    }
}

fn record<V: Variant>(recorder: &Recorder, variant: &V, hook: Hook) -> Graph {
    let at = recorder.at();
    let input = |i: usize| recorder.input(hook.arguments()[i]);
    let pair = || Pair { first: input(0), second: input(1) };
    let results = match hook {
        Hook::Query => {
            let pair = variant.query(&at, pair());
            vec![pair.first.id, pair.second.id]
        }
        Hook::Key => {
            let pair = variant.key(&at, pair());
            vec![pair.first.id, pair.second.id]
        }
        Hook::Value => vec![variant.value(&at, input(0)).id],
        Hook::Logits => vec![variant.logits(&at, input(0)).id],
        Hook::Mask => vec![variant.mask(&at).id],
        Hook::Update => {
            let (max, sum) = variant.update(&at, input(0), input(1));
            vec![max.id, sum.id]
        }
        Hook::Output => vec![variant.output(&at, input(0)).id],
    };
    recorder.finish(hook, &results)
}

impl Variant for ExpressionVariant {
    fn name(&self) -> &str {
        &self.name
    }

    fn has_softmax(&self) -> bool {
        self.softmax
    }

    fn bound_tables(&self) -> Vec<String> {
        self.bound.clone()
    }

    fn mask_tail(&self) -> Option<u32> {
        self.mask_tail
    }

    #[inline(always)]
    fn query<N: Number>(&self, at: &At<N>, pair: Pair<N>) -> Pair<N> {
        let [first, second] = N::interpret(self, Hook::Query, at, [pair.first, pair.second]).0;
        Pair { first, second }
    }

    #[inline(always)]
    fn key<N: Number>(&self, at: &At<N>, pair: Pair<N>) -> Pair<N> {
        let [first, second] = N::interpret(self, Hook::Key, at, [pair.first, pair.second]).0;
        Pair { first, second }
    }

    #[inline(always)]
    fn value<N: Number>(&self, at: &At<N>, x: N) -> N {
        N::interpret(self, Hook::Value, at, [x; 2]).0[0]
    }

    #[inline(always)]
    fn logits<N: Number>(&self, at: &At<N>, logit: N) -> N {
        N::interpret(self, Hook::Logits, at, [logit; 2]).0[0]
    }

    #[inline(always)]
    fn mask<N: Number>(&self, at: &At<N>) -> N::Bool {
        N::interpret(self, Hook::Mask, at, [at.num_qo_heads; 2]).1
    }

    #[inline(always)]
    fn update<N: Number>(&self, at: &At<N>, max: N, sum: N) -> (N, N) {
        let [max, sum] = N::interpret(self, Hook::Update, at, [max, sum]).0;
        (max, sum)
    }

    #[inline(always)]
    fn output<N: Number>(&self, at: &At<N>, o: N) -> N {
        N::interpret(self, Hook::Output, at, [o; 2]).0[0]
    }
}
