//! Copies of rows to a shared tile by `cp.async`: queries, and keys and values in pages of less than 8 tokens.
//!
//! A warp copies 32 rows. Each lane computes the address of one row; the lanes that copy chunks of a row receive it by shuffles.
//! Eight lanes copy a row, 128 adjacent bytes at once, so that the address of a lane serves all its chunks.

use crate::{attention::kernel::partition::divide, tile::SharedTile};
use tilewright_ptx::{Builder, Global, Shared, Value};

/// Rows per warp.
pub(in crate::attention::body) const ROWS: u32 = 32;
/// The most lanes that copy a row together.
const LANES_PER_ROW: usize = 8;
/// Rows of a lane per iteration: their copies are independent.
const AT_ONCE: u32 = 2;

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

/// Starts the copies of 32 rows to the first rows of a tile, by all lanes of a warp.
pub(in crate::attention::body) fn copy_rows<'k>(k: &'k Builder, row: SourceRow<'k>, to: SharedTile<'k>) {
    copy_chunks(k, row, to.columns() / 8, |number, chunk, after| {
        to.panels(after / 8..after / 8 + 1).chunk(number, chunk).cast()
    });
}

/// Starts the copies of `chunks` chunks, a multiple of 4, of 16 bytes of each of 32 rows to the addresses that `to` returns for a row, one
/// of the first chunks, and a number of chunks after it.
pub(in crate::attention::body) fn copy_chunks<'k>(
    k: &'k Builder,
    row: SourceRow<'k>,
    chunks: usize,
    to: impl Fn(Value<'k, u32>, Value<'k, u32>, usize) -> Shared<'k, u32>,
) {
    let lanes = LANES_PER_ROW.min(1 << chunks.trailing_zeros());
    let (first_row, chunk) = divide(k.lane(), lanes);
    let rows_at_once = 32 / lanes as u32;
    let words = [row.address.low(), row.address.high()];
    let exist = k.ballot(row.exists);
    k.repeat_rolled((0, ROWS), AT_ONCE * rows_at_once, |begin| {
        for step in 0..AT_ONCE {
            let number = begin + first_row + step * rows_at_once;
            let [low, high] = words.map(|word| word.of_lane(number));
            let from = Global::<u32>::new(k.pack32(low, high) + (chunk << 4).to_u64());
            let row_is_absent = ((exist >> number) & 1).eq(0);
            for after in (0..chunks).step_by(lanes) {
                let is_filled = 8 * (after + lanes) <= row.dim;
                let beyond = || (chunk + after as u32).ge((row.dim / 8) as u32);
                let is_absent = if is_filled { row_is_absent } else { row_is_absent | beyond() };
                k.copy_async_unless(is_absent, to(number, chunk, after), from.plus(4 * after), 16);
            }
        }
    });
}
