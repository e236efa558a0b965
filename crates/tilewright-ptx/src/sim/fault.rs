//! What a kernel did wrong, where, and who did it.

use std::{error::Error, fmt, panic::Location};

/// A kind of mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultKind {
    /// Nothing in the grid can go on.
    Deadlock,
    /// An address outside of what there is.
    OutOfBounds,
    /// An address that is not a multiple of the whole access.
    Misaligned,
    /// Memory or a register that nobody wrote.
    Uninitialized,
    /// Two threads touch the same bytes, one of them writes, and nothing orders them.
    Race,
    /// Bytes that an mbarrier is told to expect are not those that arrive.
    WrongTransactionCount,
    /// More threads arrive at a barrier than it expects.
    WrongArrivalCount,
    /// A phase of an mbarrier ended twice while a thread waited for its first end.
    WrongPhase,
    /// Memory or registers of an asynchronous operation that nobody waited for.
    InFlight,
    /// An asynchronous operation meets what threads wrote without `fence.proxy.async`.
    MissingProxyFence,
    /// A `wgmma` meets registers that were written after the last `wgmma.fence`.
    MissingWgmmaFence,
    /// An instruction for a whole warp or warpgroup that some of its lanes do not execute.
    Divergence,
    /// An instruction on an mbarrier where there is none, or an ordinary access to one.
    NotAnMbarrier,
    /// Operands, parameters or a launch that the hardware refuses.
    BadArgument,
    /// The kernel gave up (`trap`).
    Trap,
    /// Threads go round without changing anything.
    RunsForever,
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deadlock => "deadlock",
            Self::OutOfBounds => "out of bounds",
            Self::Misaligned => "misaligned address",
            Self::Uninitialized => "uninitialised",
            Self::Race => "race",
            Self::WrongTransactionCount => "wrong transaction count",
            Self::WrongArrivalCount => "wrong arrival count",
            Self::WrongPhase => "wrong phase",
            Self::InFlight => "in flight",
            Self::MissingProxyFence => "missing proxy fence",
            Self::MissingWgmmaFence => "missing wgmma fence",
            Self::Divergence => "divergence",
            Self::NotAnMbarrier => "not an mbarrier",
            Self::BadArgument => "bad argument",
            Self::Trap => "trap",
            Self::RunsForever => "runs forever",
        })
    }
}

/// A mistake of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// What kind.
    pub kind: FaultKind,
    /// What happened, with values, and what was expected.
    pub message: String,
    /// The line that recorded the instruction; none where no instruction is to blame.
    pub at: Option<&'static Location<'static>>,
    /// The CTA in the grid.
    pub cta: [u32; 3],
    /// The warp in its CTA.
    pub warp: u32,
    /// Which of its lanes, one bit each.
    pub lanes: u32,
}

impl Fault {
    /// One that no thread is to blame for.
    pub(super) fn of_launch(kind: FaultKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), at: None, cta: [0; 3], warp: 0, lanes: 0 }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.message)?;
        if let Some(at) = self.at {
            write!(f, " at {}", line(at))?;
        }
        if self.lanes != 0 {
            let [x, y, z] = self.cta;
            let cta = if y == 0 && z == 0 { format!("{x}") } else { format!("{x},{y},{z}") };
            write!(f, " (cta {cta}, warp {}, lanes {:#x})", self.warp, self.lanes)?;
        }
        Ok(())
    }
}

impl Error for Fault {}

/// What is wrong, before it is known who does it.
pub(super) type Trouble = (FaultKind, String);

/// A line of the kernel's source, the file without its folders.
pub(super) fn line(at: &Location<'_>) -> String {
    let file = at.file().rsplit(['/', '\\']).next().unwrap_or_default();
    format!("{file}:{}", at.line())
}
