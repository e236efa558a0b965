//! The control-flow graph of machine code, and its natural loops.
//!
//! A natural loop is entered only at its head; a branch inside it jumps back to the head. The assembler moves cold code to the
//! end, so a backward branch alone does not imply a loop.

use super::sass::{Code, Inst};
use std::collections::BTreeSet;

/// The successors of each instruction.
#[derive(Debug)]
pub(crate) struct Flow {
    next: Vec<Vec<usize>>,
    /// Instructions with a label, which may be loop heads.
    labelled: BTreeSet<usize>,
}

/// A loop: its head and its instructions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Loop {
    pub(crate) head: usize,
    pub(crate) body: BTreeSet<usize>,
}

impl Flow {
    pub(crate) fn of(code: &Code) -> Self {
        let follow = |(at, inst): (usize, &Inst)| {
            let mut next = Vec::new();
            next.extend(target(inst).and_then(|label| code.labels.get(label)).copied());
            if may_fall_through(inst) {
                next.push(at + 1);
            }
            next.retain(|&to| to < code.insts.len());
            next
        };
        let labelled = code.labels.values().copied().filter(|&at| at < code.insts.len()).collect();
        Self { next: code.insts.iter().enumerate().map(follow).collect(), labelled }
    }

    /// Whether each instruction is reachable from `start`, inclusive, without passing those that satisfy `stop`.
    pub(crate) fn reach(
        &self,
        start: impl IntoIterator<Item = usize>,
        stop: impl Fn(usize) -> bool,
    ) -> Vec<bool> {
        let mut open: Vec<usize> = start.into_iter().collect();
        let mut seen = vec![false; self.next.len()];
        open.iter().for_each(|&at| seen[at] = true);
        while let Some(at) = open.pop() {
            let next: &[usize] = if stop(at) { &[] } else { &self.next[at] };
            open.extend(next.iter().copied().filter(|&to| !std::mem::replace(&mut seen[to], true)));
        }
        seen
    }

    /// All loops; loops with the same head are merged.
    pub(crate) fn loops(&self) -> Vec<Loop> {
        let mut before = vec![Vec::new(); self.next.len()];
        for (at, next) in self.next.iter().enumerate() {
            next.iter().for_each(|&to| before[to].push(at));
        }
        let back = Self { next: before, labelled: BTreeSet::new() };
        let reachable = self.reach([0], |_| false);
        let natural = |&head: &usize| {
            // dominated by the head: not reachable without passing it
            let around = self.reach([0], |at| at == head);
            let tail = |at: &usize| reachable[*at] && (*at == head || !around[*at]);
            let tails: Vec<usize> = back.next[head].iter().copied().filter(tail).collect();
            let is_inside = back.reach(tails.iter().copied().chain([head]), |at| at == head);
            let body = (0..is_inside.len()).filter(|&at| is_inside[at]).collect();
            (!tails.is_empty()).then_some(Loop { head, body })
        };
        self.labelled.iter().filter_map(natural).collect()
    }
}

/// The target label of a branch.
fn target(inst: &Inst) -> Option<&str> {
    let branches = matches!(inst.kind(), "BRA" | "JMP");
    let (_, label) = inst.operands.split_once("`(").filter(|_| branches)?;
    label.split(')').next()
}

/// Whether the next instruction may follow. A branch with a predicate operand is conditional.
fn may_fall_through(inst: &Inst) -> bool {
    let always = match inst.kind() {
        "BRA" | "JMP" => inst.operands.starts_with('`'),
        "BRX" | "JMX" | "EXIT" | "RET" => true,
        _ => inst.opcode == "BPT.TRAP",
    };
    inst.guarded || !always
}

#[cfg(test)]
mod tests {
    use super::{Flow, Loop};
    use crate::gate::sass::Code;

    fn loops(text: &str) -> Vec<Loop> {
        Flow::of(&Code::parse(text)).loops()
    }

    /// The head, last index and number of instructions of each loop.
    fn spans(text: &str) -> Vec<(usize, usize, usize)> {
        let span = |l: &Loop| (l.head, l.body.last().copied().unwrap_or_default(), l.body.len());
        loops(text).iter().map(span).collect()
    }

    #[test]
    fn an_out_of_line_retry_is_a_loop_and_part_of_the_outer_loop() {
        let text = "
            /*00*/ MOV R0, R1 ;
            .L_x_0:
            /*10*/ SYNCS P0, [UR6], R4 ;
            /*20*/ @!P0 BRA `(.L_x_1) ;
            .L_x_2:
            /*30*/ HGMMA R24 ;
            /*40*/ @P1 BRA `(.L_x_0) ;
            /*50*/ EXIT ;
            .L_x_1:
            /*60*/ SYNCS P0, [UR6], R4 ;
            /*70*/ @!P0 BRA `(.L_x_1) ;
            /*80*/ BRA `(.L_x_2) ;
        "
        .replace("            .L", ".L");
        assert_eq!(spans(&text), [(1, 8, 7), (6, 7, 2)]);
    }

    #[test]
    fn nested_loops_are_two_and_straight_line_code_has_none() {
        let text = "
.L_x_0:
            /*00*/ MOV R0, R1 ;
.L_x_1:
            /*10*/ HGMMA R24 ;
            /*20*/ BRA.U UP0, `(.L_x_1) ;
            /*30*/ @P0 BRA `(.L_x_0) ;
            /*40*/ EXIT ;
        ";
        assert_eq!(spans(text), [(0, 3, 4), (1, 2, 2)]);
        assert!(spans(&text.replace("BRA", "NOP")).is_empty());
    }

    #[test]
    fn traps_and_exits_have_no_successor() {
        for end in ["BPT.TRAP 0x1", "EXIT", "BRA `(.L_x_1)"] {
            let text = format!(
                ".L_x_0:\n/*00*/ MOV R0, R1 ;\n/*10*/ {end} ;\n/*20*/ BRA `(.L_x_0) ;\n.L_x_1:\n/*30*/ EXIT ;"
            );
            assert!(spans(&text).is_empty(), "{end}");
            assert_eq!(spans(&text.replace(end, &format!("@P0 {end}"))), [(0, 2, 3)], "{end}");
        }
    }
}
