//! Matrix fragments and MMA instructions.

use super::{Builder, IntoOperand, Shared, Value, Var};
use crate::{
    ir::{Operand, Reg},
    isa::{Elements, Left, Major, MatrixOp, Op, Scalar},
};
use std::panic::Location;

/// The A operand of a `wgmma`.
#[derive(Debug, Clone, Copy)]
pub enum WgmmaLeft<'k> {
    /// In shared memory.
    Shared(Value<'k, u64>, Major),
    /// In registers, two elements (or four of 8 bits) each.
    Registers([Value<'k, u32>; 4]),
}

/// The operands of a `wgmma`.
#[derive(Debug, Clone, Copy)]
pub struct WgmmaOperands<'k> {
    /// The element type of A and B.
    pub elements: Elements,
    /// A, 64 rows.
    pub left: WgmmaLeft<'k>,
    /// The descriptor of B.
    pub right: Value<'k, u64>,
    /// The major dimension of B.
    pub right_major: Major,
}

impl Builder {
    /// Loads `N` (1, 2 or 4) matrices of 8 rows of 16 bytes; lanes 8 i.. hold the row addresses of matrix i.
    #[track_caller]
    pub fn load_matrix<const N: usize, T: Scalar>(
        &self,
        from: Shared<'_, T>,
        transposed: bool,
    ) -> [Value<'_, u32>; N] {
        const { assert!(N == 1 || N == 2 || N == 4, "1, 2 or 4 matrices") };
        self.effect(Op::Matrix(MatrixOp::Load(N, transposed)), &from.operands())
    }

    /// The inverse of [`Builder::load_matrix`].
    #[track_caller]
    pub fn store_matrix<const N: usize, T: Scalar>(
        &self,
        to: Shared<'_, T>,
        values: [Value<'_, u32>; N],
        transposed: bool,
    ) {
        const { assert!(N == 1 || N == 2 || N == 4, "1, 2 or 4 matrices") };
        let operands = [&to.operands()[..], &values.map(|value| value.operand)].concat();
        self.emit(Op::Matrix(MatrixOp::Store(N, transposed)), &operands);
    }

    /// `sums += A · B` with shape 16 × 8 × [`Elements::depth`].
    #[track_caller]
    pub fn mma(
        &self,
        elements: Elements,
        sums: [Var<'_, f32>; 4],
        a: [Value<'_, u32>; 4],
        b: [Value<'_, u32>; 2],
    ) {
        let old = sums.map(|sum| Operand::Reg(sum.reg));
        let operands = [&a.map(|a| a.operand)[..], &b.map(|b| b.operand), &old].concat();
        let results = sums.map(|sum| sum.reg).to_vec();
        self.0.borrow_mut().push(Op::Matrix(MatrixOp::Mma(elements)), results, &operands, Location::caller());
    }

    /// `sums = A · B`, or `sums += A · B` if `add`, asynchronously for the warpgroup. The shape is 64 rows by
    /// `2 · sums.len()` columns.
    #[track_caller]
    pub fn wgmma(&self, sums: &[Var<'_, f32>], operands: WgmmaOperands<'_>, add: impl IntoOperand<bool>) {
        let (left, words) = match operands.left {
            WgmmaLeft::Shared(descriptor, major) => (Left::Shared(major), vec![descriptor.operand]),
            WgmmaLeft::Registers(words) => (Left::Registers, words.map(|word| word.operand).to_vec()),
        };
        let WgmmaOperands { elements, right_major: right, .. } = operands;
        let op = MatrixOp::Wgmma { n: 2 * sums.len(), elements, left, right };
        // the condition must be a register
        let add = self.in_register(Value::<bool>::new(self, add.into_operand()));
        let results: Vec<Reg> = sums.iter().map(|sum| sum.reg).collect();
        let operands = [words, vec![operands.right.operand, add.operand]].concat();
        self.0.borrow_mut().push(Op::Matrix(op), results, &operands, Location::caller());
    }

    /// Orders registers and shared memory before the `wgmma` that follow.
    #[track_caller]
    pub fn wgmma_fence(&self) {
        self.emit(Op::Matrix(MatrixOp::WgmmaFence), &[]);
    }

    /// Commits the pending `wgmma` as a group.
    #[track_caller]
    pub fn wgmma_commit(&self) {
        self.emit(Op::Matrix(MatrixOp::WgmmaCommit), &[]);
    }

    /// Waits until at most `incomplete` of the most recent groups are incomplete.
    #[track_caller]
    pub fn wgmma_wait(&self, incomplete: usize) {
        self.emit(Op::Matrix(MatrixOp::WgmmaWait(incomplete)), &[]);
    }
}
