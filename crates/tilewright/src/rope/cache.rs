//! Cos/sin table: cosines and sines of every position, precomputed.
//!
//! `[max_positions, rotary_dim]` in f32: each row holds `rotary_dim / 2` cosines, then as many sines.

use super::{Rope, RopeStyle};
use crate::{Error, Result, View};
use bytemuck::allocation::try_zeroed_vec;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum elements of a table: 4 GiB.
const MAX_ELEMENTS: usize = 1 << 30;

/// A table of cosines and sines by position.
#[derive(Debug, Clone)]
pub struct CosSinCache {
    table: Vec<f32>,
    rotary_dim: usize,
    style: RopeStyle,
    id: u64,
}

/// Compares contents, not ids.
impl PartialEq for CosSinCache {
    fn eq(&self, other: &Self) -> bool {
        (&self.table, self.rotary_dim, self.style) == (&other.table, other.rotary_dim, other.style)
    }
}

/// A process-wide unique id.
fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl CosSinCache {
    /// The table of `rope` for positions `0..max_positions`, each entry the rounded cosine or sine of the f64 angle.
    ///
    /// # Errors
    /// When the table has more than 2³⁰ elements, or does not fit in memory.
    pub fn new(rope: &Rope, max_positions: u32) -> Result<Self> {
        Self::filled(&rope.frequencies(), 1.0, max_positions, rope.style())
    }

    /// The table for `frequencies`, in radians per position of each pair, with all entries multiplied by `amplitude`: the
    /// attention factor of YaRN and LongRoPE, whose square scales the logits of the rotated elements.
    ///
    /// # Errors
    /// When `frequencies` is empty, a frequency or `amplitude` is not finite, or the table does not fit as for [`Self::new`].
    pub fn from_frequencies(
        frequencies: &[f64],
        amplitude: f64,
        max_positions: u32,
        style: RopeStyle,
    ) -> Result<Self> {
        const OPERATOR: &str = "rope.cos_sin_cache";
        crate::ensure!(!frequencies.is_empty(), OPERATOR, "frequencies is empty, expected one per pair");
        for value in frequencies.iter().chain([&amplitude]) {
            crate::ensure!(
                value.is_finite(),
                OPERATOR,
                "{value} among frequencies and amplitude is not finite"
            );
        }
        Self::filled(frequencies, amplitude as f32, max_positions, style)
    }

    fn filled(frequencies: &[f64], amplitude: f32, max_positions: u32, style: RopeStyle) -> Result<Self> {
        let rotary_dim = 2 * frequencies.len();
        let elements = (max_positions as usize).saturating_mul(rotary_dim);
        let table = if elements <= MAX_ELEMENTS { try_zeroed_vec(elements) } else { Err(()) };
        let mut table = table.map_err(|()| {
            let text =
                format!("max_positions = {max_positions} of {rotary_dim} elements do not fit in memory");
            Error::new("rope.cos_sin_cache", text)
        })?;
        for (position, row) in table.chunks_mut(rotary_dim).enumerate() {
            fill_row(frequencies, position as f64, row);
            row.iter_mut().for_each(|entry| *entry *= amplitude);
        }
        Ok(Self { table, rotary_dim, style, id: next_id() })
    }

    /// A precomputed table (custom scaling): `[max_positions, rotary_dim]`, row-major, cosines in
    /// the first half of each row and sines in the second.
    ///
    /// # Errors
    /// When `rotary_dim` is 0 or odd, or does not divide the length of `table`.
    pub fn from_table(table: Vec<f32>, rotary_dim: usize, style: RopeStyle) -> Result<Self> {
        const OPERATOR: &str = "rope.cos_sin_cache";
        crate::ensure!(
            rotary_dim > 0 && rotary_dim.is_multiple_of(2),
            OPERATOR,
            "rotary_dim = {rotary_dim} is not an even number above 0"
        );
        crate::ensure!(
            table.len().is_multiple_of(rotary_dim),
            OPERATOR,
            "the table has {} elements, which is no multiple of rotary_dim = {rotary_dim}",
            table.len()
        );
        Ok(Self { table, rotary_dim, style, id: next_id() })
    }

    /// The number of positions in the table, from 0.
    pub fn max_positions(&self) -> usize {
        self.table.len() / self.rotary_dim
    }

    /// The number of leading elements of each head that are rotated.
    pub fn rotary_dim(&self) -> usize {
        self.rotary_dim
    }

    /// The pairing of elements.
    pub fn style(&self) -> RopeStyle {
        self.style
    }

    /// The table: f32 `[max_positions, rotary_dim]`.
    pub fn view(&self) -> View<'_> {
        View::new(&self.table, &[self.max_positions(), self.rotary_dim])
            .expect("every constructor makes whole rows")
    }

    /// A process-wide unique id, the key under which a device caches a copy of the table. Only clones share it.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Cosines and sines of one position, which must be below [`Self::max_positions`].
    pub(crate) fn row(&self, position: usize) -> &[f32] {
        &self.table[position * self.rotary_dim..][..self.rotary_dim]
    }
}

/// Writes the cosines, then the sines, of `position` into `row`, `[rotary_dim]`.
pub(crate) fn fill_row(frequencies: &[f64], position: f64, row: &mut [f32]) {
    let (cosines, sines) = row.split_at_mut(frequencies.len());
    for ((cos, sin), frequency) in cosines.iter_mut().zip(sines).zip(frequencies) {
        let (s, c) = (position * frequency).sin_cos();
        (*cos, *sin) = (c as f32, s as f32);
    }
}
