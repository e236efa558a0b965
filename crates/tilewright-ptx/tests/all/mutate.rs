//! Each kind of mutation on one instruction.

use std::panic::Location;
use tilewright_ptx::{
    Access, Fence, Kernel, Op, Scope,
    ir::{Condition, Inst, Operand, Reg, Stmt},
    isa::{
        copies::CopyOp,
        memory::{Element, MemoryOp, Space},
        pure::PureOp,
        sync::{MbarrierOp, SyncOp},
        types::Class,
    },
    mutate::{Kind, Mutation, mutations},
};

const A: Operand = Operand::Reg(Reg(1));
const B: Operand = Operand::Reg(Reg(2));
const EIGHT: Operand = Operand::Const(8);

fn inst(op: Op, operands: &[Operand]) -> Stmt {
    Stmt::Inst(Inst { op, results: vec![Reg(0)], operands: operands.to_vec(), at: Location::caller() })
}

fn kernel(body: Vec<Stmt>) -> Kernel {
    let (params, shared, registers) = (Vec::new(), Vec::new(), Vec::new());
    Kernel { name: "k".to_owned(), threads: 32, cluster: 1, ctas_per_sm: 1, params, shared, registers, body }
}

/// The kind of a mutation, and the mutated instruction unless it was removed.
type Mutant = (String, Option<(Op, Vec<Operand>)>);

/// The mutants of one instruction.
fn mutants(op: Op, operands: &[Operand]) -> Vec<Mutant> {
    let kernel = kernel(vec![inst(op, operands)]);
    let mutant = |mutation: &Mutation| {
        let body = mutation.apply(&kernel).body;
        let kind = mutation.id.split(':').next().unwrap_or_default().to_owned();
        let inst = body.first().map(|stmt| match stmt {
            Stmt::Inst(inst) => (inst.op, inst.operands.clone()),
            _ => panic!("not an instruction"),
        });
        (kind, inst)
    };
    mutations(&kernel).iter().map(mutant).collect()
}

#[test]
fn synchronization_is_removed() {
    let removed = vec![(Kind::RemoveSync.to_string(), None)];
    assert_eq!(mutants(Op::Sync(SyncOp::Barrier), &[Operand::Const(0), Operand::Const(64)]), removed);
    assert_eq!(mutants(Op::Sync(SyncOp::Fence(Fence::AcqRel(Scope::Gpu))), &[]), removed);
    assert_eq!(mutants(Op::Copy(CopyOp::AsyncCommit), &[]), removed);
    let wait = mutants(Op::Sync(SyncOp::Mbarrier(MbarrierOp::TryWait)), &[A, B, A]);
    let returns = Some((Op::Move(Class::Pred), vec![Operand::Const(1)]));
    assert_eq!(wait, [(Kind::RemoveSync.to_string(), returns)]);
}

#[test]
fn synchronization_is_weakened() {
    let weaker = |op| (Kind::WeakenSync.to_string(), Some((op, Vec::new())));
    let wait = |groups| Op::Copy(CopyOp::AsyncWait(groups));
    assert_eq!(mutants(wait(1), &[]), [(Kind::RemoveSync.to_string(), None), weaker(wait(2))]);
    let load = |access| Op::Memory(MemoryOp::Load(Space::Global, Element::B32, 1, access));
    let acquire = mutants(load(Access::Ordered(Scope::Gpu)), &[A, B]);
    let relaxed = (load(Access::Relaxed(Scope::Gpu)), vec![A, B]);
    assert_eq!(acquire, [(Kind::WeakenSync.to_string(), Some(relaxed))]);
}

#[test]
fn stores_are_removed_and_offsets_shifted() {
    let store = Op::Memory(MemoryOp::Store(Space::Global, Element::B32, 2, Access::Weak));
    let shifted = vec![A, Operand::Const(16), B, B];
    assert_eq!(
        mutants(store, &[A, EIGHT, B, B]),
        [(Kind::RemoveStore.to_string(), None), (Kind::ShiftConstant.to_string(), Some((store, shifted)))]
    );
    assert_eq!(mutants(Op::Memory(MemoryOp::Prefetch), &[A, EIGHT]), []);
}

