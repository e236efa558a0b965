//! Expression graph of a hook, without duplicate nodes. Any [`Number`] evaluates it, and kernels are generated from it.
//!
//! Invariant: operands precede their node, and nodes are in the order in which results need them. Equal hooks therefore
//! have equal graphs.

use super::{Number, hook::Hook};

/// Maximum nodes of one hook.
pub(super) const MAX_NODES: usize = 512;

/// Declares an enum whose variants have names in JSON.
macro_rules! named {
    ($(#[$meta:meta])* pub enum $Enum:ident[$count:literal] { $($Variant:ident = $name:literal,)+ }) => {
        $(#[$meta])*
        pub enum $Enum {
            $($Variant),+
        }

        impl $Enum {
            /// All variants with their names.
            pub const NAMED: [(Self, &'static str); $count] = [$((Self::$Variant, $name)),+];

            /// The name in JSON.
            pub fn name(self) -> &'static str {
                Self::NAMED[self as usize].1
            }
        }
    };
}

named! {
    /// An input of a graph: an index, or an argument of its hook.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    #[expect(missing_docs, reason = "named as the methods of `At` and the arguments of the hooks")]
    pub enum Input[15] {
        Request = "request",
        Qo = "qo",
        Kv = "kv",
        QoHead = "qo_head",
        KvHead = "kv_head",
        Dim = "dim",
        NumQoHeads = "num_qo_heads",
        NumKvHeads = "num_kv_heads",
        First = "first",
        Second = "second",
        X = "x",
        Logit = "logit",
        Max = "max",
        Sum = "sum",
        O = "o",
    }
}

named! {
    /// An operation; [`Number`] defines its semantics.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[expect(missing_docs, reason = "named as the methods of `Number`")]
    pub enum Op[26] {
        Neg = "neg",
        Abs = "abs",
        Floor = "floor",
        Sqrt = "sqrt",
        Exp2 = "exp2",
        Log2 = "log2",
        Exp = "exp",
        Tanh = "tanh",
        Sigmoid = "sigmoid",
        SinTurns = "sin_turns",
        CosTurns = "cos_turns",
        Add = "add",
        Sub = "sub",
        Mul = "mul",
        Div = "div",
        Min = "min",
        Max = "max",
        MulAdd = "mul_add",
        Turns = "turns",
        Lt = "lt",
        Le = "le",
        Eq = "eq",
        And = "and",
        Or = "or",
        Not = "not",
        Select = "select",
    }
}

/// The type of a node's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ValueKind {
    /// A number.
    Number,
    /// A condition.
    Truth,
}

impl Op {
    /// Operand kinds and result kind.
    pub fn signature(self) -> (&'static [ValueKind], ValueKind) {
        use ValueKind::{Number, Truth};
        match self {
            Self::Not => (&[Truth], Truth),
            Self::And | Self::Or => (&[Truth, Truth], Truth),
            Self::Lt | Self::Le | Self::Eq => (&[Number, Number], Truth),
            Self::Select => (&[Truth, Number, Number], Number),
            Self::MulAdd | Self::Turns => (&[Number, Number, Number], Number),
            Self::Add | Self::Sub | Self::Mul | Self::Div | Self::Min | Self::Max => {
                (&[Number, Number], Number)
            }
            _ => (&[Number], Number),
        }
    }
}

/// One value of a graph. Operands are indices into [`Graph::nodes`], others indices into the variant's lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Node {
    /// A constant, by its bits.
    Number(u32),
    /// A constant condition.
    Truth(bool),
    /// An index or an argument.
    Input(Input),
    /// A parameter.
    Scalar(u32),
    /// An element of a table.
    Read {
        /// Which table.
        table: u32,
        /// Which element.
        index: u32,
    },
    /// An operation; unused operands are 0.
    Apply(Op, [u32; 3]),
}

impl Node {
    /// The operand nodes.
    pub fn operands(&self) -> &[u32] {
        match self {
            Self::Read { index, .. } => std::slice::from_ref(index),
            Self::Apply(op, operands) => &operands[..op.signature().0.len()],
            _ => &[],
        }
    }

    /// The kind of its value.
    pub fn kind(&self) -> ValueKind {
        match self {
            Self::Truth(_) => ValueKind::Truth,
            Self::Apply(op, _) => op.signature().1,
            _ => ValueKind::Number,
        }
    }
}

/// A write to a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Store {
    /// Which buffer.
    pub buffer: u32,
    /// The node of the index.
    pub index: u32,
    /// The node of the value.
    pub value: u32,
}

/// One hook.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Graph {
    pub(super) nodes: Vec<Node>,
    pub(super) stores: Vec<Store>,
    pub(super) results: Vec<u32>,
}

impl Graph {
    /// The nodes, operands first.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The writes, in order.
    pub fn stores(&self) -> &[Store] {
        &self.stores
    }

