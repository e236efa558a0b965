//! Warp-level primitives: shuffles, votes, reductions.

use super::{Exec, FaultCause, Next, Range};
use crate::isa::{Lanes, Shuffle, WarpOp, WarpReduction};

impl Exec<'_, '_> {
    pub(super) fn lanes(&mut self, op: WarpOp, results: Range, operands: Range) -> Result<Next, FaultCause> {
        let out: Lanes = match op {
            WarpOp::Shuffle(kind) => shuffle(kind, self.operand(operands, 0), self.operand(operands, 1)),
            WarpOp::Ballot => [u64::from(ballot(self.operand(operands, 0))); 32],
            WarpOp::Any => [u64::from(ballot(self.operand(operands, 0)) != 0); 32],
            WarpOp::All => [u64::from(ballot(self.operand(operands, 0)) == !0); 32],
            WarpOp::Reduce(kind) => [reduce(kind, self.operand(operands, 0)); 32],
            WarpOp::Elect => {
                let elected = self.world.rng.below(32);
                std::array::from_fn(|lane| u64::from(lane == elected))
            }
            WarpOp::Sync => {
                self.sync_lanes();
                return Ok(Next::Advance);
            }
        };
        self.write(self.result(results), &out)?;
        Ok(Next::Advance)
    }
}

fn ballot(p: &Lanes) -> u32 {
    p.iter().enumerate().fold(0, |ballot, (lane, p)| ballot | ((*p & 1) as u32) << lane)
}

fn shuffle(kind: Shuffle, a: &Lanes, which: &Lanes) -> Lanes {
    std::array::from_fn(|lane| {
        let by = (which[lane] & 31) as usize;
        let from = match kind {
            Shuffle::Index => by,
            Shuffle::Butterfly => lane ^ by,
            Shuffle::Up => lane.checked_sub(by).unwrap_or(lane),
            Shuffle::Down => Some(lane + by).filter(|&from| from < 32).unwrap_or(lane),
        };
        a[from]
    })
}

fn reduce(kind: WarpReduction, a: &Lanes) -> u64 {
    let words = a.iter().map(|&word| word as u32);
    let result = match kind {
        WarpReduction::Add => words.reduce(u32::wrapping_add),
        WarpReduction::MinU32 => words.min(),
        WarpReduction::MaxU32 => words.max(),
        WarpReduction::MinS32 => words.map(u32::cast_signed).min().map(i32::cast_unsigned),
        WarpReduction::MaxS32 => words.map(u32::cast_signed).max().map(i32::cast_unsigned),
        WarpReduction::And => words.reduce(|a, b| a & b),
        WarpReduction::Or => words.reduce(|a, b| a | b),
        WarpReduction::Xor => words.reduce(|a, b| a ^ b),
    };
    u64::from(result.unwrap_or(0))
}
