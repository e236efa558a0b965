//! Appends to a cache whose pages have scales that grow: `scale = largest magnitude in the page / largest value of the dtype`.
//!
//! A CTA has a page and a head. It finds the largest magnitude that comes; where the page's scale is too small for it, the tokens
//! that are there are rounded to the steps of a larger one; then the new ones are written. Infinity and NaN have no say in the
//! scale; 0 marks a page that holds nothing. What this promises is said by [`tilewright::kv::ScaleMut::Dynamic`].

use super::Cache;
use crate::tile::{Chunk, Elements, Strided, StridedRows, reduce};
use tilewright::Dtype;
use tilewright_ptx::{
    build::{Builder, Global, Value},
    ir::Kernel,
    isa::memory::Access,
    sim::Arg,
    verify::Invalid,
};

const THREADS: u32 = 128;

/// What a kernel is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dynamic {
    /// Of new elements, and of the cache's, which have 8 bits.
    pub dtypes: (Dtype, Dtype),
}

/// One launch.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// Of new elements, and of the cache's.
    pub dtypes: (Dtype, Dtype),
    /// Heads, and elements of a head; at most 2^16 - 1 heads.
    pub shape: [u32; 2],
    /// New tokens.
    pub new: Strided,
    /// Where they go.
    pub cache: Cache,
    /// Address of u32 `[places, 3]`: a token, its page, its slot there, ordered by page and slot.
    pub slots: u64,
    /// Address of u32 `[pages, 4]` and how many there are: a page, the first of its places and the one behind its last, and how many
    /// of its slots hold tokens, counting the new ones.
    pub pages: (u64, u32),
    /// The scales, f32: where, and how far pages and heads are apart.
    pub scales: Strided,
}

impl Call {
    /// Grid and arguments for the kernel of these dtypes; there is at least one page, one head and one element.
    pub fn launch(&self) -> ([u32; 3], Vec<Arg>) {
        let mut args = [self.new.args().to_vec(), self.cache.args()].concat();
        args.extend([self.slots, self.pages.0].map(Arg::U64));
        args.extend(self.scales.args());
        args.push(Arg::U32(self.shape[1]));
        ([self.pages.1, self.shape[0], 1], args)
    }
}

impl Dynamic {
    /// A name that no other configuration has.
    pub fn name(self) -> String {
        format!("append_dynamic_{}_{}", self.dtypes.0, self.dtypes.1)
    }
}

/// The kernel of a configuration; its parameters are those of [`Call::launch`].
///
/// # Errors
/// None.
pub fn append(name: &str, config: Dynamic) -> Result<Kernel, Invalid> {
    Builder::kernel(name, THREADS, |k| {
        let (new, cache) =
            (StridedRows::param(k, "new", config.dtypes.0), Elements::param(k, "cache", config.dtypes.1));
        let strides = ["page", "slot", "head"].map(|axis| k.param::<u64>(&format!("cache_{axis}_stride")));
        let (slots, pages) = (k.global::<u32>("slots"), k.global::<u32>("pages"));
        let scales = StridedRows::param(k, "scales", Dtype::F32);
        let (dim, head) = (k.param::<u32>("head_dim"), k.cta_y());
        let [page, begin, end, filled] = [0, 1, 2, 3].map(|i| pages.at(k.cta() * 4).plus(i).load());
        let row = cache.at_wide(page.to_u64() * strides[0] + head.to_u64() * strides[2]);
        let of = Page { k, config, dim, head, new, slots, row, slot_stride: strides[1] };
        let scale = scales.row(page, head);
        let old = scale.number(Access::Weak);
        let needed = (of.largest(begin, end) / config.dtypes.1.max()).max(f32::MIN_POSITIVE);
        let grows = needed.gt(old);
        k.when(grows & old.gt(0.0), || of.round_again((begin, end, filled), old, needed));
        let now = grows.select(needed, old);
        // all threads have read the old one: they met to find the largest
        k.when(k.thread().eq(0), || Chunk::of(Dtype::F32, &[now]).store(scale));
        of.write(begin, end, now);
    })
}

/// A head of a page.
struct Page<'k> {
    k: &'k Builder,
    config: Dynamic,
    dim: Value<'k, u32>,
    head: Value<'k, u32>,
    new: StridedRows<'k>,
    slots: Global<'k, u32>,
    /// The head in slot 0.
    row: Elements<'k>,
    slot_stride: Value<'k, u64>,
}

impl<'k> Page<'k> {
    /// Calls `body` with each place of this thread's warp, and with each element of this lane there.
    #[track_caller]
    fn each(
        &self,
        (begin, end): (Value<'k, u32>, Value<'k, u32>),
        body: impl FnOnce(Value<'k, u32>, Value<'k, u32>),
    ) {
        let k = self.k;
        k.repeat((begin + (k.thread() >> 5), end), THREADS / 32, |place| {
            k.repeat((k.thread() & 31, self.dim), 32, |d| body(place, d));
        });
    }

    #[track_caller]
    fn value(&self, place: Value<'k, u32>, d: Value<'k, u32>) -> Value<'k, f32> {
        self.new.row(self.slots.at(place * 3).load(), self.head).at(d).number(Access::Weak)
    }

    #[track_caller]
    fn slot(&self, slot: Value<'k, u32>) -> Elements<'k> {
        self.row.at_wide(slot.to_u64() * self.slot_stride)
    }

    /// The largest finite magnitude that comes, 0 without any; the same in all threads.
    #[track_caller]
    fn largest(&self, begin: Value<'k, u32>, end: Value<'k, u32>) -> Value<'k, f32> {
        let largest = self.k.var("largest", 0.0_f32);
        self.each((begin, end), |place, d| {
            let magnitude = self.value(place, d).abs();
            // false for NaN, too
            let finite = magnitude.le(f32::MAX);
            largest.set(largest.get().max(finite.select(magnitude, 0.0)));
        });
        let memory = self.k.shared("largest", THREADS as usize / 32, 4);
        reduce::over_cta(self.k, (memory, THREADS), largest.get(), |x| reduce::warp_max(x), |a, b| a.max(b))
    }

    /// Rounds the tokens that are there to the steps of another scale.
    #[track_caller]
    fn round_again(
        &self,
        (begin, end, filled): (Value<'k, u32>, Value<'k, u32>, Value<'k, u32>),
        old: Value<'k, f32>,
        new: Value<'k, f32>,
    ) {
        let k = self.k;
        k.repeat((k.thread() >> 5, filled), THREADS / 32, |slot| {
            // what is about to be written for the first time is garbage
            let comes = k.var("comes", 0_u32);
            k.repeat((begin, end), 1, |place| {
                let this = self.slots.at(place * 3).plus(2).load().eq(slot);
                comes.set(this.select(1, comes.get()));
            });
            k.when(comes.get().eq(0), || {
                k.repeat((k.thread() & 31, self.dim), 32, |d| {
                    let at = self.slot(slot).at(d);
                    let value = at.number(Access::Weak) * old / new;
                    Chunk::of(self.config.dtypes.1, &[value]).store(at);
                });
            });
        });
    }

    /// Writes what comes.
    #[track_caller]
    fn write(&self, begin: Value<'k, u32>, end: Value<'k, u32>, scale: Value<'k, f32>) {
        self.each((begin, end), |place, d| {
            let slot = self.slots.at(place * 3).plus(2).load();
            let value = self.value(place, d) / scale;
            Chunk::of(self.config.dtypes.1, &[value]).store(self.slot(slot).at(d));
        });
    }
}
