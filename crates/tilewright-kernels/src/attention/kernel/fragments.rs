//! Register fragments of `mma.sync`: accumulators, row states, and the products `Q · Kᵀ` and `P · V`.
//!
//! A tile of 16 rows is an `mma` tile: lane `l` holds rows `l / 4` and `l / 4 + 8`, and columns `2 (l % 4)` and the next of each
//! 8 columns. An accumulator of 16 keys, rounded, is the A fragment of `P · V` for these keys.

use super::{CtaLayout, MmaCta, RowFormat};
use tilewright_ptx::{Builder, Shared, Value, Var};

/// An accumulator fragment of 16 rows and 8 columns.
pub(crate) type AccFragment<'k> = [Var<'k, f32>; 4];

/// The elements of a head in the columns of its accumulators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Columns {
    /// Column `j` of accumulator `t` is element `8 t + j`.
    Adjacent,
    /// Of 16 elements, one accumulator has the even ones and the next the odd ones, so that a lane has four adjacent ones.
    Interleaved,
}

/// The softmax state and accumulators of 16 rows.
#[derive(Debug, Clone)]
pub(crate) struct RowTile<'k> {
    /// Per 8 elements of a head `Σ weight · value`.
    pub(crate) o: Vec<AccFragment<'k>>,
    pub(crate) columns: Columns,
    /// Per half the running maximum of `Q · Kᵀ`.
    pub(crate) max: [Var<'k, f32>; 2],
    /// Per half this thread's part of the sum of weights.
    pub(crate) sum: [ThreadScalar<'k>; 2],
}

/// A number per thread.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ThreadScalar<'k> {
    /// In a register.
    Register(Var<'k, f32>),
    /// In shared memory, to reduce register pressure.
    Memory(Shared<'k, f32>),
}

impl<'k> ThreadScalar<'k> {
    #[track_caller]
    pub(crate) fn get(self) -> Value<'k, f32> {
        match self {
            Self::Register(register) => register.get(),
            Self::Memory(memory) => memory.load(),
        }
    }

    #[track_caller]
    pub(crate) fn set(self, value: Value<'k, f32>) {
        match self {
            Self::Register(register) => register.set(value),
            Self::Memory(memory) => memory.store(value),
        }
    }
}

impl<'k> RowTile<'k> {
    /// An empty state; the sums of weights are stored in `sum`.
    pub(crate) fn new(cta: &MmaCta<'k>, sum: [ThreadScalar<'k>; 2]) -> Self {
        Self::of_columns(cta, cta.layout.v.steps(), sum)
    }

    /// The same for `steps` times 16 elements of a head.
    pub(crate) fn of_columns(cta: &MmaCta<'k>, steps: usize, sum: [ThreadScalar<'k>; 2]) -> Self {
        let k = cta.k;
        sum.iter().for_each(|sum| sum.set(k.constant(0.0)));
        let o = cta.zeros("o", 2 * steps);
        Self { o, columns: Columns::Adjacent, max: [0, 1].map(|_| k.var("max", f32::NEG_INFINITY)), sum }
    }
}

/// Masks logits to -inf: bit `8 t + 2 (lane % 4) + i` of `visible` is column `i` of tile `t`, for both halves.
pub(crate) fn apply_mask<'k>(k: &'k Builder, visible: [Value<'k, u64>; 2], logits: &[AccFragment<'k>]) {
    let column = (k.lane() & 3) << 1;
    for (half, visible) in visible.into_iter().enumerate() {
        let own = visible >> column;
        for (tile, sums) in logits.iter().enumerate() {
            let word = if tile < 4 { own.low() } else { own.high() };
            for i in 0..2 {
                let hidden = (word & (1 << (8 * (tile % 4) + i))).eq(0);
                let logit = sums[2 * half + i];
                logit.set(logit.get().unless(hidden, f32::NEG_INFINITY));
            }
        }
    }
}

/// Per-lane `ldmatrix` offsets, in bytes from the first row of a tile of 16.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FragmentLoader<'k> {
    /// Queries, as the A operand.
    q: LaneOffset<'k>,
    /// Keys, as B columns.
    k: LaneOffset<'k>,
    /// Values, as B depth (transposed).
    v: LaneOffset<'k>,
}

