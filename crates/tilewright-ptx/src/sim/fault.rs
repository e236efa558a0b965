//! Faults: kind, message, source line, and the threads that caused them.

use std::{error::Error, fmt, panic::Location};

/// The kind of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultKind {
    /// No thread of the grid can make progress.
    Deadlock,
    /// An address outside of all allocations.
    OutOfBounds,
    /// An address that is not aligned to the access.
    Misaligned,
    /// A read of uninitialized memory or of an uninitialized register.
    Uninitialized,
    /// Two unordered accesses to the same bytes, at least one a write.
    Race,
    /// The bytes that an mbarrier expects differ from the bytes that arrive.
    WrongTransactionCount,
    /// More threads arrive at a barrier than it expects.
    WrongArrivalCount,
    /// Two phases of an mbarrier completed while a thread waited for the first.
    WrongPhase,
    /// An access to memory or registers of an asynchronous operation in flight.
    InFlight,
    /// An asynchronous operation accesses bytes written by threads without a `fence.proxy.async`.
    MissingProxyFence,
    /// A `wgmma` uses registers that were written after the last `wgmma.fence`.
    MissingWgmmaFence,
    /// A warp or warpgroup instruction that some lanes do not execute.
    Divergence,
    /// An mbarrier instruction on other memory, or an ordinary access to an mbarrier.
    NotAnMbarrier,
    /// Operands, parameters or a launch configuration that the hardware rejects.
    BadArgument,
    /// The kernel executed `trap`.
    Trap,
    /// Threads loop without progress.
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

/// A fault of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The kind.
    pub kind: FaultKind,
    /// The observed values and the expectation.
    pub message: String,
    /// The source line of the instruction; none if no instruction is at fault.
    pub at: Option<&'static Location<'static>>,
    /// The CTA index in the grid.
    pub cta: [u32; 3],
    /// The warp index in the CTA.
    pub warp: u32,
    /// A bitmask of its lanes.
    pub lanes: u32,
}

impl Fault {
    /// A fault that is not caused by a thread.
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

/// The kind and message of a fault, before its threads are added.
pub(super) type FaultCause = (FaultKind, String);

/// A source line, with the file name only.
pub(super) fn line(at: &Location<'_>) -> String {
    let file = at.file().rsplit(['/', '\\']).next().unwrap_or_default();
    format!("{file}:{}", at.line())
}
