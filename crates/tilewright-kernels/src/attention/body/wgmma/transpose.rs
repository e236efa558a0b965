//! Values of e4m3, transposed by the producer: `wgmma` reads operands of 8 bits with the depth, here keys, contiguous.
//!
//! ```text
//! row-major tile   [keys][vo] bytes, copied like keys
//! transposed tile  [vo][keys] bytes; of each 32 keys, byte 16 i + 4 t + 2 h + j is key 16 i + 8 h + 2 t + j, h, i, j < 2, t < 4
//! ```
//!
//! This order of keys is that of the weights: lane `t` of a quad has the logits of keys `8 n + 2 t` and the next, and four adjacent
//! bytes of the A operand.
//!
//! A warp transposes 32 keys. A transposed `ldmatrix` of 8 keys and 16 elements puts elements `2 g` and `2 g + 1` of keys `2 t` and
//! `2 t + 1` into a word of lane `4 g + t`. Two words of 8 keys each become one of the even element and one of the odd one, which
//! `stmatrix` writes to their rows. A tile is transposed when the copies of the next one have started.

use super::producer::{Producer, WARPS};
use crate::tile::{Cursor, Ring, release_from_warp};
use tilewright_ptx::{Builder, Fence, Value, Var};

/// Keys per warp.
const KEYS: u32 = 32;

/// The positions of a producer warp in the ring of row-major tiles.
pub(super) struct RowMajor<'k> {
    /// The next stage to which values are copied.
    pub(super) write: Cursor<'k>,
    read: Cursor<'k>,
    /// Whether a tile is not yet transposed.
    pending: Var<'k, bool>,
    /// Keys of that tile and the following ones in the segment.
    present: Var<'k, u32>,
}

impl<'k> RowMajor<'k> {
    pub(super) fn new(k: &'k Builder, ring: Ring<'k>) -> Self {
        let (pending, present) = (k.var("is_row_major", false), k.var("present", 0));
        Self { write: ring.cursor(k), read: ring.cursor(k), pending, present }
    }

    /// Remembers that a tile has been loaded; `present` keys of the segment are in it or follow.
    pub(super) fn set_pending(&self, present: Value<'k, u32>) {
        self.pending.set(true);
        self.present.set(present);
    }
}

impl<'k> Producer<'_, 'k> {
    /// Transposes the tile that is not yet transposed, if there is one. Values after the last key, which may be NaN, become 0.
    pub(super) fn transpose_pending(&self, row_major: &RowMajor<'k>) {
        let k = self.k;
        k.when(row_major.pending.get(), || {
            row_major.read.wait_full();
            self.values.wait_empty();
            self.transpose(row_major);
            // all lanes have read their rows
            release_from_warp(k, row_major.read.empty());
            row_major.read.advance();
            // products read the tile, not threads
            k.fence(Fence::ProxyAsyncShared);
            self.values.full().arrive();
            self.values.advance();
            row_major.pending.set(false);
        });
    }

    fn transpose(&self, row_major: &RowMajor<'k>) {
        let (k, shared) = (self.k, self.shared);
        let Some((tiles, _)) = shared.row_major else { return };
        let (from, to) = (tiles.stage(row_major.read.stage()), shared.values.0.stage(self.values.stage()));
        let lane = k.lane();
        let row = ((lane & 7) << 1) + ((lane >> 3) & 1);
        let to = to.chunk(row, (self.warp << 1) + (lane >> 4));
        // chunk c of a row is at c ^ (row % 8)
        let (rows, swizzle) = (from.memory().byte((self.warp * KEYS + lane) * 128), (lane & 7) << 4);
        let move_chunks = |masks: Option<[Value<'k, u32>; 4]>| {
            for elements in 0..shared.config.vo() / 16 {
                let at = rows.byte(swizzle ^ (16 * elements as u32));
                let words = k.load_matrix::<4, _>(at, true);
                let words: [Value<'k, u32>; 4] =
                    masks.map_or(words, |masks| std::array::from_fn(|eight| words[eight] & masks[eight]));
                let pairs = [[words[0], words[1]], [words[2], words[3]]];
                let [even, odd] =
                    [0x6420, 0x7531].map(|bytes: u32| pairs.map(|[a, b]| a.permute_bytes(b, bytes)));
                let words = [even[0], odd[0], even[1], odd[1]];
                k.store_matrix::<4, _>(to.plus(elements * 16 * 64), words, false);
            }
        };
        let present = row_major.present.get();
        let is_whole = present.ge(shared.config.kv_tokens() as u32);
        let masked = || {
            // this lane's first key of each 8 keys
            let first = self.warp * KEYS + ((lane & 3) << 1);
            move_chunks(Some(std::array::from_fn(|eight| {
                let exists = |at: u32| (first + (8 * eight as u32 + at)).lt(present);
                exists(0).select::<u32>(0xffff, 0) | exists(1).select::<u32>(0xffff_0000, 0)
            })));
        };
        k.when_else(is_whole, || move_chunks(None), masked);
    }
}

const _: () = assert!(WARPS * KEYS == 128, "the warps transpose a tile");