/// The offset of a lane's row, at the first of the steps of 16 elements.
#[derive(Debug, Clone, Copy)]
enum LaneOffset<'k> {
    /// Other steps are at constant distances.
    Padded(Value<'k, u32>),
    /// In boxes of 8 or more rows: one offset for each of the four steps of a panel, because of the swizzle, and bytes of a panel.
    Panels([Value<'k, u32>; 4], usize),
    /// In boxes of one row, of at most two panels: one offset for each step.
    Rows([Value<'k, u32>; 8]),
}

impl<'k> LaneOffset<'k> {
    /// Of chunk 0 or 1 of each step.
    fn new(row: Value<'k, u32>, chunk: Value<'k, u32>, format: RowFormat) -> Self {
        let at_step = |step: usize| format.chunk(row, chunk + 2 * step as u32);
        match format.box_rows {
            None => Self::Padded(at_step(0)),
            Some(1) => Self::Rows(std::array::from_fn(at_step)),
            Some(rows) => Self::Panels(std::array::from_fn(at_step), rows * format.stride),
        }
    }

    /// The address at a step of 16 elements of the rows at `rows`.
    #[track_caller]
    fn at(self, rows: Shared<'k, u32>, step: usize) -> Shared<'k, u32> {
        match self {
            Self::Padded(offset) => rows.byte(offset).plus(step * 8),
            Self::Panels(offsets, panel) => rows.byte(offsets[step % 4]).plus(step / 4 * panel / 4),
            Self::Rows(offsets) => rows.byte(offsets[step]),
        }
    }
}

impl<'k> FragmentLoader<'k> {
    pub(crate) fn new(k: &'k Builder, layout: &CtaLayout) -> Self {
        let lane = k.lane();
        let (low, high, middle) = (lane & 15, lane >> 4, (lane >> 3) & 1);
        Self {
            q: LaneOffset::new(low, high, layout.q),
            k: LaneOffset::new((lane & 7) + (high << 3), middle, layout.k),
            v: LaneOffset::new(low, high, layout.v),
        }
    }

    /// The A fragment of step `step` of 16 elements of the 16 rows at `rows`.
    #[track_caller]
    pub(crate) fn query(&self, cta: &MmaCta<'k>, rows: Shared<'k, u32>, step: usize) -> [Value<'k, u32>; 4] {
        cta.k.load_matrix(self.q.at(rows, step), false)
    }

    /// Both B fragments, of 8 keys each, of step `step` of 16 elements of the 16 keys at `keys`.
    #[track_caller]
    pub(crate) fn key(
        &self,
        cta: &MmaCta<'k>,
        keys: Shared<'k, u32>,
        step: usize,
    ) -> [[Value<'k, u32>; 2]; 2] {
        let [a, b, c, d] = cta.k.load_matrix::<4, _>(self.k.at(keys, step), false);
        [[a, b], [c, d]]
    }

    /// Both B fragments, of 8 elements each, of the `step`th 16 elements of the 16 values at `values`.
    #[track_caller]
    fn value(&self, cta: &MmaCta<'k>, values: Shared<'k, u32>, step: usize) -> [[Value<'k, u32>; 2]; 2] {
        let [a, b, c, d] = cta.k.load_matrix::<4, _>(self.v.at(values, step), true);
        [[a, b], [c, d]]
    }

    /// `logits = Q · Kᵀ` of some row tiles and all keys at `keys`; `query` returns the A fragment of a row tile and step.
    pub(crate) fn multiply_keys(
        &self,
        cta: &MmaCta<'k>,
        query: impl Fn(usize, usize) -> [Value<'k, u32>; 4],
        keys: Shared<'k, u32>,
        logits: &[Vec<AccFragment<'k>>],
    ) {
        let format = cta.layout.k;
        logits.iter().flatten().flatten().for_each(|sum| sum.set(0.0));
        let pairs = logits.first().map_or(0, Vec::len) / 2;
        for step in 0..format.steps() {
            let left: Vec<_> = (0..logits.len()).map(|tile| query(tile, step)).collect();
            for pair in 0..pairs {
                let right = self.key(cta, keys.plus(pair * format.block_bytes() / 4), step);
                for (left, sums) in left.iter().zip(logits) {
                    cta.k.mma(cta.elements, sums[2 * pair], *left, right[0]);
                    cta.k.mma(cta.elements, sums[2 * pair + 1], *left, right[1]);
                }
            }
        }
    }

    /// `O += P · V`; `values` begin at the first element of `tiles`, and `weights` are four words per row tile and 16 keys.
    pub(crate) fn multiply_values(
        &self,
        cta: &MmaCta<'k>,
        weights: &[Vec<[Value<'k, u32>; 4]>],
        values: Shared<'k, u32>,
        tiles: &[RowTile<'k>],
    ) {
        let format = cta.layout.v;
        for step in 0..weights.first().map_or(0, Vec::len) {
            for pair in 0..tiles.first().map_or(0, |tile| tile.o.len() / 2) {
                let right = self.value(cta, values.plus(step * format.block_bytes() / 4), pair);
                for (weights, tile) in weights.iter().zip(tiles) {
                    cta.k.mma(cta.elements, tile.o[2 * pair], weights[step], right[0]);
                    cta.k.mma(cta.elements, tile.o[2 * pair + 1], weights[step], right[1]);
                }
            }
        }
    }
}
