//! Matrix instructions: `ldmatrix`, `stmatrix`, `mma.sync`, and the asynchronous `wgmma`.

use super::{
    Form,
    Slot::{Address, Register, Value},
    types::Class::{self, B32, B64},
};

/// The element type of A and B. Accumulators are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Elements {
    /// f16
    F16,
    /// bf16
    Bf16,
    /// e4m3
    E4m3,
}

impl Elements {
    /// The PTX type name.
    pub fn ptx(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::E4m3 => "e4m3",
        }
    }

    /// Bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 => 1,
        }
    }

    /// The K extent of one MMA: 32 bytes of elements.
    pub fn depth(self) -> usize {
        32 / self.bytes()
    }
}

/// The major dimension of a `wgmma` operand in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Major {
    /// K-major: elements adjacent in K are contiguous.
    K,
    /// MN-major: rows of A or columns of B are contiguous; 16-bit elements only.
    Mn,
}

/// The source of the A operand of a `wgmma`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Left {
    /// Shared memory, by a descriptor.
    Shared(Major),
    /// Four registers of each thread.
    Registers,
}

/// A matrix instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MatrixOp {
    /// `ldmatrix`: loads 1, 2 or 4 matrices of 8 rows of 16 bytes; lanes 8 i .. 8 i + 8 hold the row addresses of matrix i.
    /// `true` transposes in units of 16 bits. Operands: `[a + offset]`.
    Load(usize, bool),
    /// `stmatrix`, the inverse. Operands: `[a + offset], values..`.
    Store(usize, bool),
    /// D = A · B + C with shape 16 × 8 × [`Elements::depth`], per warp. Results: D (4). Operands: A (4), B (2), C (4).
    Mma(Elements),
    /// D = A · B, or D += A · B if the last operand is true, with shape 64 × n × [`Elements::depth`]. Runs asynchronously for a
    /// warpgroup. Results: the n / 2 registers of D per thread, which are also read. Operands: A (a descriptor or 4 registers);
    /// the descriptor of B; the condition.
    Wgmma {
        /// Columns, a multiple of 8 up to 256.
        n: usize,
        /// Element type of A and B.
        elements: Elements,
        /// The source of A.
        left: Left,
        /// The major dimension of B.
        right: Major,
    },
    /// Orders registers and shared memory before the `wgmma` that follow.
    WgmmaFence,
    /// Commits the pending `wgmma` as a group.
    WgmmaCommit,
    /// Waits until at most this many of the most recent groups are incomplete.
    WgmmaWait(usize),
}

impl MatrixOp {
    pub(super) fn form(self) -> Form {
        match self {
            Self::Load(count, transposed) => {
                let trans = if transposed { ".trans" } else { "" };
                let spelling = format!("ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 $*d, $0");
                Form::new(spelling, "6.5", "sm_75")
                    .results(vec![B32; count])
                    .operands([Address(B32)])
                    .aligned()
            }
            Self::Store(count, transposed) => {
                let trans = if transposed { ".trans" } else { "" };
                let spelling =
                    format!("stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 $0, $*2:{}", 2 + count);
                let operands = [vec![Address(B32)], vec![Register(B32); count]].concat();
                Form::new(spelling, "7.8", "sm_90").operands(operands).aligned()
            }
            Self::Mma(elements) => {
                let (name, depth) = (elements.ptx(), elements.depth());
                let spelling = format!(
                    "mma.sync.aligned.m16n8k{depth}.row.col.f32.{name}.{name}.f32 $*d, $*0:4, $*4:6, $*6:10"
                );
                let (ptx, sm) = match elements {
                    Elements::E4m3 => ("8.4", "sm_89"),
                    _ => ("7.0", "sm_80"),
                };
                Form::new(spelling, ptx, sm).results([B32; 4]).operands([Register(B32); 10]).aligned()
            }
            Self::Wgmma { n, elements, left, right } => wgmma(n, elements, left, right),
            Self::WgmmaFence => Form::new("wgmma.fence.sync.aligned", "8.0", "sm_90a").aligned(),
            Self::WgmmaCommit => Form::new("wgmma.commit_group.sync.aligned", "8.0", "sm_90a").aligned(),
            Self::WgmmaWait(count) => {
                Form::new(format!("wgmma.wait_group.sync.aligned {count}"), "8.0", "sm_90a").aligned()
            }
        }
    }
}

fn wgmma(n: usize, elements: Elements, left: Left, right: Major) -> Form {
    let (a_words, a_slots) = match left {
        Left::Shared(_) => ("$0", vec![Value(B64)]),
        Left::Registers => ("$*0:4", vec![Register(B32); 4]),
    };
    let at = a_slots.len();
    // only 16-bit elements support both major dimensions and have the qualifier
    let transposed = |major| if major == Major::Mn { ", 1" } else { ", 0" };
    let ways = match (elements.bytes(), left) {
        (2, Left::Shared(major)) => format!("{}{}", transposed(major), transposed(right)),
        (2, Left::Registers) => transposed(right).to_owned(),
        _ => String::new(),
    };
    let (depth, name) = (elements.depth(), elements.ptx());
    let spelling = format!(
        "wgmma.mma_async.sync.aligned.m64n{n}k{depth}.f32.{name}.{name} $*d, {a_words}, ${at}, ${}, 1, 1{ways}",
        at + 1
    );
    let operands = [a_slots, vec![Value(B64), Value(Class::Pred)]].concat();
    Form::new(spelling, "8.0", "sm_90a").results(vec![B32; n / 2]).operands(operands).aligned()
}
