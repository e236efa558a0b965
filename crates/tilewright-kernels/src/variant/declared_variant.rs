//! A variant with declared kernel parameters, and its hooks, partially evaluated.

use super::{Arithmetic, Hooks, NodeValue, apply::apply, hoist::exact_nodes};
use std::rc::Rc;
use tilewright::attention::variant::{
    Hook, Input, Op,
    expression::{Graph, Node},
};
use tilewright_ptx::{Access, Builder, Global, Scope, Value};

/// Known index inputs of a hook; called only for inputs that the hook reads. Head counts and the hook's arguments are never
/// requested.
pub(crate) type HookInputs<'a, 'k> = dyn Fn(Input) -> Option<Value<'k, f32>> + 'a;

/// An array in device memory.
#[derive(Debug, Clone, Copy)]
struct Array<'k> {
    first: Global<'k, f32>,
    len: Value<'k, u32>,
}

/// A variant in a kernel.
#[derive(Debug, Clone)]
pub struct DeclaredVariant<'k, 'v>(Rc<VariantParams<'k, 'v>>);

#[derive(Debug)]
struct VariantParams<'k, 'v> {
    k: &'k Builder,
    hooks: Hooks<'v>,
    heads: [Value<'k, u32>; 2],
    scalars: Vec<Value<'k, f32>>,
    tables: Vec<Array<'k>>,
    buffers: Vec<Array<'k>>,
}

/// A partially evaluated hook in a kernel.
#[derive(Debug, Clone)]
pub struct PartialHook<'k, 'v> {
    params: Rc<VariantParams<'k, 'v>>,
    graph: &'v Graph,
    known: Vec<Option<NodeValue<'k>>>,
    /// Nodes to compute as soon as their operands are known.
    eager: Rc<[bool]>,
    /// Nodes to compute exactly.
    exact: Rc<[bool]>,
}

impl<'k, 'v> DeclaredVariant<'k, 'v> {
    #[track_caller]
    pub(super) fn new(k: &'k Builder, hooks: Hooks<'v>, heads: (Value<'k, u32>, Value<'k, u32>)) -> Self {
        let variant = hooks.variant;
        let array = |name: &str| Array {
            first: k.global(&format!("variant_{name}")),
            len: k.param(&format!("variant_{name}_len")),
        };
        Self(Rc::new(VariantParams {
            k,
            hooks,
            heads: heads.into(),
            scalars: variant.scalars().iter().map(|(name, _)| k.param(&format!("variant_{name}"))).collect(),
            tables: variant.tables().iter().map(|(name, _)| array(name)).collect(),
            buffers: variant.buffers().iter().map(|(name, _)| array(name)).collect(),
        }))
    }

    /// The hooks that it was declared from.
    pub fn hooks(&self) -> &Hooks<'v> {
        &self.0.hooks
    }

    /// The hook, evaluated as far as `inputs` allow. A hook that does nothing returns its arguments at no cost.
    #[track_caller]
    pub fn prepare(&self, hook: Hook, inputs: &HookInputs<'_, 'k>) -> PartialHook<'k, 'v> {
        let nodes = self.0.hooks.variant.graph(hook).nodes().len();
        self.with_known(hook, vec![None; nodes], vec![true; nodes]).evaluate(inputs, &[], true)
    }

    /// The hook with some known values, of which only `eager` nodes are computed later.
    pub(super) fn with_known(
        &self,
        hook: Hook,
        known: Vec<Option<NodeValue<'k>>>,
        eager: Vec<bool>,
    ) -> PartialHook<'k, 'v> {
        let graph = self.0.hooks.variant.graph(hook);
        let exact = exact_nodes(graph, self.0.hooks.arithmetic).into();
        PartialHook { params: Rc::clone(&self.0), graph, known, eager: eager.into(), exact }
    }
}

