//! `O = O · rescale + P · V` of a KV tile, 64 dims of the values at a time.
//!
//! A lane has dims `lane` and `lane + 32` of a part, for all rows of its warp.

use super::{KEYS, KeyTable, MASKED, RowBlock, SimtCta, WARPS, elements};
use tilewright::attention::variant::{Hook, Input};
use tilewright_ptx::{Value, Var};

impl<'k> SimtCta<'k, '_> {
    /// Zeroes this warp's rows of O.
    #[track_caller]
    pub(super) fn clear_output(&self, block: &RowBlock<'k>) {
        let first = block.warp_first * self.config.o_stride();
        let end = first + block.per_warp * self.config.o_stride();
        self.k.repeat_rolled((first + self.lane, end), 32, |at| self.o.at(at).store(0.0));
    }

    /// Adds the tile's values, multiplied by their weights, to the block's rows. `all_visible` means that this warp's rows see
    /// all keys. Leaves the stage free.
    #[track_caller]
    pub(super) fn multiply_values(&self, block: &RowBlock<'k>, all_visible: Value<'k, bool>) {
        let k = self.k;
        let parts = self.config.o_stride() / self.config.v_dims();
        k.repeat((0, parts), 1, |part| {
            self.load_values(block, part);
            k.sync_threads();
            k.when(block.count.gt(0), || {
                self.specialize(block, |rows| self.accumulate_part(block, part, rows as u32, all_visible));
            });
            k.sync_threads();
        });
    }

    /// Loads a part of all values to the stage `[64, v_dims]`, as f32 after the hook: every fourth key per warp. The rest is 0.
    #[track_caller]
    fn load_values(&self, block: &RowBlock<'k>, part: Value<'k, u32>) {
        let (dims, dtype) = (self.config.v_dims(), self.config.dtype_kv);
        let place = |key: u32| self.warp + key * WARPS;
        let at = |key: u32, ahead: u32| {
            let dim = part * dims + self.lane + ahead;
            let address = self.keys.v.at(place(key)).load();
            let in_range = KeyTable::is_real(address) & dim.lt(self.config.head_dim.vo as u32);
            let x = self.load_when(in_range, dtype, elements::address_of(dtype, address, dim.to_u64()));
            (in_range, dim, x)
        };
        let places = (0..KEYS / WARPS).flat_map(|key| (0..dims).step_by(32).map(move |ahead| (key, ahead)));
        // issue all loads before the first use
        let loaded: Vec<_> = places.map(|(key, ahead)| (key, ahead, at(key, ahead))).collect();
        for (key, ahead, (in_range, dim, mut x)) in loaded {
            if self.hooks.hooks().is_live(Hook::Value) {
                let position = self.keys.position.at(place(key)).load();
                let at = |input| match input {
                    Input::Kv => Some(position.to_f32()),
                    Input::KvHead => Some(block.item.kv_head.to_f32()),
                    Input::Dim => Some(dim.to_f32()),
                    _ => None,
                };
                x = in_range.select(self.hooks.value.value(&at, x), 0.0);
            }
            self.stage.at(place(key) * dims + self.lane + ahead).store(x);
        }
    }

    /// `O = O · rescale + P · V` of a part: weights `[rows, 64]`, values `[64, v_dims]`, sums `[rows, v_dims / 32]` per lane.
    #[track_caller]
    fn accumulate_part(
        &self,
        block: &RowBlock<'k>,
        part: Value<'k, u32>,
        rows: u32,
        all_visible: Value<'k, bool>,
    ) {
        let (k, dims, stride) = (self.k, self.config.v_dims(), self.config.o_stride());
        let first = self.o.at(block.warp_first * stride + part * dims + self.lane);
        let sums: Vec<Vec<Var<'k, f32>>> = (0..rows)
            .map(|row| {
                let rescale = self.rescale(block, row);
                let o = |ahead| first.plus((row * stride + ahead) as usize).load() * rescale;
                (0..dims).step_by(32).map(|ahead| k.var("o_sum", o(ahead))).collect()
            })
            .collect();
        k.when_else(
            all_visible,
            || self.add_values(block, &sums, |_, sum, added| sum.set(added)),
            || {
                self.add_values(block, &sums, |weight, sum, added| {
                    sum.set(weight.eq(MASKED).select(sum.get(), added));
                });
            },
        );
        for (row, sums) in (0..).zip(&sums) {
            for (ahead, sum) in (0..dims).step_by(32).zip(sums) {
                first.plus((row * stride + ahead) as usize).store(sum.get());
            }
        }
    }

    /// Adds all keys of the tile, in order, to the sums `[rows, dims / 32]`; `set` is called with a weight's bits, a sum and its
    /// new value.
    #[track_caller]
    fn add_values(
        &self,
        block: &RowBlock<'k>,
        sums: &[Vec<Var<'k, f32>>],
        set: impl Fn(Value<'k, u32>, Var<'k, f32>, Value<'k, f32>),
    ) {
        let dims = self.config.v_dims();
        self.k.repeat((0, KEYS), 4, |key| {
            let weights = self.weights.at(block.warp_first * KEYS + key).cast::<u32>();
            let values = self.stage.at(key * dims + self.lane);
            let weights: Vec<[Value<'k, u32>; 4]> =
                (0..sums.len()).map(|row| weights.plus(row * KEYS as usize).load_vector()).collect();
            for i in 0..4 {
                let value = |ahead: u32| values.plus((i * dims + ahead) as usize).load();
                let values: Vec<Value<'k, f32>> = (0..dims).step_by(32).map(value).collect();
                let each = sums.iter().zip(&weights).flat_map(|(sums, weights)| {
                    sums.iter().zip(&values).map(move |(sum, value)| (weights[i as usize], *sum, *value))
                });
                each.for_each(|(weight, sum, value)| {
                    set(weight, sum, weight.reinterpret::<f32>().mul_add(value, sum.get()));
                });
            }
        });
    }

    /// The rescale factor of row `row` of this warp; 1 for missing rows.
    #[track_caller]
    fn rescale(&self, block: &RowBlock<'k>, row: u32) -> Value<'k, f32> {
        let rescale = self.k.var("factor_is", 1.0);
        self.k.when(block.count.gt(row), || rescale.set(self.rows.rescale.at(block.warp_first + row).load()));
        rescale.get()
    }
}
