//! Overlap of softmax with an MMA: the share of a main loop's row maxima between its two waits. The exponentials
//! follow the second wait, and overlap with the MMAs of another warpgroup.
//!
//! ```text
//! HGMMA ..  Q · Kᵀ of this tile          issued
//! HGMMA ..  P · V of the previous tile   issued
//! WARPGROUP.DEPBAR.LE gsb0, 0x1          the first is complete, the second in flight
//! FMNMX ..                               row maxima, overlap the second
//! WARPGROUP.DEPBAR.LE gsb0, 0x0          the second is complete
//! ```
//!
//! The assembler may move the second wait before the softmax, which does not depend on the MMA.

use super::{
    flow::{Flow, Loop},
    sass::{Code, Inst},
};

/// The minimum share of maxima between the waits.
pub(crate) const MIN_SHARE: f64 = 0.95;

/// The maxima of a loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Overlap {
    /// Maxima between the waits on every path through the loop.
    pub(crate) between: usize,
    pub(crate) all: usize,
}

impl Overlap {
    /// The share between the waits, 0 to 1.
    pub(crate) fn share(self) -> f64 {
        self.between as f64 / self.all as f64
    }

    /// The overlap of the main loop, which is the innermost one with MMAs and maxima; the minimum if there are several.
    pub(crate) fn of(code: &Code) -> Option<Self> {
        let flow = Flow::of(code);
        let has = |l: &Loop, what: fn(&Inst) -> bool| l.body.iter().any(|&at| what(&code.insts[at]));
        let mut loops = flow.loops();
        loops.retain(|l| has(l, |inst| inst.kind() == "HGMMA") && has(l, is_maximum));
        let innermost =
            |l: &&Loop| !loops.iter().any(|other| other.head != l.head && other.body.is_subset(&l.body));
        let overlaps = loops.iter().filter(innermost).map(|l| Self::of_loop(code, &flow, l));
        overlaps.min_by(|a, b| a.share().total_cmp(&b.share()))
    }

    fn of_loop(code: &Code, flow: &Flow, main: &Loop) -> Self {
        let waits = |running: bool| {
            let kind = move |at: &usize| wait(&code.insts[*at]).is_some_and(|left| (left > 0) == running);
            main.body.iter().copied().filter(kind).collect::<Vec<_>>()
        };
        let (first, last) = (waits(true), waits(false));
        // reachable from the head or the last wait without the first wait: no MMA is in flight; the rest is between the two
        let idle = flow
            .reach(last.into_iter().chain([main.head]), |at| !main.body.contains(&at) || first.contains(&at));
        let maxima: Vec<usize> =
            main.body.iter().copied().filter(|&at| is_maximum(&code.insts[at])).collect();
        let between = maxima.iter().filter(|at| !idle[**at]).count();
        Self { between, all: maxima.len() }
    }
}

fn is_maximum(inst: &Inst) -> bool {
    inst.opcode.starts_with("FMNMX")
}

