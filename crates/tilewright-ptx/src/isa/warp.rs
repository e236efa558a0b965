//! Warp-level primitives: shuffles, votes, reductions. All 32 lanes must execute them together.

use super::{
    Form,
    Slot::Value,
    types::Class::{self, B32, Pred},
};

/// The source lane of a shuffle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Shuffle {
    /// `operand`
    Index,
    /// `lane ^ operand`
    Butterfly,
    /// `lane - operand`, or `lane` if that is below 0.
    Up,
    /// `lane + operand`, or `lane` if that is above 31.
    Down,
}

/// The operator of a warp reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WarpReduction {
    /// Sum modulo 2^32.
    Add,
    /// Minimum of u32.
    MinU32,
    /// Maximum of u32.
    MaxU32,
    /// Minimum of i32.
    MinS32,
    /// Maximum of i32.
    MaxS32,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise xor.
    Xor,
}

/// A warp-level primitive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WarpOp {
    /// `a` of another lane; operands `a`, lane selector.
    Shuffle(Shuffle),
    /// A bitmask of the lanes with a true operand.
    Ballot,
    /// Whether the operand is true in any lane.
    Any,
    /// Whether the operand is true in all lanes.
    All,
    /// Reduces the words of all lanes to one.
    Reduce(WarpReduction),
    /// True in one elected lane.
    Elect,
    /// Barrier of all lanes, with memory ordering between them.
    Sync,
}

impl WarpOp {
    pub(super) fn form(self) -> Form {
        const ALL: &str = "0xffffffff";
        let form = |spelling: String, ptx, sm| Form::new(spelling, ptx, sm).results([B32]);
        let of = |form: Form, class: Class| form.operands([Value(class)]);
        match self {
            Self::Shuffle(kind) => {
                let (word, clamp) = match kind {
                    Shuffle::Index => ("idx", 31),
                    Shuffle::Butterfly => ("bfly", 31),
                    Shuffle::Up => ("up", 0),
                    Shuffle::Down => ("down", 31),
                };
                let spelling = format!("shfl.sync.{word}.b32 $d, $0, $1, {clamp}, {ALL}");
                form(spelling, "6.0", "sm_50").operands([Value(B32), Value(B32)])
            }
            Self::Ballot => of(form(format!("vote.sync.ballot.b32 $d, $0, {ALL}"), "6.0", "sm_50"), Pred),
            Self::Any => {
                of(form(format!("vote.sync.any.pred $d, $0, {ALL}"), "6.0", "sm_50").results([Pred]), Pred)
            }
            Self::All => {
                of(form(format!("vote.sync.all.pred $d, $0, {ALL}"), "6.0", "sm_50").results([Pred]), Pred)
            }
            Self::Reduce(kind) => {
                let word = match kind {
                    WarpReduction::Add => "add.u32",
                    WarpReduction::MinU32 => "min.u32",
                    WarpReduction::MaxU32 => "max.u32",
                    WarpReduction::MinS32 => "min.s32",
                    WarpReduction::MaxS32 => "max.s32",
                    WarpReduction::And => "and.b32",
                    WarpReduction::Or => "or.b32",
                    WarpReduction::Xor => "xor.b32",
                };
                of(form(format!("redux.sync.{word} $d, $0, {ALL}"), "7.0", "sm_80"), B32)
            }
            Self::Elect => Form::new(format!("elect.sync _|$d, {ALL}"), "8.0", "sm_90").results([Pred]),
            Self::Sync => Form::new(format!("bar.warp.sync {ALL}"), "6.0", "sm_50"),
        }
        .aligned()
    }
}
