//! Append to a cache with growing per-page scales: `scale = largest magnitude in the page / largest value of the
//! dtype`.
//!
//! One CTA per page and head:
//!
//! 1. Find the largest finite magnitude of the new tokens.
//! 2. If the page's scale is too small for it, requantize the tokens in the page to a larger scale.
//! 3. Write the new tokens.
//!
//! Infinity and NaN do not affect the scale; scale 0 marks an empty page. The contract is that of
//! [`tilewright::kv::ScaleMut::Dynamic`].

use super::Cache;
use crate::{
    params::GlobalArray,
    tile::{Chunk, Elements, Strided, StridedRows, reduce},
};
use tilewright::Dtype;
use tilewright_ptx::{Access, Arg, Builder, Global, Invalid, Kernel, Value};

const THREADS: u32 = 128;

/// Compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DynamicAppendConfig {
    /// Dtypes of new elements and of the cache, which has 8 bits.
    pub dtypes: (Dtype, Dtype),
}

crate::params! {
    /// Parameters of one launch.
    #[derive(Debug, Clone, Copy)]
    pub struct DynamicAppendParams => DynamicAppendRegs(this, config: DynamicAppendConfig) {
        /// Dtypes of new elements and of the cache.
        host dtypes: (Dtype, Dtype),
        /// `[kv_heads, head_dim]`, at most 2^16 - 1 heads.
        host shape: [u32; 2],
        /// New tokens.
        new: Strided[config.dtypes.0],
        /// Destination cache.
        cache: Cache,
        /// Address of u32 `[entries, 3]`: token, page, slot in the page, ordered by page and slot.
        slots: u64 as GlobalArray<u32>,
        /// Address and length of u32 `[pages, 4]`: page, begin and end of its entries in `slots`, number of filled slots
        /// including the new ones.
        host pages: (u64, u32),
        pages: GlobalArray<u32> = this.pages.0,
        /// f32 scales, with page and head strides.
        scales: Strided[Dtype::F32],
        dim "head_dim": u32 = this.shape[1],
    }
}

impl DynamicAppendParams {
    /// Grid and arguments of the kernel for these dtypes. Requires at least one page, one head and one element.
    pub fn launch(&self) -> ([u32; 3], Vec<Arg>) {
        let config = DynamicAppendConfig { dtypes: self.dtypes };
        ([self.pages.1, self.shape[0], 1], self.args(config))
    }
}

impl DynamicAppendConfig {
    /// Kernel name, unique per configuration.
    pub fn name(self) -> String {
        format!("append_dynamic_{}_{}", self.dtypes.0, self.dtypes.1)
    }
}

/// Records the kernel of a configuration. Its parameters are those of [`DynamicAppendParams::launch`].
///
/// # Errors
/// None.
pub fn append(name: &str, config: DynamicAppendConfig) -> Result<Kernel, Invalid> {
    Builder::dependent_kernel(name, THREADS, |k| {
        let DynamicAppendRegs { new, cache, slots, pages, scales, dim } =
            DynamicAppendRegs::declare(k, config);
        let (cache, strides, head) =
            (Elements::new(cache.address, config.dtypes.1), cache.strides, k.cta_y());
        let [page, begin, end, filled] = [0, 1, 2, 3].map(|i| pages.at(k.cta() * 4).plus(i).load());
        let row = cache.at_wide(page.to_u64() * strides[0] + head.to_u64() * strides[2]);
        let update =
            PageUpdate { k, config, dim, head, new, slots, begin, end, row, slot_stride: strides[1] };
        let scale = scales.row(page, head);
        let old = scale.number(Access::Weak);
        let needed = (update.max_magnitude() / config.dtypes.1.max()).max(f32::MIN_POSITIVE);
        let grows = needed.gt(old);
        k.when(grows & old.gt(0.0), || update.rescale(filled, old, needed));
        let now = grows.select(needed, old);
        // every thread has read the old scale: the reduction above is a barrier
        k.when(k.thread().eq(0), || Chunk::of(Dtype::F32, &[now]).store(scale));
        update.write(now);
    })
}

/// One head of a page.
struct PageUpdate<'k> {
    k: &'k Builder,
    config: DynamicAppendConfig,
    dim: Value<'k, u32>,
    head: Value<'k, u32>,
    new: StridedRows<'k>,
    slots: Global<'k, u32>,
    /// The new tokens of the page.
    begin: Value<'k, u32>,
    end: Value<'k, u32>,
    /// This head in slot 0.
    row: Elements<'k>,
    slot_stride: Value<'k, u64>,
}

impl<'k> PageUpdate<'k> {
    /// Calls `body` for each new entry of this warp and each element of this lane.
    #[track_caller]
    fn for_each_new(&self, body: impl FnOnce(Value<'k, u32>, Value<'k, u32>)) {
        let k = self.k;
        k.repeat((self.begin + (k.thread() >> 5), self.end), THREADS / 32, |index| {
            k.repeat((k.thread() & 31, self.dim), 32, |d| body(index, d));
        });
    }

    #[track_caller]
    fn value(&self, index: Value<'k, u32>, d: Value<'k, u32>) -> Value<'k, f32> {
        self.new.row(self.slots.at(index * 3).load(), self.head).at(d).number(Access::Weak)
    }

    #[track_caller]
    fn slot(&self, slot: Value<'k, u32>) -> Elements<'k> {
        self.row.at_wide(slot.to_u64() * self.slot_stride)
    }

    /// Largest finite magnitude of the new tokens, 0 without any; the same in all threads.
    #[track_caller]
    fn max_magnitude(&self) -> Value<'k, f32> {
        let max_magnitude = self.k.var("largest", 0.0_f32);
        self.for_each_new(|index, d| {
            let magnitude = self.value(index, d).abs();
            // also false for NaN
            let finite = magnitude.le(f32::MAX);
            max_magnitude.set(max_magnitude.get().max(finite.select(magnitude, 0.0)));
        });
        let memory = self.k.shared("largest", THREADS as usize / 32, 4);
        reduce::over_cta(memory, THREADS, max_magnitude.get(), |x| reduce::warp_max(x), |a, b| a.max(b))
    }

    /// Requantizes the tokens in the page to another scale.
    #[track_caller]
    fn rescale(&self, filled: Value<'k, u32>, old: Value<'k, f32>, new: Value<'k, f32>) {
        let k = self.k;
        k.repeat((k.thread() >> 5, filled), THREADS / 32, |slot| {
            // slots that the new tokens fill hold garbage
            let overwritten = k.var("comes", 0_u32);
            k.repeat((self.begin, self.end), 1, |index| {
                let this = self.slots.at(index * 3).plus(2).load().eq(slot);
                overwritten.set(this.select(1, overwritten.get()));
            });
            k.when(overwritten.get().eq(0), || {
                k.repeat((k.thread() & 31, self.dim), 32, |d| {
                    let at = self.slot(slot).at(d);
                    let value = at.number(Access::Weak) * old / new;
                    Chunk::of(self.config.dtypes.1, &[value]).store(at);
                });
            });
        });
    }

    /// Writes the new tokens.
    #[track_caller]
    fn write(&self, scale: Value<'k, f32>) {
        self.for_each_new(|index, d| {
            let slot = self.slots.at(index * 3).plus(2).load();
            let value = self.value(index, d) / scale;
            Chunk::of(self.config.dtypes.1, &[value]).store(self.slot(slot).at(d));
        });
    }
}
