//! Copies of rows to a shared tile by `cp.async`: queries, and keys and values in pages of less than 8 tokens.
//!
//! A warp copies 32 rows at once. Each lane computes the address of one row; the lanes that copy chunks of a row receive it by
//! shuffles.

use crate::{attention::kernel::partition, tile::SharedTile};
use tilewright_ptx::build::{Builder, Global, Shared, Value};

/// Rows per warp.
pub(in crate::attention::body) const ROWS: u32 = 32;
/// Steps per iteration, if there are registers: their copies are independent.
pub(super) const UNROLLED: u32 = 4;

/// This lane's row in global memory.
#[derive(Debug, Clone, Copy)]
pub(in crate::attention::body) struct SourceRow<'k> {
    /// Address in bytes; valid even if the row does not exist.
    pub(in crate::attention::body) address: Value<'k, u64>,
    /// Whether the row exists; it is zero-filled otherwise.
    pub(in crate::attention::body) exists: Value<'k, bool>,
    /// Elements of 16 bits; further columns of the tile are zero-filled.
    pub(in crate::attention::body) dim: usize,
}

/// Starts the copies of 32 rows to the first rows of a tile of `columns` columns, by all lanes of a warp; `unrolled` steps per
/// iteration.
pub(in crate::attention::body) fn copy_rows<'k>(
    k: &'k Builder,
    row: SourceRow<'k>,
    to: SharedTile<'k>,
    columns: usize,
    unrolled: u32,
) {
    copy_chunks(k, row, columns / 8, unrolled, |number, chunk| to.chunk(number, chunk).cast());
}

/// Starts the copies of `chunks` chunks of 16 bytes of each of 32 rows to the addresses that `to` returns for row and chunk.
pub(in crate::attention::body) fn copy_chunks<'k>(
    k: &'k Builder,
    row: SourceRow<'k>,
    chunks: usize,
    unrolled: u32,
    to: impl Fn(Value<'k, u32>, Value<'k, u32>) -> Shared<'k, u32>,
) {
    let of_lane = partition::ThreadPartition::new(partition::ThreadGroup::of_warp(k), chunks);
    let words = [row.address.low(), row.address.high()];
    let exist = k.ballot(row.exists);
    let rows_at_once = of_lane.rows_at_once as u32;
    k.repeat((0, ROWS), unrolled * rows_at_once, |begin| {
        for step in 0..unrolled {
            let number = begin + of_lane.row + step * rows_at_once;
            let [low, high] = words.map(|word| word.of_lane(number));
            let is_absent = ((exist >> number) & 1).eq(0);
            for at in (0..chunks).step_by(of_lane.lanes) {
                let chunk = of_lane.chunk + at as u32;
                let is_absent = is_absent | chunk.ge((row.dim / 8) as u32);
                let from = Global::<u32>::new(k.pack32(low, high) + (chunk << 4).to_u64());
                k.copy_async_unless(is_absent, to(number, chunk), from, 16);
            }
        }
    });
}
