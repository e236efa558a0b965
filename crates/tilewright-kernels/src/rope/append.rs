//! Head norms, RoPE, and the append of keys and values to a paged cache in one launch.
//!
//! ```text
//! q_out = rope(norm(q))
//! cache ← rope(norm(k)), v          each rounded once
//! ```
//!
//! Shapes: q, q_out `[tokens, qo_heads, dim]`, k, v `[tokens, kv_heads, dim]`; cache pages `[page_size, kv_heads, dim]` in any strides.
//! q, k and v share one dtype, q_out and the cache another; each f32, f16 or bf16. Whole heads are rotated, in halves. Norms are
//! optional; their weights are dense `[dim]`. Sizes except `dim` are launch parameters.
//!
//! A warp processes a head of a token. A lane holds as many elements of the first half as of the second one, which form pairs.

use super::angles;
use crate::{
    append::{Cache, CacheRegs, SlotMapping, SlotMappingKind},
    params::{GlobalArray, each},
    tile::{Chunk, Elements, Strided, reduce},
};
use tilewright::Dtype;
use tilewright_ptx::{Access, Arg, Builder, Invalid, Kernel, Value};

/// Warps per CTA, all of one token.
const WARPS: u32 = 4;

/// Compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RopeAppendConfig {
    /// Dtypes of q, k and v, and of q_out and the cache.
    pub dtypes: (Dtype, Dtype),
    /// Dtype of the weights of the norms, if there are norms.
    pub norms: Option<Dtype>,
    /// Elements per head: 64, 128 or 256.
    pub dim: u32,
}

crate::params! {
    /// Parameters of one launch.
    #[derive(Debug, Clone, Copy)]
    pub struct RopeAppendParams => RopeAppendRegs(this, config: RopeAppendConfig) {
        /// Dtypes of q, k and v, and of q_out and the cache.
        host dtypes: (Dtype, Dtype),
        /// Elements per head.
        host dim: u32,
        /// Number of tokens.
        host tokens: u32,
        /// q, k and v.
        from "": [Strided; 3][each(["q", "k", "v"], config.dtypes.0)],
        /// Rotated queries.
        q_out: Strided[config.dtypes.1],
        /// Destination of rotated keys.
        k_cache: Cache,
        /// Destination of values.
        v_cache: Cache,
        /// Slots of the tokens.
        slots "": SlotMapping[SlotMappingKind::Numbers],
        /// Address of i32 `[tokens]`.
        positions: u64 as GlobalArray<u32>,
        /// Address of f32 `[max_positions, dim]`: each row holds the cosines, then the sines.
        angles: u64,
        /// Query heads and KV heads.
        heads "": [u32; 2][each(["qo_heads", "kv_heads"], ())],
        /// Weights of the norms of q and k, and their dtype.
        host norms: Option<([u64; 2], Dtype)>,
        weights "": Option<[u64; 2]>[config.norms.map(|_| each(["q_weight", "k_weight"], ()))] =
            this.norms.map(|(weights, _)| weights),
        /// Added to the mean squares.
        eps: f32,
    }
}

impl RopeAppendParams {
    /// Configuration of the kernel for this launch; `None` if the kernel does not support it.
    pub fn config(&self) -> Option<RopeAppendConfig> {
        let (from, to) = self.dtypes;
        let inputs = self.from.iter().flat_map(|tensor| tensor.alignment(from));
        let caches = [self.k_cache, self.v_cache].into_iter().flat_map(|cache| cache.alignment(to));
        let weights = self.norms.into_iter().flat_map(|(weights, dtype)| weights.map(|at| (at, dtype)));
        let weights =
            weights.flat_map(|(address, dtype)| Strided { address, strides: [0; 2] }.alignment(dtype));
        let table = Strided { address: self.angles, strides: [0; 2] }.alignment(Dtype::F32);
        let mut elements = inputs.chain(self.q_out.alignment(to)).chain(caches).chain(weights).chain(table);
        let is_supported = [64, 128, 256].contains(&self.dim)
            && self.tokens <= 0xffff
            && !to.is_cache_only()
            && elements.all(|elements| elements.is_multiple_of(u64::from(self.dim / 64)));
        let norms = self.norms.map(|(_, dtype)| dtype);
        is_supported.then_some(RopeAppendConfig { dtypes: self.dtypes, norms, dim: self.dim })
    }

    /// Grid and arguments for a configuration of [`RopeAppendParams::config`]. Requires at least one token and one head.
    pub fn launch(&self, config: RopeAppendConfig) -> ([u32; 3], Vec<Arg>) {
        let [qo_heads, kv_heads] = self.heads;
        ([(qo_heads + 2 * kv_heads).div_ceil(WARPS), self.tokens, 1], self.args(config))
    }
}

impl RopeAppendConfig {
    /// Kernel name, unique per configuration.
    pub fn name(self) -> String {
        let Self { dtypes: (from, to), norms, dim } = self;
        let norms = norms.map_or(String::new(), |dtype| format!("_norms_{dtype}"));
        format!("rope_append_{from}_to_{to}_{dim}{norms}")
    }