/// The number of MMAs that may be in flight after a wait.
fn wait(inst: &Inst) -> Option<u64> {
    let (_, left) =
        inst.operands.split_once("gsb0, 0x").filter(|_| inst.opcode.starts_with("WARPGROUP.DEPBAR"))?;
    u64::from_str_radix(left.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::{Overlap, wait};
    use crate::gate::sass::Code;

    /// A kernel with a prologue, this main loop, and an out-of-line retry.
    fn kernel(body: &[&str]) -> Code {
        let mut text = String::from("/*0000*/ FMNMX R1, R1 ;\n");
        text += ".L_x_0:\n/*0010*/ SYNCS P0, [UR6], R4 ;\n/*0020*/ @!P0 BRA `(.L_x_1) ;\n.L_x_2:\n";
        for line in body {
            text += &if line.ends_with(':') { format!("{line}\n") } else { format!("/*0030*/ {line} ;\n") };
        }
        text += "/*0040*/ @P1 BRA `(.L_x_0) ;\n/*0050*/ FMNMX R1, R1 ;\n/*0060*/ EXIT ;\n";
        text += ".L_x_1:\n/*0070*/ SYNCS P0, [UR6], R4 ;\n/*0080*/ @!P0 BRA `(.L_x_1) ;\n/*0090*/ BRA `(.L_x_2) ;\n";
        Code::parse(&text)
    }

    const PRODUCT: &str = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0";
    const MAX: &str = "FMNMX R16, R16";
    const FIRST: &str = "WARPGROUP.DEPBAR.LE gsb0, 0x1";
    const LABEL: &str = ".L_x_3:";
    const LAST: &str = "WARPGROUP.DEPBAR.LE gsb0, 0x0";

    #[test]
    fn softmax_between_the_waits_overlaps() {
        let overlap = Overlap::of(&kernel(&[PRODUCT, PRODUCT, FIRST, MAX, MAX, LAST])).unwrap();
        assert_eq!((overlap.between, overlap.all), (2, 2));
    }

    #[test]
    fn softmax_after_the_wait_does_not() {
        for (body, between) in [
            ([PRODUCT, PRODUCT, FIRST, LAST, MAX, MAX], 0),
            ([PRODUCT, PRODUCT, FIRST, MAX, LAST, MAX], 1),
            ([MAX, PRODUCT, PRODUCT, FIRST, MAX, LAST], 1),
            ([PRODUCT, PRODUCT, "NOP", MAX, MAX, LAST], 0),
            ([PRODUCT, PRODUCT, "NOP", MAX, MAX, "NOP"], 0),
        ] {
            let overlap = Overlap::of(&kernel(&body)).unwrap();
            assert_eq!((overlap.between, overlap.all), (between, 2), "{body:?}");
        }
    }

    #[test]
    fn a_path_around_the_first_wait_is_no_overlap() {
        let overlap =
            Overlap::of(&kernel(&[PRODUCT, "@P3 BRA `(.L_x_3)", FIRST, MAX, LABEL, MAX, LAST])).unwrap();
        assert_eq!((overlap.between, overlap.all), (1, 2));
    }

    #[test]
    fn only_maxima_of_the_loop_count() {
        let code = kernel(&[PRODUCT, PRODUCT, "MUFU.RCP R1, R1", FIRST, MAX, "MUFU.TANH R1, R1", LAST]);
        assert_eq!(Overlap::of(&code).unwrap(), Overlap { between: 1, all: 1 });
    }

    #[test]
    fn the_worst_of_the_innermost_loops_counts() {
        let (good, bad) = ([PRODUCT, FIRST, MAX, LAST], [PRODUCT, FIRST, LAST, MAX]);
        let inner = |body: [&'static str; 4]| [&[LABEL], &body[..], &["@P2 BRA `(.L_x_3)"]].concat();
        // an outer loop with its own maximum
        let nested = Overlap::of(&kernel(&[&inner(good)[..], &[MAX]].concat())).unwrap();
        assert_eq!((nested.between, nested.all), (1, 1));
        for [first, second] in [[good, bad], [bad, good]] {
            let second: Vec<String> =
                inner(second).iter().map(|line| line.replace(".L_x_3", ".L_x_4")).collect();
            let second = second.iter().map(String::as_str);
            let body: Vec<&str> = inner(first).into_iter().chain(second).collect();
            let worst = Overlap::of(&kernel(&body)).unwrap();
            assert_eq!((worst.between, worst.all), (0, 1));
        }
    }

    #[test]
    fn a_kernel_without_such_a_loop_has_no_overlap() {
        assert_eq!(Overlap::of(&kernel(&[FIRST, MAX, LAST])), None);
        assert_eq!(Overlap::of(&kernel(&[PRODUCT, FIRST, LAST])), None);
    }

    #[test]
    fn the_number_of_mmas_in_flight_is_parsed() {
        let waits: Vec<_> =
            kernel(&[FIRST, LAST, "WARPGROUP.ARRIVE"]).insts.iter().filter_map(wait).collect();
        assert_eq!(waits, [1, 0]);
    }
}
