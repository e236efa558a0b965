//! What the lanes of a warp do together: shuffles, votes, reductions. All lanes take part, so all must be there.

use super::{
    Form,
    Slot::Value,
    types::Class::{self, B32, Pred},
};

/// From which lane a shuffle takes its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Shuffle {
    /// The lane whose number is the operand.
    Index,
    /// `lane ^ operand`
    Butterfly,
    /// `lane - operand`, or its own where that is below the first.
    Up,
    /// `lane + operand`, or its own where that is beyond the last.
    Down,
}

/// How a warp's words become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WarpReduction {
    /// Their sum, modulo 2^32.
    Add,
    /// The least u32.
    MinU32,
    /// The greatest u32.
    MaxU32,
    /// The least i32.
    MinS32,
    /// The greatest i32.
    MaxS32,
    /// Bits that all have.
    And,
    /// Bits that any has.
    Or,
    /// Bits that an odd number has.
    Xor,
}

/// An instruction of a whole warp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Warp {
    /// `a` of another lane; operands `a`, which.
    Shuffle(Shuffle),
    /// One bit for each lane: whether its operand holds.
    Ballot,
    /// Whether the operand holds in any lane.
    Any,
    /// Whether it holds in all.
    All,
    /// One word of all lanes' words.
    Reduce(WarpReduction),
    /// One bit for each lane with the same word as this one.
    Match,
    /// Whether this is the one lane that is elected.
    Elect,
    /// Waits for all lanes; what they wrote to memory before, all see afterwards.
    Sync,
    /// The lanes that execute this, one bit each; they need not be all.
    ActiveMask,
}

impl Warp {
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
            Self::Match => of(form(format!("match.any.sync.b32 $d, $0, {ALL}"), "6.0", "sm_70"), B32),
            Self::Elect => Form::new(format!("elect.sync _|$d, {ALL}"), "8.0", "sm_90").results([Pred]),
            Self::Sync => Form::new(format!("bar.warp.sync {ALL}"), "6.0", "sm_50"),
            Self::ActiveMask => return Form::new("activemask.b32 $d", "6.2", "sm_50").results([B32]),
        }
        .aligned()
    }
}
