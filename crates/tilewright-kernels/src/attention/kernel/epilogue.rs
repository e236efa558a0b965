//! Epilogue: normalizes the accumulators and writes outputs or partial states.

use super::{CurrentItem, MmaCta, QueryHead, RowHooks, RowTile, page_scales};
use crate::{
    attention::items::{NONE, WorkItemRegs},
    tile::reduce,
};
use tilewright_ptx::{Builder, Global, Value, Var};

/// Final softmax statistics of a row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SoftmaxStats<'k> {
    /// The factor from accumulators to outputs; 0 if the row sees no key.
    pub(crate) normalizer: Value<'k, f32>,
    /// The LSE in base 2.
    pub(crate) lse: Value<'k, f32>,
    /// The maximum base-2 logit, or another reference of the sum.
    pub(crate) max: Value<'k, f32>,
    /// The sum of weights; 0 if the row sees no key.
    pub(crate) sum: Value<'k, f32>,
}

impl<'k> SoftmaxStats<'k> {
    /// From the maximum base-2 logit and the sum of weights relative to it.
    #[track_caller]
    pub(crate) fn new(max: Value<'k, f32>, sum: Value<'k, f32>) -> Self {
        Self { normalizer: normalizer(sum), lse: lse(max, sum), max, sum }
    }

    /// The statistics of a partial state.
    #[track_caller]
    pub(crate) fn of_partial_state(&self) -> [Value<'k, f32>; 2] {
        [self.max.unless(self.sum.eq(0.0), f32::NEG_INFINITY), self.sum]
    }
}

/// The factor from accumulators to outputs; 0 for a state of no keys.
#[track_caller]
pub(crate) fn normalizer(sum: Value<'_, f32>) -> Value<'_, f32> {
    let empty = sum.eq(0.0);
    sum.recip().unless(empty, 0.0)
}

/// The LSE in base 2 of a maximum base-2 logit and the sum of weights relative to it; -inf for a state of no keys.
#[track_caller]
pub(crate) fn lse<'k>(max: Value<'k, f32>, sum: Value<'k, f32>) -> Value<'k, f32> {
    (max + sum.log2()).unless(sum.eq(0.0), f32::NEG_INFINITY)
}

/// The output row of a query head.
#[track_caller]
pub(crate) fn output_row<'k>(cta: &MmaCta<'k>, head: QueryHead<'k>) -> Global<'k, u32> {
    let o = &cta.params.o;
    match cta.has_fp8_outputs() {
        true => Global::new(o.address + head.offset_in(o)),
        false => Global::<u16>::new(o.address).at_wide(head.offset_in(o)).cast(),
    }
}

/// Writes the LSE of a query head, if requested.
#[track_caller]
pub(crate) fn store_lse<'k>(cta: &MmaCta<'k>, head: QueryHead<'k>, lse: Value<'k, f32>) {
    cta.k.when(cta.params.has_lse(), || head.lse_in(&cta.params).store(lse));
}

/// The partial state of a row of an item: accumulator and statistics.
#[track_caller]
pub(crate) fn partial_row<'k>(
    cta: &MmaCta<'k>,
    item: &WorkItemRegs<'k>,
    row: Value<'k, u32>,
) -> (Global<'k, f32>, Global<'k, f32>) {
    let offset = (item.partial + row).to_u64();
    let o = cta.params.partial_o.at_wide(offset * cta.layout.v.dim as u64);
    (o, cta.params.partial_stats.at_wide(offset * 2))
}

/// The rows and elements that a row tile has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TilePosition<'k> {
    /// The first row of the item's current tile of rows.
    pub(crate) tile_begin: Value<'k, u32>,
    /// The first row of the row tile, in that tile.
    pub(crate) in_tile: Value<'k, u32>,
    /// The first element of the heads, an even number.
    pub(crate) first_column: Value<'k, u32>,
    /// Whether the rows' LSEs are written too.
    pub(crate) with_lse: Value<'k, bool>,
}

