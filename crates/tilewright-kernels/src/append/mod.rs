//! Appends new keys or values to a paged cache. The layouts NHD and HND differ in strides only.
//!
//! ```text
//! stored = value / scale, rounded to the cache's dtype
//! ```
//!
//! Shapes: new `[tokens, kv_heads, head_dim]`; cache pages `[page_size, kv_heads, head_dim]` in any strides; each of
//! any dtype. [`SlotMapping`] maps tokens to slots, which are distinct.
//! Sizes are launch parameters. For scales that grow with the appended values see [`dynamic`].

pub mod dynamic;
mod slot_lookup;

use crate::{
    params::{GlobalArray, each},
    tile::{Elements, Strided, TokenPartition, chunk},
};
use tilewright::Dtype;
use tilewright_ptx::{Access, Arg, Builder, Global, Invalid, Kernel, Value};

/// Chunks per thread, all of one token.
const CHUNKS_PER_THREAD: u32 = 2;

/// Format of a [`SlotMapping`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SlotMappingKind {
    /// [`SlotMapping::Slots`]
    Slots,
    /// [`SlotMapping::Unchecked`]
    Unchecked,
    /// [`SlotMapping::Numbers`]
    Numbers,
}

/// Destination slots of tokens, as arrays in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotMapping {
    /// u32 `[count, 3]`: token, page, slot in the page.
    Slots {
        /// Address of the array.
        slots: u64,
        /// Number of entries.
        count: u32,
    },
    /// Token t of request `r = batch_indices[t]` is written to slot `positions[t] % page_size` of page
    /// `indices[indptr[r] + positions[t] / page_size]`. The host has not checked the arrays: a token is skipped if its request, its
    /// position in the pages of the request, or its page is out of range.
    Unchecked {
        /// The arrays.
        table: SlotTable,
        /// Number of requests.
        num_requests: u32,
        /// Number of entries of indices.
        num_indices: u32,
        /// Number of pages of the cache.
        num_pages: u32,
        /// Number of new tokens.
        count: u32,
    },
    /// Token t is written to slot `n % page_size` of page `n / page_size` with `n = numbers[t]`; a number that is not in
    /// `0..num_slots` skips it.
    Numbers {
        /// i64 `[tokens]`
        numbers: u64,
        /// Tokens per page.
        page_size: u32,
        /// Number of slots of the cache.
        num_slots: u32,
        /// Number of new tokens.
        count: u32,
    },
}

impl SlotMapping {
    /// Number of entries or new tokens.
    fn count(self) -> u32 {
        let (Self::Slots { count, .. } | Self::Unchecked { count, .. } | Self::Numbers { count, .. }) = self;
        count
    }
}

/// Compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AppendConfig {
    /// Dtypes of new elements and of the cache.
    pub dtypes: (Dtype, Dtype),
    /// Elements per load: 1, or `chunk::max_width` of both dtypes.
    pub width: u32,
    /// Format of the slot mapping.
    pub slot_mapping: SlotMappingKind,
    /// Whether values are divided by a scale.
    pub scaled: bool,
}

crate::params! {
    /// Scale of stored values: element `page · page_stride + head · head_stride` of the array at `at`, or `factor` if
    /// `at` is 0.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct Scale => ScaleRegs(this) {
        /// Address of f32 scales, or 0.
        at "scale_at": u64,
        /// Page stride, in elements.
        page_stride "scale_page_stride": u64,
        /// Head stride, in elements.
        head_stride "scale_head_stride": u64,
        /// Uniform scale if `at` is 0.
        factor: f32,
    }

    /// The page table of requests, and the request and position of each token.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct SlotTable => SlotTableRegs(this) {
        /// i32 `[tokens]`
        batch_indices: u64 as GlobalArray<i32>,
        /// i32 `[tokens]`
        positions: u64 as GlobalArray<u32>,
        /// i32 `[requests + 1]`
        indptr: u64 as GlobalArray<u32>,
        /// i32 `[pages]`
        indices: u64 as GlobalArray<u32>,
        /// Tokens per page.
        page_size: u32,
    }

    /// A paged cache in memory.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Cache => CacheRegs(this) {
        /// Byte address of the first element.
        address "": u64,
        /// Strides of pages, slots and heads, in elements.
        strides "": [u64; 3][each(["_page_stride", "_slot_stride", "_head_stride"], ())],
    }

    /// Parameters of one launch.
    #[derive(Debug, Clone, Copy)]
    pub struct AppendParams => AppendRegs(this, config: AppendConfig) {
        /// Dtypes of new elements and of the cache.
        host dtypes: (Dtype, Dtype),
        /// `[kv_heads, head_dim]`
        host shape: [u32; 2],
        /// New tokens.
        new: Strided[config.dtypes.0],
        /// Destination cache.
        cache: Cache,
        /// Destination slots.
        slot_mapping "": SlotMapping[config.slot_mapping],
        /// Divisor of values, if there is one.
        scale "": Option<Scale>[config.scaled.then_some(())],
        count: u32 = this.slot_mapping.count(),
        threads: u32 = this.threads(config),
        heads: u32 = this.shape[0],
        chunks: u32 = this.shape[1] / config.width,
    }
}