    /// The result nodes: two for pairs and states, otherwise one.
    pub fn results(&self) -> &[u32] {
        &self.results
    }

    /// Whether the hook has an effect: it does not just return its arguments or show every key.
    pub(super) fn is_live(&self, hook: Hook) -> bool {
        let identity = hook.identity();
        let same = self.results.iter().map(|&id| self.nodes[id as usize]).eq(identity);
        !same || !self.stores.is_empty()
    }

    /// The canonical graph: only reachable nodes, in the order in which results need them.
    pub(super) fn canonical(&self) -> Self {
        let mut renumbering =
            Renumbering { from: self, new_ids: vec![None; self.nodes.len()], nodes: Vec::new() };
        let renumber = |renumbering: &mut Renumbering<'_>, store: &Store| Store {
            index: renumbering.visit(store.index),
            value: renumbering.visit(store.value),
            ..*store
        };
        let stores = self.stores.iter().map(|store| renumber(&mut renumbering, store)).collect();
        let results = self.results.iter().map(|&id| renumbering.visit(id)).collect();
        Self { stores, results, nodes: renumbering.nodes }
    }
}

/// Depth-first renumbering of nodes.
struct Renumbering<'a> {
    from: &'a Graph,
    new_ids: Vec<Option<u32>>,
    nodes: Vec<Node>,
}

impl Renumbering<'_> {
    /// Recursion is bounded by [`MAX_NODES`].
    fn visit(&mut self, id: u32) -> u32 {
        if let Some(new_id) = self.new_ids[id as usize] {
            return new_id;
        }
        let node = match self.from.nodes[id as usize] {
            Node::Read { table, index } => Node::Read { table, index: self.visit(index) },
            Node::Apply(op, mut operands) => {
                for operand in &mut operands[..op.signature().0.len()] {
                    *operand = self.visit(*operand);
                }
                Node::Apply(op, operands)
            }
            other => other,
        };
        let new_id = self.nodes.len() as u32;
        self.nodes.push(node);
        self.new_ids[id as usize] = Some(new_id);
        new_id
    }
}

/// A node's value.
#[derive(Clone, Copy)]
pub(super) enum ExpressionValue<N: Number> {
    Number(N),
    Truth(N::Bool),
}

/// Evaluates one operation. Operands must match its signature; otherwise the result is the first operand.
#[inline(always)]
pub(super) fn apply<N: Number>(op: Op, operands: [ExpressionValue<N>; 3]) -> ExpressionValue<N> {
    use ExpressionValue::{Number as Num, Truth};
    match (op, operands) {
        (Op::Neg, [Num(a), ..]) => Num(-a),
        (Op::Abs, [Num(a), ..]) => Num(a.abs()),
        (Op::Floor, [Num(a), ..]) => Num(a.floor()),
        (Op::Sqrt, [Num(a), ..]) => Num(a.sqrt()),
        (Op::Exp2, [Num(a), ..]) => Num(a.exp2()),
        (Op::Log2, [Num(a), ..]) => Num(a.log2()),
        (Op::Exp, [Num(a), ..]) => Num(a.exp()),
        (Op::Tanh, [Num(a), ..]) => Num(a.tanh()),
        (Op::Sigmoid, [Num(a), ..]) => Num(a.sigmoid()),
        (Op::SinTurns, [Num(a), ..]) => Num(a.sin_cos_turns().0),
        (Op::CosTurns, [Num(a), ..]) => Num(a.sin_cos_turns().1),
        (Op::Add, [Num(a), Num(b), _]) => Num(a + b),
        (Op::Sub, [Num(a), Num(b), _]) => Num(a - b),
        (Op::Mul, [Num(a), Num(b), _]) => Num(a * b),
        (Op::Div, [Num(a), Num(b), _]) => Num(a / b),
        (Op::Min, [Num(a), Num(b), _]) => Num(a.min(b)),
        (Op::Max, [Num(a), Num(b), _]) => Num(a.max(b)),
        (Op::MulAdd, [Num(a), Num(b), Num(c)]) => Num(a.mul_add(b, c)),
        (Op::Turns, [Num(a), Num(b), Num(c)]) => Num(a.turns(b, c)),
        (Op::Lt, [Num(a), Num(b), _]) => Truth(a.lt(b)),
        (Op::Le, [Num(a), Num(b), _]) => Truth(a.le(b)),
        (Op::Eq, [Num(a), Num(b), _]) => Truth(a.eq(b)),
        (Op::And, [Truth(a), Truth(b), _]) => Truth(a & b),
        (Op::Or, [Truth(a), Truth(b), _]) => Truth(a | b),
        (Op::Not, [Truth(a), ..]) => Truth(!a),
        (Op::Select, [Truth(a), Num(b), Num(c)]) => Num(N::select(a, b, c)),
        (_, [first, ..]) => first,
    }
}
