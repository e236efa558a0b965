//! Mutations of the attention kernel, one at a time: the simulator reports each, with its source line.
//!
//! A mutation counts as found if one of several seeds shows it, because many are correct most of the time. Every
//! report must be of the expected kind.

use super::{
    edit::{add, change, delay, delay_past_release, find, is, remove, remove_wait},
    prefill::{Case, Inputs, kernel},
};
use tilewright_kernels::attention::body::wgmma::PrefillConfig;
use tilewright_ptx::{
    ir::{Inst, Kernel, Operand},
    isa::{
        Op,
        matrix::MatrixOp,
        pure::PureOp,
        sync::{Fence, MbarrierOp, SyncOp},
    },
    sim::FaultKind,
};

const SEEDS: u64 = 32;

fn case() -> Case {
    Case {
        config: PrefillConfig { heads: (1, 1), causal: true },
        capped: false,
        lengths: &[(130, 600), (1, 200)],
    }
}

/// Expected detection.
enum Found {
    /// A fault of one of these kinds, reported at or caused by a kernel line that contains one of these texts.
    Fault(&'static [FaultKind], &'static [&'static str]),
    /// Wrong results.
    Wrong,
}

/// Applies a mutation and checks its detection.
fn finds(expected: &Found, plant: impl FnOnce(&mut Kernel)) {
    let case = case();
    let inputs = Inputs::new(&case);
    let mut broken = kernel(&case);
    plant(&mut broken);
    let mut seen = Vec::new();
    for seed in 0..SEEDS {
        let outcome = match inputs.run(&case, &broken, seed) {
            Ok((o, lse, _)) => inputs.judge(&case, &o, &lse).map_err(|why| (None, why)),
            Err(fault) => Err((Some(fault.kind), fault.to_string())),
        };
        match (expected, &outcome) {
            (Found::Fault(kinds, line), Err((Some(kind), text))) => {
                let named = named_lines(text);
                let right = named.iter().any(|named| line.iter().any(|line| named.contains(line)));
                assert!(kinds.contains(kind) && right, "seed {seed}: {text}\nlines: {named:#?}");
                return;
            }
            (Found::Wrong, Err((None, _))) => return,
            (_, Err((_, text))) => seen.push(text.clone()),
            (_, Ok(())) => {}
        }
    }
    panic!("not found by {SEEDS} seeds: {seen:?}");
}

/// Kernel source lines in a report.
fn named_lines(report: &str) -> Vec<&'static str> {
    const SOURCE: &str = include_str!("../../../src/attention/body/wgmma.rs");
    let numbers = report.split("wgmma.rs:").skip(1).filter_map(|rest| {
        rest.split(|c: char| !c.is_ascii_digit()).next().and_then(|number| number.parse::<usize>().ok())
    });
    numbers.filter_map(|number| SOURCE.lines().nth(number - 1)).collect()
}

fn mbarrier(op: MbarrierOp) -> impl Fn(&Inst) -> bool {
    is(Op::Sync(SyncOp::Mbarrier(op)))
}

#[test]
fn the_unmodified_kernel_is_correct() {
    let case = case();
    let inputs = Inputs::new(&case);
    for seed in 0..SEEDS {
        let (o, lse, _) = inputs.run(&case, &kernel(&case), seed).unwrap_or_else(|fault| panic!("{fault}"));
        inputs.judge(&case, &o, &lse).unwrap_or_else(|why| panic!("{why}"));
    }
}

#[test]
fn a_dropped_arrival() {
    finds(&Found::Fault(&[FaultKind::Deadlock], &["cursor.fill"]), |kernel| {
        remove(kernel, &find(&mbarrier(MbarrierOp::Arrive), 1));
    });
}

#[test]
fn a_barrier_that_expects_too_few() {
    finds(
        &Found::Fault(
            &[FaultKind::WrongArrivalCount, FaultKind::InFlight, FaultKind::Race],
            &["load(k, map"],
        ),
        |kernel| {
            // an `empty` barrier, which both consumers arrive at
            let two = |inst: &Inst| mbarrier(MbarrierOp::Init)(inst) && inst.operands[2] == Operand::Const(2);
            change(kernel, &find(&two, 0), |inst| add(inst, 2, -1));
        },
    );
}

#[test]
fn a_barrier_that_expects_too_many() {
    finds(&Found::Fault(&[FaultKind::Deadlock], &["cursor.fill"]), |kernel| {
        let two = |inst: &Inst| mbarrier(MbarrierOp::Init)(inst) && inst.operands[2] == Operand::Const(2);
        change(kernel, &find(&two, 0), |inst| add(inst, 2, 1));
    });
}

#[test]
fn a_missing_wait_for_keys() {
    finds(
        &Found::Fault(
            &[FaultKind::InFlight, FaultKind::Uninitialized, FaultKind::WrongPhase],
            &["self.k.wgmma(self.logits"],
        ),
        |kernel| {
            // the producer waits twice, then a consumer for queries, then for its first keys
            remove_wait(kernel, &find(&mbarrier(MbarrierOp::TryWait), 3));
        },
    );
}

#[test]
fn a_missing_wait_for_products() {
    finds(&Found::Fault(&[FaultKind::InFlight], &["self.logits.row_max"]), |kernel| {
        remove(kernel, &find(&is(Op::Matrix(MatrixOp::WgmmaWait(1))), 0));
    });
}

#[test]
fn a_missing_wgmma_fence() {
    finds(&Found::Fault(&[FaultKind::MissingWgmmaFence], &["self.k.wgmma(self.logits"]), |kernel| {
        remove(kernel, &find(&is(Op::Matrix(MatrixOp::WgmmaFence)), 1));
        remove(kernel, &find(&is(Op::Matrix(MatrixOp::WgmmaFence)), 1));
    });
}

#[test]
fn a_producer_in_the_wrong_phase() {
    finds(&Found::Fault(&[FaultKind::Deadlock], &["cursor.fill"]), |kernel| {
        let flip = |inst: &Inst| inst.op == Op::Pure(PureOp::XorB32) && inst.operands[1] == Operand::Const(1);
        change(kernel, &find(&flip, 0), |inst| add(inst, 1, -1));
    });
}

#[test]
fn phases_that_never_change() {
    let kinds =
        &[FaultKind::Deadlock, FaultKind::InFlight, FaultKind::WrongPhase, FaultKind::WrongArrivalCount];
    finds(&Found::Fault(kinds, &["cursor.fill"]), |kernel| {
        // the second flip in the text is in the producer's advance
        let flip = |inst: &Inst| inst.op == Op::Pure(PureOp::XorB32) && inst.operands[1] == Operand::Const(1);
        change(kernel, &find(&flip, 1), |inst| add(inst, 1, -1));
    });
}

#[test]
fn a_stage_released_too_early() {
    finds(&Found::Fault(&[FaultKind::InFlight, FaultKind::Race], &["load(k, map"]), |kernel| {
        // the wait before the release of keys follows it
        delay_past_release(kernel, &find(&is(Op::Matrix(MatrixOp::WgmmaWait(0))), 2));
    });
}

#[test]
fn weights_packed_before_their_products_are_done() {
    finds(&Found::Fault(&[FaultKind::InFlight], &["self.o.map", "self.logits.pair"]), |kernel| {
        // the release, the rescaled sums and the packed weights follow the wait of the loop
        let waits = is(Op::Matrix(MatrixOp::WgmmaWait(0)));
        delay(kernel, &find(&waits, 2), 400);
    });
}

#[test]
fn a_descriptor_with_a_wrong_stride() {
    finds(&Found::Wrong, |kernel| {
        let pack = |inst: &Inst| {
            inst.op == Op::Pure(PureOp::Pack32) && matches!(inst.operands[1], Operand::Const(_))
        };
        change(kernel, &find(&pack, 3), |inst| add(inst, 1, -32));
    });
}

#[test]
fn causal_mask_off_by_one() {
    finds(&Found::Wrong, |kernel| {
        let hides = |inst: &Inst| inst.op == Op::Pure(PureOp::LeI32);
        for nth in 0..64 {
            change(kernel, &find(&hides, nth), |inst| add(inst, 1, -1));
        }
    });
}

#[test]
fn expected_bytes_that_are_never_sent() {
    finds(&Found::Fault(&[FaultKind::WrongTransactionCount], &["self.q_full.arrive_expecting"]), |kernel| {
        let expects = |inst: &Inst| mbarrier(MbarrierOp::ArriveExpect)(inst);
        change(kernel, &find(&expects, 0), |inst| add(inst, 2, 128));
    });
}

#[test]
fn sent_bytes_that_are_not_expected() {
    let kinds = &[FaultKind::WrongTransactionCount, FaultKind::InFlight];
    finds(&Found::Fault(kinds, &["self.q.load"]), |kernel| {
        let expects = |inst: &Inst| mbarrier(MbarrierOp::ArriveExpect)(inst);
        change(kernel, &find(&expects, 0), |inst| add(inst, 2, -128));
    });
}

#[test]
fn values_cleared_without_a_proxy_fence() {
    finds(&Found::Fault(&[FaultKind::MissingProxyFence], &["values.chunk(row"]), |kernel| {
        remove(kernel, &find(&is(Op::Sync(SyncOp::Fence(Fence::ProxyAsyncShared))), 0));
    });
}

#[test]
fn values_cleared_without_a_barrier() {
    let kinds = &[FaultKind::MissingProxyFence, FaultKind::Race, FaultKind::InFlight];
    finds(&Found::Fault(kinds, &["values.chunk(row"]), |kernel| {
        // the second barrier in the text; the first follows the initialization
        remove(kernel, &find(&is(Op::Sync(SyncOp::Barrier)), 1));
    });
}

#[test]
fn barriers_used_before_their_initialization_is_visible() {
    let kinds = &[FaultKind::NotAnMbarrier, FaultKind::Race, FaultKind::Uninitialized];
    finds(&Found::Fault(kinds, &["q_full.wait", "wait_full", "cursor.fill"]), |kernel| {
        remove(kernel, &find(&is(Op::Sync(SyncOp::Barrier)), 0));
    });
}
