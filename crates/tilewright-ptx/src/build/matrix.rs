//! Fragments and their products.

use super::{Builder, Of, Shared, Value, Var};
use crate::{
    ir::{Operand, Reg},
    isa::{
        Op,
        matrix::{Elements, Left, Major, Matrix},
        types::Scalar,
    },
};
use std::panic::Location;

/// The left side of a `wgmma`.
#[derive(Debug, Clone, Copy)]
pub enum WgmmaLeft<'k> {
    /// In shared memory.
    Shared(Value<'k, u64>, Major),
    /// In registers, two elements (or four of 8 bits) each.
    Registers([Value<'k, u32>; 4]),
}

/// What a `wgmma` multiplies.
#[derive(Debug, Clone, Copy)]
pub struct WgmmaOperands<'k> {
    /// What elements of A and B are.
    pub elements: (Elements, Elements),
    /// A, 64 rows.
    pub left: WgmmaLeft<'k>,
    /// The descriptor of B.
    pub right: Value<'k, u64>,
    /// How B lies.
    pub right_major: Major,
}

impl Builder {
    /// Loads `N` (1, 2 or 4) matrices of 8 rows of 16 bytes; lanes 8 i.. hold the addresses of the rows of matrix i.
    #[track_caller]
    pub fn load_matrix<const N: usize, T: Scalar>(
        &self,
        from: Shared<'_, T>,
        transposed: bool,
    ) -> [Value<'_, u32>; N] {
        const { assert!(N == 1 || N == 2 || N == 4, "1, 2 or 4 matrices") };
        self.effect(Op::Matrix(Matrix::Load(N, transposed)), &from.operands())
    }

    /// The way back.
    #[track_caller]
    pub fn store_matrix<const N: usize, T: Scalar>(
        &self,
        to: Shared<'_, T>,
        values: [Value<'_, u32>; N],
        transposed: bool,
    ) {
        const { assert!(N == 1 || N == 2 || N == 4, "1, 2 or 4 matrices") };
        let operands = [&to.operands()[..], &values.map(|value| value.is)].concat();
        self.act(Op::Matrix(Matrix::Store(N, transposed)), &operands);
    }

    /// `sums += A · B`, 16 by 8 by the depth of the elements. Sums are f32, or i32 for i8.
    #[track_caller]
    pub fn mma<S: Scalar>(
        &self,
        elements: Elements,
        sums: [Var<'_, S>; 4],
        a: [Value<'_, u32>; 4],
        b: [Value<'_, u32>; 2],
    ) {
        let old = sums.map(|sum| Operand::Reg(sum.reg));
        let operands = [&a.map(|a| a.is)[..], &b.map(|b| b.is), &old].concat();
        let results = sums.map(|sum| sum.reg).to_vec();
        self.0.borrow_mut().push(Op::Matrix(Matrix::Mma(elements)), results, &operands, Location::caller());
    }

    /// `sums = A · B`, or `sums += A · B` where `add` holds: 64 rows and `2 · sums.len()` columns, for the warpgroup, some time
    /// before its group is waited for.
    #[track_caller]
    pub fn wgmma<S: Scalar>(&self, sums: &[Var<'_, S>], operands: WgmmaOperands<'_>, add: impl Of<bool>) {
        let (left, words) = match operands.left {
            WgmmaLeft::Shared(descriptor, major) => (Left::Shared(major), vec![descriptor.is]),
            WgmmaLeft::Registers(words) => (Left::Registers, words.map(|word| word.is).to_vec()),
        };
        let (a, b) = operands.elements;
        let op = Matrix::Wgmma { n: 2 * sums.len(), a, b, left, right: operands.right_major };
        // the instruction takes no constant condition
        let add = self.in_register(Value::<bool>::new(self, add.of()));
        let results: Vec<Reg> = sums.iter().map(|sum| sum.reg).collect();
        let operands = [words, vec![operands.right.is, add.is]].concat();
        self.0.borrow_mut().push(Op::Matrix(op), results, &operands, Location::caller());
    }

    /// Orders registers and shared memory before the `wgmma` that follow.
    #[track_caller]
    pub fn wgmma_fence(&self) {
        self.act(Op::Matrix(Matrix::WgmmaFence), &[]);
    }

    /// Ends a group.
    #[track_caller]
    pub fn wgmma_commit(&self) {
        self.act(Op::Matrix(Matrix::WgmmaCommit), &[]);
    }

    /// Waits until at most so many of the youngest groups are incomplete.
    #[track_caller]
    pub fn wgmma_wait(&self, incomplete: usize) {
        self.act(Op::Matrix(Matrix::WgmmaWait(incomplete)), &[]);
    }
}
