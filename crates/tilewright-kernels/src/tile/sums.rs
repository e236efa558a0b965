//! `wgmma` accumulator: the f32 fragment of 64 rows and `n` columns of a warpgroup.
//!
//! Thread `t` in lane `l` of warp `w` holds `n / 2` values. With `g = l / 4` and `c = l % 4`, register `i` is row `16
//! w + g + 8 ((i / 2) % 2)`, column `8 (i / 4) + 2 c + i % 2`. A thread holds two rows, four adjacent lanes share
//! them, and registers `2 i, 2 i + 1` are adjacent columns.
//!
//! A 16-column fragment of A has the same layout with 16-bit elements, so softmax weights become the A operand of the
//! next product without leaving their threads.

use super::reduce;
use std::panic::Location;
use tilewright_ptx::{Builder, Value, Var, isa::types::Bf16x2};

/// An accumulator fragment.
#[derive(Debug, Clone)]
pub struct Sums<'k> {
    registers: Vec<Var<'k, f32>>,
}

/// Position of a register: row half of the thread, and column relative to the first column of the thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FragmentPosition {
    /// 0, or 1 for the row 8 below.
    pub half: usize,
    /// `8 (i / 4) + i % 2`
    pub column: usize,
}

impl<'k> Sums<'k> {
    /// Uninitialized accumulator of 64 rows and `columns` columns.
    pub fn unset(k: &'k Builder, name: &str, columns: usize) -> Self {
        Self { registers: (0..columns / 2).map(|_| k.unset_var(name)).collect() }
    }

    /// Accumulator of zeros.
    #[track_caller]
    pub fn zero(k: &'k Builder, name: &str, columns: usize) -> Self {
        let sums = Self::unset(k, name, columns);
        sums.registers.iter().for_each(|sum| sum.set(0.0));
        sums
    }

    /// Registers in the order of `wgmma`.
    pub fn registers(&self) -> &[Var<'k, f32>] {
        &self.registers
    }

    /// Position of register `i`.
    pub fn position(i: usize) -> FragmentPosition {
        FragmentPosition { half: i / 2 % 2, column: 8 * (i / 4) + i % 2 }
    }

    /// Replaces each value by `f(position, value)`.
    #[track_caller]
    pub fn map(&self, mut f: impl FnMut(FragmentPosition, Value<'k, f32>) -> Value<'k, f32>) {
        for (i, sum) in self.registers.iter().enumerate() {
            sum.set(f(Self::position(i), sum.get()));
        }
    }

    /// Values of one of the two rows of the thread.
    pub fn row(&self, half: usize) -> impl Iterator<Item = Var<'k, f32>> {
        self.registers
            .iter()
            .copied()
            .enumerate()
            .filter(move |(i, _)| Self::position(*i).half == half)
            .map(|(_, sum)| sum)
    }

    /// Maximum of a row and `min`; the same in all four threads of the row.
    #[track_caller]
    pub fn row_max(&self, half: usize, min: Value<'k, f32>) -> Value<'k, f32> {
        let _line = min.builder().at_line(Location::caller());
        let own = self.row(half).fold(min, |max, sum| max.max(sum.get()));
        reduce::quad_max(own)
    }

    /// Registers `2 pair` and `2 pair + 1` as bf16.
    #[track_caller]
    pub fn pair(&self, k: &'k Builder, pair: usize) -> Value<'k, Bf16x2> {
        let _line = k.at_line(Location::caller());
        k.bf16x2(self.registers[2 * pair].get(), self.registers[2 * pair + 1].get())
    }

    /// Number of register pairs per thread.
    pub fn pairs(&self) -> usize {
        self.registers.len() / 2
    }
}

/// Row of the first half of this thread, in the 64 rows of the warpgroup.
#[track_caller]
pub fn first_row<'k>(thread: Value<'k, u32>) -> Value<'k, u32> {
    let (warp, lane) = ((thread >> 5) & 3, thread & 31);
    (warp << 4) + (lane >> 2)
}

/// First column of this thread, to be added to [`FragmentPosition::column`].
#[track_caller]
pub fn first_column<'k>(thread: Value<'k, u32>) -> Value<'k, u32> {
    (thread & 3) << 1
}
