//! Dequantization of 8-bit K and V tiles to 16 bits, from a stage in shared memory to a tile that `ldmatrix` reads.
//!
//! ```text
//! stage              [keys, head_dim] of 8 bits, rows of `stored` format
//! dequantized tile   [keys, head_dim] of 16 bits, first the keys, then the values in their place
//! ```
//!
//! Each thread converts 8 elements at a time, so that loads and stores are free of bank conflicts. Kernels of 16-bit caches
//! contain none of this.

use super::{
    cta::{Cta, Deal},
    keys::Copier,
    layout::RowFormat,
};
use crate::tile::halves::halves;
use tilewright::Dtype;
use tilewright_ptx::{
    build::{Shared, Value},
    isa::matrix::Elements,
};

/// The keys or the values of a KV tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Half {
    Keys,
    Values,
}

/// Conversion of a tile by a warp or the CTA.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wide<'k> {
    cta: Cta<'k>,
    thread: Value<'k, u32>,
    threads: usize,
    rows: usize,
    tile: Shared<'k, u32>,
}

/// Approximate chunks of 8 elements in flight per thread, to hide the load latency.
const PIECES: usize = 4;

impl<'k> Wide<'k> {
    /// Converts to `tile` of `rows` rows, by `threads` threads, a warp or the CTA, of which this is `thread`.
    pub(super) fn new(
        cta: &Cta<'k>,
        (thread, threads): (Value<'k, u32>, usize),
        (tile, rows): (Shared<'k, u32>, usize),
    ) -> Self {
        Self { cta: *cta, thread, threads, rows, tile }
    }

    /// The 16-bit operand of the rows at `stored`, whose copies by this thread have arrived. Valid at once for a warp, and after
    /// a barrier for a CTA. Before the barrier each thread may read its own partition.
    #[track_caller]
    pub(super) fn arrived(&self, half: Half, stored: Shared<'k, u32>) -> Shared<'k, u32> {
        let (k, layout) = (self.cta.k, &self.cta.layout);
        if self.cta.kv.size() > 1 {
            return stored;
        }
        let formats = match half {
            Half::Keys => (layout.stored_k, layout.k),
            Half::Values => (layout.stored_v, layout.v),
        };
        // the copies of other threads have arrived, and the previous tile has been read
        if self.threads == 32 {
            k.sync_warp();
        } else {
            k.sync_threads();
        }
        self.widen(stored, formats);
        if self.threads == 32 {
            k.sync_warp();
        }
        self.tile
    }

    /// The thread partition of the 16-bit values, if `loader` copied them.
    #[track_caller]
    pub(super) fn deal(&self, copier: &Copier<'k>) -> (Deal<'k>, RowFormat, usize) {
        match self.cta.kv.size() {
            1 => (self.deal_of(self.cta.layout.v), self.cta.layout.v, self.rows),
            _ => copier.deal(),
        }
    }

    fn deal_of(&self, format: RowFormat) -> Deal<'k> {
        Deal::new(self.thread, self.threads, format.chunks)
    }

    fn widen(&self, from: Shared<'k, u32>, (stored, format): (RowFormat, RowFormat)) {
        let (k, deal) = (self.cta.k, self.deal_of(format));
        let (from, to) = (from.byte(deal.chunk << 3), self.tile.byte(deal.chunk << 4));
        // all are powers of two
        let turns = self.rows / deal.rows_at_once;
        let pieces = if self.threads == 32 { PIECES } else { 2 };
        let at_once = (pieces * deal.lanes / format.chunks).clamp(1, turns);
        let at_once = 1 << at_once.ilog2();
        // the first row is not a constant, so that assemblers do not unroll the loop
        k.repeat((deal.row, self.rows as u32), (at_once * deal.rows_at_once) as u32, |row| {
            let (from, to) = (from.byte(row * stored.stride as u32), to.byte(row * format.stride as u32));
            let pieces: Vec<_> = (0..at_once)
                .flat_map(|turn| (0..format.chunks).step_by(deal.lanes).map(move |chunk| (turn, chunk)))
                .map(|(turn, chunk)| (turn * deal.rows_at_once, chunk))
                .collect();
            let load = |&(row, chunk): &(usize, usize)| {
                from.plus((row * stored.stride + chunk * 8) / 4).load_vector::<2>()
            };
            let words: Vec<_> = pieces.iter().map(load).collect();
            for ((row, chunk), [low, high]) in pieces.into_iter().zip(words) {
                let ([a, b], [c, d]) = (self.halves(low), self.halves(high));
                to.plus((row * format.stride + chunk * 16) / 4).store_vector([a, b, c, d]);
            }
        });
    }

    fn halves(&self, word: Value<'k, u32>) -> [Value<'k, u32>; 2] {
        let to = if self.cta.elements == Elements::F16 { Dtype::F16 } else { Dtype::Bf16 };
        halves((self.cta.kv, to), self.cta.arch, word)
    }
}
