//! Loads queries to shared memory, and computes `S = Q · Kᵀ` of a KV tile, 32 dims of the keys at a time.
//!
//! A lane has keys `lane` and `lane + 32` of the tile, and all rows of its warp. If a hook needs pairs, the 32 dims are 16 dims
//! and their partners half a head further on, in queries and keys alike.

use super::{K_DIMS, K_STRIDE, KEYS, KeyTable, RowBlock, SimtCta, WARPS, elements};
use crate::attention::params::RowTensorRegs;
use tilewright::attention::variant::{Hook, Input};
use tilewright_ptx::{Value, Var};

/// A lane's dim of a part of 32.
#[derive(Clone, Copy)]
struct LaneDim<'k> {
    /// Index in the head.
    dim: Value<'k, u32>,
    /// Index of the pair, if hooks need pairs.
    pair: Value<'k, u32>,
    /// Whether the head has this dim.
    exists: Value<'k, bool>,
}

impl<'k> SimtCta<'k, '_> {
    /// Number of parts of 32 dims.
    fn parts(&self) -> u32 {
        (self.config.head_dim.qk as u32).div_ceil(K_DIMS)
    }

    /// This lane's dim of a part.
    #[track_caller]
    fn dim(&self, part: Value<'k, u32>) -> LaneDim<'k> {
        let (qk, lane) = (self.config.head_dim.qk as u32, self.lane);
        if !self.hooks.needs_pairs() {
            let dim = part * K_DIMS + lane;
            return LaneDim { dim, pair: dim, exists: dim.lt(qk) };
        }
        let (half, pair) = (qk / 2, part * (K_DIMS / 2) + (lane & 15));
        LaneDim { dim: lane.lt(16).select(pair, pair + half), pair, exists: pair.lt(half) }
    }

    /// The address of an element of a head. In MLA it is relative to `first` below `head_dim.vo`, otherwise to `second`.
    #[track_caller]
    fn element_at(
        &self,
        dtype: tilewright::Dtype,
        first: Value<'k, u64>,
        second: Option<Value<'k, u64>>,
        dim: Value<'k, u32>,
    ) -> Value<'k, u64> {
        let vo = self.config.head_dim.vo as u32;
        let Some(second) = second else { return elements::address_of(dtype, first, dim.to_u64()) };
        let in_first = dim.lt(vo);
        let (base, dim) = (in_first.select(first, second), in_first.select(dim, dim - vo));
        elements::address_of(dtype, base, dim.to_u64())
    }

    /// Loads the element at an address if `condition` holds, otherwise 0.
    #[track_caller]
    pub(super) fn load_when(
        &self,
        condition: Value<'k, bool>,
        dtype: tilewright::Dtype,
        at: Value<'k, u64>,
    ) -> Value<'k, f32> {
        let x = self.k.var("x", 0.0);
        self.k.when(condition, || x.set(elements::load(dtype, at)));
        x.get()
    }

    /// Applies a hook on pairs to this lane's element `x`.
    #[track_caller]
    fn with_partner(
        &self,
        x: Value<'k, f32>,
        hook: impl FnOnce([Value<'k, f32>; 2]) -> [Value<'k, f32>; 2],
    ) -> Value<'k, f32> {
        let (partner, is_first) = (x.shuffle_xor(16), self.lane.lt(16));
        let [first, second] = hook([is_first.select(x, partner), is_first.select(partner, x)]);
        is_first.select(first, second)
    }

    /// Loads the block's queries `[rows, head_dim_qk]` to shared memory, each warp its rows; missing rows are 0.
    #[track_caller]
    pub(super) fn load_queries(&self, block: &RowBlock<'k>) {
        let (k, params, dtype) = (self.k, &self.params, self.config.dtype_q);
        let end = block.warp_first + block.per_warp;
        k.repeat_rolled((block.warp_first, end), 1, |r| {
            let exists = r.lt(block.warp_first + block.count);
            // missing rows use the indices of the first row and are not loaded
            let row = self.rows.row(exists.select(r, 0), block.item.kv_head);
            let at = |q: &RowTensorRegs<'k>| elements::address_of(dtype, q.address, row.head.offset_in(q));
            let (first, second) = (at(&params.q), params.pe.map(|pe| at(&pe.q)));
            let hook = self.hooks.query.bind(&|input| row.input(input));
            k.repeat((0, self.parts()), 1, |part| {
                let dim = self.dim(part);
                let in_range = exists & dim.exists;
                let mut x = self.load_when(in_range, dtype, self.element_at(dtype, first, second, dim.dim));
                if self.hooks.hooks().is_live(Hook::Query) {
                    let at = |input| (input == Input::Dim).then(|| dim.pair.to_f32());
                    let hooked = self.with_partner(x, |pair| hook.pair(&at, pair));
                    x = in_range.select(hooked, 0.0);
                }
                self.q.at(r * self.config.q_stride() + part * K_DIMS + self.lane).store(x);
            });
        });
    }

    /// Computes the logits `[rows, 64]` of the tile's keys for the block's rows into `weights`. Leaves the stage free.
    #[track_caller]
    pub(super) fn multiply_keys(&self, block: &RowBlock<'k>) {
        let k = self.k;
        let sums: Vec<[Var<'k, f32>; 2]> =
            (0..self.config.rows() / WARPS).map(|_| [k.var("s", 0.0), k.var("s", 0.0)]).collect();
        k.repeat((0, self.parts()), 1, |part| {
            self.load_keys(block, part);
            k.sync_threads();
            k.when(block.count.gt(0), || {
                self.specialize(block, |rows| self.multiply_part(block, part, &sums[..rows]));
            });
            k.sync_threads();
        });
        self.specialize(block, |rows| {
            for (row, sums) in sums[..rows].iter().enumerate() {
                let row = self.weights.at((block.warp_first + row as u32) * KEYS + self.lane);
                row.store(sums[0].get());
                row.plus(32).store(sums[1].get());
            }
        });
        k.sync_warp();
    }

    /// Loads 32 dims of all keys to the stage `[64, 32]`, as f32 after the hook: every fourth key per warp.
    #[track_caller]
    fn load_keys(&self, block: &RowBlock<'k>, part: Value<'k, u32>) {
        let dtype = self.config.dtype_kv;
        let dim = self.dim(part);
        let places = |key: u32| self.warp + key * WARPS;
        let load = |key: u32| {
            let address = self.keys.k.at(places(key)).load();
            let second = self.config.mla.then(|| self.keys.pe.at(places(key)).load());
            let at = self.element_at(dtype, address, second, dim.dim);
            self.load_when(KeyTable::is_real(address) & dim.exists, dtype, at)
        };
        // issue all loads before the first use
        let loaded: Vec<Value<'k, f32>> = (0..KEYS / WARPS).map(load).collect();
        for (key, x) in (0..).zip(loaded) {
            let to = self.stage.at(places(key) * K_STRIDE + self.lane);
            if !self.hooks.hooks().is_live(Hook::Key) {
                to.store(x);
                continue;
            }
            let position = self.keys.position.at(places(key)).load();
            let at = |input| match input {
                Input::Kv => Some(position.to_f32()),
                Input::KvHead => Some(block.item.kv_head.to_f32()),
                Input::Dim => Some(dim.pair.to_f32()),
                _ => None,
            };
            let hooked = self.with_partner(x, |pair| self.hooks.key.pair(&at, pair));
            to.store(dim.exists.select(hooked, 0.0));
        }
    }

    /// Adds the products of a part, queries `[rows, 32]` by keys `[64, 32]`, to the sums `[rows, 2]` of this lane's two keys.
    #[track_caller]
    fn multiply_part(&self, block: &RowBlock<'k>, part: Value<'k, u32>, sums: &[[Var<'k, f32>; 2]]) {
        let q = self.q.at(block.warp_first * self.config.q_stride() + part * K_DIMS);
        let key = self.stage.at(self.lane * K_STRIDE);
        for dims in (0..K_DIMS as usize).step_by(4) {
            let keys = [0, 32 * K_STRIDE as usize].map(|at| key.plus(at + dims).load_vector::<4>());
            for (row, sums) in sums.iter().enumerate() {
                let q = q.plus(row * self.config.q_stride() as usize + dims).load_vector::<4>();
                for (sum, key) in sums.iter().zip(&keys) {
                    q.iter().zip(key).for_each(|(q, key)| sum.set(q.mul_add(*key, sum.get())));
                }
            }
        }
    }
}