impl<'k> VariantParams<'k, '_> {
    /// `table[index]` as `At::read` defines it: the index is rounded down and clamped, NaN reads the first element.
    #[track_caller]
    fn read(&self, table: usize, index: Value<'k, f32>) -> Value<'k, f32> {
        let Array { first, len } = self.tables[table];
        // the conversion saturates, and maps NaN to 0
        let index = index.trunc_to_i32().max(0).reinterpret::<u32>();
        first.at(index.min(len - 1)).load_with(Access::ReadOnly)
    }

    /// `buffer[index] = value` as `At::store` defines it: no store outside of the buffer or for a NaN index.
    #[track_caller]
    fn store(&self, buffer: usize, index: Value<'k, f32>, value: Value<'k, f32>, real: Value<'k, bool>) {
        let Array { first, len } = self.buffers[buffer];
        let at = index.trunc_to_i32().reinterpret::<u32>();
        self.k.when(real & index.ge(0.0) & at.lt(len), || {
            // the order of several writes to one element is unspecified, as on the CPU
            first.at(at).store_with(value, Access::Relaxed(Scope::Gpu));
        });
    }
}

impl<'k> PartialHook<'k, '_> {
    /// Evaluates further with `inputs`.
    #[must_use]
    #[track_caller]
    pub fn bind(&self, inputs: &HookInputs<'_, 'k>) -> Self {
        self.evaluate(inputs, &[], true)
    }

    /// Applies the query or key hook to elements `i` and `i + head_dim / 2`.
    #[track_caller]
    pub fn pair(&self, inputs: &HookInputs<'_, 'k>, pair: [Value<'k, f32>; 2]) -> [Value<'k, f32>; 2] {
        let all = self.evaluate(inputs, &[(Input::First, pair[0]), (Input::Second, pair[1])], false);
        [all.number(0, pair[0]), all.number(1, pair[1])]
    }

    /// Applies the value hook to an element.
    #[track_caller]
    pub fn value(&self, inputs: &HookInputs<'_, 'k>, x: Value<'k, f32>) -> Value<'k, f32> {
        self.evaluate(inputs, &[(Input::X, x)], false).number(0, x)
    }

    /// Applies the logits hook to a scaled logit, in natural-log units. Its stores are executed only if `real`, that is, if the
    /// key exists.
    #[track_caller]
    pub fn logit(
        &self,
        inputs: &HookInputs<'_, 'k>,
        logit: Value<'k, f32>,
        real: Value<'k, bool>,
    ) -> Value<'k, f32> {
        let all = self.evaluate(inputs, &[(Input::Logit, logit)], false);
        for store in self.graph.stores() {
            let [index, value] = [store.index, store.value].map(|node| all.known[node as usize]);
            if let (Some(NodeValue::Number(index)), Some(NodeValue::Number(value))) = (index, value) {
                self.params.store(store.buffer as usize, index, value, real);
            }
        }
        all.number(0, logit)
    }

    /// Applies the mask hook: whether the row sees the key.
    #[track_caller]
    pub fn mask(&self, inputs: &HookInputs<'_, 'k>) -> Value<'k, bool> {
        match self.evaluate(inputs, &[], false).result(0) {
            Some(NodeValue::Truth(seen)) => seen,
            _ => self.params.k.constant(true),
        }
    }

    /// Applies the update hook to a row's state `(max, Σ e^(logit - max))`, in natural-log units; (-inf, 0) if no key is visible.
    #[track_caller]
    pub fn update(
        &self,
        inputs: &HookInputs<'_, 'k>,
        max: Value<'k, f32>,
        sum: Value<'k, f32>,
    ) -> (Value<'k, f32>, Value<'k, f32>) {
        let all = self.evaluate(inputs, &[(Input::Max, max), (Input::Sum, sum)], false);
        (all.number(0, max), all.number(1, sum))
    }

    /// Applies the output hook to an element.
    #[track_caller]
    pub fn output(&self, inputs: &HookInputs<'_, 'k>, o: Value<'k, f32>) -> Value<'k, f32> {
        self.evaluate(inputs, &[(Input::O, o)], false).number(0, o)
    }

    pub(super) fn builder(&self) -> &'k Builder {
        self.params.k
    }

    pub(super) fn graph(&self) -> &Graph {
        self.graph
    }

    /// Whether a node is computed as soon as its operands are known.
    pub(super) fn is_eager(&self, node: usize) -> bool {
        self.eager[node]
    }

    /// Whether a node is computed exactly.
    pub(super) fn is_exact(&self, node: usize) -> bool {
        self.exact[node]
    }

    #[track_caller]
    pub(super) fn read(&self, table: u32, index: Value<'k, f32>) -> Value<'k, f32> {
        self.params.read(table as usize, index)
    }

    /// The value of a number, a scalar, or a number of heads.
    #[track_caller]
    pub(super) fn uniform(&self, node: &Node) -> Option<NodeValue<'k>> {
        self.node(0, node, &|input| self.input(input, &|_| None, &[]), false)
    }

    pub(super) fn known(&self, node: u32) -> Option<NodeValue<'k>> {
        self.known[node as usize]
    }

    fn result(&self, place: usize) -> Option<NodeValue<'k>> {
        self.graph.results().get(place).and_then(|&node| self.known[node as usize])
    }

    /// A numeric result, or `argument` if an input is missing.
    fn number(&self, place: usize, argument: Value<'k, f32>) -> Value<'k, f32> {
        match self.result(place) {
            Some(NodeValue::Number(value)) => value,
            _ => argument,
        }
    }

    /// Evaluates all nodes whose inputs are known; `once` as in [`apply`].
    #[track_caller]
    fn evaluate(
        &self,
        inputs: &HookInputs<'_, 'k>,
        arguments: &[(Input, Value<'k, f32>)],
        once: bool,
    ) -> Self {
        let mut values = self.clone();
        for (at, node) in self.graph.nodes().iter().enumerate() {
            if values.known[at].is_none() && self.eager[at] {
                let input = |input| self.input(input, inputs, arguments);
                values.known[at] = values.node(at, node, &input, once);
            }
        }
        values
    }

    #[track_caller]
    fn input(
        &self,
        input: Input,
        inputs: &HookInputs<'_, 'k>,
        arguments: &[(Input, Value<'k, f32>)],
    ) -> Option<Value<'k, f32>> {
        let argument = arguments.iter().find(|(of, _)| *of == input).map(|(_, value)| *value);
        match input {
            Input::NumQoHeads => Some(self.params.heads[0].to_f32()),
            Input::NumKvHeads => Some(self.params.heads[1].to_f32()),
            Input::First | Input::Second | Input::X | Input::Logit | Input::Max | Input::Sum | Input::O => {
                argument
            }
            _ => inputs(input),
        }
    }

    /// A node's value, if its operands are known.
    #[track_caller]
    fn node(&self, at: usize, node: &Node, input: &HookInputs<'_, 'k>, once: bool) -> Option<NodeValue<'k>> {
        let (params, k) = (&self.params, self.params.k);
        match *node {
            Node::Number(bits) => Some(NodeValue::Number(k.constant(f32::from_bits(bits)))),
            Node::Truth(truth) => Some(NodeValue::Truth(k.constant(truth))),
            Node::Input(of) => input(of).map(NodeValue::Number),
            Node::Scalar(place) => Some(NodeValue::Number(params.scalars[place as usize])),
            Node::Read { table, index } => match self.known[index as usize] {
                Some(NodeValue::Number(index)) => Some(NodeValue::Number(params.read(table as usize, index))),
                _ => None,
            },
            Node::Apply(op, _) => {
                let arithmetic = if self.exact[at] { Arithmetic::Exact } else { Arithmetic::Fast };
                self.apply_op(op, node.operands(), arithmetic, once)
            }
        }
    }

    #[track_caller]
    fn apply_op(
        &self,
        op: Op,
        operands: &[u32],
        arithmetic: Arithmetic,
        once: bool,
    ) -> Option<NodeValue<'k>> {
        let known: Option<Vec<NodeValue<'k>>> =
            operands.iter().map(|&operand| self.known[operand as usize]).collect();
        known.map(|known| apply(self.params.k, op, &known, arithmetic, once))
    }
}