#[test]
fn operands_are_swapped_if_their_order_matters() {
    let swapped = |op, operands: &[Operand]| (Kind::SwapOperands.to_string(), Some((op, operands.to_vec())));
    for op in [PureOp::SubU32, PureOp::SubF32, PureOp::Pack32, PureOp::ShlB32, PureOp::F32ToBf16x2] {
        assert!(mutants(Op::Pure(op), &[A, B]).contains(&swapped(Op::Pure(op), &[B, A])), "{op:?}");
        assert!(!mutants(Op::Pure(op), &[A, A]).contains(&swapped(Op::Pure(op), &[A, A])), "{op:?}");
    }
    for op in [PureOp::AddU32, PureOp::MulF32, PureOp::AndB32, PureOp::MinI32, PureOp::MulBf16x2] {
        assert!(!mutants(Op::Pure(op), &[A, B]).contains(&swapped(Op::Pure(op), &[B, A])), "{op:?}");
    }
    let select = Op::Pure(PureOp::SelB32);
    assert_eq!(mutants(select, &[A, B, B]), [swapped(select, &[B, A, B])]);
}

#[test]
fn terms_are_removed() {
    let kept = |operand| vec![(Kind::RemoveTerm.to_string(), Some((Op::Move(Class::B32), vec![operand])))];
    assert_eq!(mutants(Op::Pure(PureOp::MulF32), &[A, B]), kept(A));
    assert_eq!(mutants(Op::Pure(PureOp::FmaF32), &[A, A, B])[..1], kept(B));
    assert_eq!(mutants(Op::Pure(PureOp::U32ToF32), &[A]), []);
    assert_eq!(mutants(Op::Pure(PureOp::MinF32), &[A, B]), []);
}

#[test]
fn bounds_move_by_one() {
    let mutants = mutants(Op::Pure(PureOp::LtI32), &[A, EIGHT]);
    let of =
        |kind: Kind, op, operands: &[Operand]| (kind.to_string(), Some((Op::Pure(op), operands.to_vec())));
    let expected = [
        of(Kind::MoveBound, PureOp::LeI32, &[A, EIGHT]),
        of(Kind::SwapOperands, PureOp::LtI32, &[EIGHT, A]),
        of(Kind::ShiftConstant, PureOp::LtI32, &[A, Operand::Const(9)]),
    ];
    assert_eq!(mutants, expected);
}

#[test]
fn constants_wrap_at_their_width() {
    let minus_one = |bits| mutants(Op::Pure(bits), &[A, Operand::Const(0xffff_ffff)]);
    let shifted =
        |op, bits| (Kind::ShiftConstant.to_string(), Some((Op::Pure(op), vec![A, Operand::Const(bits)])));
    assert!(minus_one(PureOp::AddU32).contains(&shifted(PureOp::AddU32, 0)));
    assert!(minus_one(PureOp::AddU64).contains(&shifted(PureOp::AddU64, 1 << 32)));
    assert!(!minus_one(PureOp::AddF32).contains(&shifted(PureOp::AddF32, 0)));
    assert!(!minus_one(PureOp::AddF32).contains(&shifted(PureOp::AddF32, 1 << 32)));
}

#[test]
fn nested_copies_of_an_instruction_are_distinct() {
    let barrier = || inst(Op::Sync(SyncOp::Barrier), &[]);
    let condition = Condition { reg: Reg(0), holds: true };
    let at = Location::caller();
    let loop_ = Stmt::Loop { body: vec![barrier()], rolled: false, at };
    let branch = Stmt::If { condition, then: vec![loop_], otherwise: vec![barrier()], at };
    let kernel = kernel(vec![branch]);
    let all = mutations(&kernel);
    assert_eq!(all.len(), 2);
    assert!(all[0].id.ends_with("copy 0") && all[1].id.ends_with("copy 1"), "{all:?}");
    let counts = |mutation: &Mutation| match &mutation.apply(&kernel).body[..] {
        [Stmt::If { then, otherwise, .. }] => match &then[..] {
            [Stmt::Loop { body, .. }] => (body.len(), otherwise.len()),
            _ => panic!("no loop"),
        },
        _ => panic!("no branch"),
    };
    assert_eq!((counts(&all[0]), counts(&all[1])), ((0, 1), (1, 0)));
}