impl Cache {
    pub(crate) fn alignment(self, dtype: Dtype) -> Vec<u64> {
        let slots = Strided { address: self.address, strides: [self.strides[0], self.strides[1]] };
        slots.alignment(dtype).into_iter().chain([self.strides[2]]).collect()
    }
}

impl AppendParams {
    /// Configuration of the kernel for this launch.
    pub fn config(&self) -> AppendConfig {
        let (new, cache) = self.dtypes;
        let elements = self.new.alignment(new).into_iter().chain(self.cache.alignment(cache));
        let width = chunk::width(&[new, cache], elements.chain([u64::from(self.shape[1])]));
        let slot_mapping = match self.slot_mapping {
            SlotMapping::Slots { .. } => SlotMappingKind::Slots,
            SlotMapping::Unchecked { .. } => SlotMappingKind::Unchecked,
            SlotMapping::Numbers { .. } => SlotMappingKind::Numbers,
        };
        AppendConfig { dtypes: self.dtypes, width, slot_mapping, scaled: self.scale.is_some() }
    }

    /// Grid and arguments for [`AppendParams::config`]. Requires at least one entry and one element.
    pub fn launch(&self) -> ([u32; 3], Vec<Arg>) {
        let (config, count) = (self.config(), self.slot_mapping.count());
        let [x, y] = TokenPartition::new(self.threads(config)).ctas(count);
        ([x, y, 1], self.args(config))
    }

    /// Threads per token.
    fn threads(&self, config: AppendConfig) -> u32 {
        let [heads, dim] = self.shape;
        (heads * (dim / config.width)).div_ceil(CHUNKS_PER_THREAD)
    }
}

impl AppendConfig {
    /// Kernel name, unique per configuration.
    pub fn name(self) -> String {
        let (new, cache) = self.dtypes;
        let slot_mapping = match self.slot_mapping {
            SlotMappingKind::Slots => "slots",
            SlotMappingKind::Unchecked => "unchecked",
            SlotMappingKind::Numbers => "numbers",
        };
        let scaled = if self.scaled { "_scaled" } else { "" };
        format!("append_{slot_mapping}_{new}_{cache}_{}{scaled}", self.width)
    }
}

/// Records the kernel of a configuration. Its parameters are those of [`AppendParams::launch`].
///
/// # Errors
/// None for a configuration from [`AppendParams::config`].
pub fn append(name: &str, config: AppendConfig) -> Result<Kernel, Invalid> {
    Builder::dependent_kernel(name, TokenPartition::THREADS, |k| {
        let AppendRegs { new, cache, slot_mapping: lookup, scale, count, threads, heads, chunks } =
            AppendRegs::declare(k, config);
        let (cache, strides) = (Elements::new(cache.address, config.dtypes.1), cache.strides);
        let (index, first, in_bounds) = TokenPartition::locate(k, count, threads);
        k.when(in_bounds, || {
            let token = lookup.token(index);
            let locate_chunk = |i| {
                let chunk = first + threads * i;
                let (head, column) = (chunk / chunks, chunk % chunks * config.width);
                (chunk.lt(heads * chunks), head, column)
            };
            let load = |i| {
                let (in_bounds, head, column) = locate_chunk(i);
                new.row(token, head).at(column).load_when(in_bounds, config.width, Access::Streaming)
            };
            // the page lookup is a chain of dependent loads: prefetch the values before it
            let loaded: Vec<_> = (0..CHUNKS_PER_THREAD).map(load).collect();
            lookup.find(k, index, |page, slot| {
                let row = cache.at_wide(page.to_u64() * strides[0] + slot.to_u64() * strides[1]);
                (0..CHUNKS_PER_THREAD).zip(&loaded).for_each(|(i, loaded)| {
                    let (in_bounds, head, column) = locate_chunk(i);
                    let to = row.at_wide(head.to_u64() * strides[2]).at(column);
                    let dtype = config.dtypes.1;
                    k.when(in_bounds, || match &scale {
                        None => loaded.to(dtype).store(to),
                        Some(scale) => loaded.divided(dtype, scale.of(page, head)).store(to),
                    });
                });
            });
        });
    })
}

impl<'k> ScaleRegs<'k> {
    #[track_caller]
    fn of(&self, page: Value<'k, u32>, head: Value<'k, u32>) -> Value<'k, f32> {
        let k = page.builder();
        let scale = k.var::<f32>("scale", self.factor);
        k.when(self.at.ne(0), || {
            let index = page.to_u64() * self.page_stride + head.to_u64() * self.head_stride;
            scale.set(Global::<f32>::new(self.at).at_wide(index).load());
        });
        scale.get()
    }
}