impl<'k> TilePosition<'k> {
    /// A row tile with all elements of its rows.
    #[track_caller]
    pub(crate) fn all_columns(k: &'k Builder, tile_begin: Value<'k, u32>, in_tile: Value<'k, u32>) -> Self {
        Self { tile_begin, in_tile, first_column: k.constant(0), with_lse: k.constant(true) }
    }
}

/// Writes the 16 rows of a row tile.
pub(crate) fn store_tile<'k>(
    current: &CurrentItem<'k>,
    hooks: &RowHooks<'k, '_>,
    tile: &RowTile<'k>,
    TilePosition { tile_begin, in_tile, first_column, with_lse }: TilePosition<'k>,
) {
    let (cta, k) = (&current.cta, current.cta.k);
    let (first_row, lane, item) = (tile_begin + in_tile, k.lane(), current.load());
    let rows = item.qo_len * cta.params.group.by;
    for half in 0..2 {
        let sum = reduce::quad_sum(tile.sum[half].get());
        let stats = SoftmaxStats::new(tile.max[half].get() * current.scale, sum);
        let v_scale = page_scales::accumulator_scale(cta, item.kv_head);
        let factor = stats.normalizer * v_scale;
        let row = first_row + (lane >> 2) + 8 * half as u32;
        let first_of_quad = (lane & 3).eq(0) & with_lse;
        let pairs = |factor: Value<'k, f32>| {
            let tiles = tile.o.iter().enumerate().take(cta.layout.v.dim / 8);
            tiles.map(move |(at, o)| (at, [o[2 * half].get() * factor, o[2 * half + 1].get() * factor]))
        };
        k.when(row.lt(rows), || {
            k.when_else(
                item.partial.ne(NONE),
                || {
                    let (o, stats_of_row) = partial_row(cta, &item, row);
                    let o = o.at(first_column + ((lane & 3) << 1));
                    pairs(v_scale).for_each(|(at, pair)| o.plus(8 * at).store_vector(pair));
                    k.when(first_of_quad, || stats_of_row.store_vector(stats.of_partial_state()));
                },
                || {
                    let head = cta.query_head(&item, row);
                    let (o, first) = (output_row(cta, head), (first_column >> 1) + (lane & 3));
                    let epilogue = hooks.epilogue(|| in_tile + (lane >> 2), 8 * half);
                    let (stats, factor) = match epilogue.is_empty() {
                        true => (stats, factor),
                        false => {
                            let stats = epilogue.apply_update(stats);
                            (stats, stats.normalizer * v_scale)
                        }
                    };
                    pairs(factor).for_each(|(at, pair)| {
                        let [low, high] =
                            epilogue.apply_output(|| first_column + ((lane & 3) << 1) + 8 * at as u32, pair);
                        match cta.has_fp8_outputs() {
                            true => o.cast().at(first).plus(4 * at).store(cta.round_to_e4m3(low, high)),
                            false => o.at(first).plus(4 * at).store(cta.round_pair(low, high)),
                        }
                    });
                    k.when(first_of_quad, || store_lse(cta, head, stats.lse));
                },
            );
        });
    }
}

/// Adds weighted values; those of an empty state must not contribute, even if they are NaN.
pub(crate) fn add_weighted<'k>(
    sums: &[Var<'k, f32>; 4],
    values: [Value<'k, f32>; 4],
    weight: Value<'k, f32>,
) {
    for (sum, value) in sums.iter().zip(values) {
        sum.set(value.mul_add(weight, sum.get()).unless(weight.eq(0.0), sum.get()));
    }
}

/// Rounds four adjacent elements and writes them to an output.
#[track_caller]
pub(crate) fn store_vec4<'k>(
    cta: &MmaCta<'k>,
    to: Global<'k, u32>,
    chunk: Value<'k, u32>,
    values: [Value<'k, f32>; 4],
) {
    if cta.has_fp8_outputs() {
        let [low, high] = [0, 2].map(|at| cta.round_to_e4m3(values[at], values[at + 1]));
        return to.at(chunk).store(cta.k.pack16(low, high));
    }
    let words = [cta.round_pair(values[0], values[1]), cta.round_pair(values[2], values[3])];
    to.at(chunk << 1).store_vector(words);
}
