//! `O = O · factor + P · V` of a KV tile, 64 dims of the values at a time.
//!
//! A lane has dims `lane` and `lane + 32` of a part, for all rows of its warp.

use super::{
    KEYS, WARPS,
    block::{Block, Cta},
    elements,
    locate::Keys,
    weights::HIDDEN,
};
use tilewright::attention::variant::{Hook, Input};
use tilewright_ptx::build::{Value, Var};

impl<'k> Cta<'k, '_> {
    /// Makes this warp's rows of O 0.
    #[track_caller]
    pub(super) fn clear_output(&self) {
        let first = self.warp * (self.warp_rows() * self.config.o_stride());
        let end = first + self.warp_rows() * self.config.o_stride();
        self.k.repeat((first + self.lane, end), 32, |at| self.o.at(at).store(0.0));
    }

    /// Adds the tile's values, each with its weight, to the block's rows. Leaves the stage free.
    #[track_caller]
    pub(super) fn weigh_values(&self, block: &Block<'k>) {
        let k = self.k;
        let parts = self.config.o_stride() / self.config.v_dims();
        k.repeat((0, parts), 1, |part| {
            self.load_values(block, part);
            k.sync_threads();
            k.when(block.count.gt(0), || self.weigh_part(block, part));
            k.sync_threads();
        });
    }

    /// Brings a part of all values to the stage, as f32 and hooked: each warp every fourth key. What is no key or no dim is 0.
    #[track_caller]
    fn load_values(&self, block: &Block<'k>, part: Value<'k, u32>) {
        let (dims, dtype) = (self.config.v_dims(), self.config.dtype_kv);
        let place = |key: u32| self.warp + key * WARPS;
        let at = |key: u32, ahead: u32| {
            let dim = part * dims + self.lane + ahead;
            let address = self.keys.v.at(place(key)).load();
            let there = Keys::is_real(address) & dim.lt(self.config.head_dim.1);
            (there, dim, self.load_when(there, dtype, elements::place(dtype, address, dim.to_u64())))
        };
        let places = (0..KEYS / WARPS).flat_map(|key| (0..dims).step_by(32).map(move |ahead| (key, ahead)));
        // all are asked for before the first is needed
        let loaded: Vec<_> = places.map(|(key, ahead)| (key, ahead, at(key, ahead))).collect();
        for (key, ahead, (there, dim, mut x)) in loaded {
            if self.hooks.is().is_live(Hook::Value) {
                let position = self.keys.position.at(place(key)).load();
                let at = |input| match input {
                    Input::Kv => Some(position.to_f32()),
                    Input::KvHead => Some(block.item.kv_head.to_f32()),
                    Input::Dim => Some(dim.to_f32()),
                    _ => None,
                };
                x = there.select(self.hooks.value.value(&at, x), 0.0);
            }
            self.stage.at(place(key) * dims + self.lane + ahead).store(x);
        }
    }

    #[track_caller]
    fn weigh_part(&self, block: &Block<'k>, part: Value<'k, u32>) {
        let (k, dims) = (self.k, self.config.v_dims());
        let first = block.of_warp * self.config.o_stride() + part * dims + self.lane;
        let place =
            |row: u32, ahead: u32| self.o.at(first).plus((row * self.config.o_stride() + ahead) as usize);
        let each =
            || (0..self.warp_rows()).flat_map(|row| (0..dims).step_by(32).map(move |ahead| (row, ahead)));
        let factors: Vec<Value<'k, f32>> = (0..self.warp_rows()).map(|row| self.factor(block, row)).collect();
        let sums: Vec<Var<'k, f32>> = each()
            .map(|(row, ahead)| k.var("o_sum", place(row, ahead).load() * factors[row as usize]))
            .collect();
        k.repeat((0, KEYS), 4, |key| {
            let weights = self.weights.at(block.of_warp * KEYS + key).cast::<u32>();
            let values = self.stage.at(key * dims + self.lane);
            let weights: Vec<[Value<'k, u32>; 4]> = (0..self.warp_rows() as usize)
                .map(|row| weights.plus(row * KEYS as usize).load_vector())
                .collect();
            for i in 0..4 {
                let values: Vec<Value<'k, f32>> =
                    (0..dims / 32).map(|at| values.plus((i * dims + 32 * at) as usize).load()).collect();
                for ((row, ahead), sum) in each().zip(&sums) {
                    let weight = weights[row as usize][i as usize];
                    let value = values[(ahead / 32) as usize];
                    let added = weight.reinterpret::<f32>().mul_add(value, sum.get());
                    sum.set(weight.eq(HIDDEN).select(sum.get(), added));
                }
            }
        });
        for ((row, ahead), sum) in each().zip(&sums) {
            place(row, ahead).store(sum.get());
        }
    }

    /// What brings row `row` of this warp to its new maximum; 1 for rows that are not there.
    #[track_caller]
    fn factor(&self, block: &Block<'k>, row: u32) -> Value<'k, f32> {
        let factor = self.k.var("factor_is", 1.0);
        self.k.when(block.count.gt(row), || factor.set(self.rows.factor.at(block.of_warp + row).load()));
        factor.get()
    }
}
