//! The f32 fragment of 64 rows and `n` columns that a warpgroup accumulates by `wgmma`.
//!
//! Thread `t` of the warpgroup, in lane `l` of warp `w`, holds `n / 2` of them; with `g = l / 4` and `c = l % 4`, register `i` is
//! row `16 w + g + 8 ((i / 2) % 2)`, column `8 (i / 4) + 2 c + i % 2`. So a thread holds two rows, four threads side by side hold
//! the same two, and registers `2 i, 2 i + 1` are neighbours. A fragment of A of 16 columns is the same with 16-bit elements:
//! weights become the left side of the next product without leaving their threads.

use super::reduce;
use std::panic::Location;
use tilewright_ptx::{
    build::{Builder, Value, Var},
    isa::types::Bf16x2,
};

/// A fragment of sums.
#[derive(Debug, Clone)]
pub struct Sums<'k> {
    registers: Vec<Var<'k, f32>>,
}

/// Where a register of a fragment is: its row among the thread's two, and its column in the fragment, less that of the thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FragmentPosition {
    /// 0, or 1 for the row 8 further down.
    pub half: usize,
    /// `8 (i / 4) + i % 2`
    pub column: usize,
}

impl<'k> Sums<'k> {
    /// 64 rows and `columns` columns, not yet set.
    pub fn unset(k: &'k Builder, name: &str, columns: usize) -> Self {
        Self { registers: (0..columns / 2).map(|_| k.unset_var(name)).collect() }
    }

    /// The same, all 0.
    #[track_caller]
    pub fn zero(k: &'k Builder, name: &str, columns: usize) -> Self {
        let sums = Self::unset(k, name, columns);
        sums.registers.iter().for_each(|sum| sum.set(0.0));
        sums
    }

    /// As `wgmma` takes them.
    pub fn registers(&self) -> &[Var<'k, f32>] {
        &self.registers
    }

    /// Where register `i` is.
    pub fn position(i: usize) -> FragmentPosition {
        FragmentPosition { half: i / 2 % 2, column: 8 * (i / 4) + i % 2 }
    }

    /// Replaces each by what `f` makes of its place and it.
    #[track_caller]
    pub fn map(&self, mut f: impl FnMut(FragmentPosition, Value<'k, f32>) -> Value<'k, f32>) {
        for (i, sum) in self.registers.iter().enumerate() {
            sum.set(f(Self::position(i), sum.get()));
        }
    }

    /// Those of one of the thread's two rows.
    pub fn row(&self, half: usize) -> impl Iterator<Item = Var<'k, f32>> {
        self.registers
            .iter()
            .copied()
            .enumerate()
            .filter(move |(i, _)| Self::position(*i).half == half)
            .map(|(_, sum)| sum)
    }

    /// The greatest of a row, and of `least`; the same in all four threads of the row.
    #[track_caller]
    pub fn row_max(&self, half: usize, min: Value<'k, f32>) -> Value<'k, f32> {
        let _line = min.builder().at_line(Location::caller());
        let own = self.row(half).fold(min, |max, sum| max.max(sum.get()));
        reduce::quad_max(own)
    }

    /// Two neighbours as bf16, which lie at [`Sums::place`] of register `2 pair`.
    #[track_caller]
    pub fn pair(&self, k: &'k Builder, pair: usize) -> Value<'k, Bf16x2> {
        let _line = k.at_line(Location::caller());
        k.bf16x2(self.registers[2 * pair].get(), self.registers[2 * pair + 1].get())
    }

    /// How many pairs of neighbours a thread holds.
    pub fn pairs(&self) -> usize {
        self.registers.len() / 2
    }
}

/// The row, of the warpgroup's 64, of this thread's first half.
#[track_caller]
pub fn first_row<'k>(thread: Value<'k, u32>) -> Value<'k, u32> {
    let (warp, lane) = ((thread >> 5) & 3, thread & 31);
    (warp << 4) + (lane >> 2)
}

/// The first column of this thread, to be added to [`Place::column`].
#[track_caller]
pub fn first_column<'k>(thread: Value<'k, u32>) -> Value<'k, u32> {
    (thread & 3) << 1
}