    /// Elements of each half per lane.
    fn lane_elements(self) -> u32 {
        self.dim / 64
    }
}

/// Records the kernel of a configuration. Its parameters are those of [`RopeAppendParams::launch`].
///
/// # Errors
/// None for a configuration from [`RopeAppendParams::config`].
pub fn rope_append(name: &str, config: RopeAppendConfig) -> Result<Kernel, Invalid> {
    Builder::kernel(name, 32 * WARPS, |k| {
        // attention follows: its CTAs are spread evenly only if the kernels before this one have left the SMs
        k.wait_for_prerequisites();
        k.launch_dependents();
        let params = RopeAppendRegs::declare(k, config);
        let ([q, key, value], [qo_heads, kv_heads], token) = (params.from, params.heads, k.cta_y());
        let head = k.cta() * WARPS + (k.thread() >> 5).of_lane(0);
        let lane = HeadLane { k, config, params, token };
        let is_query = head.lt(qo_heads);
        k.when(is_query, || {
            let rotated = lane.rotated(q.row(token, head), 0);
            lane.store(&rotated, params.q_out.row(token, head));
        });
        let head = head - qo_heads;
        k.when(!is_query & head.lt(kv_heads), || {
            let rotated = lane.rotated(key.row(token, head), 1);
            lane.append(&rotated, params.k_cache, head);
        });
        let head = head - kv_heads;
        k.when(!is_query & head.lt(kv_heads), || {
            let halves = lane
                .halves(value.row(token, head))
                .map(|half| half.load(config.lane_elements(), Access::Streaming));
            lane.append(&halves.map(|half| half.numbers()), params.v_cache, head);
        });
    })
}

/// A lane of the warp of a head.
struct HeadLane<'k> {
    k: &'k Builder,
    config: RopeAppendConfig,
    params: RopeAppendRegs<'k>,
    token: Value<'k, u32>,
}

impl<'k> HeadLane<'k> {
    /// The first elements of this lane in both halves of a vector.
    #[track_caller]
    fn halves(&self, row: Elements<'k>) -> [Elements<'k>; 2] {
        let first = row.at(self.k.lane() * self.config.lane_elements());
        [first, first.plus(self.config.dim / 2)]
    }

    /// Loads a head and rotates it, after its norm if there are norms; `part` is 0 for queries and 1 for keys.
    #[track_caller]
    fn rotated(&self, row: Elements<'k>, part: usize) -> [Vec<Value<'k, f32>>; 2] {
        let (k, width) = (self.k, self.config.lane_elements());
        // issued first: the angles depend on it
        let position = self.params.positions.at(self.token).load();
        let load = |row, access| self.halves(row).map(|half| half.load(width, access));
        let loaded = load(row, Access::Streaming);
        let weights = self.params.weights.zip(self.config.norms);
        let weights =
            weights.map(|(weights, dtype)| load(Elements::new(weights[part], dtype), Access::ReadOnly));
        let angles = Elements::new(self.params.angles, Dtype::F32)
            .at_wide(position.to_u64() * u64::from(self.config.dim));
        let [cosines, sines] = self.halves(angles).map(|half| angles::load(half, width));
        let mut head = loaded.map(|half| half.numbers());
        if let Some(weights) = weights {
            let squares = head.iter().flatten().fold(k.constant(0.0), |sum, &x| x.mul_add(x, sum));
            let mean = reduce::warp_sum(squares) * (1.0 / self.config.dim as f32);
            let factor = (mean + self.params.eps).rsqrt();
            for (half, weights) in head.iter_mut().zip(weights) {
                half.iter_mut().zip(weights.numbers()).for_each(|(x, weight)| *x = *x * factor * weight);
            }
        }
        let [first, second] = &mut head;
        for (at, (cos, sin)) in cosines.into_iter().zip(sines).enumerate() {
            let (x, y) = (first[at], second[at]);
            first[at] = x.mul_add(cos, -(y * sin));
            second[at] = y.mul_add(cos, x * sin);
        }
        head
    }

    #[track_caller]
    fn store(&self, head: &[Vec<Value<'k, f32>>; 2], row: Elements<'k>) {
        for (half, to) in head.iter().zip(self.halves(row)) {
            Chunk::of(self.config.dtypes.1, half).store(to);
        }
    }

    /// Stores a head in the slot of the token, if it has one.
    #[track_caller]
    fn append(&self, elements: &[Vec<Value<'k, f32>>; 2], cache: CacheRegs<'k>, head: Value<'k, u32>) {
        self.params.slots.find(self.k, self.token, |page, slot| {
            let [page_stride, slot_stride, head_stride] = cache.strides;
            let at = page.to_u64() * page_stride + slot.to_u64() * slot_stride + head.to_u64() * head_stride;
            self.store(elements, Elements::new(cache.address, self.config.dtypes.1).at_wide(at));
        });
    }
}
